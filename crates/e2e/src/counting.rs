//! A program that counts, in memory and on disk, and its client: for tests that go back in time or make copies.

use serde_json::{Value, json};

use crate::{Assembly, Ws};

/// Counts in memory and on disk, a line of input each, and says both.
const COUNTER: &str = "
import sys
n = 0
print('ready', flush=True)
for line in sys.stdin:
    n += 1
    with open('/root/count', 'a') as f: f.write('x')
    print(n, len(open('/root/count').read()), flush=True)
";

/// A client of the counter, which reads whatever else is said on the way.
#[derive(Debug)]
pub struct Counting {
    pub ws: Ws,
    pub out: Assembly,
    /// The longest output seen, as every history begins alike.
    longest: Vec<u8>,
    /// Bytes of input so far, in the counter's own time.
    input: usize,
}

impl Counting {
    /// A counter that is ready.
    pub async fn start(mut ws: Ws) -> Self {
        ws.may_repeat();
        ws.start(json!({"language": "python", "code": COUNTER, "execution_id": "counter"})).await;
        let mut counting = Self { ws, out: Assembly::default(), longest: Vec::new(), input: 0 };
        counting.until(b"ready\n").await;
        counting
    }

    async fn until(&mut self, end: &[u8]) {
        while !self.out.bytes.ends_with(end) {
            let message = self.ws.next().await;
            match message["event"].as_str().unwrap() {
                "stdout" => self.out.take(&message),
                "stdin_ack" => {}
                _ => panic!("{message}"),
            }
        }
    }

    /// One more line of input, answered by this count in memory and on disk.
    pub async fn expect_count(&mut self, expected: usize) {
        self.ws.send(json!({"event": "stdin", "data": "\n", "offset": self.input})).await;
        self.input += 1;
        self.until(format!("\n{expected} {expected}\n").as_bytes()).await;
    }

    /// The next status, past output.
    pub async fn status(&mut self) -> Value {
        loop {
            let message = self.ws.next().await;
            match message["event"].as_str().unwrap() {
                "stdout" => self.out.take(&message),
                "stdin_ack" => {}
                "status_update" => return message,
                _ => panic!("{message}"),
            }
        }
    }

    /// Returns its id.
    pub async fn snapshot(&mut self, name: Option<&str>) -> String {
        self.ws.send(json!({"action": "snapshot", "name": name})).await;
        assert_eq!(self.status().await["status"], "SANDBOX_SNAPSHOT_CREATING");
        let created = self.status().await;
        assert_eq!(created["status"], "SANDBOX_SNAPSHOT_CREATED", "{created}");
        created["snapshot_id"].as_str().unwrap().to_owned()
    }

    /// Where it is, for a copy of it that goes on from here.
    #[must_use]
    pub fn now(&self) -> Point {
        Point { bytes: self.out.bytes.clone(), input: self.input }
    }

    /// Ends the program, and leaves the sandbox to others.
    pub async fn stop(mut self) -> Ws {
        self.ws.send(json!({"action": "kill_process"})).await;
        assert_eq!(self.status().await["status"], "SANDBOX_EXECUTION_FORCE_KILLED");
        assert_eq!(self.status().await["status"], "SANDBOX_EXECUTION_DONE");
        self.ws
    }

    /// Goes back, and on from where the sandbox says it is.
    pub async fn roll_back(&mut self, to: Value) -> Value {
        self.ws.send(to).await;
        self.rolled_back().await
    }

    /// The same where somebody else has asked for it.
    pub async fn rolled_back(&mut self) -> Value {
        assert_eq!(self.status().await["status"], "SANDBOX_RESTORING");
        let running = self.status().await;
        assert_eq!((&running["status"], &running["rewound"]), (&json!("SANDBOX_RUNNING"), &json!(true)), "{running}");
        assert_eq!(running["execution_id"], "counter", "{running}");
        let offset = running["stdout_offset"].as_u64().unwrap();
        if self.out.bytes.len() > self.longest.len() {
            self.longest = std::mem::take(&mut self.out.bytes);
        }
        self.out.bytes = self.longest[..usize::try_from(offset).unwrap()].to_vec();
        self.input = usize::try_from(running["stdin_offset"].as_u64().unwrap()).unwrap();
        self.ws.send(json!({"action": "reconnect", "execution_id": "counter", "stdout_offset": offset})).await;
        let resumed = self.ws.next().await;
        assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
        running
    }
}

/// A moment of the counter, at which all that it was told was answered.
#[derive(Debug, Clone)]
pub struct Point {
    bytes: Vec<u8>,
    input: usize,
}

impl Point {
    /// The counter in this sandbox goes on from here.
    pub async fn goes_on(&self, mut ws: Ws) -> Counting {
        ws.may_repeat();
        ws.send(json!({"action": "reconnect", "execution_id": "counter", "stdout_offset": self.bytes.len()})).await;
        let resumed = ws.next().await;
        assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
        assert_eq!(resumed["stdin_offset"], self.input, "{resumed}");
        let out = Assembly { bytes: self.bytes.clone(), repeated: 0 };
        Counting { ws, out, longest: Vec::new(), input: self.input }
    }
}
