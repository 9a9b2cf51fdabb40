//! Placement hosts: where sandboxes of other kinds may be put. Named by whoever runs the server, in a file; never by a client.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::HostName;

const MAX_HOSTS_BYTES: u64 = 256 * 1024;
const DEFAULT_SSH_PORT: u16 = 22;

/// One host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Host {
    pub name: HostName,
    #[serde(flatten)]
    pub place: Place,
    /// Below it lie the directories of sandboxes and their snapshots. None: nothing is put there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_dir: Option<PathBuf>,
    /// A repository may ask for everything that its containers could have, the host itself included.
    pub trust_repos: bool,
}

/// How a host is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Place {
    /// The machine of the server itself.
    Local,
    Ssh(SshTarget),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SshTarget {
    pub user: String,
    pub address: String,
    pub port: u16,
    /// Paths of files; what is in them never leaves the machine.
    pub key: PathBuf,
    pub known_hosts: PathBuf,
}

/// What `inputs.repo` may name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Repos {
    /// Directories of the server's machine whose subdirectories may be copied to hosts. None by default: a client could name any.
    pub local: Vec<PathBuf>,
    /// Of git URLs.
    pub schemes: Vec<String>,
}

impl Default for Repos {
    fn default() -> Self {
        Self { local: Vec::new(), schemes: vec!["https".to_owned(), "ssh".to_owned()] }
    }
}

/// The hosts file.
#[derive(Debug, Clone)]
pub struct Hosts {
    hosts: BTreeMap<HostName, Host>,
    pub repos: Repos,
}

/// Everything that is wrong with a hosts file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct HostFaults(pub Vec<String>);

impl fmt::Display for HostFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct File {
    hosts: BTreeMap<HostName, Entry>,
    repos: Repos,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    kind: EntryKind,
    target: Option<String>,
    port: Option<u16>,
    key: Option<PathBuf>,
    known_hosts: Option<PathBuf>,
    base_dir: Option<PathBuf>,
    #[serde(default)]
    trust_repos: bool,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum EntryKind {
    Local,
    Ssh,
}

impl Hosts {
    /// The name of the server's own machine, which is always there.
    ///
    /// # Panics
    /// Never: it is a name.
    #[must_use]
    pub fn local_name() -> HostName {
        "local".parse().expect("a name")
    }

    /// # Errors
    /// The file can't be read or is no hosts file; all faults together. One that is not there names no hosts.
    pub fn load(file: Option<&Path>) -> Result<Self, HostFaults> {
        let text = match file.map(read) {
            None => String::new(),
            Some(Ok(text)) => text,
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Some(Err(error)) => return Err(HostFaults(vec![format!("{}: {error}", file.unwrap_or(Path::new("")).display())])),
        };
        Self::parse(&text)
    }

    /// # Errors
    /// It is no hosts file; all faults together.
    pub fn parse(text: &str) -> Result<Self, HostFaults> {
        let file: File = toml::from_str(text).map_err(|error| HostFaults(vec![error.to_string().trim_end().to_owned()]))?;
        let mut faults = Vec::new();
        let mut hosts = BTreeMap::new();
        for (name, entry) in file.hosts {
            if let Some(host) = entry.check(&name, &mut faults) {
                hosts.insert(name, host);
            }
        }
        for dir in file.repos.local.iter().filter(|dir| !dir.is_absolute()) {
            faults.push(format!("repos.local: {} is not an absolute path", dir.display()));
        }
        for scheme in file.repos.schemes.iter().filter(|scheme| !["https", "http", "ssh", "git"].contains(&scheme.as_str())) {
            faults.push(format!("repos.schemes: {scheme:?} is none of https, http, ssh, git"));
        }
        if !faults.is_empty() {
            return Err(HostFaults(faults));
        }
        let local = Self::local_name();
        hosts.entry(local.clone()).or_insert(Host { name: local, place: Place::Local, base_dir: None, trust_repos: false });
        Ok(Self { hosts, repos: file.repos })
    }

    #[must_use]
    pub fn get(&self, name: &HostName) -> Option<&Host> {
        self.hosts.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Host> {
        self.hosts.values()
    }
}

impl Entry {
    fn check(self, name: &HostName, faults: &mut Vec<String>) -> Option<Host> {
        let before = faults.len();
        let mut fault = |what: String| faults.push(format!("hosts.{name}.{what}"));
        for (field, path) in [("base_dir", &self.base_dir), ("key", &self.key), ("known_hosts", &self.known_hosts)] {
            if let Some(path) = path
                && !plain_path(path)
            {
                fault(format!("{field}: an absolute path of A-Z, a-z, 0-9, ., _, - and /, without . or .. as a part"));
            }
        }
        let place = match self.kind {
            EntryKind::Local => {
                if self.target.is_some() || self.port.is_some() || self.key.is_some() || self.known_hosts.is_some() {
                    fault("kind: a local host has no target, port, key or known_hosts".to_owned());
                }
                Place::Local
            }
            EntryKind::Ssh => {
                let target = self.target.as_deref().and_then(|target| target.split_once('@'));
                let target = target.filter(|(user, address)| plain_word(user) && plain_word(address));
                if target.is_none() {
                    fault("target: USER@ADDRESS, of letters, digits, ., _, - and :, not beginning with -".to_owned());
                }
                if self.key.is_none() || self.known_hosts.is_none() || self.base_dir.is_none() {
                    fault("kind: an ssh host needs key, known_hosts and base_dir".to_owned());
                }
                let (user, address) = target.unwrap_or_default();
                Place::Ssh(SshTarget {
                    user: user.to_owned(),
                    address: address.to_owned(),
                    port: self.port.unwrap_or(DEFAULT_SSH_PORT),
                    key: self.key.unwrap_or_default(),
                    known_hosts: self.known_hosts.unwrap_or_default(),
                })
            }
        };
        let host = Host { name: name.clone(), place, base_dir: self.base_dir, trust_repos: self.trust_repos };
        (faults.len() == before).then_some(host)
    }
}

/// It can be written into ssh's configuration and into a command line as it is.
fn plain_path(path: &Path) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    path.is_absolute()
        && path.parent().is_some()
        && path.as_os_str().as_encoded_bytes().iter().all(|byte| good(*byte))
        && path
            .to_str()
            .is_some_and(|text| !text.contains("//") && !text.ends_with('/') && !text.split('/').any(|part| part == "." || part == ".."))
}

fn plain_word(word: &str) -> bool {
    !word.is_empty() && !word.starts_with('-') && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte))
}

fn read(file: &Path) -> io::Result<String> {
    if fs::metadata(file)?.len() > MAX_HOSTS_BYTES {
        return Err(io::Error::other(format!("larger than {MAX_HOSTS_BYTES} bytes")));
    }
    fs::read_to_string(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        [repos]
        local = ["/srv/repos"]
        [hosts.east]
        kind = "ssh"
        target = "deploy@east.example.org"
        port = 2222
        key = "/etc/sandboxer/key"
        known_hosts = "/etc/sandboxer/known_hosts"
        base_dir = "/srv/sandboxer"
    "#;

    #[test]
    fn a_hosts_file_names_hosts_and_local_is_always_there() {
        let hosts = Hosts::parse(GOOD).unwrap();
        let east = hosts.get(&"east".parse().unwrap()).unwrap();
        let Place::Ssh(target) = &east.place else { panic!("{east:?}") };
        assert_eq!((target.user.as_str(), target.address.as_str(), target.port), ("deploy", "east.example.org", 2222));
        assert_eq!(hosts.get(&Hosts::local_name()).unwrap().base_dir, None, "nothing is put on this machine unless somebody says where");
        assert_eq!(Hosts::load(Some(Path::new("/nowhere/hosts.toml"))).unwrap().iter().count(), 1);
    }

    #[test]
    fn what_could_be_an_option_or_a_command_is_refused() {
        for (from, to) in [
            ("deploy@east.example.org", "deploy@-oProxyCommand=x"),
            ("deploy@east.example.org", "-x@east"),
            ("deploy@east.example.org", "east.example.org"),
            ("deploy@east.example.org", "a b@c"),
            ("/srv/sandboxer", "/srv/sand boxer"),
            ("/srv/sandboxer", "srv"),
            ("/srv/sandboxer", "/"),
            ("/srv/sandboxer", "/srv/../etc"),
            ("/srv/sandboxer", "/srv/$(x)"),
            ("/etc/sandboxer/key", "/etc/%h"),
            ("/srv/repos", "repos"),
            ("port = 2222", "port = 222222"),
            ("kind = \"ssh\"", "kind = \"local\""),
            ("[repos]", "[repos]\nschemes = [\"ext\"]"),
        ] {
            assert!(Hosts::parse(&GOOD.replace(from, to)).is_err(), "{to}");
        }
    }
}
