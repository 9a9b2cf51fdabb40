//! Interpreters that are started ahead of executions: how many, and what they have imported.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Of each language. Beyond it they cost more than they save: executions of a sandbox come one after the other.
pub const MAX_SPARES: u32 = 8;
pub const MAX_WARM_MODULES: usize = 64;
const MAX_MODULE_NAME_BYTES: usize = 200;

/// What the agent is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpareConfig {
    /// How many of each language.
    pub each: u32,
    /// The environment they are started with. An execution gets one only if it agrees with it in everything that counts when an interpreter
    /// starts; the rest is changed when it gets it.
    pub env: BTreeMap<String, String>,
    /// The modules that a waiting Python has imported already.
    pub warm_modules: Vec<String>,
}

/// What an image says of them, in [`ImageSpares::PATH`] as JSON; what it does not say is as the server wants it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpares {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub each: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_modules: Option<Vec<String>>,
}

impl ImageSpares {
    /// Beside the agent, where no archive can put it.
    pub const PATH: &str = "/sandboxer/spares.json";

    /// Says what is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        if self.each.is_some_and(|each| each > MAX_SPARES) {
            return Err(format!("at most {MAX_SPARES} interpreters of each language can wait"));
        }
        let modules = self.warm_modules.as_deref().unwrap_or_default();
        if let Some(bad) = modules.iter().find(|name| !is_module_name(name)) {
            return Err(format!("{bad:?} can't be the name of a module"));
        }
        if modules.len() > MAX_WARM_MODULES {
            return Err(format!("at most {MAX_WARM_MODULES} modules can be warm"));
        }
        Ok(())
    }

    /// What is wanted in a sandbox of this image. None: none are.
    #[must_use]
    pub fn applied_to(self, config: SpareConfig) -> Option<SpareConfig> {
        let config = SpareConfig {
            each: self.each.unwrap_or(config.each),
            warm_modules: self.warm_modules.unwrap_or(config.warm_modules),
            env: config.env,
        };
        (config.each > 0).then_some(config)
    }
}

/// Whether this can be the name of a module: it becomes an argument of an import.
fn is_module_name(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with(|first: char| first.is_ascii_digit())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    name.len() <= MAX_MODULE_NAME_BYTES && name.split('.').all(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(each: Option<u32>, modules: Option<&[&str]>) -> ImageSpares {
        ImageSpares { each, warm_modules: modules.map(|modules| modules.iter().map(|&name| name.to_owned()).collect()) }
    }

    #[test]
    fn only_names_of_modules_are_taken_for_such() {
        for good in ["json", "os.path", "_x1"] {
            assert_eq!(said(None, Some(&[good])).check(), Ok(()), "{good}");
        }
        for bad in ["", ".", "a.", "a b", "1a", "a;b", "é", "a\n", &"x".repeat(201)] {
            assert!(said(None, Some(&[bad])).check().is_err(), "{bad}");
        }
        assert!(said(None, Some(&["x"; 65])).check().is_err());
        assert!(said(Some(9), None).check().is_err());
    }

    #[test]
    fn an_image_changes_what_it_speaks_of_and_nothing_else() {
        let server = SpareConfig { each: 1, env: BTreeMap::new(), warm_modules: vec!["json".to_owned()] };
        assert_eq!(ImageSpares::default().applied_to(server.clone()), Some(server.clone()));
        assert_eq!(said(Some(0), None).applied_to(server.clone()), None);
        let two = said(Some(2), Some(&["numpy"])).applied_to(server).unwrap();
        assert_eq!((two.each, two.warm_modules), (2, vec!["numpy".to_owned()]));
    }

    #[test]
    fn what_agents_and_servers_without_them_say_is_still_understood() {
        use crate::agent::{AgentConfig, FromAgent};
        let old = r#"{"marker":"00","disk_bytes":1,"disk_inodes":1,"memory_bytes":null,"pids":null,"output_window_bytes":1,"stdin_window_bytes":1}"#;
        let config: AgentConfig = serde_json::from_str(old).unwrap();
        assert_eq!(config.spares, None);
        assert_eq!(serde_json::to_string(&config).unwrap(), old);
        let started: FromAgent = serde_json::from_str(r#"{"type":"started","number":1,"spawn_us":2}"#).unwrap();
        assert_eq!(started, FromAgent::Started { number: 1, spawn_us: 2, by_spare: false });
    }
}
