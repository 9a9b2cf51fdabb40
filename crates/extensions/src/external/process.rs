//! One process of an extension: bounded in time and in what it may say, alone in its process group, and ended with everything it started.

use std::{os::unix::process::CommandExt as _, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout,
};
use tracing::{info, warn};

use super::Program;
use crate::{
    ExtensionName,
    child::{Group, read_all},
};

/// The most that a program may answer.
pub(super) const MAX_ANSWER_BYTES: u64 = 1024 * 1024;
/// What of its standard error is logged for one call; what is beyond is read and dropped.
const MAX_LOGGED_BYTES: usize = 64 * 1024;
const MAX_LINE_CHARS: usize = 2000;

/// Runs the program with this input, and returns what it wrote. The error says what it did wrong.
pub(super) async fn run(name: &ExtensionName, program: &Program, input: &str, within: Duration) -> Result<Vec<u8>, String> {
    let mut command = Command::new(&program.path);
    command.args(&program.args).current_dir(&program.state_dir).env_clear();
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("HOME", &program.state_dir).env("LANG", "C.UTF-8").envs(&program.env);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.as_std_mut().process_group(0);
    let mut child = command.spawn().map_err(|error| format!("{} can't be started: {error}", program.path.display()))?;
    let group = Group::of(&child);
    match timeout(within, converse(name, &mut child, input, group)).await {
        Ok(said) => said,
        Err(_) => Err(format!("it took longer than {} s and was ended", within.as_secs_f64())),
    }
}

async fn converse(name: &ExtensionName, child: &mut Child, input: &str, group: Option<Group>) -> Result<Vec<u8>, String> {
    let (Some(mut stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
        return Err("it has no pipes".to_owned());
    };
    let writing = async move {
        // A program that does not read its input may still know what to say.
        let _ = stdin.write_all(input.as_bytes()).await;
    };
    let reading = async {
        let mut said = Vec::new();
        let read = stdout.take(MAX_ANSWER_BYTES + 1).read_to_end(&mut said).await;
        (said, read)
    };
    let ending = async {
        let status = child.wait().await;
        // What it started and left would hold its output open.
        drop(group);
        status
    };
    let logging = log(name, stderr);
    let talk = async { tokio::join!(writing, logging, ending) };
    tokio::pin!(talk);
    tokio::pin!(reading);
    // Who floods is not waited for.
    let (said, status) = tokio::select! {
        said = &mut reading => {
            if said.0.len() as u64 > MAX_ANSWER_BYTES {
                return Err(format!("its answer is larger than {MAX_ANSWER_BYTES} bytes"));
            }
            (said, talk.await.2)
        }
        done = &mut talk => (reading.await, done.2),
    };
    let (said, read) = said;
    read.map_err(|error| format!("its answer can't be read: {error}"))?;
    if said.len() as u64 > MAX_ANSWER_BYTES {
        return Err(format!("its answer is larger than {MAX_ANSWER_BYTES} bytes"));
    }
    match status {
        Ok(status) if said.is_empty() => Err(format!("it said nothing and ended ({status})")),
        Ok(status) if !status.success() => Err(format!("it failed ({status})")),
        Ok(_) => Ok(said),
        Err(error) => Err(format!("its end can't be told: {error}")),
    }
}

/// Logs its standard error, up to a bound, and reads it to the end, so that it never waits for a reader.
async fn log(name: &ExtensionName, stderr: impl AsyncRead + Unpin) {
    let (kept, dropped) = read_all(stderr, MAX_LOGGED_BYTES).await;
    for line in String::from_utf8_lossy(&kept).lines() {
        let line: String = line.chars().filter(|c| !c.is_control()).take(MAX_LINE_CHARS).collect();
        info!(extension = %name, "{line}");
    }
    if dropped > 0 {
        warn!(extension = %name, dropped, "it said more than is logged");
    }
}
