//! How long one program took, as whoever asked for it saw it.

use anyhow::{Result, ensure};

use crate::programs::Program;

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
