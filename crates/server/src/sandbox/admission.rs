//! One table decides what fits which moment.

use sandboxer_protocol::client::Request;

/// What a sandbox is doing, as far as requests are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Nothing runs.
    Idle,
    /// An execution runs, or was asked for.
    Executing,
    /// The execution has ended, and the client has not been told everything of it yet.
    Finishing,
}

/// What a request asks for, without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Configure,
    Execute,
    Stdin,
    Terminal,
    KillProcess,
    KillSandbox,
    Bookkeeping,
    Checkpoint,
    /// The running execution is to be saved along.
    CheckpointAlong,
    Snapshot,
    Rollback,
    SnapshotFilesystem,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is carried out.
    Go,
    /// It waits until the client has been told the end of the last execution.
    Wait,
    /// It is answered by the error status of its own kind.
    Refuse(Refusal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    LateConfiguration,
    ExecutionInProgress,
    NothingRunning,
    CheckpointDuringExecution,
}

impl Kind {
    pub(crate) fn of(request: &Request) -> Self {
        match request {
            Request::Configure(_) => Kind::Configure,
            Request::Execute(_) => Kind::Execute,
            Request::Stdin { .. } | Request::StdinEof { .. } => Kind::Stdin,
            Request::Resize { .. } | Request::Signal { .. } => Kind::Terminal,
            Request::KillProcess => Kind::KillProcess,
            Request::KillSandbox => Kind::KillSandbox,
            // The files of a sandbox are not the driver's: its socket asks for them.
            Request::Ack(_) | Request::Reconnect(_) | Request::File(_) => Kind::Bookkeeping,
            Request::Checkpoint { include_execution: false } => Kind::Checkpoint,
            Request::Checkpoint { include_execution: true } => Kind::CheckpointAlong,
            Request::Snapshot { .. } => Kind::Snapshot,
            Request::Rollback(_) => Kind::Rollback,
            Request::SnapshotFilesystem { .. } => Kind::SnapshotFilesystem,
        }
    }
}

pub(crate) fn admit(moment: Moment, kind: Kind) -> Verdict {
    use Verdict::{Go, Refuse, Wait};
    match (moment, kind) {
        (_, Kind::Configure) => Refuse(Refusal::LateConfiguration),
        (Moment::Idle, Kind::Stdin | Kind::Terminal) => Refuse(Refusal::NothingRunning),
        // A request that resumes the running execution by its id never comes here: it is no second one.
        (Moment::Executing, Kind::Execute) => Refuse(Refusal::ExecutionInProgress),
        (Moment::Executing, Kind::Checkpoint) => Refuse(Refusal::CheckpointDuringExecution),
        (Moment::Finishing, Kind::Execute | Kind::Checkpoint) => Wait,
        (Moment::Finishing, Kind::Stdin | Kind::Terminal) => Refuse(Refusal::NothingRunning),
        (_, Kind::Execute | Kind::Stdin | Kind::Terminal | Kind::KillProcess | Kind::KillSandbox | Kind::Bookkeeping) => Go,
        (_, Kind::Checkpoint | Kind::CheckpointAlong | Kind::Snapshot | Kind::Rollback | Kind::SnapshotFilesystem) => Go,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENTS: [Moment; 3] = [Moment::Idle, Moment::Executing, Moment::Finishing];

    #[test]
    fn a_configuration_is_never_taken_late_and_never_ignored() {
        for moment in MOMENTS {
            assert_eq!(admit(moment, Kind::Configure), Verdict::Refuse(Refusal::LateConfiguration));
        }
    }

    #[test]
    fn only_one_execution_runs() {
        let started: Vec<_> = MOMENTS.into_iter().filter(|moment| admit(*moment, Kind::Execute) == Verdict::Go).collect();
        assert_eq!(started, [Moment::Idle]);
    }

    #[test]
    fn killing_and_bookkeeping_fit_every_moment() {
        for kind in [Kind::KillProcess, Kind::KillSandbox, Kind::Bookkeeping] {
            for moment in MOMENTS {
                assert_eq!(admit(moment, kind), Verdict::Go);
            }
        }
    }

    #[test]
    fn a_running_program_is_saved_only_if_that_was_asked_for() {
        assert_eq!(admit(Moment::Executing, Kind::Checkpoint), Verdict::Refuse(Refusal::CheckpointDuringExecution));
        assert_eq!(admit(Moment::Executing, Kind::CheckpointAlong), Verdict::Go);
    }

    #[test]
    fn input_goes_to_a_running_program_only() {
        assert_eq!(admit(Moment::Executing, Kind::Stdin), Verdict::Go);
        for moment in [Moment::Idle, Moment::Finishing] {
            assert_eq!(admit(moment, Kind::Stdin), Verdict::Refuse(Refusal::NothingRunning));
        }
    }
}
