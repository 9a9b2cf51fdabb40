use proptest::prelude::*;
use sandboxer_protocol::SandboxId;

use super::*;
use crate::contract::example;
use crate::key::VolumeKey;
use crate::layout::CheckpointName;
use crate::pack::HEAD_BYTES as PACK_HEAD;

fn place() -> (ManifestAt, SandboxId) {
    let sandbox_id = SandboxId::random();
    (ManifestAt::Checkpoint { sandbox_id, name: CheckpointName::at(1_700_000_000_000).unwrap() }, sandbox_id)
}

fn parts() -> (Vec<PackRef>, Vec<FileEntry>, Vec<Chunk>) {
    let packs =
        vec![PackRef { id: PackId::from_bytes([1; 16]), bytes: 10_000 }, PackRef { id: PackId::from_bytes([2; 16]), bytes: 20_000 }];
    let chunks = vec![
        Chunk { hash: ChunkHash([3; 32]), pack: 0, offset: PACK_HEAD as u32, stored: 4000, raw: 8192, codec: Codec::Zstd },
        Chunk { hash: ChunkHash::ZERO, pack: 0, offset: 0, stored: 0, raw: 4096, codec: Codec::Zero },
        Chunk { hash: ChunkHash([4; 32]), pack: 1, offset: 5000, stored: 100, raw: 100, codec: Codec::Raw },
    ];
    let files = vec![
        FileEntry { name: "checkpoint.img".parse().unwrap(), bytes: 12288, chunks: 2, digest: file_digest(&chunks[..2]) },
        FileEntry { name: "empty.img".parse().unwrap(), bytes: 0, chunks: 0, digest: file_digest(&[]) },
        FileEntry { name: "pages.img".parse().unwrap(), bytes: 100, chunks: 1, digest: file_digest(&chunks[2..]) },
    ];
    (packs, files, chunks)
}

fn manifest() -> Manifest {
    let (at, sandbox_id) = place();
    let (packs, files, chunks) = parts();
    Manifest::new(at, About::Sandbox(Box::new(example(sandbox_id))), Tenant::open(), packs, files, chunks).unwrap()
}

fn fault(result: Result<Manifest>) -> Fault {
    match result {
        Err(Error::Damaged { fault, .. }) => fault,
        other => panic!("{other:?}"),
    }
}

/// With the digest made right again: what a hostile writer would do.
fn reseal(bytes: &mut [u8]) {
    let body = bytes.len() - TAIL_BYTES;
    let digest = *blake3::hash(&bytes[..body]).as_bytes();
    bytes[body..body + 32].copy_from_slice(&digest);
}

#[test]
fn it_comes_back_as_it_was() {
    let manifest = manifest();
    let key = VolumeKey::from_bytes(b"0123456789abcdef");
    for key in [None, Some(&key)] {
        let bytes = manifest.encode(key).unwrap();
        assert_eq!(Manifest::decode(manifest.at(), &bytes, key).unwrap(), manifest);
        // A server without the key can't check, and need not.
        assert_eq!(Manifest::decode(manifest.at(), &bytes, None).unwrap(), manifest);
    }
    assert_eq!(manifest.raw_bytes(), 12388);
    assert_eq!(manifest.stored_bytes(), 4100);
}

#[test]
fn torn_at_any_byte_it_is_told_so() {
    let manifest = manifest();
    let bytes = manifest.encode(None).unwrap();
    for length in 0..bytes.len() {
        let fault = fault(Manifest::decode(manifest.at(), &bytes[..length], None));
        assert!(matches!(fault, Fault::Torn { found, .. } if found == length as u64), "{length}: {fault:?}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(matches!(fault(Manifest::decode(manifest.at(), &longer, None)), Fault::Torn { .. }));
}

#[test]
fn a_flipped_bit_anywhere_is_found() {
    let manifest = manifest();
    let bytes = manifest.encode(None).unwrap();
    for at in 0..bytes.len() - MAC {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let fault = fault(Manifest::decode(manifest.at(), &flipped, None));
        match at {
            0..8 => assert_eq!(fault, Fault::Magic),
            8..12 => assert!(matches!(fault, Fault::NewerFormat { .. } | Fault::Malformed(_)), "{at}: {fault:?}"),
            12..28 => assert!(matches!(fault, Fault::Torn { .. }), "{at}: {fault:?}"),
            _ => assert_eq!(fault, Fault::Digest, "{at}"),
        }
    }
}

const MAC: usize = crate::key::MAC_BYTES;

#[test]
fn a_newer_format_says_so() {
    let manifest = manifest();
    let mut bytes = manifest.encode(None).unwrap();
    bytes[8..12].copy_from_slice(&2_u32.to_le_bytes());
    reseal(&mut bytes);
    assert_eq!(fault(Manifest::decode(manifest.at(), &bytes, None)), Fault::NewerFormat { found: 2, known: 1 });
}

#[test]
fn only_the_right_key_authenticates() {
    let manifest = manifest();
    let (key, other) = (VolumeKey::from_bytes(b"0123456789abcdef"), VolumeKey::from_bytes(b"another key here"));
    let signed = manifest.encode(Some(&key)).unwrap();
    assert_eq!(fault(Manifest::decode(manifest.at(), &signed, Some(&other))), Fault::Authentication);
    let plain = manifest.encode(None).unwrap();
    assert_eq!(fault(Manifest::decode(manifest.at(), &plain, Some(&key))), Fault::NotAuthenticated);
    let mut changed = signed;
    changed[HEAD_BYTES] ^= 1;
    reseal(&mut changed);
    assert_eq!(fault(Manifest::decode(manifest.at(), &changed, Some(&key))), Fault::Authentication);
}

#[test]
fn it_holds_at_its_own_place_only() {
    let manifest = manifest();
    let bytes = manifest.encode(None).unwrap();
    let (elsewhere, _) = place();
    assert!(matches!(fault(Manifest::decode(elsewhere, &bytes, None)), Fault::Misplaced { .. }));
    assert!(matches!(manifest.expect_tenant(Tenant::of_key(b"x")), Err(Error::Damaged { fault: Fault::ForeignTenant { .. }, .. })));
}

#[test]
fn what_does_not_hold_together_is_refused() {
    type Change = fn(&mut Vec<PackRef>, &mut Vec<FileEntry>, &mut Vec<Chunk>);
    let changes: [(&str, Change); 15] = [
        ("offset beyond the pack", |_, _, chunks| chunks[0].offset = 9_999),
        ("offset that overflows", |_, _, chunks| (chunks[0].offset, chunks[0].stored) = (u32::MAX, 8191)),
        ("offset within the head", |_, _, chunks| chunks[0].offset = 31),
        ("pack that is not listed", |_, _, chunks| chunks[0].pack = 2),
        ("chunk of nothing", |_, _, chunks| chunks[2].raw = 0),
        ("giant chunk", |_, _, chunks| chunks[0].raw = MAX_CHUNK_BYTES + 1),
        ("stored larger than raw", |_, _, chunks| chunks[0].stored = 8192),
        ("raw of another length", |_, _, chunks| chunks[2].stored = 99),
        ("zeros that lie somewhere", |_, _, chunks| chunks[1].offset = 40),
        ("file of another size", |_, files, _| files[0].bytes = 12_287),
        ("file with too many chunks", |_, files, _| files[2].chunks = u32::MAX),
        ("chunks of no file", |_, files, _| drop(files.pop())),
        ("files of one name", |_, files, _| files[1].name = files[0].name.clone()),
        ("another order", |_, _, chunks| chunks.swap(0, 1)),
        ("pack beyond the bound", |packs, _, _| packs[0].bytes = MAX_PACK_BYTES + 1),
    ];
    let (at, sandbox_id) = place();
    for (what, change) in changes {
        let (mut packs, mut files, mut chunks) = parts();
        change(&mut packs, &mut files, &mut chunks);
        let words = Words { at, about: About::Sandbox(Box::new(example(sandbox_id))) };
        // Written without the checks, as somebody else might.
        let bytes = Manifest { tenant: Tenant::open(), packs, files, chunks, words, digest: [0; 32] }.encode(None).unwrap();
        assert!(matches!(fault(Manifest::decode(at, &bytes, None)), Fault::Malformed(_)), "{what}");
    }
}

#[test]
fn another_sandboxs_contract_is_refused() {
    let (at, _) = place();
    let (packs, files, chunks) = parts();
    let about = About::Sandbox(Box::new(example(SandboxId::random())));
    assert!(Manifest::new(at, about, Tenant::open(), packs, files, chunks).is_err());
}

#[test]
fn state_beyond_its_bound_is_refused_when_it_is_written() {
    let (at, sandbox_id) = place();
    let (packs, files, chunks) = parts();
    let mut contract = example(sandbox_id);
    contract.state = "x".repeat(MAX_ABOUT_BYTES).into();
    let result = Manifest::new(at, About::Sandbox(Box::new(contract)), Tenant::open(), packs, files, chunks);
    assert!(matches!(result, Err(Error::TooLarge { .. })), "{result:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn hostile_bytes_never_panic(changes in prop::collection::vec((0_usize..4096, any::<u8>()), 1..8), cut in 0_usize..4096, sealed: bool) {
        let manifest = manifest();
        let mut bytes = manifest.encode(None).unwrap();
        for (at, byte) in changes {
            let length = bytes.len();
            bytes[at % length] = byte;
        }
        if cut % 4 == 0 {
            let length = bytes.len();
            bytes.truncate(cut % length);
        }
        if sealed && bytes.len() > TAIL_BYTES {
            reseal(&mut bytes);
        }
        // Either it is refused or it holds together.
        if let Ok(decoded) = Manifest::decode(manifest.at(), &bytes, None) {
            prop_assert!(decoded.check().is_ok());
        }
    }
}
