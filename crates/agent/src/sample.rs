//! What tests run.

use sandboxer_protocol::agent::{ExecSpec, Language};

/// A program with nothing special about it.
pub(crate) fn program(language: Language) -> ExecSpec {
    ExecSpec {
        number: 1,
        id: "x".parse().unwrap(),
        language,
        env: Default::default(),
        only_here: Default::default(),
        cwd: "/".to_owned(),
        stdin: true,
        tty: None,
        detached_output: Default::default(),
        note: String::new(),
    }
}
