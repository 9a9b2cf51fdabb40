//! Archives: too large to be held, so they pass through.

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::body::Frame;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    sync::mpsc,
};
use tokio_util::io::ReaderStream;

use super::{Answer, Api, next_piece};
use crate::Error;

const TAR: &str = "application/x-tar";
/// What is read at once.
const PIECE_BYTES: usize = 256 * 1024;

impl Api {
    /// Sends all that can be read as the body of a request, such as `PUT /v1/filesystem-snapshots/NAME/layer`. What the server refuses is an answer too.
    ///
    /// # Errors
    /// The server can't be reached, or does not answer in JSON.
    pub async fn upload(&self, path: &str, from: impl AsyncRead + Send + Sync + Unpin + 'static) -> Result<Answer, Error> {
        let pieces = ReaderStream::with_capacity(from, PIECE_BYTES).map_ok(Frame::data);
        let response = self.send("PUT", path, Some(TAR), StreamBody::new(pieces).boxed()).await?;
        self.answer(response).await
    }

    /// Hands on what is answered as it comes; who no longer takes it ends it.
    pub(crate) async fn download_pieces(&self, path: &str, into: mpsc::Sender<Bytes>) -> Result<Answer, Error> {
        let nothing = Empty::new().map_err(|never| match never {}).boxed();
        let response = self.send("GET", path, None, nothing).await?;
        let status = response.status();
        if !status.is_success() {
            return self.answer(response).await;
        }
        let mut body = response.into_body();
        while let Some(data) = next_piece(&mut body).await.map_err(|why| self.cut(why))? {
            if into.send(data).await.is_err() {
                break;
            }
        }
        Ok(Answer { status: status.as_u16(), body: Value::Null })
    }

    /// Writes what is answered as it comes. What the server refuses is an answer too, of which nothing is written.
    ///
    /// # Errors
    /// The server can't be reached, it breaks off, or what it sends can't be written.
    pub async fn download(&self, path: &str, into: &mut (impl AsyncWrite + Unpin)) -> Result<Answer, Error> {
        let nothing = Empty::new().map_err(|never| match never {}).boxed();
        let response = self.send("GET", path, None, nothing).await?;
        let status = response.status();
        if !status.is_success() {
            return self.answer(response).await;
        }
        let mut body = response.into_body();
        while let Some(data) = next_piece(&mut body).await.map_err(|why| self.cut(why))? {
            into.write_all(&data).await.map_err(|error| Error::invalid(format!("What the server sends can't be written: {error}")))?;
        }
        into.flush().await.map_err(|error| Error::invalid(format!("What the server sends can't be written: {error}")))?;
        Ok(Answer { status: status.as_u16(), body: Value::Null })
    }
}
