//! Which executions an interpreter that waits can run exactly as one that is started for them.
//!
//! Its environment is changed when it gets its code. What an interpreter, its libraries or the search for it look at only when it starts
//! must be the same already; whoever wants it different gets a fresh one.

use std::collections::BTreeMap;

use sandboxer_protocol::agent::{ExecSpec, Language};

/// Beyond it starting a program may be refused, which must not depend on who waits.
const MAX_ENVIRONMENT_BYTES: usize = 64 * 1024;

/// Looked at by the loader, the C library, or whoever finds the interpreter.
const COMMON: [&str; 12] =
    ["PATH", "LANG", "LANGUAGE", "TZ", "TZDIR", "LOCPATH", "NLSPATH", "GCONV_PATH", "HOSTALIASES", "RES_OPTIONS", "LOCALDOMAIN", "TMPDIR"];
const COMMON_PREFIXES: [&str; 5] = ["LC_", "LD_", "MALLOC_", "GLIBC_", "PYTHON"];

/// Besides all that begins with its name: Python looks here for the user's own modules, and OpenSSL for its settings.
const PYTHON: [&str; 3] = ["HOME", "OPENSSL_CONF", "OPENSSL_MODULES"];
const PYTHON_PREFIXES: [&str; 2] = ["SSL_", "OPENSSL_"];

/// What bash gives a meaning or a value of its own.
const BASH: [&str; 52] = [
    "CDPATH",
    "CHILD_MAX",
    "COLUMNS",
    "COPROC",
    "DIRSTACK",
    "EMACS",
    "ENV",
    "EPOCHREALTIME",
    "EPOCHSECONDS",
    "EUID",
    "EXECIGNORE",
    "FCEDIT",
    "FIGNORE",
    "FUNCNAME",
    "FUNCNEST",
    "GLOBIGNORE",
    "GROUPS",
    "HOSTFILE",
    "HOSTNAME",
    "HOSTTYPE",
    "IFS",
    "IGNOREEOF",
    "INSIDE_EMACS",
    "LINENO",
    "LINES",
    "MACHTYPE",
    "MAPFILE",
    "OLDPWD",
    "OPTARG",
    "OPTERR",
    "OPTIND",
    "OSTYPE",
    "PIPESTATUS",
    "POSIXLY_CORRECT",
    "POSIX_PEDANTIC",
    "PPID",
    "PROMPT_COMMAND",
    "PS1",
    "PS2",
    "PS4",
    "PWD",
    "RANDOM",
    "REPLY",
    "SECONDS",
    "SHELLOPTS",
    "SHLVL",
    "SRANDOM",
    "TERM",
    "TMOUT",
    "UID",
    "_",
    // While it waits.
    "__sandboxer",
];
const BASH_PREFIXES: [&str; 4] = ["BASH", "COMP_", "HIST", "READLINE_"];

fn counts_at_start(language: Language, name: &str) -> bool {
    let (names, prefixes): (&[&str], &[&str]) = match language {
        Language::Python => (&PYTHON, &PYTHON_PREFIXES),
        Language::Bash => (&BASH, &BASH_PREFIXES),
    };
    let among = |names: &[&str], prefixes: &[&str]| names.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix));
    among(&COMMON, &COMMON_PREFIXES) || among(names, prefixes)
}

fn is_identifier(name: &str) -> bool {
    !name.starts_with(|first: char| first.is_ascii_digit())
        && !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// By this Python knows an archive of modules, which it runs in another way.
const END_OF_ARCHIVE: &[u8] = b"PK\x05\x06";
/// With the longest comment that may follow it.
const END_OF_ARCHIVE_BYTES: usize = 22 + u16::MAX as usize;

fn is_archive(code: &[u8]) -> bool {
    let end = &code[code.len().saturating_sub(END_OF_ARCHIVE_BYTES)..];
    end.windows(END_OF_ARCHIVE.len()).any(|piece| piece == END_OF_ARCHIVE)
}

/// `env` is what the one that waits was started with.
pub(super) fn suits(spec: &ExecSpec, code: &[u8], env: &BTreeMap<String, String>) -> bool {
    let bytes: usize = spec.env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    let same = |name: &String| spec.env.get(name) == env.get(name);
    spec.tty.is_none()
        && bytes <= MAX_ENVIRONMENT_BYTES
        && spec.cwd.starts_with('/')
        && !spec.cwd.contains('\0')
        && spec.env.keys().chain(env.keys()).all(|name| is_identifier(name) && (same(name) || !counts_at_start(spec.language, name)))
        && spec.env.values().all(|value| !value.contains('\0'))
        && !(spec.language == Language::Python && is_archive(code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::program;

    fn suit(language: Language, change: &[(&str, Option<&str>)]) -> bool {
        let base: BTreeMap<String, String> =
            [("PATH", "/bin"), ("HOME", "/root"), ("LANG", "C.UTF-8")].map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut env = base.clone();
        for (name, value) in change {
            match value {
                Some(value) => env.insert((*name).to_owned(), (*value).to_owned()),
                None => env.remove(*name),
            };
        }
        let spec = ExecSpec { env, ..program(language) };
        suits(&spec, b"", &base)
    }

    #[test]
    fn what_a_start_depends_on_must_be_as_it_was_then() {
        for language in [Language::Bash, Language::Python] {
            assert!(suit(language, &[]));
            assert!(suit(language, &[("TOKEN", Some("a=b\n'\"")), ("USER", Some("me"))]));
            for changed in
                [("PATH", Some("/usr/bin")), ("LANG", None), ("LC_ALL", Some("C")), ("LD_PRELOAD", Some("/x.so")), ("TZ", Some("UTC"))]
            {
                assert!(!suit(language, &[changed]), "{changed:?}");
            }
            for odd in ["a-b", "1x", "", "BASH_FUNC_f%%", "é"] {
                assert!(!suit(language, &[(odd, Some("x"))]), "{odd:?}");
            }
            assert!(!suit(language, &[("BIG", Some(&"x".repeat(70_000)))]));
        }
    }

    #[test]
    fn each_language_has_variables_of_its_own() {
        assert!(suit(Language::Bash, &[("HOME", Some("/tmp"))]) && !suit(Language::Python, &[("HOME", Some("/tmp"))]));
        assert!(!suit(Language::Python, &[("PYTHONHASHSEED", Some("0"))]));
        assert!(!suit(Language::Python, &[("PYTHONPATH", Some("/x"))]));
        for name in ["BASH_ENV", "SHELLOPTS", "POSIXLY_CORRECT", "IFS", "SHLVL", "PWD", "_", "__sandboxer"] {
            assert!(!suit(Language::Bash, &[(name, Some("x"))]), "{name}");
        }
    }
}
