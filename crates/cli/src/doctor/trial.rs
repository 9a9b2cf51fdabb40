//! Starts one real sandbox and ends it again: the only proof that gVisor runs here.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sandboxer_runsc::SandboxSpec;

use super::{Finding, Machine};

const ID: &str = "doctor";
/// A start takes 0.1 s; some platforms hang instead of failing.
const PATIENCE: Duration = Duration::from_secs(20);
const SHOWN_BYTES: usize = 600;

pub(super) fn sandbox(machine: &Machine) -> Finding {
    const NAME: &str = "a sandbox (platform systrap)";
    let (Ok(runsc), Some(image)) = (&machine.runsc, &machine.image) else {
        return Finding::limited(
            NAME,
            "not tried: that needs runsc and the base image",
            "sandboxer image build, then sandboxer doctor again",
        );
    };
    match start_and_end(machine.is_root, runsc, image) {
        Ok(taken) => Finding::ok(NAME, format!("started in {} ms", taken.as_millis())).required(),
        Err(error) => Finding::missing(
            NAME,
            format!("could not be started: {error:#}"),
            "what the lines above say is missing; else the message of runsc tells more",
        )
        .required(),
    }
}

fn start_and_end(is_root: bool, runsc: &Path, image: &Path) -> Result<Duration> {
    let directory = tempfile::tempdir().context("can't make a temporary directory")?;
    let path = directory.path();
    fs::create_dir(path.join("rootfs"))?;
    fs::write(path.join("config.json"), SandboxSpec { image: image.to_owned(), env: Vec::new() }.to_json()?)?;
    let call = |arguments: &[&OsStr]| {
        let mut command = if is_root { Command::new(runsc) } else { in_user_namespace(runsc) };
        let root = path.join("state");
        command
            .arg("--root")
            .arg(root)
            .args(["--platform=systrap", "--network=none", "--overlay2=none", "--ignore-cgroups"])
            .args(arguments);
        run_to_end(command, &path.join("messages"))
    };
    let begun = Instant::now();
    let started = call(&["run".as_ref(), "-detach".as_ref(), "-bundle".as_ref(), path.as_os_str(), ID.as_ref()]);
    let taken = begun.elapsed();
    // Whatever came of it, nothing is to be left.
    let ended = call(&["delete".as_ref(), "-force".as_ref(), ID.as_ref()]);
    started?;
    ended.context("it started, but could not be ended")?;
    Ok(taken)
}

/// As the server does it where it is not root.
fn in_user_namespace(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--"]).arg(program);
    command
}

/// What it says goes to a file: a pipe would be held open by the sandbox.
fn run_to_end(mut command: Command, messages: &Path) -> Result<()> {
    let output = File::create(messages)?;
    let mut child = command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).spawn().context("it can't be executed")?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            bail!("no answer within {} s", PATIENCE.as_secs());
        }
        thread::sleep(Duration::from_millis(2));
    };
    if status.success() {
        return Ok(());
    }
    bail!("{status}: {}", end_of(messages)?)
}

fn end_of(messages: &Path) -> io::Result<String> {
    let text = fs::read(messages)?;
    Ok(String::from_utf8_lossy(&text[text.len().saturating_sub(SHOWN_BYTES)..]).trim().to_owned())
}
