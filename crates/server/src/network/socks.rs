//! SOCKS5 without authentication: one connection to a name, or to an address if that is what is allowed.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    Shared,
    policy::{self, Kind, Open, Refusal},
};
use crate::sandbox::tunnel::TunnelStream;

pub(super) const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NOTHING_ACCEPTABLE: u8 = 0xff;
const CONNECT: u8 = 1;

/// What the program is told.
mod reply {
    pub(super) const DONE: u8 = 0;
    pub(super) const FAILED: u8 = 1;
    pub(super) const NOT_ALLOWED: u8 = 2;
    pub(super) const UNREACHABLE: u8 = 4;
    pub(super) const REFUSED: u8 = 5;
    pub(super) const NOT_OFFERED: u8 = 7;
    pub(super) const NO_SUCH_ADDRESS: u8 = 8;
}

/// Hears what the program wants and connects it. None: it does not get it, and was told so.
pub(super) async fn greet(stream: &mut TunnelStream, shared: &Arc<Shared>) -> io::Result<Option<Open>> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).await?;
    let mut methods = [0; 255];
    let methods = &mut methods[..usize::from(head[1])];
    stream.read_exact(methods).await?;
    if !methods.contains(&NO_AUTHENTICATION) {
        stream.write_all(&[VERSION, NOTHING_ACCEPTABLE]).await?;
        return Ok(None);
    }
    stream.write_all(&[VERSION, NO_AUTHENTICATION]).await?;
    let mut request = [0; 4];
    stream.read_exact(&mut request).await?;
    let [version, command, _, kind] = request;
    let host = match kind {
        _ if version != VERSION => return Ok(None),
        1 => {
            let mut address = [0; 4];
            stream.read_exact(&mut address).await?;
            Ipv4Addr::from(address).to_string()
        }
        4 => {
            let mut address = [0; 16];
            stream.read_exact(&mut address).await?;
            Ipv6Addr::from(address).to_string()
        }
        3 => {
            let mut name = [0; 255];
            let length = usize::from(stream.read_u8().await?);
            stream.read_exact(&mut name[..length]).await?;
            String::from_utf8_lossy(&name[..length]).into_owned()
        }
        _ => return answer(stream, reply::NO_SUCH_ADDRESS).await.map(|()| None),
    };
    let port = stream.read_u16().await?;
    if command != CONNECT {
        let refusal = Refusal::new(Kind::Malformed, "only CONNECT is offered");
        policy::refuse(shared, "socks5", &host, port, refusal).await;
        return answer(stream, reply::NOT_OFFERED).await.map(|()| None);
    }
    match policy::open(shared, "socks5", &host, port).await {
        Ok(open) => {
            answer(stream, reply::DONE).await?;
            Ok(Some(open))
        }
        Err(refusal) => {
            let code = match refusal.kind {
                Kind::Malformed | Kind::NotAllowed | Kind::Denied | Kind::Address | Kind::UsedUp => reply::NOT_ALLOWED,
                Kind::TooMany => reply::FAILED,
                Kind::NotResolved => reply::UNREACHABLE,
                Kind::NotConnected => reply::REFUSED,
            };
            answer(stream, code).await.map(|()| None)
        }
    }
}

async fn answer(stream: &mut TunnelStream, code: u8) -> io::Result<()> {
    stream.write_all(&[VERSION, code, 0, 1, 0, 0, 0, 0, 0, 0]).await
}
