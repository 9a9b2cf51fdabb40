use std::collections::{BTreeMap, HashMap};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sandboxer_protocol::SandboxId;

use super::*;
use crate::contract::{About, example};
use crate::layout::{CheckpointName, ManifestAt, PackId, Tenant};
use crate::manifest::{ChunkHash, FileEntry, MAX_PACK_BYTES, PackRef, file_digest};
use crate::pack::HEAD_BYTES;

const BOTH: [Reach; 2] = [Reach::NEAR, Reach::FAR];

fn chunk(pack: u32, offset: u32, stored: u32) -> Chunk {
    Chunk { hash: ChunkHash([7; 32]), pack, offset, stored, raw: stored, codec: Codec::Raw }
}

fn zeros(raw: u32) -> Chunk {
    Chunk { hash: ChunkHash::ZERO, pack: 0, offset: 0, stored: 0, raw, codec: Codec::Zero }
}

fn manifest(packs: u8, files: &[Vec<Chunk>]) -> Manifest {
    let sandbox_id = SandboxId::random();
    let at = ManifestAt::Checkpoint { sandbox_id, name: CheckpointName::at(1).unwrap() };
    let packs = (0..packs).map(|number| PackRef { id: PackId::from_bytes([number; 16]), bytes: MAX_PACK_BYTES }).collect();
    let entry = |(number, chunks): (usize, &Vec<Chunk>)| FileEntry {
        name: format!("file_{number}").parse().unwrap(),
        bytes: chunks.iter().map(|chunk| u64::from(chunk.raw)).sum(),
        chunks: chunks.len() as u32,
        digest: file_digest(chunks),
    };
    let entries = files.iter().enumerate().map(entry).collect();
    Manifest::new(at, About::Sandbox(Box::new(example(sandbox_id))), Tenant::open(), packs, entries, files.concat()).unwrap()
}

/// As a sandbox lies after many saves: runs of chunks in this pack and that, now and then zeros, and now and then what was there before.
fn scattered(seed: u64) -> Manifest {
    let mut random = StdRng::seed_from_u64(seed);
    let packs = random.random_range(1..=12_u8);
    let most = *[500, 30_000, 300_000].get(random.random_range(0..3_usize)).unwrap();
    let mut ends = vec![HEAD_BYTES as u32; usize::from(packs)];
    let mut all: Vec<Chunk> = Vec::new();
    let mut files = Vec::new();
    for _ in 0..random.random_range(1..=3) {
        let mut chunks = Vec::new();
        for _ in 0..random.random_range(0..120) {
            let pack = random.random_range(0..u32::from(packs));
            for _ in 0..random.random_range(1..5) {
                match random.random_range(0..10) {
                    0 => chunks.push(zeros(random.random_range(1..100_000))),
                    1 if !all.is_empty() => chunks.push(all[random.random_range(0..all.len())]),
                    kind => {
                        let end = &mut ends[pack as usize];
                        // What nobody wants any more.
                        let offset = *end + if kind > 6 { random.random_range(0..400_000) } else { 0 };
                        let new = chunk(pack, offset, random.random_range(1..most));
                        if u64::from(offset + new.stored) <= MAX_PACK_BYTES {
                            *end = offset + new.stored;
                            all.push(new);
                            chunks.push(new);
                        }
                    }
                }
            }
        }
        files.push(chunks);
    }
    manifest(packs, &files)
}

/// What is to be brought, in the order of the files.
fn wanted(manifest: &Manifest) -> Vec<Place> {
    let mut places = Vec::new();
    for (file, (_, chunks)) in manifest.files_with_chunks().enumerate() {
        let mut offset = 0;
        for chunk in chunks {
            if chunk.codec != Codec::Zero {
                places.push(Place { file, offset, chunk: *chunk });
            }
            offset += u64::from(chunk.raw);
        }
    }
    places
}

fn all(manifest: &Manifest, reach: Reach) -> Vec<Span> {
    spans(manifest, reach, |_| true).collect()
}

/// Where in the files each lies, and its window.
fn windows(places: &[Place], reach: Reach) -> HashMap<(usize, u64), (usize, usize)> {
    let (mut window, mut bytes, mut count) = (0, 0, 0);
    let mut found = HashMap::new();
    for (number, place) in places.iter().enumerate() {
        let stored = u64::from(place.chunk.stored);
        if bytes + stored > reach.window || count == MAX_GATHERED {
            (window, bytes, count) = (window + 1, 0, 0);
        }
        found.insert((place.file, place.offset), (window, number));
        bytes += stored;
        count += 1;
    }
    found
}

#[test]
fn no_chunk_is_lost_and_none_comes_twice() {
    for (seed, reach) in (0..150).flat_map(|seed| BOTH.map(|reach| (seed, reach))) {
        let manifest = scattered(seed);
        let mut brought = Vec::new();
        for span in all(&manifest, reach) {
            for place in &span.places {
                let range = range_of(&place.chunk);
                assert_eq!(span.pack, place.chunk.pack as usize, "seed {seed}");
                assert!(span.range.start <= range.start && range.end <= span.range.end, "seed {seed}: {span:?}");
            }
            brought.extend(span.places);
        }
        brought.sort_unstable_by_key(|place| (place.file, place.offset));
        assert_eq!(brought, wanted(&manifest), "seed {seed}");
    }
}

#[test]
fn what_is_not_wanted_is_read_over_within_bounds_and_no_byte_twice() {
    for (seed, reach) in (0..150).flat_map(|seed| BOTH.map(|reach| (seed, reach))) {
        let manifest = scattered(seed);
        let windows = windows(&wanted(&manifest), reach);
        let mut read: BTreeMap<(usize, usize), Vec<Range<u64>>> = BTreeMap::new();
        for span in all(&manifest, reach) {
            let length = span.range.end - span.range.start;
            assert!(length <= reach.span, "seed {seed}: {length}");
            let mut lying: Vec<Range<u64>> = span.places.iter().map(|place| range_of(&place.chunk)).collect();
            lying.sort_unstable_by_key(|range| range.start);
            let (mut end, mut unwanted) = (span.range.start, 0);
            for range in lying {
                let gap = range.start.saturating_sub(end);
                assert!(gap <= reach.gap, "seed {seed}: {gap}");
                unwanted += gap;
                end = end.max(range.end);
            }
            assert_eq!(end, span.range.end, "seed {seed}: nothing behind the last");
            assert!(unwanted <= (length - unwanted).max(reach.gap), "seed {seed}: {unwanted} of {length}");
            let (window, _) = windows[&(span.places[0].file, span.places[0].offset)];
            read.entry((window, span.pack)).or_default().push(span.range);
        }
        for ranges in read.values_mut() {
            ranges.sort_unstable_by_key(|range| range.start);
            assert!(ranges.windows(2).all(|two| two[0].end <= two[1].start), "seed {seed}: {ranges:?}");
        }
    }
}

#[test]
fn the_order_of_the_files_is_left_within_a_window_alone() {
    for (seed, reach) in (0..150).flat_map(|seed| BOTH.map(|reach| (seed, reach))) {
        let manifest = scattered(seed);
        let windows = windows(&wanted(&manifest), reach);
        let firsts: Vec<(usize, usize)> = all(&manifest, reach)
            .iter()
            .map(|span| {
                let places: Vec<_> = span.places.iter().map(|place| windows[&(place.file, place.offset)]).collect();
                assert!(places.iter().all(|(window, _)| *window == places[0].0), "seed {seed}: a piece of two windows");
                *places.iter().min().unwrap()
            })
            .collect();
        assert!(firsts.is_sorted(), "seed {seed}: {firsts:?}");
    }
}

#[test]
fn chunks_of_many_packs_in_turn_are_a_request_for_each_pack_of_a_bucket() {
    let (packs, each, stored) = (9, 12_u32, 10_000);
    // The second file has the end of each pack.
    let at = |number: u32| chunk(number % packs, HEAD_BYTES as u32 + number / packs * 2 * stored, stored);
    let chunks: Vec<Chunk> = (0..packs * each).map(at).collect();
    let (first, second) = chunks.split_at(chunks.len() - 20);
    let manifest = manifest(packs as u8, &[first.to_vec(), second.to_vec()]);
    assert_eq!(all(&manifest, Reach::FAR).len(), packs as usize);
    let wanted_few = spans(&manifest, Reach::FAR, |chunk| chunk.pack < 2);
    assert_eq!(wanted_few.map(|span| span.places.len()).collect::<Vec<_>>(), [each as usize; 2]);
}

#[test]
fn what_lies_in_order_is_read_in_order_a_mib_at_a_time() {
    let (chunks, stored) = (200_u32, 60_000);
    let manifest = manifest(1, &[(0..chunks).map(|number| chunk(0, HEAD_BYTES as u32 + number * stored, stored)).collect()]);
    for reach in BOTH {
        let spans = all(&manifest, reach);
        assert!(spans.windows(2).all(|two| two[0].range.end == two[1].range.start), "{spans:?}");
        assert!(spans.len() <= 13, "{}", spans.len());
    }
}

#[test]
fn the_smallest_chunks_fill_a_window_by_their_number() {
    let chunks: Vec<Chunk> = (0..MAX_GATHERED as u32 + 1).map(|number| chunk(number % 2, HEAD_BYTES as u32 + number, 1)).collect();
    let manifest = manifest(2, &[chunks]);
    let spans = all(&manifest, Reach::FAR);
    assert_eq!(spans.iter().map(|span| span.places.len()).collect::<Vec<_>>(), [MAX_GATHERED / 2, MAX_GATHERED / 2, 1]);
}

#[test]
fn chunks_that_a_hostile_manifest_lays_over_each_other_are_all_in_their_piece() {
    let head = HEAD_BYTES as u32;
    let chunks = vec![chunk(0, head + 50, 100), chunk(0, head, 1000), chunk(0, head + 999, 2), chunk(0, head + 10, 10)];
    let manifest = manifest(1, &[chunks]);
    for reach in BOTH {
        let spans = all(&manifest, reach);
        let [span] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((span.range.clone(), span.places.len()), (u64::from(head)..u64::from(head) + 1001, 4));
    }
}
