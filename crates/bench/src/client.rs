//! The measuring client. It looks at each message just closely enough: of output only where it ends.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{Message, Utf8Bytes, protocol::WebSocketConfig},
};

use crate::{
    programs::Program,
    raw::{LIMIT, ms_since},
    timing::Timing,
};

const OUTPUT: &str = "{\"event\":\"stdout\"";
/// What follows the data in a message of output is shorter than this.
const TAIL_BYTES: usize = 400;
const END: &str = "\"end\":";
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

pub(crate) struct Client {
    socket: WebSocketStream<TcpStream>,
    pub(crate) sandbox_id: String,
}

/// A message of the server.
enum Incoming {
    /// Standard output that ends here.
    Output(u64),
    Other(Value),
}

impl Client {
    async fn connect(address: SocketAddr, path: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        let (socket, _) = client_async_with_config(format!("ws://{address}{path}"), stream, Some(config)).await?;
        Ok(Self { socket, sandbox_id: String::new() })
    }

    /// Creates a sandbox, its configuration sent first. The time is from before the connection to `SANDBOX_RUNNING`.
    pub(crate) async fn create(address: SocketAddr) -> Result<(Self, f64)> {
        Self::create_with(address, &json!({"idle_timeout": 600})).await
    }

    pub(crate) async fn create_with(address: SocketAddr, config: &Value) -> Result<(Self, f64)> {
        let begun = Instant::now();
        let mut client = Self::connect(address, "/create").await?;
        client.send(config).await?;
        loop {
            let message = client.other().await?;
            if let Some(id) = message["sandbox_id"].as_str() {
                id.clone_into(&mut client.sandbox_id);
            }
            if message["status"] == "SANDBOX_RUNNING" {
                return Ok((client, ms_since(begun)));
            }
        }
    }

    /// Becomes the client of a sandbox, wherever it is. The time is from before the connection to `SANDBOX_RUNNING`.
    pub(crate) async fn attach(address: SocketAddr, sandbox_id: &str) -> Result<(Self, f64)> {
        let begun = Instant::now();
        let mut client = Self::connect(address, &format!("/attach/{sandbox_id}")).await?;
        sandbox_id.clone_into(&mut client.sandbox_id);
        while client.other().await?["status"] != "SANDBOX_RUNNING" {}
        let taken = ms_since(begun);
        client.send(&json!({"action": "reconnect"})).await?;
        while client.other().await?["event"] != "resumed" {}
        Ok((client, taken))
    }

    /// Creates a sandbox by a request as the first message. The time is from before the connection to the first byte of output.
    pub(crate) async fn create_to_output(address: SocketAddr, program: &Program) -> Result<(Self, f64)> {
        let begun = Instant::now();
        let mut client = Self::connect(address, "/create").await?;
        client.request(program).await?;
        let mut first = None;
        loop {
            match client.next().await? {
                Incoming::Output(_) => first = first.or(Some(ms_since(begun))),
                Incoming::Other(message) if message["status"] == "SANDBOX_EXECUTION_DONE" => {
                    return Ok((client, first.context("it printed nothing")?));
                }
                Incoming::Other(_) => {}
            }
        }
    }

    /// Runs a program to its end.
    pub(crate) async fn run(&mut self, program: &Program) -> Result<Timing> {
        let begun = Instant::now();
        self.request(program).await?;
        let (mut first, mut bytes) = (None, 0);
        loop {
            match self.next().await? {
                Incoming::Output(end) => {
                    first.get_or_insert_with(|| ms_since(begun));
                    ensure!(end > bytes, "output that ends at {end} came behind {bytes}");
                    bytes = end;
                }
                Incoming::Other(message) if message["status"] == "SANDBOX_EXECUTION_DONE" => {
                    let done_ms = ms_since(begun);
                    ensure!(message["exit_code"] == 0, "it ended badly: {message}");
                    let agent_ms = message["duration_ms"].as_f64();
                    return Timing { first_ms: first, done_ms, agent_ms, bytes }.checked(program);
                }
                Incoming::Other(_) => {}
            }
        }
    }

    /// Starts a program that goes on, and waits until it has printed something.
    pub(crate) async fn start(&mut self, code: &str, printed: u64) -> Result<()> {
        self.send(&json!({"language": "python", "code": code})).await?;
        self.printed(printed).await
    }

    /// Gives the program a line of input, and waits until its output ends somewhere.
    pub(crate) async fn ask(&mut self, line: &str, printed: u64) -> Result<()> {
        self.send(&json!({"event": "stdin", "data": format!("{line}\n")})).await?;
        self.printed(printed).await
    }

    /// Gives the program a line of input, and returns the line that it answers with.
    pub(crate) async fn answer(&mut self, line: &str) -> Result<String> {
        self.send(&json!({"event": "stdin", "data": format!("{line}\n")})).await?;
        let mut answer = String::new();
        while !answer.ends_with('\n') {
            let text = self.text().await?;
            if let Incoming::Output(_) = read(&text)? {
                answer += serde_json::from_str::<Value>(&text)?["data"].as_str().unwrap_or_default();
            }
        }
        Ok(answer)
    }

    async fn printed(&mut self, end: u64) -> Result<()> {
        loop {
            match self.next().await? {
                Incoming::Output(at) if at >= end => return Ok(()),
                Incoming::Other(message) if message["status"] == "SANDBOX_EXECUTION_DONE" => bail!("it has ended: {message}"),
                _ => {}
            }
        }
    }

    /// Saves the sandbox with what runs in it. The time is from the request to `SANDBOX_CHECKPOINTED`.
    pub(crate) async fn checkpoint(mut self) -> Result<f64> {
        let begun = Instant::now();
        self.send(&json!({"action": "checkpoint", "include_execution": true})).await?;
        while self.other().await?["status"] != "SANDBOX_CHECKPOINTED" {}
        let taken = ms_since(begun);
        self.leave().await?;
        Ok(taken)
    }

    /// A snapshot of the sandbox, which goes on. Returns its id.
    pub(crate) async fn snapshot(&mut self) -> Result<String> {
        self.send(&json!({"action": "snapshot"})).await?;
        loop {
            let message = self.other().await?;
            if let Some(id) = message["snapshot_id"].as_str() {
                return Ok(id.to_owned());
            }
        }
    }

    /// Ends a sandbox.
    pub(crate) async fn end(address: SocketAddr, sandbox_id: &str) -> Result<()> {
        let mut client = Self::connect(address, &format!("/attach/{sandbox_id}")).await?;
        while client.other().await?["status"] != "SANDBOX_RUNNING" {}
        client.kill().await
    }

    /// Goes away.
    pub(crate) async fn leave(mut self) -> Result<()> {
        timeout(CLOSE_LIMIT, self.socket.close(None)).await.context("the server does not close")?.ok();
        while let Some(Ok(_)) = timeout(CLOSE_LIMIT, self.socket.next()).await.context("the server does not close")? {}
        Ok(())
    }

    /// Ends the sandbox, and waits until it is gone.
    pub(crate) async fn kill(mut self) -> Result<()> {
        self.send(&json!({"action": "kill_sandbox"})).await?;
        while self.other().await?["status"] != "SANDBOX_KILLED" {}
        timeout(CLOSE_LIMIT, self.socket.close(None)).await.context("the server does not close")?.ok();
        Ok(())
    }

    async fn request(&mut self, program: &Program) -> Result<()> {
        self.send(&json!({"language": program.language_name(), "code": program.code})).await
    }

    async fn send(&mut self, message: &Value) -> Result<()> {
        Ok(self.socket.send(Message::text(message.to_string())).await?)
    }

    async fn other(&mut self) -> Result<Value> {
        loop {
            if let Incoming::Other(message) = self.next().await? {
                return Ok(message);
            }
        }
    }

    async fn next(&mut self) -> Result<Incoming> {
        read(&self.text().await?)
    }

    async fn text(&mut self) -> Result<Utf8Bytes> {
        loop {
            let message =
                timeout(LIMIT, self.socket.next()).await.context("the server says nothing")?.context("the server went away")??;
            match message {
                Message::Text(text) => return Ok(text),
                Message::Close(frame) => bail!("the server closed: {frame:?}"),
                // The library answers pings.
                _ => {}
            }
        }
    }
}

fn read(text: &Utf8Bytes) -> Result<Incoming> {
    if text.starts_with(OUTPUT) {
        return Ok(Incoming::Output(end_of(text).context("output that does not say where it ends")?));
    }
    let message: Value = serde_json::from_str(text)?;
    match message["event"].as_str() {
        Some("error") => bail!("the server says: {message}"),
        Some("stderr") => bail!("the program says: {message}"),
        _ => Ok(Incoming::Other(message)),
    }
}

/// The `end` of a message of output. It stands behind the data, so what the data holds can't be mistaken for it.
fn end_of(text: &str) -> Option<u64> {
    let bytes = text.as_bytes();
    let tail = std::str::from_utf8(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]).ok()?;
    let (_, behind) = tail.rsplit_once(END)?;
    behind.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_output_is_found_without_parsing_it() {
        let long = format!("{OUTPUT},\"data\":\"{}\\\"end\\\":7\",\"offset\":5,\"end\":70000,\"execution_id\":\"e\"}}", "x".repeat(2000));
        assert_eq!(end_of(&long), Some(70_000));
        assert_eq!(end_of("{\"event\":\"stdout\",\"data\":\"\",\"offset\":0,\"end\":3}"), Some(3));
        assert_eq!(end_of("{\"event\":\"stdout\"}"), None);
    }
}
