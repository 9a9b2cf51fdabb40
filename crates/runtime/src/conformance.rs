//! What every [`Runtime`] promises, as tests that each implementation runs: `conformance_tests!(subject())` in a test file.
//!
//! The programs are bash, within what the fake understands.

mod promises;
mod session;

use std::path::Path;

use sandboxer_protocol::SandboxId;

pub use self::{promises::*, session::Session};
use crate::{BoxFuture, Runtime};

/// One implementation under test, with what only a test may do.
pub trait Subject: Sync {
    fn runtime(&self) -> &dyn Runtime;

    fn image(&self) -> &Path;

    /// The runtime of a server that was started again and knows nothing but what is on disk.
    fn restarted(&self) -> BoxFuture<'_, Box<dyn Runtime>>;

    /// Kills the sandbox as somebody outside would.
    fn kill_from_outside<'a>(&'a self, id: SandboxId, dir: &'a Path) -> BoxFuture<'a, ()>;

    /// What there still is of a sandbox that was removed: processes, mounts, state, FIFOs.
    fn leftovers(&self, id: SandboxId, dir: &Path) -> Vec<String>;
}

/// A test for each promise. `$subject` is an async expression.
#[macro_export]
macro_rules! conformance_tests {
    ($subject:expr) => {
        $crate::conformance_tests!($subject;
            an_agent_answers_with_its_version,
            a_restore_may_begin_before_anything_is_there,
            a_restore_that_was_only_begun_leaves_nothing,
            output_and_exit_code_are_exact,
            a_program_that_a_signal_ended_says_which,
            input_is_taken_once_and_in_order,
            a_killed_program_says_so,
            a_program_killed_at_once_says_so,
            what_the_agent_keeps_for_the_next_server_comes_back,
            a_second_program_finds_the_files_of_the_first,
            output_waits_for_credit,
            a_full_window_blocks_until_it_is_acknowledged,
            a_resumed_stream_repeats_exactly,
            a_server_that_died_in_the_middle_of_a_frame_loses_nothing,
            nobody_can_take_up_what_is_not_there,
            a_removed_sandbox_leaves_nothing,
            a_half_started_sandbox_leaves_nothing,
            a_sandbox_of_an_earlier_server_can_be_removed,
            a_sandbox_killed_from_outside_is_noticed_at_once,
            a_sandbox_taken_up_and_killed_is_noticed_at_once,
            a_saved_sandbox_goes_on_and_so_does_its_copy,
            a_sandbox_saved_to_stop_goes_on_elsewhere,
            a_sandbox_saved_to_stop_can_be_thawed,
            a_failed_save_keeps_the_sandbox_running,
            a_frozen_sandbox_waits,
        );
    };
    ($subject:expr; $($promise:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                let subject = $subject.await;
                $crate::conformance::$promise(&subject).await;
            }
        )*
    };
}
