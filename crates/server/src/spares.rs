//! Interpreters that wait: how many the agents keep, and the environment they are started with.

use std::collections::BTreeMap;

use sandboxer_protocol::agent::SpareConfig;

/// What every program finds in its environment, unless the client says otherwise.
const ENVIRONMENT: [(&str, &str); 6] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/root"),
    ("USER", "root"),
    ("LOGNAME", "root"),
    ("SHELL", "/bin/bash"),
    ("LANG", "C.UTF-8"),
];

/// What scripts of this kind begin with, the small ones first: an execution that can't wait gets those that are there.
pub const WARM_MODULES: [&str; 4] = ["re", "json", "subprocess", "asyncio"];

/// Beyond it they cost more than they save: executions of a sandbox come one after the other.
pub const MAX_SPARES: u32 = 8;
pub const MAX_WARM_MODULES: usize = 64;

/// The waiting interpreters of every sandbox.
#[derive(Debug, Clone)]
pub struct Spares {
    /// How many of each language; 0: none.
    pub each: u32,
    pub warm_modules: Vec<String>,
}

impl Default for Spares {
    fn default() -> Self {
        Self { each: 1, warm_modules: WARM_MODULES.map(str::to_owned).to_vec() }
    }
}

impl Spares {
    pub(crate) fn for_agents(&self) -> Option<SpareConfig> {
        let config = || SpareConfig { each: self.each, env: environment(), warm_modules: self.warm_modules.clone() };
        (self.each > 0).then(config)
    }

    /// Whether this can be the name of a module: it becomes an argument of an import.
    #[must_use]
    pub fn is_module_name(name: &str) -> bool {
        let part = |part: &str| {
            !part.is_empty()
                && !part.starts_with(|first: char| first.is_ascii_digit())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        name.len() <= 200 && name.split('.').all(part)
    }
}

pub(crate) fn environment() -> BTreeMap<String, String> {
    ENVIRONMENT.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_modules_are_taken_for_such() {
        for good in ["json", "os.path", "_x1"] {
            assert!(Spares::is_module_name(good), "{good}");
        }
        for bad in ["", ".", "a.", "a b", "1a", "a;b", "é"] {
            assert!(!Spares::is_module_name(bad), "{bad}");
        }
    }

    #[test]
    fn agents_are_told_nothing_where_there_are_to_be_none() {
        assert_eq!(Spares { each: 0, ..Spares::default() }.for_agents(), None);
        assert_eq!(Spares::default().for_agents().map(|config| config.each), Some(1));
    }
}
