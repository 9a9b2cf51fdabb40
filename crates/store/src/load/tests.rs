use std::fs;

use object_store::memory::InMemory;
use sandboxer_protocol::SandboxId;

use super::*;
use crate::layout::{ManifestAt, PackId, Tenant};
use crate::save::tests::{Here, memory};
use crate::verify::{Depth, verify};

async fn saved(here: &Here, bytes: usize) -> Manifest {
    here.checkpoint(SandboxId::random(), &[here.source("pages.img", &memory(bytes, 1))], &[]).await.0
}

async fn fault(here: &Here, manifest: &Manifest) -> (object_store::path::Path, Fault) {
    let into = tempfile::tempdir().unwrap();
    match here.loader().load(manifest, into.path(), u64::MAX).await {
        Err(Error::Damaged { file, fault }) => (file, fault),
        other => panic!("{other:?}"),
    }
}

/// What `verify` says agrees with what a load says.
async fn verified(here: &Here) -> Vec<Error> {
    verify(&here.loader(), &[], Depth::Everything).await.unwrap().faults
}

fn only_pack(here: &Here, manifest: &Manifest) -> (PackId, std::path::PathBuf) {
    let [pack] = manifest.packs() else { panic!("{:?}", manifest.packs()) };
    (pack.id, here.file(&layout::pack(manifest.tenant(), pack.id)))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_in_many_packs_of_a_bucket_comes_back_as_it_was_and_not_much_else_is_read() {
    const PART: usize = 64 << 10;
    let here = Here { volume: Volume::on(Arc::new(InMemory::new())).asking_again(), ..Here::new() };
    let (sandbox_id, mut data, mut last) = (SandboxId::random(), memory(96 * PART, 7), None);
    for round in 0..8 {
        for part in 0..6 {
            let at = (round * 5 + part * 17) % 96 * PART;
            data[at..at + PART].copy_from_slice(&memory(PART, (100 + round * 6 + part) as u64));
        }
        let sources = [here.source("checkpoint.img", &data[..9 * PART]), here.source("pages.img", &data[9 * PART..])];
        let parents: Vec<&Manifest> = last.iter().collect();
        last = Some(here.checkpoint(sandbox_id, &sources, &parents).await.0);
    }
    let manifest = last.unwrap();
    assert!(manifest.packs().len() > 4, "{:?}", manifest.packs());
    let into = tempfile::tempdir().unwrap();
    let stats = here.loader().load(&manifest, into.path(), u64::MAX).await.unwrap();
    let there = ["checkpoint.img", "pages.img"].map(|name| fs::read(into.path().join(name)).unwrap()).concat();
    assert!(there == data, "the files have changed");
    let most = 2 * manifest.stored_bytes() + ((manifest.packs().len() as u64) << 18);
    assert!(stats.read_bytes <= most, "{stats:?} of {}", manifest.stored_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_pack_is_named() {
    let here = Here::new();
    let manifest = saved(&here, 1 << 20).await;
    let (id, path) = only_pack(&here, &manifest);
    fs::remove_file(path).unwrap();
    let (file, fault) = fault(&here, &manifest).await;
    assert_eq!(file, layout::pack(Tenant::open(), id));
    assert_eq!(fault, Fault::MissingPack { needed_by: manifest.at().to_string() });
    assert!(matches!(&verified(&here).await[..], [Error::Damaged { fault: Fault::MissingPack { .. }, .. }]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_torn_anywhere_is_named() {
    let here = Here::new();
    let manifest = saved(&here, 300 << 10).await;
    let (_, path) = only_pack(&here, &manifest);
    let whole = fs::read(&path).unwrap();
    let boundaries = manifest.chunks().iter().flat_map(|chunk| [chunk.offset as usize, (chunk.offset + chunk.stored) as usize - 1]);
    for length in boundaries.chain([0, 1, 16, 31, whole.len() - 1]) {
        fs::write(&path, &whole[..length]).unwrap();
        let (_, fault) = fault(&here, &manifest).await;
        assert!(matches!(fault, Fault::TornPack { found, .. } if found == length as u64), "{length}: {fault:?}");
        assert_eq!(verified(&here).await.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_in_a_pack_is_found_and_placed() {
    let here = Here::new();
    let manifest = saved(&here, 300 << 10).await;
    let (_, path) = only_pack(&here, &manifest);
    let whole = fs::read(&path).unwrap();
    for chunk in manifest.chunks() {
        for within in [0, chunk.stored / 2, chunk.stored - 1] {
            let mut flipped = whole.clone();
            flipped[(chunk.offset + within) as usize] ^= 0x10;
            fs::write(&path, &flipped).unwrap();
            let (_, fault) = fault(&here, &manifest).await;
            let expected =
                Fault::Chunk { offset: u64::from(chunk.offset), length: u64::from(chunk.stored), needed_by: manifest.at().to_string() };
            assert_eq!(fault, expected);
            assert_eq!(verified(&here).await.len(), 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_in_the_place_of_another_is_told() {
    let here = Here::new();
    let manifest = saved(&here, 1 << 20).await;
    let (_, path) = only_pack(&here, &manifest);
    let mut bytes = vec![0; fs::metadata(&path).unwrap().len() as usize];
    bytes[..pack::HEAD_BYTES].copy_from_slice(&pack::head(PackId::random()));
    fs::write(&path, bytes).unwrap();
    assert!(matches!(fault(&here, &manifest).await.1, Fault::ForeignPack { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_or_a_fifo_on_the_volume_is_not_read() {
    let here = Here::new();
    let manifest = saved(&here, 1 << 20).await;
    let (_, path) = only_pack(&here, &manifest);
    let aside = here.local.path().join("aside");
    fs::rename(&path, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &path).unwrap();
    let into = tempfile::tempdir().unwrap();
    assert!(here.loader().load(&manifest, into.path(), u64::MAX).await.is_err());
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let into = tempfile::tempdir().unwrap();
    assert!(here.loader().load(&manifest, into.path(), u64::MAX).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_larger_than_allowed_is_not_begun() {
    let here = Here::new();
    let manifest = saved(&here, 1 << 20).await;
    let into = tempfile::tempdir().unwrap();
    let refused = here.loader().load(&manifest, into.path(), (1 << 20) - 1).await;
    assert!(matches!(refused, Err(Error::Damaged { fault: Fault::TooLarge { .. }, .. })), "{refused:?}");
    assert_eq!(fs::read_dir(into.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_tells_every_checkpoint_that_a_fault_hurts_and_where_to_go_back_to() {
    let here = Here::new();
    let sandbox_id = SandboxId::random();
    let mut data = memory(2 << 20, 2);
    let (first, _) = here.checkpoint(sandbox_id, &[here.source("pages.img", &data)], &[]).await;
    data[1 << 20..].copy_from_slice(&memory(1 << 20, 3));
    let (second, _) = here.checkpoint(sandbox_id, &[here.source("pages.img", &data)], &[&first]).await;
    assert!(verified(&here).await.is_empty());
    let shared = first.packs()[0];
    let own = *second.packs().iter().find(|pack| **pack != shared).unwrap();
    let ManifestAt::Checkpoint { name, .. } = second.at() else { panic!("{second:?}") };

    let path = here.file(&layout::pack(Tenant::open(), own.id));
    let whole = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(verified(&here).await.len(), 1);
    let older = here.volume.intact_before(sandbox_id, name).await.unwrap();
    assert_eq!(older.map(|name| ManifestAt::Checkpoint { sandbox_id, name }), Some(first.at()));
    fs::write(&path, whole).unwrap();

    let path = here.file(&layout::pack(Tenant::open(), shared.id));
    let mut bytes = fs::read(&path).unwrap();
    let both = second.chunks().iter().find(|chunk| second.packs()[chunk.pack as usize] == shared).unwrap();
    bytes[both.offset as usize] ^= 1;
    fs::write(&path, bytes).unwrap();
    let faults = verified(&here).await;
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults.iter().all(|error| matches!(error, Error::Damaged { fault: Fault::Chunk { .. }, .. })));
}

#[tokio::test]
async fn verify_tells_names_of_nothing_and_texts_that_are_none() {
    let here = Here::new();
    let sandbox_id = SandboxId::random();
    here.checkpoint(sandbox_id, &[here.source("a", b"a")], &[]).await;
    let name = crate::CheckpointName::at(77).unwrap();
    here.volume.put_latest(sandbox_id, name).await.unwrap();
    let path = here.file(&layout::metadata(sandbox_id));
    fs::write(path, b"{").unwrap();
    let report = verify(&here.loader(), &[(sandbox_id, name)], Depth::Sizes).await.unwrap();
    let [latest, metadata, record] = &report.faults[..] else { panic!("{report:?}") };
    assert!(latest.to_string().contains("latest: it names checkpoint_77.img, which is not there"), "{latest}");
    assert!(matches!(metadata, Error::Damaged { fault: Fault::Unreadable(_), .. }));
    assert!(record.to_string().contains(&format!("locks/{sandbox_id}.lock")), "{record}");
}
