//! A sandbox that goes from server to server by a bucket: exact, quick, and with few requests.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Bucket, Server, Store, Talk, Volume, Ws, count, soak};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

fn median(took: &mut [Duration]) -> Duration {
    took.sort();
    took[took.len() / 2]
}

/// A program that prints and reads goes round; what each handoff took, from the attach to SANDBOX_RUNNING.
async fn bounce(servers: &[Server; 3], bounces: usize) -> Vec<Duration> {
    let mut ws = Ws::create_kept(&servers[0]).await;
    let id = ws.sandbox_id.clone();
    let mut talk = Talk::begin(&mut ws).await;
    let mut took = Vec::new();
    for bounce in 1..=bounces {
        talk.go_on(&mut ws, 100).await;
        // Every other time without a word.
        if bounce % 2 == 0 {
            ws.vanish()
        } else {
            ws.close().await
        }
        let begun = Instant::now();
        let (next, running) = Ws::reach(&servers[bounce % servers.len()], &id).await;
        took.push(begun.elapsed());
        assert!(running.get("rewound").is_none(), "{running}");
        ws = next;
        talk.resume(&mut ws).await;
    }
    talk.finish(&mut ws).await;
    took
}

/// What so many bytes take to the store itself and back.
async fn transfer(bucket: &Bucket, bytes: usize) -> Duration {
    let address = bucket.endpoint().trim_start_matches("http://").to_owned();
    let begun = Instant::now();
    for request in [
        format!("PUT /{}/transfer HTTP/1.1\r\nContent-Length: {bytes}\r\n", Bucket::NAME),
        format!("GET /{}/transfer HTTP/1.1\r\n", Bucket::NAME),
    ] {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(format!("{request}Host: {address}\r\n\r\n").as_bytes()).await.unwrap();
        if request.starts_with("PUT") {
            stream.write_all(&vec![7; bytes]).await.unwrap();
        }
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
    }
    begun.elapsed()
}

async fn is_handed_on_by(store: Store, bounces: usize) {
    let bucket = Bucket::start_on(store).await;
    let servers = [bucket.serve(), bucket.serve(), bucket.serve()];
    let before = bucket.bytes();
    let mut took = bounce(&servers, bounces).await;
    let bytes = usize::try_from(bucket.bytes() - before).unwrap() / bounces;
    let requests = bucket.requests();
    drop(servers);
    // In the same run, for comparison: a directory of this machine.
    let volume = Volume::default();
    let mut near = bounce(&[volume.serve(), volume.serve(), volume.serve()], bounces.min(20)).await;
    let mut transfers = Vec::new();
    for _ in 0..5 {
        // There and back: each byte was counted both ways.
        transfers.push(transfer(&bucket, bytes / 2).await);
    }
    let (far, near, transfer) = (median(&mut took), median(&mut near), median(&mut transfers));
    let bound = near + Duration::from_secs(1) + transfer;
    println!(
        "{bounces} handoffs by {store:?}: median {} ms, longest {} ms; by a directory {} ms, and {} ms for {} KiB there and back: at most {} ms\n{requests:?}",
        far.as_millis(),
        took[took.len() - 1].as_millis(),
        near.as_millis(),
        transfer.as_millis(),
        bytes >> 10,
        bound.as_millis()
    );
    assert!(!soak() || far <= bound, "the median is too long");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_from_instance_to_instance_misses_and_repeats_nothing() {
    is_handed_on_by(Store::Moto, count(4, 200)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_does_it_on_another_store_that_speaks_s3() {
    is_handed_on_by(Store::Seaweed, count(2, 200)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_on_googles_as_a_shim_shows_it() {
    is_handed_on_by(Store::Google, count(2, 200)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_that_do_nothing_cost_their_renewals_and_the_instance_one_look_at_its_bell() {
    let sandboxes = count(3, 50);
    let bucket = Bucket::start().await;
    let server = bucket.options().arg("--idle-timeout").arg("0").start();
    let mut clients = Vec::new();
    for _ in 0..sandboxes {
        let mut ws = Ws::create_kept(&server).await;
        let _ = ws.bash("true").await.ok();
        clients.push(ws);
    }
    // Until what their creation began is done.
    let settled = Duration::from_secs(if soak() { 90 } else { 6 });
    tokio::time::sleep(settled).await;
    sandboxer_e2e::eventually("the image is there", sandboxer_e2e::DEADLINE, || bucket.requests().contains_key("PUT images")).await;
    let (before, begun) = (bucket.requests(), Instant::now());
    tokio::time::sleep(Duration::from_secs(if soak() { 300 } else { 15 })).await;
    let (after, took) = (bucket.requests(), begun.elapsed().as_secs_f64());
    let spent = |name: &str| (after.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0)) as f64;
    for name in after.keys().filter(|name| spent(name) > 0.0) {
        let hour = spent(name) * 3600.0 / took;
        println!("{name}: {hour:.0} an hour, {:.0} for each of {sandboxes} sandboxes", hour / sandboxes as f64);
    }
    let each = |name: &str| spent(name) / sandboxes as f64;
    assert!(each("PUT locks") <= took / 5.0 + 2.0, "renewals: {}", each("PUT locks"));
    assert!(each("GET locks") <= 3.0, "looks at records: {}", each("GET locks"));
    assert!(spent("GET bells") <= took * 2.0 + 2.0 && spent("GET bells") >= 1.0, "looks at the bell: {}", spent("GET bells"));
}
