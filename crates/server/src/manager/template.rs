//! A sandbox that is made from a filesystem snapshot: it gets its files before anything runs in it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_protocol::{
    agent::{FilesFault, FromAgent, FromAgentFrame, ToAgent},
    client::ErrorCode,
    limits::MAX_FILES_PIECE_BYTES,
};
use sandboxer_runtime::{
    Launch,
    link::{LinkError, LinkReader, LinkWriter},
};
use tokio::{
    fs::File,
    io::AsyncReadExt as _,
    time::{Instant, timeout},
};
use tracing::info;

use super::{
    CreateError, Manager,
    converse::{Opened, Running},
    create::CREATE_ELSEWHERE,
};
use crate::{
    filesystems::{self, Filesystems},
    sandbox::record::Record,
    templates::Wanted,
};

/// How long the agent may take to read a piece, and to finish at last.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);
/// Nothing else is unpacked in this conversation.
const SEQUENCE: u64 = 1;

/// What a sandbox is made from.
#[derive(Clone)]
pub(super) struct Template {
    pub(super) filesystems: Arc<Filesystems>,
    pub(super) found: filesystems::Template,
}

impl Manager {
    /// What a sandbox is to be made from, if its creator said so.
    pub(super) async fn template(&self, name: Option<&str>, owner: Option<&str>) -> Result<Option<Template>, CreateError> {
        let Some(name) = name else { return Ok(None) };
        let Some(filesystems) = &self.filesystems else {
            let (code, message) = filesystems::not_configured();
            return Err(CreateError::new(code, message));
        };
        let found = filesystems.template(owner, name).await?;
        Ok(Some(Template { filesystems: Arc::clone(filesystems), found }))
    }

    /// The image that was asked for, or else the one that the files lie on.
    pub(super) async fn image_for(&self, template: Option<&Template>, wanted: Option<&str>) -> Result<PathBuf, CreateError> {
        if let (Some(Template { filesystems, found }), None) = (template, wanted)
            && let Some(digest) = found.image
        {
            return filesystems.image(digest, &self.images).await;
        }
        self.images.find(wanted).await
    }

    /// Starts a sandbox, with the files that it is to have. One that is a copy of another has the marker of that one.
    pub(super) async fn start_with_files(
        self: &Arc<Self>,
        launch: &mut Launch,
        record: &mut Record,
        template: Option<&Template>,
    ) -> Result<Opened, CreateError> {
        let not_started = |why: String| match self.stopping() {
            Some(_) => CreateError::new(ErrorCode::ServerStopping, CREATE_ELSEWHERE),
            None => CreateError::new(ErrorCode::RuntimeFailed, format!("The sandbox could not be started: {why}")),
        };
        let Some(template) = template else { return self.start(launch, record).await.map_err(not_started) };
        let key = template.key(launch);
        if let Some(key) = &key
            && let Some(opened) = self.start_copy(template, key, launch, record).await
        {
            return Ok(opened);
        }
        let Template { filesystems, found } = template;
        // Until it has its files it is of no use to the next server, should this one die.
        let unfinished = Record { standby: true, ..record.clone() };
        // Both take a while, and neither needs the other.
        let (opened, layer) = tokio::join!(self.start(launch, &unfinished), filesystems.bring(found));
        let (mut opened, layer) = (opened.map_err(not_started)?, layer?);
        let begun = Instant::now();
        unpack(&mut opened.running, &layer.path).await?;
        record.write(&launch.dir).map_err(|error| not_started(error.to_string()))?;
        info!(ms = begun.elapsed().as_millis(), "its files are there");
        if let Some(key) = &key {
            self.keep_template(template, key, launch, record, Wanted::Now);
        }
        Ok(opened)
    }
}

/// Sends an archive to the agent, which unpacks it.
pub(super) async fn unpack(running: &mut Running, layer: &Path) -> Result<(), CreateError> {
    if !running.files {
        return Err(failed("its image has an agent that can't unpack it; prepare or import the image again"));
    }
    let local = |error: std::io::Error| failed(&error.to_string());
    let mut file = File::open(layer).await.map_err(local)?;
    file.set_max_buf_size(MAX_FILES_PIECE_BYTES);
    let Running { reader, writer, .. } = running;
    writer.queue(&ToAgent::UnpackFiles { sequence: SEQUENCE });
    let mut piece = vec![0; MAX_FILES_PIECE_BYTES];
    let mut offset = 0;
    loop {
        let read = file.read(&mut piece).await.map_err(local)?;
        if read == 0 {
            break;
        }
        writer.queue_files(SEQUENCE, offset, &piece[..read]);
        offset += read as u64;
        flush(writer, reader).await?;
    }
    writer.queue(&ToAgent::FilesEnd { sequence: SEQUENCE });
    flush(writer, reader).await?;
    match timeout(TAKEN_WITHIN, answer(reader)).await {
        Ok(answer) => answer,
        Err(_) => Err(failed("the agent did not finish in time")),
    }
}

/// Writes all that waits, unless the agent says that it is of no use.
async fn flush(writer: &mut LinkWriter, reader: &mut LinkReader) -> Result<(), CreateError> {
    let flushed = async {
        tokio::select! {
            flushed = writer.flush() => flushed.map_err(|error| failed(&error.to_string())),
            answer = answer(reader) => answer.and_then(|()| Err(failed("the agent answered too early"))),
        }
    };
    timeout(TAKEN_WITHIN, flushed).await.unwrap_or_else(|_| Err(failed("the agent did not take it in time")))
}

/// Cancel-safe, as reading a frame is.
async fn answer(reader: &mut LinkReader) -> Result<(), CreateError> {
    loop {
        match reader.recv().await {
            Ok(FromAgentFrame::Control(FromAgent::FilesUnpacked { sequence: SEQUENCE })) => return Ok(()),
            Ok(FromAgentFrame::Control(FromAgent::FilesFailed { sequence: SEQUENCE, reason, message })) => {
                let message: String = message.chars().take(1000).collect();
                return Err(match reason {
                    FilesFault::NoRoom => failed(&format!("it does not fit into limits.disk_mb ({message})")).of_the_request(),
                    FilesFault::Refused | FilesFault::Failed => failed(&message),
                });
            }
            Ok(FromAgentFrame::Control(_)) => {}
            Ok(_) => return Err(failed("the agent broke its protocol")),
            Err(LinkError::Closed) => return Err(failed("the sandbox ended meanwhile")),
            Err(error) => return Err(failed(&error.to_string())),
        }
    }
}

fn failed(why: &str) -> CreateError {
    CreateError::new(ErrorCode::FilesystemSnapshotFailed, format!("The filesystem snapshot could not be unpacked: {why}."))
}
