//! Which mirror this machine's apt uses, so that images are built from the same one.

use std::fs;
use std::path::Path;

/// One repository that apt knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AptSource {
    uri: String,
    suite: String,
    components: Vec<String>,
    signed_by: Option<String>,
    trusted: bool,
}

/// The lines for mmdebstrap that name `suite` on the mirrors which this machine uses for its own `codename`; none if it has none.
pub(crate) fn lines_for(sources: &[AptSource], codename: &str, suite: &str, components: &[&str]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut has_suite_itself = false;
    for source in sources {
        // The distribution's own repositories: `bookworm`, `bookworm-updates`, `bookworm-security`; third parties rarely have a `main`.
        let Some(pocket) = source.suite.strip_prefix(codename).filter(|pocket| ["", "-updates", "-security"].contains(pocket)) else {
            continue;
        };
        let wanted: Vec<&str> =
            components.iter().copied().filter(|wanted| source.components.iter().any(|component| component == wanted)).collect();
        if !wanted.contains(&"main") {
            continue;
        }
        has_suite_itself |= pocket.is_empty();
        let mut options = Vec::new();
        options.extend(source.signed_by.as_ref().map(|keyring| format!("signed-by={keyring}")));
        options.extend(source.trusted.then(|| "trusted=yes".to_owned()));
        let options = if options.is_empty() { String::new() } else { format!("[{}] ", options.join(" ")) };
        let line = format!("deb {options}{} {suite}{pocket} {}", source.uri, wanted.join(" "));
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    if has_suite_itself { lines } else { Vec::new() }
}

/// Everything in this machine's apt configuration.
pub(crate) fn read(apt: &Path) -> Vec<AptSource> {
    let mut files = vec![apt.join("sources.list")];
    if let Ok(directory) = fs::read_dir(apt.join("sources.list.d")) {
        files.extend(directory.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut sources = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(parse_list(&text)),
            Some("sources") => sources.extend(parse_stanzas(&text)),
            _ => {}
        }
    }
    sources
}

/// The content of a `.list` file.
pub(crate) fn parse_list(text: &str) -> impl Iterator<Item = AptSource> {
    text.lines().filter_map(parse_line)
}

/// The content of a `.sources` file.
pub(crate) fn parse_stanzas(text: &str) -> impl Iterator<Item = AptSource> {
    text.split("\n\n").flat_map(parse_stanza)
}

/// `deb [signed-by=/path] URI suite component…`
fn parse_line(line: &str) -> Option<AptSource> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let (uri, suite) = (words.next()?, words.next()?);
    let option = |name: &str| options.split_whitespace().find_map(|option| option.strip_prefix(name)?.strip_prefix('=').map(str::to_owned));
    Some(AptSource {
        uri,
        suite,
        components: words.collect(),
        signed_by: option("signed-by").filter(|keyring| keyring.starts_with('/')),
        trusted: option("trusted").is_some_and(|value| value == "yes"),
    })
}

/// A stanza of `Key: values` lines, in which a line that begins with a blank goes on with the one before.
fn parse_stanza(stanza: &str) -> Vec<AptSource> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in stanza.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((key, value)) = line.split_once(':') {
            fields.push((key.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    let words = |key: &str| -> Vec<&str> {
        fields.iter().filter(|(name, _)| name == key).flat_map(|(_, value)| value.split_whitespace()).collect()
    };
    if words("enabled") == ["no"] || !words("types").contains(&"deb") {
        return Vec::new();
    }
    let mut sources = Vec::new();
    for uri in words("uris") {
        for suite in words("suites") {
            sources.push(AptSource {
                uri: uri.to_owned(),
                suite: suite.to_owned(),
                components: words("components").into_iter().map(str::to_owned).collect(),
                // A key written out in place has no path; mmdebstrap then looks for the right keyring itself.
                signed_by: words("signed-by").first().filter(|keyring| keyring.starts_with('/')).map(|keyring| (*keyring).to_owned()),
                trusted: words("trusted") == ["yes"],
            });
        }
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Vec<AptSource> {
        let apt = tempfile::tempdir().unwrap();
        fs::create_dir(apt.path().join("sources.list.d")).unwrap();
        for (name, text) in files {
            fs::write(apt.path().join(name), text).unwrap();
        }
        read(apt.path())
    }

    #[test]
    fn both_forms_of_apt_sources_are_read() {
        let sources = sources(&[
            (
                "sources.list",
                "# comment\ndeb [signed-by=/k.gpg arch=amd64] http://m/debian bookworm main contrib # x\ndeb-src http://m/debian bookworm main\n",
            ),
            (
                "sources.list.d/debian.sources",
                "Types: deb\n# was elsewhere\nURIs: http://m/debian-security\nSuites: bookworm-security\nComponents: main\nSigned-By: /k.gpg\n\nTypes: deb\nEnabled: no\nURIs: http://off\nSuites: bookworm\nComponents: main\n",
            ),
            ("sources.list.d/other.list", "deb http://third.party bookworm stable\n"),
            ("sources.list.d/ignored.list.save", "deb http://old bookworm main\n"),
        ]);
        assert_eq!(
            lines_for(&sources, "bookworm", "bookworm", &["main"]),
            [
                "deb [signed-by=/k.gpg] http://m/debian bookworm main",
                "deb [signed-by=/k.gpg] http://m/debian-security bookworm-security main"
            ]
        );
    }

    #[test]
    fn another_suite_comes_from_the_same_mirror() {
        let sources = sources(&[(
            "sources.list",
            "deb http://m/debian trixie main\ndeb http://m/debian trixie-updates main\ndeb http://m/debian trixie-backports main\n",
        )]);
        assert_eq!(
            lines_for(&sources, "trixie", "bookworm", &["main"]),
            ["deb http://m/debian bookworm main", "deb http://m/debian bookworm-updates main"]
        );
    }

    #[test]
    fn a_machine_without_the_suite_gives_no_lines() {
        let sources = sources(&[("sources.list", "deb http://m/debian bookworm-updates main\n")]);
        assert!(lines_for(&sources, "bookworm", "bookworm", &["main"]).is_empty());
    }
}
