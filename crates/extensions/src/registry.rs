//! What whoever runs the server has configured: profiles, hosts, and programs that are extensions. One directory:
//!
//! ```text
//! hosts.toml         placement hosts, and where repositories may come from
//! extensions.toml    programs that are extensions
//! profiles/*.toml    profiles besides the built-in ones
//! ```

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;

use crate::{
    ExtensionName, Hosts, Profiles,
    external::{CALL_WITHIN, Program},
};

const MAX_FILE_BYTES: u64 = 256 * 1024;
/// The longest that a configured call may take.
const MAX_CALL_SECONDS: f64 = 24.0 * 3600.0;

/// The names that are taken.
const BUILT_IN: [&str; 3] = ["ext.gvisor", "ext.compose-ssh", "ext.saas-stub"];

#[derive(Debug, Clone)]
pub struct Config {
    pub profiles: Profiles,
    pub hosts: Hosts,
    pub programs: BTreeMap<ExtensionName, Program>,
}

/// Everything that is wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ConfigFaults(pub Vec<String>);

impl fmt::Display for ConfigFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct File {
    extensions: BTreeMap<ExtensionName, Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    program: PathBuf,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    timeout_seconds: Option<f64>,
}

impl Config {
    /// Reads the directory, if there is one; each program gets a directory of its own below `state_dir`.
    ///
    /// # Errors
    /// All faults together.
    pub fn load(dir: Option<&Path>, state_dir: &Path) -> Result<Self, ConfigFaults> {
        let mut faults = Vec::new();
        let profiles = Profiles::load(dir.map(|dir| dir.join("profiles")).as_deref()).map_err(|error| faults.extend(error.0)).ok();
        let named = |fault: String| format!("hosts.toml: {fault}");
        let hosts = Hosts::load(dir.map(|dir| dir.join("hosts.toml")).as_deref());
        let hosts = hosts.map_err(|error| faults.extend(error.0.into_iter().map(named))).ok();
        let mut programs = BTreeMap::new();
        match dir.map(|dir| read(&dir.join("extensions.toml"))) {
            None => {}
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Some(Err(error)) => faults.push(format!("extensions.toml: {error}")),
            Some(Ok(text)) => match toml::from_str::<File>(&text) {
                Err(error) => faults.push(format!("extensions.toml: {}", error.to_string().trim_end())),
                Ok(file) => {
                    for (name, entry) in file.extensions {
                        match entry.check(&name, state_dir) {
                            Ok(program) => drop(programs.insert(name, program)),
                            Err(fault) => faults.push(format!("extensions.toml: {name}: {fault}")),
                        }
                    }
                }
            },
        }
        for profile in profiles.iter().flat_map(Profiles::iter) {
            if !BUILT_IN.contains(&profile.extension.as_str()) && !programs.contains_key(&profile.extension) && faults.is_empty() {
                faults.push(format!("{}: there is no extension {}", profile.name, profile.extension));
            }
            if let (Some(hosts), Some(host)) = (&hosts, &profile.host)
                && hosts.get(host).is_none()
            {
                faults.push(format!("{}: there is no host {host}", profile.name));
            }
        }
        match (profiles, hosts) {
            (Some(profiles), Some(hosts)) if faults.is_empty() => Ok(Self { profiles, hosts, programs }),
            _ => Err(ConfigFaults(faults)),
        }
    }
}

impl Entry {
    fn check(self, name: &ExtensionName, state_dir: &Path) -> Result<Program, String> {
        if BUILT_IN.contains(&name.as_str()) {
            return Err("this name is a built-in extension's".to_owned());
        }
        if !self.program.is_absolute() {
            return Err("program: an absolute path is needed".to_owned());
        }
        let within = match self.timeout_seconds {
            None => CALL_WITHIN,
            Some(seconds) if seconds > 0.0 && seconds <= MAX_CALL_SECONDS => Duration::from_secs_f64(seconds),
            Some(_) => return Err("timeout_seconds: more than 0 and at most a day".to_owned()),
        };
        let state_dir = state_dir.join(name.as_str());
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&state_dir)
            .map_err(|error| format!("{}: {error}", state_dir.display()))?;
        Ok(Program { path: self.program, args: self.args, env: self.env, state_dir, within })
    }
}

fn read(file: &Path) -> io::Result<String> {
    if fs::metadata(file)?.len() > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("larger than {MAX_FILE_BYTES} bytes")));
    }
    fs::read_to_string(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_read_whole_and_all_faults_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        assert!(Config::load(None, &state).unwrap().programs.is_empty());
        assert!(Config::load(Some(dir.path()), &state).is_ok(), "an empty directory is a configuration");
        fs::write(dir.path().join("extensions.toml"), "[extensions.\"ext.mine\"]\nprogram = \"/bin/true\"\ntimeout_seconds = 5\n").unwrap();
        let config = Config::load(Some(dir.path()), &state).unwrap();
        assert_eq!(config.programs.values().next().unwrap().within, Duration::from_secs(5));
        assert!(state.join("ext.mine").is_dir());

        fs::write(dir.path().join("extensions.toml"), "[extensions.\"ext.saas-stub\"]\nprogram = \"true\"\n").unwrap();
        fs::write(dir.path().join("hosts.toml"), "[hosts.x]\nkind = \"ssh\"\n").unwrap();
        let faults = Config::load(Some(dir.path()), &state).unwrap_err();
        assert!(faults.to_string().contains("built-in") && faults.to_string().contains("hosts.x.target"), "{faults}");
    }

    #[test]
    fn a_profile_of_an_extension_or_host_that_is_not_there_is_a_fault() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("profiles")).unwrap();
        let text = "name = \"profile.x\"\nextension = \"ext.none\"\ndescription = \"d\"\nhost = \"nowhere\"\n";
        fs::write(dir.path().join("profiles/x.toml"), text).unwrap();
        let faults = Config::load(Some(dir.path()), &dir.path().join("state")).unwrap_err().to_string();
        assert!(faults.contains("no extension ext.none") && faults.contains("no host nowhere"), "{faults}");
    }
}
