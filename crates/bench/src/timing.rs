//! How long one program took, as whoever asked for it saw it.

use std::{process::Stdio, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::{io::AsyncReadExt as _, process::Command, time::timeout};

use crate::{
    programs::Program,
    raw::{LIMIT, ms_since},
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    /// Until the first byte of output; none where that can't be seen.
    pub(crate) first_ms: Option<f64>,
    /// Until its end was told, with all output before it.
    pub(crate) done_ms: f64,
    /// From its spawning to its end, as the agent measured it.
    pub(crate) agent_ms: Option<f64>,
    pub(crate) bytes: u64,
}

impl Timing {
    /// It printed all that it was to print.
    pub(crate) fn checked(self, program: &Program) -> Result<Self> {
        ensure!(self.bytes == program.output_bytes, "{} bytes of output came instead of {}", self.bytes, program.output_bytes);
        Ok(self)
    }

    /// Output a second, in millions of bytes, from its first byte to its last where the first can be seen.
    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    pub(crate) fn megabytes_per_second(&self) -> f64 {
        self.bytes as f64 / 1000.0 / (self.done_ms - self.first_ms.unwrap_or(0.0))
    }
}

/// Runs a command that runs `program`, and reads its output to the end.
pub(crate) async fn timed(command: &mut Command, program: &Program) -> Result<Timing> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let begun = Instant::now();
    let mut child = command.spawn()?;
    let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else { bail!("its streams are not there") };
    let mut buffer = vec![0; 256 * 1024];
    let (mut first, mut bytes) = (None, 0);
    loop {
        let count = timeout(LIMIT, stdout.read(&mut buffer)).await.context("no output")??;
        if count == 0 {
            break;
        }
        first.get_or_insert_with(|| ms_since(begun));
        bytes += count as u64;
    }
    let status = timeout(LIMIT, child.wait()).await.context("it does not end")??;
    let timing = Timing { first_ms: first, done_ms: ms_since(begun), agent_ms: None, bytes };
    if !status.success() {
        let mut said = String::new();
        stderr.read_to_string(&mut said).await?;
        bail!("it ended with {status}: {}", said.trim());
    }
    timing.checked(program)
}
