//! The first words with the agent of a sandbox, and what it says that it can do.

use std::time::Duration;

use sandboxer_protocol::agent::{Enforced, FromAgent, Marker, ToAgent};
use sandboxer_runtime::{
    Instance,
    link::{self, Link, LinkError},
};

use crate::sandbox::{Execution, driver::END_EXPLAINED, record::Record, transfers::SingleFiles};

/// A sandbox whose agent has answered.
pub(super) struct Opened {
    pub(super) enforced: Enforced,
    pub(super) running: Running,
}

pub(super) struct Running {
    pub(super) reader: link::LinkReader,
    pub(super) writer: link::LinkWriter,
    pub(super) ended: sandboxer_runtime::Ended,
    pub(super) execution: Option<Execution>,
    pub(super) next_number: u64,
    /// The agent can be told who it is.
    pub(super) identifies: bool,
    /// The agent packs and unpacks files.
    pub(super) files: bool,
    /// It does what is asked of single files.
    pub(super) single_files: SingleFiles,
    /// It carries streams of the network.
    pub(super) tunnel: bool,
}

impl Running {
    /// The agent is told who it is before it hears anything else.
    pub(super) fn identified(mut self, record: &Record) -> Self {
        if self.identifies {
            self.writer.queue(&ToAgent::Identify { hostname: record.hostname(), generation: record.generation });
        }
        self
    }
}

/// Opens the conversation, unless the sandbox ends first.
pub(super) async fn converse(instance: Instance, marker: &Marker, within: Duration) -> Result<Opened, String> {
    let ended = instance.ended.clone();
    let opened = tokio::select! {
        opened = link::open(instance, marker, within) => opened,
        end = ended.wait() => return Err(end.to_string()),
    };
    match opened {
        Ok(Link {
            hello: FromAgent::HelloReply { enforced, execution, last_number, identifies, files, single_files, watches, tunnel, .. },
            reader,
            writer,
            ended,
        }) => {
            let last = execution.as_ref().map_or(0, |execution| execution.number).max(last_number.unwrap_or(0));
            let next_number = last.saturating_add(1);
            let execution = execution.map(Execution::taken_up);
            let single_files = SingleFiles::of(single_files, watches);
            let running = Running { reader, writer, ended, execution, next_number, identifies, files, single_files, tunnel };
            Ok(Opened { enforced, running })
        }
        Ok(_) => Err(LinkError::NotAReply.to_string()),
        // The agent's end closes a moment before the runtime knows why.
        Err(LinkError::Closed) => match tokio::time::timeout(END_EXPLAINED, ended.wait()).await {
            Ok(end) => Err(end.to_string()),
            Err(_) => Err(LinkError::Closed.to_string()),
        },
        Err(error) => Err(error.to_string()),
    }
}
