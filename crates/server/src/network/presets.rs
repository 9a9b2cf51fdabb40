//! Rules by a short name: `@pypi` stands for the hosts that pip needs.

use super::rules::{BadRule, Rule};

/// Each preset and its hosts, at the ports of the web.
const PRESETS: [(&str, &[&str]); 3] = [
    ("@pypi", &["pypi.org", "files.pythonhosted.org"]),
    ("@npm", &["registry.npmjs.org"]),
    ("@debian", &["deb.debian.org", "security.debian.org"]),
];

/// The rules that a text stands for: one, or all of a preset.
///
/// # Errors
/// The text is no rule, or there is no such preset.
pub fn rules_of(text: &str) -> Result<Vec<Rule>, BadRule> {
    if !text.starts_with('@') {
        return Ok(vec![text.parse()?]);
    }
    let (_, hosts) = PRESETS.iter().find(|(name, _)| *name == text).ok_or_else(|| BadRule::Preset(names()))?;
    hosts.iter().map(|host| host.parse()).collect()
}

fn names() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preset_stands_for_its_hosts_and_no_others() {
        let shown = |text: &str| rules_of(text).unwrap().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown("@pypi"), ["pypi.org", "files.pythonhosted.org"]);
        assert_eq!(shown("*.example.org:443"), ["*.example.org:443"]);
        let error = rules_of("@pipy").unwrap_err().to_string();
        assert!(error.contains("@pypi, @npm, @debian"), "{error}");
        for (name, hosts) in PRESETS {
            assert_eq!(rules_of(name).unwrap().len(), hosts.len());
        }
    }
}
