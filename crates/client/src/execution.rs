//! What to run, and how it ended.

use std::{collections::BTreeMap, time::Duration};

use sandboxer_protocol::{
    ExecutionId,
    agent::signal_number,
    client::{Encoding, ExecuteRequest, Request, StatusUpdate, TtyRequest},
    limits::MAX_CLIENT_MESSAGE_BYTES,
};

use crate::Error;

/// A program to be run, built step by step.
///
/// ```
/// use std::time::Duration;
/// use sandboxer_client::{Execution, ExecutionId};
///
/// let tests = Execution::bash("make test").cwd("/src").env("CI", "1").timeout(Duration::from_secs(600)).stdin(false);
/// // Asked for again under the same name, it is not run again.
/// let once = Execution::python("print(42)").id(ExecutionId::random());
/// let editor = Execution::new("bash", "exec vi").tty(24, 80).raw(true);
/// let server = Execution::python("import http.server; http.server.main()").for_others();
/// ```
#[derive(Debug, Clone)]
pub struct Execution {
    request: ExecuteRequest,
}

impl Execution {
    /// A program in a language that the server knows.
    #[must_use]
    pub fn new(language: impl Into<String>, code: impl Into<String>) -> Self {
        let request = ExecuteRequest {
            language: language.into(),
            code: code.into(),
            execution_id: None,
            env: None,
            cwd: None,
            timeout: None,
            stdin: None,
            tty: None,
            encoding: None,
            peek: None,
        };
        Self { request }
    }

    /// A Python program.
    #[must_use]
    pub fn python(code: impl Into<String>) -> Self {
        Self::new("python", code)
    }

    /// A bash script.
    #[must_use]
    pub fn bash(code: impl Into<String>) -> Self {
        Self::new("bash", code)
    }

    /// The name of this execution, in place of a random one. Asked for twice, the same name runs once.
    #[must_use]
    pub fn id(mut self, id: ExecutionId) -> Self {
        self.request.execution_id = Some(id);
        self
    }

    /// A variable of its environment.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.env.get_or_insert_with(BTreeMap::new).insert(name.into(), value.into());
        self
    }

    /// Where it starts.
    #[must_use]
    pub fn cwd(mut self, path: impl Into<String>) -> Self {
        self.request.cwd = Some(path.into());
        self
    }

    /// How long it may run; then it is killed with everything it started.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.request.timeout = Some(timeout.into());
        self
    }

    /// Whether its input is open (the default) or at its end from the start.
    #[must_use]
    pub fn stdin(mut self, open: bool) -> Self {
        self.request.stdin = Some(open);
        self
    }

    /// Gives it a terminal of this size. All its output is then stdout.
    #[must_use]
    pub fn tty(mut self, rows: u16, cols: u16) -> Self {
        self.request.tty = Some(TtyRequest { rows, cols });
        self
    }

    /// Whether output shall arrive as the very bytes that were written. By default it is text: what is not UTF-8 arrives as U+FFFD.
    /// Raw output costs a third more on the wire.
    #[must_use]
    pub fn raw(mut self, raw: bool) -> Self {
        self.request.encoding = raw.then_some(Encoding::Base64);
        self
    }

    /// Starts it for others: what this client is sent of its output is there for whoever attaches next, as long as it does not consume
    /// it.
    #[must_use]
    pub fn for_others(mut self) -> Self {
        self.request.peek = Some(true);
        self
    }

    /// The identity and the message that is sent, as often as need be.
    pub(crate) fn into_message(mut self) -> Result<(ExecutionId, String), Error> {
        let id = self.request.execution_id.get_or_insert_with(ExecutionId::random).clone();
        let message = Request::Execute(Box::new(self.request)).to_json();
        if message.len() > MAX_CLIENT_MESSAGE_BYTES {
            return Err(Error::invalid(format!("The program is too large: at most {MAX_CLIENT_MESSAGE_BYTES} bytes as a message.")));
        }
        // What the server would refuse is told without asking it.
        Request::parse(&message).map_err(|bad| Error::invalid(bad.message))?;
        Ok((id, message))
    }
}

/// How a program ended.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// let exit = sandbox.bash("exit 3").await?.wait().await?;
/// assert!(!exit.success());
/// assert_eq!((exit.code, exit.signal.as_deref(), exit.timed_out), (Some(3), None, false));
/// std::process::exit(exit.shell_code().into());
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exit {
    /// Its exit code, if it ended by itself.
    pub code: Option<i32>,
    /// The name of the signal that ended it, such as `SIGKILL`.
    pub signal: Option<String>,
    /// How long it ran.
    pub duration: Duration,
    /// Whether it was ended because its time was over.
    pub timed_out: bool,
}

impl Exit {
    /// Whether it ended by itself, with exit code 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// The exit code as a shell tells it: 128 and the number of the signal, if one ended it.
    #[must_use]
    pub fn shell_code(&self) -> u8 {
        if let Some(code) = self.code {
            // As the kernel does it: the low eight bits.
            return u8::try_from(code & 0xff).unwrap_or(u8::MAX);
        }
        let signal = self.signal.as_deref().and_then(|name| signal_number(name).or_else(|| name.strip_prefix("SIG")?.parse().ok()));
        signal.and_then(|number| u8::try_from(128 + number).ok()).unwrap_or(u8::MAX)
    }
}

impl From<StatusUpdate> for Exit {
    fn from(done: StatusUpdate) -> Self {
        let milliseconds = done.duration_ms.filter(|ms| (0.0..1e15).contains(ms)).unwrap_or_default();
        Self {
            code: done.exit_code,
            signal: done.signal,
            duration: Duration::from_secs_f64(milliseconds / 1000.0),
            timed_out: done.timed_out.unwrap_or(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: Option<i32>, signal: Option<&str>) -> Exit {
        Exit { code, signal: signal.map(str::to_owned), duration: Duration::ZERO, timed_out: false }
    }

    #[test]
    fn an_exit_is_told_as_a_shell_tells_it() {
        let cases = [(Some(0), None, 0), (Some(3), None, 3), (None, Some("SIGKILL"), 137), (None, Some("SIG34"), 162), (None, None, 255)];
        for (code, signal, expected) in cases {
            assert_eq!(exit(code, signal).shell_code(), expected);
        }
    }

    #[test]
    fn a_request_that_would_be_refused_is_not_sent() {
        for bad in [Execution::python("a\0b"), Execution::bash("x").cwd("here"), Execution::bash("x").env("A=B", "")] {
            assert!(matches!(bad.into_message(), Err(Error::Invalid { .. })));
        }
        assert!(matches!(Execution::bash("x".repeat(9 << 20)).into_message(), Err(Error::Invalid { .. })));
    }

    #[test]
    fn every_execution_has_a_name_of_its_own() {
        let (first, message) = Execution::python("1").into_message().unwrap();
        let (second, _) = Execution::python("1").into_message().unwrap();
        assert_ne!(first, second);
        assert_eq!(message, format!(r#"{{"language":"python","code":"1","execution_id":"{first}"}}"#));
    }

    #[test]
    fn a_nonsensical_duration_is_none() {
        let mut done = StatusUpdate::new(sandboxer_protocol::client::Status::ExecutionDone);
        for wrong in [-1.0, f64::NAN, f64::INFINITY] {
            done.duration_ms = Some(wrong);
            assert_eq!(Exit::from(done.clone()).duration, Duration::ZERO);
        }
    }
}
