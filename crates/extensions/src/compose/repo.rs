//! `inputs.repo`: a git URL, or a directory of the server's machine. It comes from a client and reaches command lines.

use std::path::{Path, PathBuf};

use crate::{ExtensionError, InputValue, Inputs, Repos};

const MAX_URL_BYTES: usize = 2048;
const MAX_REF_BYTES: usize = 200;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Repo {
    Git { url: String, reference: Option<String> },
    Local(PathBuf),
}

fn bad(why: &str) -> ExtensionError {
    ExtensionError::invalid(format!("inputs.repo: {why}."))
}

pub(super) fn parse(inputs: &Inputs, repos: &Repos) -> Result<Repo, ExtensionError> {
    let text = inputs.get("repo").and_then(InputValue::as_str).ok_or_else(|| bad("it is needed"))?;
    let reference = inputs.get("ref").and_then(InputValue::as_str);
    if text.starts_with('/') {
        if reference.is_some() {
            return Err(ExtensionError::invalid("inputs.ref: only a git repository has branches and tags."));
        }
        return local(Path::new(text), repos).map(Repo::Local);
    }
    if let Some(reference) = reference
        && !plain_reference(reference)
    {
        return Err(ExtensionError::invalid(
            "inputs.ref: the name of a branch or tag, of letters, digits, ., _, - and /, not beginning with -.",
        ));
    }
    url(text, repos).map(|url| Repo::Git { url, reference: reference.map(str::to_owned) })
}

/// Links are followed first: what counts is where a directory really is.
fn local(path: &Path, repos: &Repos) -> Result<PathBuf, ExtensionError> {
    let refused = || bad("the hosts file of this server allows no such local directory (repos.local)");
    let real = path.canonicalize().map_err(|_| refused())?;
    let allowed = repos.local.iter().filter_map(|root| root.canonicalize().ok()).any(|root| real.starts_with(root));
    if allowed && real.is_dir() { Ok(real) } else { Err(refused()) }
}

fn url(text: &str, repos: &Repos) -> Result<String, ExtensionError> {
    let schemes = || repos.schemes.iter().map(|scheme| format!("{scheme}://")).collect::<Vec<_>>().join(", ");
    let (scheme, rest) =
        text.split_once("://").ok_or_else(|| bad(&format!("a URL that begins with {}, or an absolute path", schemes())))?;
    if !repos.schemes.iter().any(|allowed| allowed == scheme) {
        return Err(bad(&format!("this server takes URLs that begin with {}", schemes())));
    }
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:@%+".contains(&byte);
    if text.len() > MAX_URL_BYTES || !rest.bytes().all(good) {
        return Err(bad("a URL has letters, digits and -._~/:@%+ only"));
    }
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    if host.is_empty() || host.starts_with(['-', ':']) || user.starts_with('-') || path.is_empty() {
        return Err(bad("a URL names a host and a path, and none of its parts begins with -"));
    }
    if user.contains(':') || user.contains('@') {
        return Err(bad("a URL must not carry a password: it would be seen by others"));
    }
    if path.split('/').any(|part| part == ".." || part.starts_with('-')) {
        return Err(bad("no part of its path may be .. or begin with -"));
    }
    Ok(text.to_owned())
}

fn plain_reference(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    (1..=MAX_REF_BYTES).contains(&text.len()) && text.bytes().all(good) && !text.starts_with('-') && !text.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, repos: &Repos) -> Result<Repo, ExtensionError> {
        parse(&Inputs::from([("repo".to_owned(), InputValue::String(text.to_owned()))]), repos)
    }

    #[test]
    fn a_url_is_one_and_nothing_else() {
        let repos = Repos::default();
        for good in ["https://example.org/a/b.git", "ssh://git@example.org:2222/~me/x", "https://example.org/a%20b"] {
            assert!(parsed(good, &repos).is_ok(), "{good}");
        }
        for bad in [
            "",
            "; rm -rf /",
            "https://example.org/x; rm -rf /",
            "https://example.org/$(id)",
            "https://example.org/`id`",
            "https://example.org/a b",
            "https://example.org/a\nb",
            "https://example.org/'x",
            "-o ProxyCommand=id",
            "-oProxyCommand=id",
            "--upload-pack=id",
            "ssh://-oProxyCommand=id/x",
            "ssh://git@-oProxyCommand=id/x",
            "ssh://-x@host/x",
            "https://user:secret@example.org/x",
            "https:///x",
            "https://example.org",
            "https://example.org/../x",
            "https://example.org/-x",
            "ext::sh -c id",
            "file:///etc",
            "http://example.org/x",
            "git@example.org:x/y.git",
            "fd::3",
        ] {
            assert!(parsed(bad, &repos).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_local_directory_must_really_lie_where_it_may() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("repos");
        std::fs::create_dir_all(root.join("one")).unwrap();
        std::fs::create_dir(dir.path().join("secret")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("secret"), root.join("link")).unwrap();
        let text = |path: &str| root.join(path).to_str().unwrap().to_owned();
        assert!(parsed(&text("one"), &Repos::default()).is_err(), "nothing is allowed unless somebody says so");
        let repos = Repos { local: vec![root.clone()], ..Repos::default() };
        assert_eq!(parsed(&text("one"), &repos).unwrap(), Repo::Local(root.join("one").canonicalize().unwrap()));
        for bad in [text("link"), text("../secret"), text("none"), "/etc".to_owned(), "/".to_owned()] {
            assert!(parsed(&bad, &repos).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reference_is_a_name() {
        for bad in ["", "-x", "--upload-pack=x", "a b", "a..b", "a;b", "a\nb"] {
            assert!(!plain_reference(bad), "{bad}");
        }
        assert!(plain_reference("release/1.2-x"));
    }
}
