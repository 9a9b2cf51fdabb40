//! The harness itself: a faulty network that does what it says, and an assembly that notices what is missing.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use sandboxer_e2e::{Assembly, CutProxy, DelayProxy, Fault, Options, User};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

#[tokio::test]
async fn a_delay_holds_for_both_directions_and_changes_nothing() {
    let proxy = DelayProxy::start(echo().await, Duration::from_millis(100)).await;
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    let start = Instant::now();
    stream.write_all(b"there and back").await.unwrap();
    let mut bytes = [0; 14];
    stream.read_exact(&mut bytes).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(200));
    assert_eq!(&bytes, b"there and back");
}

#[tokio::test]
async fn a_cut_comes_at_its_byte_and_both_ends_see_it() {
    let proxy = CutProxy::start(echo().await, 1, 1000..1001, &[Fault::Cut]).await;
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    stream.write_all(&[7; 600]).await.unwrap();
    let mut bytes = Vec::new();
    // An end or a reset, after what passed.
    let _ = stream.read_to_end(&mut bytes).await;
    assert_eq!((bytes.len(), proxy.happened()), (400, 1));
    proxy.heal();
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    stream.write_all(&[7; 6000]).await.unwrap();
    stream.read_exact(&mut [0; 6000]).await.unwrap();
}

#[tokio::test]
async fn a_half_open_connection_neither_ends_nor_passes_anything() {
    let proxy = CutProxy::start(echo().await, 1, 10..11, &[Fault::HalfOpen]).await;
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    stream.write_all(&[7; 20]).await.unwrap();
    let read = tokio::time::timeout(Duration::from_millis(300), stream.read(&mut [0; 100])).await;
    assert!(read.is_err(), "{read:?}");
}

#[tokio::test]
async fn a_silent_connection_passes_everything_in_the_end() {
    let proxy = CutProxy::start(echo().await, 1, 10..11, &[Fault::Silent(Duration::from_millis(300))]).await;
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    let start = Instant::now();
    stream.write_all(&[7; 500]).await.unwrap();
    stream.read_exact(&mut [0; 500]).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(300));
    stream.write_all(&[7; 500]).await.unwrap();
    stream.read_exact(&mut [0; 500]).await.unwrap();
}

#[test]
fn an_assembly_takes_repetitions() {
    let mut assembly = Assembly::default();
    for (data, offset) in [("abc", 0), ("bc", 1), ("cde", 2)] {
        assembly.take(&json!({"data": data, "offset": offset, "end": offset + data.len()}));
    }
    assert_eq!((assembly.bytes.as_slice(), assembly.repeated), (b"abcde".as_slice(), 3));
}

#[test]
#[should_panic(expected = "bytes 0..1 are missing")]
fn an_assembly_notices_a_gap() {
    Assembly::default().take(&json!({"data": "b", "offset": 1, "end": 2}));
}

#[test]
#[should_panic(expected = "differs")]
fn an_assembly_notices_a_difference() {
    let mut assembly = Assembly::default();
    assembly.take(&json!({"data": "ab", "offset": 0, "end": 2}));
    assembly.take(&json!({"data": "b", "offset": 0, "end": 1}));
}

#[test]
fn the_server_of_an_ordinary_user_has_nothing_of_roots() {
    let server = Options::default().user(User::Ordinary).start();
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let ids: Vec<&str> = status.lines().filter(|line| line.starts_with("Uid:") || line.starts_with("Gid:")).collect();
    assert!(ids.len() == 2 && ids.iter().all(|line| line.split_whitespace().skip(1).all(|id| id != "0")), "{ids:?}");
    assert!(server.log().contains("OwnNamespace"), "{}", server.log());
}
