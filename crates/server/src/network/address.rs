//! Which addresses may be connected to: those of the public internet, and those that the server's own settings name.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    str::FromStr,
};

/// Addresses that are reached though they are not public: `ADDRESS[/BITS][:PORT]`, with an IPv6 address in brackets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRule {
    address: IpAddr,
    bits: u8,
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not an address such as 10.1.2.3, 10.0.0.0/8, 127.0.0.1:8000 or [fd00::1]:443")]
pub struct BadAddress;

impl AddressRule {
    #[must_use]
    pub fn matches(&self, to: SocketAddr) -> bool {
        let same = match (self.address, to.ip()) {
            (IpAddr::V4(rule), IpAddr::V4(address)) => same_bits(rule.to_bits().into(), address.to_bits().into(), 32, self.bits),
            (IpAddr::V6(rule), IpAddr::V6(address)) => same_bits(rule.to_bits(), address.to_bits(), 128, self.bits),
            _ => false,
        };
        same && self.port.is_none_or(|port| port == to.port())
    }
}

fn same_bits(one: u128, other: u128, width: u8, bits: u8) -> bool {
    let ignored = u32::from(width - bits.min(width));
    ignored >= 128 || (one ^ other) >> ignored == 0
}

/// What is in brackets, if there are any; none: they are not a pair.
fn bare(text: &str) -> Option<&str> {
    match text.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']'),
        None => Some(text),
    }
}

impl FromStr for AddressRule {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let (network, port) = match text.rfind(':').filter(|at| !text.starts_with('[') || text.rfind(']').is_some_and(|end| end < *at)) {
            // Without brackets an IPv6 address has no port.
            Some(_) if !text.starts_with('[') && text.matches(':').count() > 1 => (text, None),
            Some(at) => (&text[..at], Some(text[at + 1..].parse().map_err(|_| BadAddress)?)),
            None => (text, None),
        };
        // Brackets are around the address, or around all of the network.
        let network = bare(network).unwrap_or(network);
        let (address, bits) = match network.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| BadAddress)?)),
            None => (network, None),
        };
        let address: IpAddr = bare(address).and_then(|address| address.parse().ok()).ok_or(BadAddress)?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(width);
        if bits > width || port == Some(0) {
            return Err(BadAddress);
        }
        Ok(Self { address, bits, port })
    }
}

impl fmt::Display for AddressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bits, .. } = self;
        match self.port {
            Some(port) if address.is_ipv6() => write!(f, "[{address}/{bits}]:{port}"),
            Some(port) => write!(f, "{address}/{bits}:{port}"),
            None => write!(f, "{address}/{bits}"),
        }
    }
}

/// Why an address is not one of the public internet; none: it is.
pub(super) fn why_not_public(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => not_public_v4(address),
        IpAddr::V6(address) => not_public_v6(address),
    }
}

/// Public by its number, and in each machine of one provider the way to its host.
const WIRE_SERVER: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);

fn not_public_v4(address: Ipv4Addr) -> Option<&'static str> {
    if address == WIRE_SERVER {
        return Some("an address where machines have their metadata");
    }
    let [a, b, c, _] = address.octets();
    match (a, b, c) {
        (0, ..) => Some("an unspecified address"),
        (10, ..) | (172, 16..=31, _) | (192, 168, _) => Some("a private address"),
        (127, ..) => Some("a loopback address"),
        (169, 254, _) => Some("a link-local address, where machines have their metadata"),
        (100, 64..=127, _) => Some("an address of a provider's inner network"),
        (192, 0, 0) | (192, 88, 99) | (198, 18..=19, _) => Some("a reserved address"),
        (192, 0, 2) | (198, 51, 100) | (203, 0, 113) => Some("an address for documentation"),
        (224..=239, ..) => Some("a multicast address"),
        (240..=255, ..) => Some("a reserved address"),
        _ => None,
    }
}

fn not_public_v6(address: Ipv6Addr) -> Option<&'static str> {
    let [a, b, ..] = address.segments();
    if address.is_loopback() {
        return Some("a loopback address");
    }
    if address.is_unspecified() {
        return Some("an unspecified address");
    }
    match a {
        0xfe80..=0xfebf => Some("a link-local address"),
        0xfc00..=0xfdff => Some("a private address"),
        0xff00..=0xffff => Some("a multicast address"),
        // Others are reached through these: 6to4, Teredo, NAT64, IPv4-mapped and IPv4-compatible ones.
        0x2002 => Some("an IPv4 address inside an IPv6 address"),
        0x2001 if b == 0 => Some("an IPv4 address inside an IPv6 address"),
        0x0000 | 0x0064 => Some("an IPv4 address inside an IPv6 address"),
        0x2001 if b < 0x0200 => Some("a reserved address"),
        0x2001 if b == 0x0db8 => Some("an address for documentation"),
        0x3fff if b < 0x1000 => Some("an address for documentation"),
        0x2000..=0x3fff => None,
        _ => Some("a reserved address"),
    }
}

/// Whether it is one of this machine's own: only these can be bound. One of which that can't be found out may be.
pub(super) fn is_own(address: IpAddr) -> bool {
    !matches!(UdpSocket::bind((address, 0)), Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_public() {
        for bad in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::127.0.0.1",
            "::8.8.8.8",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2001::1",
            "2001:10::1",
            "2001:db8::1",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "5f00::1",
            "4000::1",
            "100::1",
        ] {
            assert!(why_not_public(bad.parse().unwrap()).is_some(), "{bad}");
        }
        for good in [
            "1.1.1.1",
            "8.8.8.8",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "100.128.0.1",
            "168.63.129.17",
            "2606:4700::1",
            "2a00:1450::1",
            "2001:4860::8888",
        ] {
            assert_eq!(why_not_public(good.parse().unwrap()), None, "{good}");
        }
    }

    #[test]
    fn the_settings_name_exactly_what_is_reached() {
        let allows = |rule: &str, to: &str| rule.parse::<AddressRule>().unwrap().matches(to.parse().unwrap());
        assert!(allows("127.0.0.1:8000", "127.0.0.1:8000"));
        assert!(!allows("127.0.0.1:8000", "127.0.0.1:8001") && !allows("127.0.0.1:8000", "127.0.0.2:8000"));
        assert!(allows("10.0.0.0/8", "10.200.0.1:1") && !allows("10.0.0.0/8", "11.0.0.1:1"));
        assert!(allows("0.0.0.0/0", "9.9.9.9:1") && !allows("0.0.0.0/0", "[::1]:1"));
        assert!(allows("[fd00::1]:443", "[fd00::1]:443") && allows("fd00::/8", "[fd99::1]:1") && allows("[fd00::/8]:443", "[fd99::1]:443"));
        assert!(allows("[fd00::]/8:443", "[fd99::1]:443") && !allows("[fd00::]/8:443", "[fd99::1]:444"));
        assert!(!allows("127.0.0.1", "[::ffff:127.0.0.1]:80"));
        for bad in ["", "10.0.0.0/33", "fd00::/129", "example.com", "10.0.0.1:0", "10.0.0.1:x", "10.0.0", "127.0.0.1:70000", "[::1"] {
            assert!(bad.parse::<AddressRule>().is_err(), "{bad}");
        }
    }

    #[test]
    fn this_machine_knows_its_own_addresses() {
        assert!(is_own("127.0.0.1".parse().unwrap()));
        assert!(!is_own("192.0.2.1".parse().unwrap()));
    }
}
