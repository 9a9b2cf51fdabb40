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

/// Of each language, unless the operator says otherwise.
pub const SPARE_INTERPRETERS: u32 = 1;

/// What a bash and a Python that wait with the modules below are resident with, pages of the image among them.
pub const SPARE_PAIR_MIB: u32 = 32;

/// What scripts of this kind begin with, the small ones first: an execution that can't wait gets those that are there.
pub const WARM_MODULES: [&str; 4] = ["re", "json", "subprocess", "asyncio"];

/// The waiting interpreters of every sandbox.
#[derive(Debug, Clone)]
pub struct Spares {
    /// How many of each language; 0: none.
    pub each: u32,
    pub warm_modules: Vec<String>,
}

impl Default for Spares {
    fn default() -> Self {
        Self { each: SPARE_INTERPRETERS, warm_modules: WARM_MODULES.map(str::to_owned).to_vec() }
    }
}

impl Spares {
    pub(crate) fn for_agents(&self) -> Option<SpareConfig> {
        let config = || SpareConfig { each: self.each, env: environment(), warm_modules: self.warm_modules.clone() };
        (self.each > 0).then(config)
    }
}

pub(crate) fn environment() -> BTreeMap<String, String> {
    ENVIRONMENT.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_told_nothing_where_there_are_to_be_none() {
        assert_eq!(Spares { each: 0, ..Spares::default() }.for_agents(), None);
        assert_eq!(Spares { each: 1, ..Spares::default() }.for_agents().map(|config| config.each), Some(1));
    }
}
