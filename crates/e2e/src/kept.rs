//! A sandbox that is kept on a volume, as its client sees it: saved, brought back at any server, its program never the wiser.

use serde_json::{Value, json};

use crate::{Assembly, Server, Ws, ws::LONG};

impl Ws {
    /// A sandbox that is kept on its server's volume.
    pub async fn create_kept(server: &Server) -> Self {
        Self::create_with(server, json!({"enable_checkpoint": true})).await
    }

    /// Saves the sandbox, in which nothing runs, and gives it up. Returns its id.
    pub async fn checkpoint(self) -> String {
        let id = self.sandbox_id.clone();
        let said = self.save_and_close(json!({"action": "checkpoint"})).await;
        assert!(said.is_empty(), "nothing runs: {said:?}");
        id
    }

    /// Saves the sandbox with what runs in it, and gives it up. Returns the output that came meanwhile.
    pub async fn checkpoint_with_execution(self) -> Vec<Value> {
        self.save_and_close(json!({"action": "checkpoint", "include_execution": true})).await
    }

    async fn save_and_close(mut self, request: Value) -> Vec<Value> {
        let mut said = Vec::new();
        self.send(request).await;
        for status in ["SANDBOX_CHECKPOINTING", "SANDBOX_CHECKPOINTED"] {
            loop {
                match self.next().await {
                    message if message["status"] == status => break,
                    message if message["event"] == "stdin_ack" => {}
                    // The save before may have lost that this client heard of an end.
                    message if self.repeats_allowed && message["status"] == "SANDBOX_EXECUTION_DONE" => {}
                    message => {
                        assert!(matches!(message["event"].as_str(), Some("stdout" | "stderr")), "{message}");
                        said.push(message);
                    }
                }
            }
        }
        self.expect_close(1000).await;
        said
    }

    /// A checkpoint fails, and says so as the contract wants it. Returns the message.
    pub async fn expect_checkpoint_error(mut self, code: &str) -> String {
        self.send(json!({"action": "checkpoint"})).await;
        self.expect_status("SANDBOX_CHECKPOINTING").await;
        self.expect_status("SANDBOX_CHECKPOINT_ERROR").await;
        let error = self.expect_error(code).await;
        self.expect_close(4000).await;
        error["message"].as_str().unwrap().to_owned()
    }

    /// Attaches where the sandbox is not in memory. Returns what `SANDBOX_RUNNING` said.
    pub async fn restore(server: &Server, sandbox_id: &str) -> (Self, Value) {
        let mut ws = Self::comes_back(server, sandbox_id).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        let running = ws.expect_status("SANDBOX_RUNNING").await;
        (ws, running)
    }

    /// Attaches wherever the sandbox is.
    pub async fn reach(server: &Server, sandbox_id: &str) -> (Self, Value) {
        let mut ws = Self::comes_back(server, sandbox_id).await;
        let mut first = ws.next().await;
        if first["status"] == "SANDBOX_RESTORING" {
            first = ws.expect_running_after(LONG).await;
        }
        assert_eq!(first["status"], "SANDBOX_RUNNING", "{first}");
        (ws, first)
    }

    /// A restore fails, and says so as the contract wants it. Returns the message.
    pub async fn expect_restore_error(server: &Server, sandbox_id: &str) -> String {
        let mut ws = Self::open(server, &format!("/attach/{sandbox_id}")).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        ws.expect_status("SANDBOX_RESTORE_ERROR").await;
        let error = ws.expect_error("restore_failed").await;
        ws.expect_close(4000).await;
        error["message"].as_str().unwrap().to_owned()
    }

    async fn comes_back(server: &Server, sandbox_id: &str) -> Self {
        let mut ws = Self::open(server, &format!("/attach/{sandbox_id}")).await;
        ws.repeats_allowed = true;
        sandbox_id.clone_into(&mut ws.sandbox_id);
        ws
    }
}

/// A program that prints numbered lines on stderr and echoes its input on stdout until that ends, and all that its client has of it.
#[derive(Debug, Default)]
pub struct Talk {
    out: Assembly,
    err: Assembly,
    sent: String,
    lines: usize,
}

impl Talk {
    const ID: &str = "talk";
    const PROGRAM: &str = "
import sys, threading, time
def echo():
    for line in sys.stdin:
        print('echo', line.strip(), flush=True)
    print('bye', flush=True)
reader = threading.Thread(target=echo); reader.start()
n = 0
while reader.is_alive():
    print('n', n, file=sys.stderr, flush=True); n += 1; time.sleep(0.005)
";

    pub async fn begin(ws: &mut Ws) -> Self {
        ws.start(json!({"language": "python", "code": Self::PROGRAM, "execution_id": Self::ID})).await;
        Self::default()
    }

    /// Says another line, and reads until the program has said `bytes` more.
    pub async fn go_on(&mut self, ws: &mut Ws, bytes: usize) {
        self.lines += 1;
        let line = format!("line {}\n", self.lines);
        ws.send(json!({"event": "stdin", "data": line, "offset": self.sent.len()})).await;
        self.sent += &line;
        let wanted = self.err.bytes.len() + bytes;
        while self.err.bytes.len() < wanted {
            let message = ws.next().await;
            assert!(self.take(&message), "{message}");
        }
    }

    /// Takes what belongs to it.
    pub fn take(&mut self, message: &Value) -> bool {
        match message["event"].as_str() {
            Some("stdout") => self.out.take(message),
            Some("stderr") => self.err.take(message),
            Some("stdin_ack") => {}
            _ => return false,
        }
        true
    }

    /// Goes on behind an attach, and says again what was not heard.
    pub async fn resume(&mut self, ws: &mut Ws) {
        let (stdout, stderr) = (self.out.bytes.len(), self.err.bytes.len());
        ws.send(json!({"action": "reconnect", "execution_id": Self::ID, "stdout_offset": stdout, "stderr_offset": stderr})).await;
        let resumed = ws.next().await;
        assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
        let heard = usize::try_from(resumed["stdin_offset"].as_u64().unwrap()).unwrap();
        if heard < self.sent.len() {
            ws.send(json!({"event": "stdin", "data": self.sent[heard..], "offset": heard})).await;
        }
    }

    /// Ends the program's input, reads to its end, and finds nothing missing and nothing twice.
    pub async fn finish(mut self, ws: &mut Ws) {
        ws.send(json!({"event": "stdin_eof", "offset": self.sent.len()})).await;
        let mut done = ws.next().await;
        while self.take(&done) {
            done = ws.next().await;
        }
        assert_eq!((&done["status"], &done["exit_code"]), (&json!("SANDBOX_EXECUTION_DONE"), &json!(0)), "{done}");
        let echoed: String = (1..=self.lines).map(|line| format!("echo line {line}\n")).collect();
        assert_eq!(String::from_utf8_lossy(&self.out.bytes), echoed + "bye\n");
        let numbers = String::from_utf8(self.err.bytes).unwrap();
        for (number, line) in numbers.lines().enumerate() {
            assert_eq!(line, format!("n {number}"));
        }
    }
}
