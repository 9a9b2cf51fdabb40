//! What was measured: for each row and column the values of all rounds.

use std::collections::BTreeMap;

use serde::Serialize;

/// What is measured. The order is that of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Row {
    Create,
    CreateReady,
    CreateToOutput,
    EchoFirst,
    EchoDone,
    EchoFresh,
    EchoAgent,
    PrintFirst,
    PrintDone,
    ImportsFirst,
    ImportsDone,
    BackToBack,
    BackToBackFresh,
    StdoutLarge,
    StdoutSmall,
    Memory,
    MemoryOfSpares,
    MemoryOfServer,
    RunscCheckpoint,
    Sync,
    Compress,
    Decompress,
    Checkpoint,
    /// Likewise of a sandbox with 64 MiB.
    CheckpointSmall,
    SecondWrites,
    RestoreCached,
    RestoreWhole,
    RestoreUncached,
    Handoff,
    Forks,
    AutosavePause,
    AutosaveWrites,
}

impl Row {
    pub(crate) const ALL: [Self; 32] = [
        Self::Create,
        Self::CreateReady,
        Self::CreateToOutput,
        Self::EchoFirst,
        Self::EchoDone,
        Self::EchoFresh,
        Self::EchoAgent,
        Self::PrintFirst,
        Self::PrintDone,
        Self::ImportsFirst,
        Self::ImportsDone,
        Self::BackToBack,
        Self::BackToBackFresh,
        Self::StdoutLarge,
        Self::StdoutSmall,
        Self::Memory,
        Self::MemoryOfSpares,
        Self::MemoryOfServer,
        Self::RunscCheckpoint,
        Self::Sync,
        Self::Compress,
        Self::Decompress,
        Self::Checkpoint,
        Self::CheckpointSmall,
        Self::SecondWrites,
        Self::RestoreCached,
        Self::RestoreWhole,
        Self::RestoreUncached,
        Self::Handoff,
        Self::Forks,
        Self::AutosavePause,
        Self::AutosaveWrites,
    ];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Create => "create, until it answers (RUNNING), ms",
            Self::CreateReady => "create, one waits in the pool, ms",
            Self::CreateToOutput => "create to first output, ms",
            Self::EchoFirst => "bash echo, first byte, ms",
            Self::EchoDone => "bash echo, to its end (DONE), ms",
            Self::EchoFresh => "... without spares, to its end, ms",
            Self::EchoAgent => "... as the agent measures that, ms",
            Self::PrintFirst => "Python print, first byte, ms",
            Self::PrintDone => "Python print, to its end (DONE), ms",
            Self::ImportsFirst => "Python with four imports, first byte, ms",
            Self::ImportsDone => "Python with four imports, to its end, ms",
            Self::BackToBack => "executions back to back, all of them, ms",
            Self::BackToBackFresh => "... without spares, ms",
            Self::StdoutLarge => "stdout by 64 KiB writes, MB/s",
            Self::StdoutSmall => "stdout by 4 KiB writes, MB/s",
            Self::Memory => "memory of an idle sandbox (PSS), MiB",
            Self::MemoryOfSpares => "... and of a bash and a Python that wait, MiB",
            Self::MemoryOfServer => "... and of the server for it (PSS), MiB",
            Self::RunscCheckpoint => "runsc checkpoint of 100 MiB, ms",
            Self::Sync => "... one write and sync of its files, ms",
            Self::Compress => "... BLAKE3 and zstd -1 on all cores, ms",
            Self::Decompress => "... zstd back and BLAKE3 on all cores, ms",
            Self::Checkpoint => "checkpoint until durable, ms",
            Self::CheckpointSmall => "... of 64 MiB, ms",
            Self::SecondWrites => "1 MiB changed, written by the next, MiB",
            Self::RestoreCached => "attach with restore, data in the cache, ms",
            Self::RestoreWhole => "... and until all of its memory was read, ms",
            Self::RestoreUncached => "restore, data on the volume, ms",
            Self::Handoff => "handoff (raw: the bars of its halves), ms",
            Self::Forks => "8 forks at once, data in the cache, ms",
            Self::AutosavePause => "autosave of 200 MiB, longest pause, ms",
            Self::AutosaveWrites => "... written each time 1 MiB changed, MiB",
        }
    }

    /// Of a rate the worst is the lowest.
    fn more_is_better(self) -> bool {
        matches!(self, Self::StdoutLarge | Self::StdoutSmall)
    }
}

/// By what means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Column {
    /// `runsc run` and `runsc exec`, nothing around them.
    Raw,
    /// The agent over its FIFOs, spoken to by a reader that discards everything.
    Fifo,
    /// The PyPI package `gvisor`.
    Package,
    /// `docker run --runtime=runsc` and `docker exec`.
    Docker,
    Server,
}

impl Column {
    pub(crate) const ALL: [Self; 5] = [Self::Raw, Self::Fifo, Self::Package, Self::Docker, Self::Server];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Raw => "raw runsc",
            Self::Fifo => "agent, bare",
            Self::Package => "PyPI gvisor",
            Self::Docker => "docker, runsc",
            Self::Server => "this server",
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<(Row, Column), Vec<f64>>);

impl Samples {
    pub(crate) fn add(&mut self, row: Row, column: Column, value: f64) {
        self.0.entry((row, column)).or_default().push(value);
    }

    pub(crate) fn get(&self, row: Row, column: Column) -> &[f64] {
        self.0.get(&(row, column)).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn summary(&self, row: Row, column: Column) -> Option<Summary> {
        let mut summary = Summary::of(self.get(row, column))?;
        if row.more_is_better() {
            let negated: Vec<f64> = self.get(row, column).iter().map(|value| -value).collect();
            summary.p99 = -percentile(&negated, 99.0)?;
        }
        Some(summary)
    }
}

/// The middle and the worst of a hundred. For a rate the worst is the lowest.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Summary {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) count: usize,
}

impl Summary {
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        Some(Self { p50: percentile(values, 50.0)?, p99: percentile(values, 99.0)?, count: values.len() })
    }
}

/// The smallest value that at least this share of all is not above. With few values the 99th is the largest.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few thousand values at most")]
pub(crate) fn percentile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!(percentile(&values, 50.0), Some(3.0));
        assert_eq!(percentile(&values, 99.0), Some(5.0));
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn the_worst_of_a_rate_is_the_lowest() {
        let mut samples = Samples::default();
        for value in [10.0, 30.0, 20.0] {
            samples.add(Row::StdoutLarge, Column::Server, value);
            samples.add(Row::EchoDone, Column::Server, value);
        }
        assert_eq!(samples.summary(Row::StdoutLarge, Column::Server).map(|s| (s.p50, s.p99)), Some((20.0, 10.0)));
        assert_eq!(samples.summary(Row::EchoDone, Column::Server).map(|s| (s.p50, s.p99)), Some((20.0, 30.0)));
    }
}
