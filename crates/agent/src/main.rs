//! `sandboxer-agent`: PID 1 of every sandbox, and (as `sandboxer-agent init`) the init of the namespaces that user code lives in.
//!
//! ```text
//!  server ══ two FIFOs ══ agent (PID 1, one thread, never blocks)
//!                           │ mounts, groups, windows, memory watch
//!                           │ SOCK_SEQPACKET
//!                         init (own PID, mount, IPC, UTS namespaces; root = overlay; few capabilities)
//!                           └ user programs, each in a session and a group of its own; their pipes go to the agent
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test"))]

mod agent;
mod cgroup;
mod execution;
mod hold;
mod init;
mod ipc;
mod link;
mod memory;
#[cfg(test)]
mod sample;
mod setup;
mod spawn;
mod supervisor;
mod sys;

use std::process::ExitCode;

use sandboxer_protocol::agent::AgentConfig;

/// For the agent and, to begin with, for programs.
const DESCRIPTORS: u64 = 4096;

fn main() -> ExitCode {
    let outcome = if std::env::args_os().nth(1).is_some_and(|argument| argument == "init") { init::run() } else { run() };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandboxer-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> std::io::Result<()> {
    sys::return_large_buffers_at_once();
    sys::raise_descriptor_limit(DESCRIPTORS);
    sys::set_not_dumpable()?;
    let config = std::env::var(AgentConfig::VARIABLE).map_err(std::io::Error::other)?;
    // SAFETY: there is only this thread.
    unsafe { std::env::remove_var(AgentConfig::VARIABLE) };
    let config: AgentConfig = serde_json::from_str(&config)?;
    agent::Agent::new(config)?.run()
}
