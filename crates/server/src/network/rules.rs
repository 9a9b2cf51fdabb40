//! Which names may be reached: rules such as `example.com`, `*.example.org:443`, parsed once and strictly.

use std::{fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};

const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;
/// Rules that one sandbox may ask for.
pub(crate) const MAX_RULES: usize = 256;

/// What a rule without a port stands for.
const WEB_PORTS: [u16; 2] = [80, 443];

/// Why a text is no rule, or no host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRule {
    #[error("it is empty")]
    Empty,
    #[error("a name has at most {MAX_NAME_BYTES} characters")]
    Long,
    #[error("it has other characters than letters, digits and hyphens; write an international name in its ASCII form (xn--…)")]
    Characters,
    #[error("it is an address in an unusual form")]
    Unusual,
    #[error("its port is not a number from 1 to 65535")]
    Port,
    #[error("a star stands alone, or before a dot and a name")]
    Star,
    #[error("there is no such preset; there are {0}")]
    Preset(String),
}

/// A host as somebody names it: in lower case, with no dot at its end.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    Name(String),
    Address(IpAddr),
}

impl FromStr for Host {
    type Err = BadRule;

    fn from_str(text: &str) -> Result<Self, BadRule> {
        if text.len() > MAX_NAME_BYTES + 3 {
            return Err(BadRule::Long);
        }
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        if let Some(bare) = bare {
            return bare.parse().map(|address| Self::Address(IpAddr::V6(address))).map_err(|_| BadRule::Unusual);
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        name(text).map(Self::Name)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
            Self::Address(address) => write!(f, "{address}"),
        }
    }
}

fn name(text: &str) -> Result<String, BadRule> {
    let text = text.strip_suffix('.').unwrap_or(text);
    if text.is_empty() {
        return Err(BadRule::Empty);
    }
    if text.len() > MAX_NAME_BYTES {
        return Err(BadRule::Long);
    }
    let is_label = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        !label.is_empty() && label.len() <= MAX_LABEL_BYTES && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    if !text.split('.').all(is_label) {
        return Err(BadRule::Characters);
    }
    // Resolvers take 127.1, 0x7f.1 and 2130706433 for addresses, and no top-level name is a number.
    let last = text.rsplit('.').next().unwrap_or_default();
    let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    if last.bytes().all(|byte| byte.is_ascii_digit()) || hex.is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit())) {
        return Err(BadRule::Unusual);
    }
    Ok(text.to_ascii_lowercase())
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Who {
    /// Every name, and no address literal.
    Any,
    Name(String),
    /// Any depth below it, and not it itself.
    Below(String),
    Address(IpAddr),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ports {
    Web,
    One(u16),
    All,
}

/// One of a list of rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rule {
    who: Who,
    ports: Ports,
}

impl Rule {
    #[must_use]
    pub fn matches(&self, host: &Host, port: u16) -> bool {
        let who = match (&self.who, host) {
            (Who::Any, Host::Name(_)) => true,
            (Who::Name(rule), Host::Name(name)) => rule == name,
            (Who::Below(rule), Host::Name(name)) => is_below(name, rule),
            (Who::Address(rule), Host::Address(address)) => rule == address,
            _ => false,
        };
        who && self.has_port(port)
    }

    fn has_port(&self, port: u16) -> bool {
        match self.ports {
            Ports::Web => WEB_PORTS.contains(&port),
            Ports::One(one) => one == port,
            Ports::All => true,
        }
    }

    /// Whether everything that another one matches, at this port, is matched by this one.
    fn covers(&self, other: &Who, port: Option<u16>) -> bool {
        let who = match (&self.who, other) {
            (Who::Any, Who::Any | Who::Name(_) | Who::Below(_)) => true,
            (Who::Name(rule), Who::Name(name)) => rule == name,
            (Who::Below(rule), Who::Name(name)) => is_below(name, rule),
            (Who::Below(rule), Who::Below(name)) => rule == name || is_below(name, rule),
            (Who::Address(rule), Who::Address(address)) => rule == address,
            _ => false,
        };
        who && port.map_or(self.ports == Ports::All, |port| self.has_port(port))
    }

    /// Whether these together match all that this one does.
    #[must_use]
    pub fn is_within(&self, rules: &[Self]) -> bool {
        let covered = |port| rules.iter().any(|rule| rule.covers(&self.who, port));
        match self.ports {
            Ports::Web => WEB_PORTS.into_iter().all(|port| covered(Some(port))),
            Ports::One(port) => covered(Some(port)),
            Ports::All => covered(None),
        }
    }
}

fn is_below(name: &str, above: &str) -> bool {
    name.strip_suffix(above).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

impl Rule {
    /// A rule that denies: without a port it holds for all of them.
    ///
    /// # Errors
    /// As with any rule.
    pub fn denying(text: &str) -> Result<Self, BadRule> {
        let rule: Self = text.parse()?;
        Ok(Self { ports: if rule.ports == Ports::Web { Ports::All } else { rule.ports }, ..rule })
    }
}

impl FromStr for Rule {
    type Err = BadRule;

    fn from_str(text: &str) -> Result<Self, BadRule> {
        let (host, ports) = split_port(text)?;
        let who = match host.strip_prefix('*') {
            Some("") => Who::Any,
            Some(below) => Who::Below(name(below.strip_prefix('.').ok_or(BadRule::Star)?)?),
            None => match host.parse()? {
                Host::Name(name) => Who::Name(name),
                Host::Address(address) => Who::Address(address),
            },
        };
        Ok(Self { who, ports })
    }
}

fn split_port(text: &str) -> Result<(&str, Ports), BadRule> {
    // An IPv6 address without brackets has no port.
    if text.parse::<std::net::Ipv6Addr>().is_ok() {
        return Ok((text, Ports::Web));
    }
    let behind = text.rfind(']').unwrap_or(0);
    let Some(at) = text[behind..].find(':').map(|at| behind + at) else { return Ok((text, Ports::Web)) };
    let ports = match &text[at + 1..] {
        "*" => Ports::All,
        port if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ports::One(port.parse().ok().filter(|port| *port > 0).ok_or(BadRule::Port)?)
        }
        _ => return Err(BadRule::Port),
    };
    Ok((&text[..at], ports))
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.who {
            Who::Any => f.write_str("*")?,
            Who::Name(name) => f.write_str(name)?,
            Who::Below(name) => write!(f, "*.{name}")?,
            Who::Address(address) => write!(f, "{}", Host::Address(*address))?,
        }
        match self.ports {
            Ports::Web => Ok(()),
            Ports::One(port) => write!(f, ":{port}"),
            Ports::All => f.write_str(":*"),
        }
    }
}

impl TryFrom<String> for Rule {
    type Error = BadRule;

    fn try_from(text: String) -> Result<Self, BadRule> {
        text.parse()
    }
}

impl From<Rule> for String {
    fn from(rule: Rule) -> Self {
        rule.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(text: &str) -> Rule {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn allows(rule_text: &str, host: &str, port: u16) -> bool {
        host.parse().is_ok_and(|host| rule(rule_text).matches(&host, port))
    }

    #[test]
    fn what_is_denied_without_a_port_is_denied_at_all_of_them() {
        let denied = |text: &str, port| Rule::denying(text).unwrap().matches(&"denied.test".parse().unwrap(), port);
        assert!(denied("denied.test", 8443) && denied("*.test", 22) && denied("denied.test:*", 1));
        assert!(denied("denied.test:8443", 8443) && !denied("denied.test:8443", 443));
    }

    #[test]
    fn a_name_stands_for_itself_at_the_ports_of_the_web() {
        assert!(allows("example.com", "example.com", 443) && allows("example.com", "example.com", 80));
        for (host, port) in [("example.com", 22), ("www.example.com", 443), ("example.com.evil.test", 443), ("xample.com", 443)] {
            assert!(!allows("example.com", host, port), "{host}:{port}");
        }
        assert!(allows("example.com:8443", "example.com", 8443) && !allows("example.com:8443", "example.com", 443));
    }

    #[test]
    fn case_and_a_dot_at_the_end_don_t_matter() {
        assert!(allows("Example.COM.", "eXample.com", 443) && allows("example.com", "EXAMPLE.COM.", 443));
        assert!("example.com..".parse::<Host>().is_err());
    }

    #[test]
    fn a_star_stands_for_any_depth_and_not_for_the_name_itself() {
        for good in ["a.example.org", "a.b.example.org"] {
            assert!(allows("*.example.org", good, 443), "{good}");
        }
        for bad in ["example.org", "badexample.org", ".example.org", "example.org.evil.test"] {
            assert!(!allows("*.example.org", bad, 443), "{bad}");
        }
        for bad in ["*example.org", "a.*.org", "**.org", "*.", "*.*.org"] {
            assert!(bad.parse::<Rule>().is_err(), "{bad}");
        }
    }

    #[test]
    fn no_address_is_reached_by_a_rule_for_names() {
        for literal in ["127.0.0.1", "169.254.169.254", "[::1]", "::ffff:127.0.0.1", "8.8.8.8"] {
            assert!(!allows("*:*", literal, 443), "{literal}");
        }
        for unusual in ["127.1", "0x7f.1", "2130706433", "0177.0.0.1", "1.2.3.4.", "[fe80::1%eth0]", "127.0.0.1 ", "0X7F000001"] {
            assert!(unusual.parse::<Host>().is_err(), "{unusual}");
        }
        assert!(allows("192.0.2.7:443", "192.0.2.7", 443) && !allows("192.0.2.7:443", "192.0.2.8", 443));
        assert!(allows("[2001:db8::1]:443", "[2001:DB8::1]", 443));
    }

    #[test]
    fn international_names_only_in_their_ascii_form() {
        assert_eq!("bücher.example".parse::<Rule>(), Err(BadRule::Characters));
        assert!(allows("xn--bcher-kva.example", "XN--bcher-kva.example", 443));
        for bad in ["exаmple.com", "example。com", "example.com/", "a@example.com", "example.com\r\nx", "exa mple.com", "", ".", "a..b"] {
            assert!(bad.parse::<Host>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_a_sandbox_asks_for_is_within_what_the_server_allows_or_not() {
        let server = ["*.example.org", "index.example.com:443", "index.example.com:80", "10.0.0.5:5432", "any.test:*"].map(rule);
        for good in
            ["a.example.org", "*.b.example.org:443", "*.example.org", "index.example.com", "10.0.0.5:5432", "any.test:9", "any.test:*"]
        {
            assert!(rule(good).is_within(&server), "{good}");
        }
        for bad in ["example.org", "*.org", "*", "a.example.org:22", "*.example.org:*", "index.example.com:81", "10.0.0.5", "other.test"] {
            assert!(!rule(bad).is_within(&server), "{bad}");
        }
        assert!(!rule("example.com").is_within(&[]));
        assert!(rule("*").is_within(&[rule("*")]) && rule("10.0.0.1").is_within(&[rule("*:*")]).eq(&false));
    }

    proptest! {
        #[test]
        fn a_rule_reads_as_it_is_written(text in "(\\*\\.)?[a-z0-9-]{1,8}(\\.[a-z]{1,5}){0,3}\\.?(:[0-9]{1,5})?|.{0,20}") {
            if let Ok(rule) = text.parse::<Rule>() {
                prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule));
            }
        }

        #[test]
        fn what_is_within_matches_no_more(name in "([a-c]\\.){0,3}(x|y)", port in 79u16..82, inner in "(\\*\\.)?([a-c]\\.){0,2}(x|y)(:8[01])?", outer in "(\\*\\.)?([a-c]\\.){0,2}(x|y)(:8[01]|:\\*)?") {
            let (host, inner, outer) = (name.parse::<Host>().unwrap(), rule(&inner), rule(&outer));
            if inner.is_within(std::slice::from_ref(&outer)) && inner.matches(&host, port) {
                prop_assert!(outer.matches(&host, port));
            }
        }
    }
}
