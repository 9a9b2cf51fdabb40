//! Profiles: which extension makes a sandbox, and what may be said about it.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ExtensionError, ExtensionName, HostName, InputType, InputValue, Inputs, ProfileName};

const MAX_PROFILE_BYTES: u64 = 256 * 1024;
const MAX_INPUTS: usize = 64;
const MAX_INPUT_NAME: usize = 64;

/// The profiles that every server has.
const BUILT_IN: [&str; 4] = [
    include_str!("../profiles/gvisor.toml"),
    include_str!("../profiles/compose-e2e.toml"),
    include_str!("../profiles/compose-checkpoint.toml"),
    include_str!("../profiles/saas-stub.toml"),
];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub name: ProfileName,
    pub extension: ExtensionName,
    pub description: String,
    /// Where its sandboxes go, unless their creator says otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostName>,
    /// Whether its sandboxes can be snapshotted, where the extension can do it.
    #[serde(default)]
    pub snapshots: bool,
    #[serde(default)]
    pub inputs: BTreeMap<String, InputSpec>,
    /// For the extension; not a user's to change.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, InputValue>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputSpec {
    #[serde(rename = "type")]
    pub kind: InputType,
    pub description: String,
    #[serde(default)]
    pub required: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<InputValue>,
    /// If not empty, one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<InputValue>,
}

/// Everything that is wrong with a profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ProfileFaults(pub Vec<String>);

impl fmt::Display for ProfileFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl Profile {
    /// # Errors
    /// It is not TOML, or not a profile; all faults together.
    pub fn parse(text: &str) -> Result<Self, ProfileFaults> {
        let profile: Self = toml::from_str(text).map_err(|error| ProfileFaults(vec![error.to_string().trim_end().to_owned()]))?;
        let mut faults = Vec::new();
        if profile.description.trim().is_empty() {
            faults.push("description: say what it is for".to_owned());
        }
        if profile.inputs.len() > MAX_INPUTS {
            faults.push(format!("inputs: {} of them, and {MAX_INPUTS} are the most", profile.inputs.len()));
        }
        for (name, spec) in &profile.inputs {
            spec.check(name, &mut faults);
        }
        if faults.is_empty() { Ok(profile) } else { Err(ProfileFaults(faults)) }
    }

    /// The inputs of a new sandbox: what was given, of the right types, and defaults for the rest.
    ///
    /// # Errors
    /// One is unknown, missing or of the wrong type; all faults together.
    pub fn resolve(&self, given: &BTreeMap<String, Value>) -> Result<Inputs, ExtensionError> {
        let mut faults = Vec::new();
        for name in given.keys().filter(|name| !self.inputs.contains_key(*name)) {
            let known: Vec<&str> = self.inputs.keys().map(String::as_str).collect();
            let shown: String = name.chars().take(MAX_INPUT_NAME).collect();
            faults.push(format!("inputs.{shown:?}: {} has no such input; it has {}", self.name, known.join(", ")));
        }
        let mut inputs = Inputs::new();
        for (name, spec) in &self.inputs {
            match (given.get(name), &spec.default) {
                (Some(value), _) => match spec.kind.read(value) {
                    Ok(value) if !spec.choices.is_empty() && !spec.choices.contains(&value) => {
                        let choices: Vec<String> = spec.choices.iter().map(ToString::to_string).collect();
                        faults.push(format!("inputs.{name}: one of {}", choices.join(", ")));
                    }
                    Ok(value) => drop(inputs.insert(name.clone(), value)),
                    Err(why) => faults.push(format!("inputs.{name}: {why}")),
                },
                (None, Some(default)) => drop(inputs.insert(name.clone(), default.clone())),
                (None, None) if spec.required => faults.push(format!("inputs.{name}: needed ({})", spec.description)),
                (None, None) => {}
            }
        }
        if faults.is_empty() { Ok(inputs) } else { Err(ExtensionError::invalid(format!("{}.", faults.join("; ")))) }
    }
}

impl InputSpec {
    fn check(&self, name: &str, faults: &mut Vec<String>) {
        let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.is_empty() || name.len() > MAX_INPUT_NAME || !name.bytes().all(good) || !name.as_bytes()[0].is_ascii_lowercase() {
            faults.push(format!("inputs.{name:?}: a name is a-z, 0-9 and _, begins with a letter and has {MAX_INPUT_NAME} at most"));
        }
        if self.description.trim().is_empty() {
            faults.push(format!("inputs.{name}.description: say what it is for"));
        }
        if self.required && self.default.is_some() {
            faults.push(format!("inputs.{name}: what has a default is not required"));
        }
        if self.default.iter().chain(&self.choices).any(|value| !value.is_a(self.kind)) {
            faults.push(format!("inputs.{name}: its default and choices must be {}", self.kind));
        }
        if let Some(default) = &self.default
            && !self.choices.is_empty()
            && !self.choices.contains(default)
        {
            faults.push(format!("inputs.{name}.default: not among its choices"));
        }
    }
}

/// The built-in profiles and those of a directory, which replace built-in ones of the same name.
#[derive(Debug, Clone)]
pub struct Profiles(BTreeMap<ProfileName, Profile>);

impl Profiles {
    /// # Errors
    /// A file can't be read or is no profile; all faults together.
    pub fn load(dir: Option<&Path>) -> Result<Self, ProfileFaults> {
        let mut faults = Vec::new();
        let mut profiles = BTreeMap::new();
        for text in BUILT_IN {
            let profile = Profile::parse(text)?;
            profiles.insert(profile.name.clone(), profile);
        }
        for file in dir.map(files).unwrap_or_default() {
            match read(&file).map_err(|error| error.to_string()).and_then(|text| Profile::parse(&text).map_err(|faults| faults.to_string()))
            {
                Ok(profile) => drop(profiles.insert(profile.name.clone(), profile)),
                Err(why) => faults.push(format!("{}: {why}", file.display())),
            }
        }
        if faults.is_empty() { Ok(Self(profiles)) } else { Err(ProfileFaults(faults)) }
    }

    #[must_use]
    pub fn get(&self, name: &ProfileName) -> Option<&Profile> {
        self.0.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Profile> {
        self.0.values()
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    files.sort();
    files
}

fn read(file: &Path) -> io::Result<String> {
    if fs::metadata(file)?.len() > MAX_PROFILE_BYTES {
        return Err(io::Error::other(format!("larger than {MAX_PROFILE_BYTES} bytes")));
    }
    fs::read_to_string(file)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn profile(name: &str) -> Profile {
        Profiles::load(None).unwrap().get(&name.parse().unwrap()).unwrap().clone()
    }

    fn given(value: Value) -> BTreeMap<String, Value> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_built_in_profiles_are_whole() {
        let names: Vec<String> = Profiles::load(None).unwrap().iter().map(|profile| profile.name.to_string()).collect();
        assert_eq!(names, ["profile.compose-checkpoint", "profile.compose-e2e", "profile.gvisor", "profile.saas-stub"]);
        let (checkpoint, e2e) = (profile("profile.compose-checkpoint"), profile("profile.compose-e2e"));
        assert_eq!((checkpoint.extension.as_str(), checkpoint.snapshots), ("ext.compose-ssh", true));
        assert_eq!((e2e.extension.as_str(), e2e.snapshots), ("ext.compose-ssh", false));
        assert_eq!(checkpoint.inputs["repo"], e2e.inputs["repo"], "the same convention");
    }

    #[test]
    fn inputs_are_resolved_or_all_faults_are_told() {
        let profile = profile("profile.compose-e2e");
        let inputs = profile.resolve(&given(json!({ "repo": "https://example.org/x.git" }))).unwrap();
        assert_eq!(inputs["repo"].as_str(), Some("https://example.org/x.git"));
        let error = profile.resolve(&given(json!({ "nonsense": 1, "healthy_within": "soon" }))).unwrap_err();
        for part in ["nonsense", "healthy_within", "repo", "needed"] {
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn a_bad_profile_is_told_all_its_faults() {
        let text = r#"
            name = "profile.x"
            extension = "ext.y"
            description = " "
            [inputs.Bad]
            type = "string"
            description = "x"
            [inputs.both]
            type = "integer"
            description = ""
            required = true
            default = "a"
        "#;
        let faults = Profile::parse(text).unwrap_err().0;
        assert_eq!(faults.len(), 5, "{faults:?}");
        for bad in ["", "name = 1", "name = \"profile.x\"\nextension = \"ext.y\"\ndescription = \"d\"\nunknown = 1", "\u{0}"] {
            assert!(Profile::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_replaces_a_built_in_profile_and_a_bad_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let text = include_str!("../profiles/saas-stub.toml").replace("host = \"local\"", "host = \"east\"");
        fs::write(dir.path().join("stub.toml"), text).unwrap();
        let profiles = Profiles::load(Some(dir.path())).unwrap();
        assert_eq!(profiles.get(&"profile.saas-stub".parse().unwrap()).unwrap().host.as_ref().unwrap().as_str(), "east");
        fs::write(dir.path().join("bad.toml"), "nonsense").unwrap();
        assert!(Profiles::load(Some(dir.path())).unwrap_err().to_string().contains("bad.toml"));
    }
}
