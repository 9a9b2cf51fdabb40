use std::io;

use sandboxer_protocol::limits::TUNNEL_CREDIT_BYTES;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

fn opened(tunnel: &mut Tunnel, number: Number, credit: u64) -> TunnelStream {
    let stream = tunnel.opened_by_agent(number, credit).unwrap().unwrap();
    assert_eq!(said(tunnel), [format!("{number}: credit {TUNNEL_CREDIT_BYTES}")]);
    stream
}

/// All that is to be said now.
fn said(tunnel: &mut Tunnel) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(say) = tunnel.next() {
        all.push(match say {
            Say::Data(stream, data) => format!("{stream}: {} bytes", data.len()),
            Say::Control(ToAgent::TunnelCredit { stream, upto }) => format!("{stream}: credit {upto}"),
            Say::Control(ToAgent::TunnelEnd { stream }) => format!("{stream}: end"),
            Say::Control(ToAgent::TunnelReset { stream }) => format!("{stream}: reset"),
            Say::Control(ToAgent::TunnelConnect { stream, port, .. }) => format!("{stream}: connect {port}"),
            Say::Control(other) => format!("{other:?}"),
        });
    }
    all
}

#[test]
fn an_agent_that_invents_numbers_or_sends_beyond_its_credit_is_found_out() {
    let mut tunnel = Tunnel::default();
    let _stream = opened(&mut tunnel, 1, 0);
    for number in [0, 1, 2] {
        assert!(tunnel.opened_by_agent(number, 0).is_err(), "{number}");
    }
    assert!(tunnel.data(1, &vec![0; TUNNEL_CREDIT_BYTES as usize]).is_ok());
    assert!(tunnel.data(1, &[0]).is_err());
    // Of one that is not there: it was given up here, and the agent could not know.
    assert!(tunnel.data(99, &[0; 100]).is_ok());
    let _port = tunnel.connect(80).unwrap();
    assert!(tunnel.data(2, &[0]).is_err(), "it was not opened yet");
    let mut streams = Vec::new();
    let most = (1..).find(|step| match tunnel.opened_by_agent(2 * step + 1, 0) {
        Ok(stream) => {
            streams.push(stream);
            false
        }
        Err(_) => true,
    });
    assert_eq!(most, Some(MAX_PROXY_STREAMS as u64));
}

#[tokio::test]
async fn nothing_is_said_beyond_the_agents_credit_and_each_stream_has_its_turn() {
    let mut tunnel = Tunnel::default();
    let (mut one, mut two) = (opened(&mut tunnel, 1, 100_000), opened(&mut tunnel, 3, 10));
    assert_eq!(one.write(&[1; 500_000]).await.unwrap(), OUTBOX_BYTES);
    two.write_all(&[2; 20]).await.unwrap();
    assert_eq!(said(&mut tunnel), ["1: 65536 bytes", "3: 10 bytes", "1: 34464 bytes"]);
    tunnel.credit(3, 30);
    two.write_all(&[2; 5]).await.unwrap();
    assert_eq!(said(&mut tunnel), ["3: 15 bytes"]);
}

#[tokio::test]
async fn what_is_read_gives_new_credit_in_steps() {
    let mut tunnel = Tunnel::default();
    let mut stream = opened(&mut tunnel, 1, 0);
    tunnel.data(1, &vec![7; TUNNEL_CREDIT_BYTES as usize]).unwrap();
    stream.read_exact(&mut [0; 1000]).await.unwrap();
    assert!(said(&mut tunnel).is_empty());
    stream.read_exact(&mut vec![0; TUNNEL_CREDIT_BYTES as usize - 1000]).await.unwrap();
    assert_eq!(said(&mut tunnel), [format!("1: credit {}", 2 * TUNNEL_CREDIT_BYTES)]);
}

#[tokio::test]
async fn each_direction_has_its_end_and_who_drops_a_stream_cuts_it_off() {
    let mut tunnel = Tunnel::default();
    let mut stream = opened(&mut tunnel, 1, 100);
    tunnel.data(1, b"last words").unwrap();
    tunnel.ended(1);
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).await.unwrap();
    assert_eq!(heard, b"last words");
    stream.write_all(b"answer").await.unwrap();
    let (shut, said_now) = tokio::join!(stream.shutdown(), async { said(&mut tunnel) });
    shut.unwrap();
    assert_eq!(said_now, ["1: 6 bytes", "1: end"]);
    drop(stream);
    assert!(said(&mut tunnel).is_empty() && tunnel.shared.lock().streams.is_empty());
    drop(opened(&mut tunnel, 3, 100));
    assert_eq!(said(&mut tunnel), ["3: reset"]);
    assert!(tunnel.shared.lock().streams.is_empty());
}

#[tokio::test]
async fn a_port_is_asked_for_and_opened_or_refused() {
    let mut tunnel = Tunnel::default();
    let (mut good, bad) = (tunnel.connect(80).unwrap(), tunnel.connect(81).unwrap());
    good.write_all(b"early").await.unwrap();
    assert_eq!(said(&mut tunnel), ["2: connect 80", "4: connect 81"]);
    tunnel.opened(2, 100);
    tunnel.reset(4, TunnelFault::Refused);
    assert_eq!((good.opened().await, bad.opened().await), (Ok(()), Err(TunnelFault::Refused)));
    assert_eq!(said(&mut tunnel), ["2: 5 bytes"]);
    assert!(tunnel.serves());
    drop((good, bad));
    assert_eq!(said(&mut tunnel), ["2: reset"]);
    assert!(!tunnel.serves());
}

#[tokio::test]
async fn the_end_of_the_conversation_is_seen_by_whoever_waits() {
    let mut tunnel = Tunnel::default();
    let mut stream = opened(&mut tunnel, 1, 0);
    let reading = tokio::spawn(async move { stream.read(&mut [0; 1]).await.map_err(|error| error.kind()) });
    tokio::task::yield_now().await;
    tunnel.begin_again();
    assert_eq!(reading.await.unwrap(), Err(io::ErrorKind::ConnectionReset));
    assert!(said(&mut tunnel).is_empty());
}

#[test]
fn an_agent_that_opens_and_cuts_off_and_reads_nothing_fills_no_memory() {
    let mut tunnel = Tunnel::default();
    for step in 0..10_000 {
        let number = 2 * step + 1;
        drop(tunnel.opened_by_agent(number, 0).unwrap());
        tunnel.reset(number, TunnelFault::Reset);
    }
    let state = tunnel.shared.lock();
    assert_eq!((state.streams.len(), state.queue.len()), (0, 0));
}

#[tokio::test]
async fn the_driver_hears_when_the_last_port_is_left() {
    let mut tunnel = Tunnel::default();
    let mut stream = tunnel.connect(80).unwrap();
    assert_eq!(said(&mut tunnel), ["2: connect 80"]);
    tunnel.opened(2, 100);
    tunnel.ended(2);
    let (shut, said_now) = tokio::join!(stream.shutdown(), async { said(&mut tunnel) });
    shut.unwrap();
    assert_eq!(said_now, ["2: end"]);
    assert!(tunnel.serves());
    // Nothing is left to be said of it, and it is told all the same.
    let left = async {
        tunnel.stirred().await;
        tunnel.serves()
    };
    let (serves, ()) = tokio::join!(left, async { drop(stream) });
    assert!(!serves && tunnel.next().is_none());
}
