//! Streams of the network: those that programs open to the proxy, and those that the server opens to programs.
//!
//! The agent looks into none of them: it carries bytes, each stream under a credit in each direction. What came from the server and was not yet taken is all
//! that it holds, and never more than it gave credit for; from a program it reads only what it may send at once. No stream outlives the conversation: the
//! program then sees a reset.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd},
};

use bytes::{Buf, Bytes, BytesMut};
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollFlags},
        socket::{AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrIn6, connect, setsockopt, socket, sockopt},
    },
};
use sandboxer_protocol::{
    agent::{FromAgent, TunnelFault, TunnelStream},
    limits::{MAX_PROXY_STREAMS, MAX_TUNNEL_PIECE_BYTES, MAX_TUNNEL_STREAMS, tunnel_credit},
};

use super::{Agent, token, watch};
use crate::link::Link;

/// Connections taken before everything else gets its turn.
const ACCEPTS_A_ROUND: usize = 32;
/// How programs are told of the proxy, each in both cases.
const VARIABLES: [&str; 3] = ["http_proxy", "https_proxy", "all_proxy"];
const NO_PROXY: (&str, &str) = ("no_proxy", "localhost,127.0.0.1,::1");

#[derive(Default)]
pub(super) struct Tunnel {
    proxy: Option<Proxy>,
    streams: BTreeMap<TunnelStream, Stream>,
    /// Those of them that came over the proxy.
    proxied: usize,
    /// The last number that was given to one of those.
    last: TunnelStream,
    /// Something may have become possible.
    stirred: bool,
    /// The streams are first now, before output.
    turn: bool,
    /// The one that comes first the next time.
    next: TunnelStream,
}

struct Proxy {
    listener: TcpListener,
    port: u16,
    ready: bool,
}

struct Stream {
    socket: TcpStream,
    phase: Phase,
    readable: bool,
    writable: bool,
    /// From the server, and not yet taken.
    held: BytesMut,
    received: u64,
    granted: u64,
    window: u64,
    /// The server sends nothing more.
    ended_by_server: bool,
    /// The program was told so.
    shut: bool,
    sent: u64,
    credit: u64,
    /// The program sends nothing more.
    ended: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// To this port; with IPv4 first.
    Connecting {
        port: u16,
        ipv6: bool,
    },
    Open,
}

/// What is left of a stream that had its turn.
enum Left {
    Nothing { moved: bool },
    Over,
    Broken(TunnelFault),
}

impl Stream {
    fn new(socket: TcpStream, phase: Phase, window: u64, credit: u64) -> Self {
        Self {
            socket,
            phase,
            readable: true,
            writable: true,
            held: BytesMut::new(),
            received: 0,
            granted: window,
            window,
            ended_by_server: false,
            shut: false,
            sent: 0,
            credit,
            ended: false,
        }
    }

    /// Whoever is at the other end sees that it was cut off, and takes nothing for whole that is not.
    fn cut_off(self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // Without it the end is an ordinary one.
        let _ = setsockopt(&self.socket, sockopt::Linger, &linger);
    }

    /// Writes what the program takes of it now. Returns how much that was.
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut written = 0;
        while self.writable && written < data.len() {
            match self.socket.write(&data[written..]) {
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(written)
    }

    /// Passes on what is held. Returns whether anything was.
    fn pass_on(&mut self) -> io::Result<bool> {
        let mut held = std::mem::take(&mut self.held);
        let written = self.write(&held)?;
        let mut any = written > 0;
        // One that waits holds no buffer.
        if written < held.len() {
            held.advance(written);
            self.held = held;
        } else if self.ended_by_server && !self.shut {
            self.shut = true;
            any = true;
            // One that is gone already needs no end.
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        Ok(any)
    }

    /// How far the server may send now, if that is news.
    fn more_credit(&mut self) -> Option<u64> {
        let upto = self.received - self.held.len() as u64 + self.window;
        (upto >= self.granted + self.window / 4).then(|| {
            self.granted = upto;
            upto
        })
    }
}

impl Tunnel {
    pub(super) fn is_busy(&self) -> bool {
        !self.streams.is_empty()
    }

    pub(super) fn proxy_ready(&mut self) {
        if let Some(proxy) = &mut self.proxy {
            proxy.ready = true;
        }
    }

    pub(super) fn stream_ready(&mut self, stream: TunnelStream) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            (stream.readable, stream.writable) = (true, true);
            self.stirred = true;
        }
    }

    /// How programs find the proxy, unless they were told something else.
    pub(super) fn add_to_environment(&self, env: &mut BTreeMap<String, String>) {
        let Some(proxy) = &self.proxy else { return };
        let address = format!("http://127.0.0.1:{}", proxy.port);
        for (name, value) in VARIABLES.map(|name| (name, address.as_str())).into_iter().chain([NO_PROXY]) {
            let both = [name.to_owned(), name.to_ascii_uppercase()];
            if !both.iter().any(|name| env.contains_key(name)) {
                env.extend(both.map(|name| (name, value.to_owned())));
            }
        }
    }

    pub(super) fn set_proxy(&mut self, epoll: &Epoll, on: bool) -> io::Result<()> {
        if !on {
            self.proxy = None;
        } else if self.proxy.is_none() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            listener.set_nonblocking(true)?;
            watch(epoll, listener.as_fd(), token::PROXY, EpollFlags::EPOLLIN)?;
            let port = listener.local_addr()?.port();
            self.proxy = Some(Proxy { listener, port, ready: true });
        }
        Ok(())
    }

    /// The conversation is over, and with it every stream.
    pub(super) fn drop_all(&mut self) {
        std::mem::take(&mut self.streams).into_values().for_each(Stream::cut_off);
        (self.proxied, self.last) = (0, 0);
    }

    fn remove(&mut self, number: TunnelStream) -> Option<Stream> {
        let stream = self.streams.remove(&number)?;
        if number % 2 == 1 {
            self.proxied -= 1;
            self.stirred = true;
        }
        Some(stream)
    }

    /// Takes those who have connected to the proxy. Returns whether there may be more.
    fn accept(&mut self, epoll: &Epoll, link: &mut Link) -> bool {
        for _ in 0..ACCEPTS_A_ROUND {
            // Those beyond wait with the kernel, as they do where no server is.
            if self.proxied >= MAX_PROXY_STREAMS || !link.is_open() {
                return false;
            }
            let Some(proxy) = self.proxy.as_mut().filter(|proxy| proxy.ready) else { return false };
            let socket = match proxy.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) => {
                    // An edge tells of the next one; a connection that was broken off is none.
                    proxy.ready = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted);
                    continue;
                }
            };
            let number = self.last + if self.last == 0 { 1 } else { 2 };
            let ready = socket.set_nonblocking(true).and_then(|()| watch_stream(epoll, &socket, number));
            if ready.is_err() {
                continue;
            }
            let _ = socket.set_nodelay(true);
            self.last = number;
            let window = tunnel_credit(self.streams.len());
            self.streams.insert(number, Stream::new(socket, Phase::Open, window, 0));
            self.proxied += 1;
            link.say(&FromAgent::TunnelOpen { stream: number, credit: window });
        }
        true
    }

    fn connect(&mut self, epoll: &Epoll, number: TunnelStream, port: u16, credit: u64) -> Result<(), TunnelFault> {
        if self.streams.len() >= MAX_TUNNEL_STREAMS {
            return Err(TunnelFault::Busy);
        }
        let begun = begin_connecting(port, false).map(|socket| (socket, false));
        let begun = begun.or_else(|_| begin_connecting(port, true).map(|socket| (socket, true)));
        let (socket, ipv6) = begun.map_err(|_| TunnelFault::Refused)?;
        watch_stream(epoll, &socket, number).map_err(|_| TunnelFault::Busy)?;
        let window = tunnel_credit(self.streams.len());
        self.streams.insert(number, Stream::new(socket, Phase::Connecting { port, ipv6 }, window, credit));
        self.stirred = true;
        Ok(())
    }

    /// A stream goes on with what it can do now.
    fn go_on_with(&mut self, number: TunnelStream, epoll: &Epoll, link: &mut Link, scratch: &mut [u8]) -> Left {
        let Some(stream) = self.streams.get_mut(&number) else { return Left::Nothing { moved: false } };
        let mut moved = false;
        if let Phase::Connecting { port, ipv6 } = stream.phase {
            match is_connected(&stream.socket) {
                Ok(false) => {
                    stream.writable = false;
                    return Left::Nothing { moved };
                }
                Ok(true) => {
                    stream.phase = Phase::Open;
                    let _ = stream.socket.set_nodelay(true);
                    moved = true;
                    link.say(&FromAgent::TunnelOpened { stream: number, credit: stream.window });
                }
                // It may listen at the other loopback address only.
                Err(_) if !ipv6 => {
                    let again = begin_connecting(port, true).and_then(|socket| watch_stream(epoll, &socket, number).map(|()| socket));
                    let Ok(socket) = again else { return Left::Broken(TunnelFault::Refused) };
                    stream.socket = socket;
                    stream.phase = Phase::Connecting { port, ipv6: true };
                    return Left::Nothing { moved: true };
                }
                Err(_) => return Left::Broken(TunnelFault::Refused),
            }
        }
        match stream.pass_on() {
            Ok(any) => moved |= any,
            Err(_) => return Left::Broken(TunnelFault::Reset),
        }
        if let Some(upto) = stream.more_credit().filter(|_| !stream.ended_by_server) {
            link.say(&FromAgent::TunnelCredit { stream: number, upto });
        }
        if stream.readable && !stream.ended && stream.sent < stream.credit && link.takes_files() {
            let room = usize::try_from(stream.credit - stream.sent).unwrap_or(usize::MAX).min(MAX_TUNNEL_PIECE_BYTES).min(scratch.len());
            match stream.socket.read(&mut scratch[..room]) {
                Ok(0) => {
                    stream.ended = true;
                    link.say(&FromAgent::TunnelEnd { stream: number });
                    moved = true;
                }
                Ok(count) => {
                    stream.sent += count as u64;
                    link.send_tunnel(number, &scratch[..count]);
                    moved = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => moved = true,
                Err(_) => return Left::Broken(TunnelFault::Reset),
            }
        }
        if stream.ended && stream.shut { Left::Over } else { Left::Nothing { moved } }
    }
}

impl Agent {
    pub(super) fn offer_proxy(&mut self, on: bool) {
        // Programs without it have no network, which they see.
        let _ = self.tunnel.set_proxy(&self.epoll, on);
    }

    pub(super) fn connect_stream(&mut self, stream: TunnelStream, port: u16, credit: u64) {
        if let Err(reason) = self.tunnel.connect(&self.epoll, stream, port, credit) {
            self.link.say(&FromAgent::TunnelReset { stream, reason });
        }
    }

    pub(super) fn credit_stream(&mut self, stream: TunnelStream, upto: u64) {
        if let Some(stream) = self.tunnel.streams.get_mut(&stream) {
            stream.credit = stream.credit.max(upto);
            self.tunnel.stirred = true;
        }
    }

    pub(super) fn end_stream(&mut self, stream: TunnelStream) {
        if let Some(stream) = self.tunnel.streams.get_mut(&stream) {
            stream.ended_by_server = true;
            self.tunnel.stirred = true;
        }
    }

    pub(super) fn reset_stream(&mut self, stream: TunnelStream) {
        match self.tunnel.streams.get_mut(&stream) {
            // It was told its end before that: it still gets all that was sent to it, and nobody hears it any longer.
            Some(going) if going.ended_by_server => {
                going.ended = true;
                self.tunnel.stirred = true;
            }
            _ => self.cut_off(stream),
        }
    }

    fn cut_off(&mut self, stream: TunnelStream) {
        if let Some(stream) = self.tunnel.remove(stream) {
            stream.cut_off();
        }
    }

    pub(super) fn take_stream(&mut self, number: TunnelStream, data: &Bytes) {
        // What was on its way when it ended here.
        let Some(stream) = self.tunnel.streams.get_mut(&number) else { return };
        stream.received += data.len() as u64;
        self.tunnel.stirred = true;
        // At once and from where it lies, while it is at hand; how it went is seen in its turn.
        let at_once = stream.phase == Phase::Open && stream.held.is_empty();
        let written = if at_once { stream.write(data) } else { Ok(0) };
        stream.writable |= written.is_err();
        stream.held.extend_from_slice(&data[written.unwrap_or(0)..]);
        // So is what makes room: the server goes on sending while there is more to be heard.
        if let Some(upto) = stream.more_credit() {
            self.link.say(&FromAgent::TunnelCredit { stream: number, upto });
            self.link.flush();
        }
    }

    /// Whether streams are before output this time: both get their turn, however much there is of either.
    pub(super) fn streams_first(&mut self) -> bool {
        self.tunnel.turn = !self.tunnel.turn && self.tunnel.is_busy();
        self.tunnel.turn
    }

    /// Goes on with each for a moment. Returns whether anything was done.
    pub(super) fn go_on_with_streams(&mut self) -> bool {
        let more = self.tunnel.accept(&self.epoll, &mut self.link);
        if !self.tunnel.stirred && !more || !self.link.is_open() {
            return more;
        }
        let mut any = false;
        // Those with something to send that found no room come first the next time.
        let numbers: Vec<TunnelStream> = self.tunnel.streams.keys().copied().collect();
        let begin = numbers.partition_point(|number| *number < self.tunnel.next);
        let mut crowded = None;
        for &number in numbers[begin..].iter().chain(&numbers[..begin]) {
            if crowded.is_none() && !self.link.takes_files() {
                crowded = Some(number);
            }
            let left = self.tunnel.go_on_with(number, &self.epoll, &mut self.link, &mut self.scratch);
            match left {
                Left::Nothing { moved } => any |= moved,
                Left::Over => drop(self.tunnel.remove(number)),
                Left::Broken(reason) => {
                    self.cut_off(number);
                    self.link.say(&FromAgent::TunnelReset { stream: number, reason });
                    any = true;
                }
            }
            self.link.flush();
        }
        self.tunnel.next = crowded.unwrap_or(0);
        // Whatever comes next is told of: by an edge, by the server, or by room in the way to it.
        self.tunnel.stirred = any || crowded.is_some();
        any || more
    }
}

fn watch_stream(epoll: &Epoll, socket: &TcpStream, number: TunnelStream) -> io::Result<()> {
    watch(epoll, socket.as_fd(), token::TUNNEL | number, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP)
}

/// An error at once means that nobody is there.
fn begin_connecting(port: u16, ipv6: bool) -> io::Result<TcpStream> {
    let family = if ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let made = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    let begun = if ipv6 {
        connect(made.as_raw_fd(), &SockaddrIn6::from(SocketAddrV6::new(Ipv6Addr::LOCALHOST, port, 0, 0)))
    } else {
        connect(made.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)))
    };
    match begun {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(made.into()),
        Err(error) => Err(error.into()),
    }
}

/// Whether it is by now. An error: it never will be.
fn is_connected(socket: &TcpStream) -> io::Result<bool> {
    if let Some(error) = socket.take_error()? {
        return Err(error);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}
