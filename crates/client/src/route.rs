//! The servers by which a sandbox may be reached: usually one, or several that share a volume.

use std::{
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{Address, Connection, Error, connect::Connector, cookies::Cookies};

/// More are a mistake.
const MAX_ADDRESSES: usize = 64;

/// Addresses, separated by commas, in the order in which they are tried.
#[derive(Debug, Clone)]
pub(crate) struct Addresses {
    all: Arc<[Address]>,
    /// Which of them answered last. Shared by everything that talks about the same sandbox: files are asked for where it is.
    at: Arc<AtomicUsize>,
}

impl Addresses {
    /// The one that answered last, and then all others.
    pub(crate) fn in_turn(&self) -> impl Iterator<Item = (usize, &Address)> {
        let at = self.at.load(Ordering::Relaxed);
        (0..self.all.len()).map(move |step| (at + step) % self.all.len()).map(|index| (index, &self.all[index]))
    }

    pub(crate) fn here(&self) -> &Address {
        &self.all[self.at.load(Ordering::Relaxed) % self.all.len()]
    }

    /// This one answered.
    pub(crate) fn answered(&self, index: usize) {
        self.at.store(index, Ordering::Relaxed);
    }
}

impl FromStr for Addresses {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all: Arc<[Address]> = text.split(',').map(|one| one.trim().parse()).collect::<Result<_, _>>()?;
        if all.len() > MAX_ADDRESSES {
            return Err(Error::invalid(format!("{} addresses are too many: at most {MAX_ADDRESSES}.", all.len())));
        }
        Ok(Self { all, at: Arc::default() })
    }
}

/// Which server is tried next.
pub(crate) struct Route {
    addresses: Addresses,
    servers: Vec<Server>,
    at: usize,
}

struct Server {
    connector: Connector,
    /// What a load balancer in front of it set.
    cookies: Cookies,
    /// It said that it knows no such sandbox, since one was last reached.
    knows_nothing: bool,
    /// It said that it has no room for another sandbox, since one was last reached.
    has_no_room: bool,
}

impl Route {
    /// # Errors
    /// As [`Connector::new`].
    pub(crate) fn new(addresses: Addresses, connection: &Connection) -> Result<Self, Error> {
        let server = |address: &Address| {
            let connector = Connector::new(address.clone(), connection)?;
            Ok::<_, Error>(Server { connector, cookies: Cookies::default(), knows_nothing: false, has_no_room: false })
        };
        let servers = addresses.all.iter().map(server).collect::<Result<_, _>>()?;
        Ok(Self { addresses, servers, at: 0 })
    }

    pub(crate) fn connector(&self) -> &Connector {
        &self.servers[self.at].connector
    }

    pub(crate) fn cookies(&mut self) -> &mut Cookies {
        &mut self.servers[self.at].cookies
    }

    /// The sandbox is reached here.
    pub(crate) fn reached(&mut self) {
        self.addresses.answered(self.at);
        self.servers.iter_mut().for_each(|server| (server.knows_nothing, server.has_no_room) = (false, false));
    }

    /// This one can't be reached, or does not have it now.
    pub(crate) fn turn_to_next(&mut self) {
        self.at = (self.at + 1) % self.servers.len();
    }

    /// This one knows no such sandbox. True: none of them does.
    pub(crate) fn knows_nothing(&mut self) -> bool {
        self.servers[self.at].knows_nothing = true;
        self.servers.iter().all(|server| server.knows_nothing)
    }

    /// This one has no room for another sandbox. True: none of them has.
    pub(crate) fn has_no_room(&mut self) -> bool {
        self.servers[self.at].has_no_room = true;
        self.servers.iter().all(|server| server.has_no_room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(text: &str) -> Route {
        Route::new(text.parse().unwrap(), &Connection::default()).unwrap()
    }

    #[test]
    fn several_addresses_are_told_apart_and_one_that_is_none_is_refused() {
        let addresses: Addresses = "http://a:1, ws://b:2,c:3".parse().unwrap();
        let told = |addresses: &Addresses| addresses.in_turn().map(|(_, one)| one.to_string()).collect::<Vec<_>>();
        assert_eq!(told(&addresses), ["http://a:1", "http://b:2", "http://c:3"]);
        addresses.clone().answered(2);
        assert_eq!(told(&addresses), ["http://c:3", "http://a:1", "http://b:2"]);
        assert_eq!(addresses.here().to_string(), "http://c:3");
        let many = vec!["http://a"; MAX_ADDRESSES + 1].join(",");
        for wrong in ["", "http://a,", ",http://a", "http://a,ftp://b", &many] {
            assert!(matches!(wrong.parse::<Addresses>(), Err(Error::Invalid { .. })), "{wrong}");
        }
    }

    #[test]
    fn there_is_no_room_only_if_no_server_has_any() {
        assert!(route("http://a").has_no_room());
        let mut two = route("http://a,http://b");
        assert!(!two.has_no_room(), "the other may have some");
        two.turn_to_next();
        assert!(two.has_no_room());
        two.reached();
        assert!(!two.has_no_room());
    }

    #[test]
    fn a_sandbox_is_not_there_only_if_no_server_has_it() {
        let mut one = route("http://a");
        assert!(one.knows_nothing());
        let mut two = route("http://a,http://b");
        assert!(!two.knows_nothing(), "the other may have it");
        two.turn_to_next();
        two.turn_to_next();
        assert!(!two.knows_nothing(), "the same again is no news");
        two.turn_to_next();
        assert!(two.knows_nothing());
        two.reached();
        assert!(!two.knows_nothing());
    }
}
