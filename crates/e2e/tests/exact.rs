//! Output and input across cut connections: nothing lost, nothing twice.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Assembly, CutProxy, DEADLINE, Fault, Incoming, Opcode, Options, Raw, Server, Ws, count, host, seed, shared};
use serde_json::{Value, json};

/// Numbered lines on both streams until the end of input, and every line of input as a line of output.
const PROGRAM: &str = "
import sys, threading, time
lock, stop, said = threading.Lock(), threading.Event(), {}
def say(stream, text):
    with lock:
        stream.write(text + '\\n')
def lines(stream, name):
    i = 0
    while not stop.is_set():
        say(stream, f'{name} {i} ' + 'x' * (i % 90))
        i += 1
        time.sleep(0.001)
    said[name] = i
threads = [threading.Thread(target=lines, args=a) for a in ((sys.stdout, 'out'), (sys.stderr, 'err'))]
for t in threads: t.start()
for line in sys.stdin: say(sys.stdout, 'echo ' + line.rstrip('\\n'))
stop.set()
for t in threads: t.join()
say(sys.stdout, f\"total {said['out']}\")
say(sys.stderr, f\"total {said['err']}\")
";

/// How long the program is silent at most: beyond it the connection is dead.
const SILENCE: Duration = Duration::from_millis(800);

/// A client that reconnects by offset, as the contract lets it.
struct Exact {
    host: String,
    path: String,
    /// All input so far: numbered lines, of which there are always more until it is told to finish.
    input: String,
    lines: usize,
    stdout: Assembly,
    stderr: Assembly,
    /// The server has what lies before.
    acknowledged: u64,
    done: Option<Value>,
    connections: usize,
}

impl Exact {
    async fn start(server: &Server) -> Self {
        let mut ws = Ws::create(server).await;
        ws.start(json!({"language": "python", "code": PROGRAM, "execution_id": "exact"})).await;
        // Nothing that this connection saw counts: the next one asks from zero.
        Self {
            host: server.address().to_string(),
            path: format!("/attach/{}", ws.sandbox_id),
            input: String::new(),
            lines: 0,
            stdout: Assembly::default(),
            stderr: Assembly::default(),
            acknowledged: 0,
            done: None,
            connections: 0,
        }
    }

    /// Connects again and again until there were so many faults, then until the program has ended.
    async fn follow(&mut self, proxy: &CutProxy, faults: usize) {
        while self.done.is_none() {
            if proxy.happened() >= faults {
                proxy.heal();
            }
            self.connections += 1;
            let host = self.host.clone();
            if let Ok(mut ws) = Ws::connect(proxy.address(), &self.path, &[("Host", &host)]).await {
                ws.repeats_allowed = true;
                self.one_connection(&mut ws, || proxy.happened() >= faults).await;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn one_connection(&mut self, ws: &mut Ws, enough: impl Fn() -> bool) {
        // In use: the dead connection before this one is being found out.
        match ws.incoming_within(Duration::from_secs(4)).await {
            Some(Incoming::Message(message)) if message["status"] == "SANDBOX_RUNNING" => {}
            Some(Incoming::Message(message)) => return assert_eq!(message["status"], "SANDBOX_IN_USE", "{message}"),
            _ => return,
        }
        let (stdout, stderr) = (self.stdout.bytes.len(), self.stderr.bytes.len());
        let reconnect = json!({"action": "reconnect", "execution_id": "exact", "stdout_offset": stdout, "stderr_offset": stderr});
        if ws.try_send(reconnect.to_string().into()).await.is_err() {
            return;
        }
        let resumed = loop {
            match ws.incoming_within(Duration::from_secs(4)).await {
                // Of what the connection before had sent.
                Some(Incoming::Message(message)) if message["event"] == "stdin_ack" => {}
                Some(Incoming::Message(message)) => break message,
                _ => return,
            }
        };
        assert_eq!((&resumed["event"], &resumed["execution_id"]), (&json!("resumed"), &json!("exact")), "{resumed}");
        assert_eq!((resumed["stdout_offset"].as_u64(), resumed["stderr_offset"].as_u64()), (Some(stdout as u64), Some(stderr as u64)));
        let taken = resumed["stdin_offset"].as_u64().unwrap();
        assert!(taken >= self.acknowledged, "input was acknowledged up to {} and is now at {taken}", self.acknowledged);
        let mut sent = usize::try_from(taken).unwrap();
        let (mut ended, mut heard) = (resumed["running"] == false, Instant::now());
        while self.done.is_none() && heard.elapsed() < SILENCE {
            let message = if sent == self.input.len() && enough() {
                json!({"event": "stdin_eof", "offset": sent})
            } else {
                if sent == self.input.len() {
                    self.input += &format!("in {}\n", self.lines);
                    self.lines += 1;
                }
                let end = (sent + 64).min(self.input.len());
                let piece = &self.input[sent..end];
                json!({"event": "stdin", "data": piece, "offset": std::mem::replace(&mut sent, end)})
            };
            if !std::mem::replace(&mut ended, message["event"] == "stdin_eof") && ws.try_send(message.to_string().into()).await.is_err() {
                return;
            }
            while let Some(incoming) = ws.incoming_within(Duration::from_millis(5)).await {
                heard = Instant::now();
                let Incoming::Message(message) = incoming else { return };
                self.take(&message, sent as u64);
            }
        }
    }

    fn take(&mut self, message: &Value, sent: u64) {
        match (message["event"].as_str().unwrap(), message["status"].as_str()) {
            ("stdout", _) => self.stdout.take(message),
            ("stderr", _) => self.stderr.take(message),
            ("stdin_ack", _) => {
                let offset = message["offset"].as_u64().unwrap();
                assert!((self.acknowledged..=sent).contains(&offset), "{message} after {}, {sent} sent", self.acknowledged);
                self.acknowledged = offset;
            }
            (_, Some("SANDBOX_EXECUTION_DONE")) => self.done = Some(message.clone()),
            // The end of input sent again behind the end of the program.
            (_, Some("SANDBOX_STDIN_ERROR")) => {}
            ("error", _) if message["code"] == "nothing_running" => {}
            _ => panic!("unexpected: {message}"),
        }
    }

    fn expect_exact(&self) {
        let done = self.done.as_ref().unwrap();
        assert_eq!((&done["execution_id"], &done["exit_code"]), (&json!("exact"), &json!(0)), "{done}");
        for (stream, name) in [(&self.stdout, "out"), (&self.stderr, "err")] {
            let text = std::str::from_utf8(&stream.bytes).unwrap();
            let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("echo ")).collect();
            let count = lines.len() - 1;
            let expected = (0..count).map(|i| format!("{name} {i} {}", "x".repeat(i % 90))).chain([format!("total {count}")]);
            assert!(expected.eq(lines), "{name} is not exact");
        }
        let text = std::str::from_utf8(&self.stdout.bytes).unwrap();
        let echoed = text.lines().filter_map(|line| line.strip_prefix("echo "));
        assert!(echoed.eq(self.input.lines()), "stdin is not exact");
    }
}

/// Some connections carry more than the largest message, so that something passes however much has gathered.
#[tokio::test]
async fn output_and_input_are_exact_across_cuts() {
    let mut client = Exact::start(shared()).await;
    let proxy = CutProxy::start(shared().address(), seed(), 300..1_000_000, &[Fault::Cut]).await;
    client.follow(&proxy, count(40, 500)).await;
    client.expect_exact();
    assert!(client.lines > 40, "hardly any input passed");
}

#[tokio::test]
async fn output_and_input_are_exact_across_half_open_and_silent_connections() {
    let mut client = Exact::start(shared()).await;
    let faults = [Fault::HalfOpen, Fault::Silent(Duration::from_secs(5))];
    let proxy = CutProxy::start(shared().address(), seed(), 1_000..2_000_000, &faults).await;
    client.follow(&proxy, count(4, 40)).await;
    client.expect_exact();
}

#[tokio::test]
async fn reconnecting_where_nothing_was_ever_run_resumes_nothing() {
    let mut ws = Ws::create(shared()).await;
    ws.send(json!({"action": "reconnect"})).await;
    let resumed = ws.next().await;
    assert_eq!(resumed["event"], "resumed", "{resumed}");
    for field in ["execution_id", "running", "stdout_offset", "stderr_offset", "stdin_offset"] {
        assert_eq!(resumed.get(field), Some(&Value::Null), "{field} of {resumed}");
    }
    ws.expect_alive().await;
}

#[tokio::test]
async fn reconnecting_to_what_has_ended_says_its_end_again() {
    let mut ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.run(json!({"language": "bash", "code": "echo 12345; exit 3", "execution_id": "e"})).await;
    ws.vanish();
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": 6, "stderr_offset": 0})).await;
    let resumed = ws.next().await;
    assert_eq!(
        (&resumed["event"], &resumed["running"], &resumed["stdout_offset"]),
        (&json!("resumed"), &json!(false), &json!(6)),
        "{resumed}"
    );
    let done = ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    assert_eq!((&done["execution_id"], &done["exit_code"]), (&json!("e"), &json!(3)), "{done}");
    ws.expect_alive().await;
}

#[tokio::test]
async fn every_reconnect_to_a_finished_program_tells_its_end() {
    let mut ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.run(json!({"language": "bash", "code": "echo 12345; exit 3", "execution_id": "e"})).await;
    ws.close().await;
    for _ in 0..3 {
        let mut ws = Ws::attach(shared(), &id).await;
        ws.repeats_allowed = true;
        for _ in 0..2 {
            ws.send(json!({"action": "reconnect"})).await;
            let resumed = ws.next().await;
            assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(false)), "{resumed}");
            let outcome = ws.until_done().await;
            assert_eq!((&outcome.done["execution_id"], outcome.exit_code()), (&json!("e"), Some(3)), "{:?}", outcome.done);
            // From here on its end is acknowledged: the ping behind it is answered before this is.
            ws.send(json!({"action": "kill_process"})).await;
            ws.expect_status("SANDBOX_EXECUTION_FORCE_KILLED").await;
        }
        ws.close().await;
    }
}

#[tokio::test]
async fn an_offset_that_is_no_longer_held_is_told_and_output_goes_on_from_what_is() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "echo 12345; read -r line; echo 67890", "execution_id": "e"})).await;
    ws.until_output("stdout", "12345\n").await;
    ws.send(json!({"action": "ack", "execution_id": "e", "stdout_offset": 6, "stderr_offset": 0})).await;
    ws.repeats_allowed = true;
    ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": 0})).await;
    let mut told = [ws.next().await, ws.next().await];
    told.sort_by_key(|message| message["event"].as_str().unwrap().to_owned());
    assert_eq!((&told[0]["code"], &told[1]["event"]), (&json!("output_gone"), &json!("resumed")), "{told:?}");
    assert_eq!(told[0]["available_from"]["stdout_offset"], 6, "{}", told[0]);
    assert_eq!(told[1]["stdout_offset"], 6, "{}", told[1]);
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    assert_eq!(ws.until_done().await.ok(), "67890\n");
}

#[tokio::test]
async fn reconnecting_to_an_execution_that_never_was_is_an_error() {
    let mut ws = Ws::create(shared()).await;
    ws.expect_alive().await;
    ws.send(json!({"action": "reconnect", "execution_id": "never"})).await;
    ws.expect_error("unknown_execution").await;
    ws.expect_alive().await;
}

#[tokio::test]
async fn acknowledging_the_future_is_an_error_and_loses_nothing() {
    let mut ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    ws.start(json!({"language": "bash", "code": "echo 12345; read -r line; echo 67890", "execution_id": "e"})).await;
    ws.until_output("stdout", "12345\n").await;
    ws.send(json!({"action": "ack", "execution_id": "e", "stdout_offset": 1_000_000, "stderr_offset": 0})).await;
    assert_eq!(ws.next().await["event"], "error");
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    ws.until_output("stdout", "67890\n").await;
    ws.vanish();
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": 6, "stderr_offset": 0})).await;
    assert_eq!(ws.next().await["event"], "resumed");
    assert_eq!(ws.until_done().await.ok(), "67890\n");
}

/// Those that come while one is being answered count as one.
#[tokio::test]
async fn a_thousand_reconnects_are_answered_in_bounded_memory() {
    let server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    ws.repeats_allowed = true;
    ws.start(json!({"language": "bash", "code": "echo 12345; read -r line; echo end", "execution_id": "e"})).await;
    ws.until_output("stdout", "12345\n").await;
    let before = host::rss(server.pid());
    for _ in 0..1000 {
        ws.send(json!({"action": "reconnect"})).await;
    }
    let mut resumed = 0;
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    let outcome = ws.until_done().await;
    for message in &outcome.between {
        assert_eq!(message["event"], "resumed", "{message}");
        resumed += 1;
    }
    assert!((1..=1000).contains(&resumed), "{resumed}");
    assert!(outcome.ok().ends_with("end\n"));
    assert!(host::rss(server.pid()).saturating_sub(before) < 32 << 20);
    ws.repeats_allowed = false;
    ws.expect_alive().await;
}

/// What an agent holds of a stream.
const WINDOW: u64 = 8 << 20;

/// Reads output, answering no ping, up to where there has to be some, and on until nothing comes for a second; returns where it ends.
async fn read_without_answering(raw: &mut Raw, mut end: u64, until: u64) -> u64 {
    loop {
        let frame = if end < until { raw.frame().await } else { raw.frame_within(Duration::from_secs(1)).await };
        let Some(frame) = frame else { return end };
        if frame.opcode == Opcode::Text && frame.json()["event"] == "stdout" {
            let message = frame.json();
            assert_eq!(message["offset"], end, "{}", message["end"]);
            end = message["end"].as_u64().unwrap();
        }
    }
}

#[tokio::test]
async fn a_client_that_never_acknowledges_stops_its_program_at_the_window() {
    let server = Options::default().start();
    let (mut raw, _) = Raw::create(server.address(), None).await;
    let before = host::rss(server.pid());
    let code = "import sys\nwhile True: sys.stdout.write('x' * 65535 + '\\n')";
    raw.send_text(&json!({"language": "python", "code": code, "execution_id": "e"}).to_string()).await;
    let mut end = read_without_answering(&mut raw, 0, WINDOW).await;
    assert_eq!(end, WINDOW);
    for _ in 0..3 {
        raw.send_text(&json!({"action": "ack", "execution_id": "e", "stdout_offset": end, "stderr_offset": 0}).to_string()).await;
        end = read_without_answering(&mut raw, end, end + WINDOW).await;
    }
    assert_eq!(end, 4 * WINDOW, "an acknowledged window makes room for another");
    let grown = host::rss(server.pid()).saturating_sub(before);
    assert!(grown < 32 << 20, "the server grew by {grown} bytes");
}

/// Every one of them asks for all that is held.
#[tokio::test]
async fn a_burst_of_reconnects_to_a_full_window_is_answered_with_bounded_work() {
    const TIMES: usize = 1000;
    let server = Options::default().start();
    let (mut raw, _) = Raw::create(server.address(), None).await;
    let code = "import sys\nsys.stdout.write('x' * (8 << 20))\nsys.stdout.flush()\nsys.stdin.read()";
    raw.send_text(&json!({"language": "python", "code": code, "execution_id": "e"}).to_string()).await;
    assert_eq!(read_without_answering(&mut raw, 0, WINDOW).await, WINDOW);
    let (before, start) = (host::rss(server.pid()), Instant::now());
    let reconnect = json!({"action": "reconnect", "execution_id": "e", "stdout_offset": 0, "stderr_offset": 0}).to_string();
    for _ in 0..TIMES {
        raw.send_text(&reconnect).await;
    }
    let (mut resumed, mut bytes, mut end, mut most) = (0, 0, 0, 0);
    while resumed < TIMES || end < WINDOW {
        let frame = raw.frame().await.unwrap();
        if frame.opcode != Opcode::Text {
            continue;
        }
        let message = frame.json();
        if message["event"] == "resumed" {
            (resumed, end) = (resumed + 1, 0);
            most = most.max(host::rss(server.pid()));
            continue;
        }
        assert_eq!((&message["event"], message["offset"].as_u64()), (&json!("stdout"), Some(end)));
        end = message["end"].as_u64().unwrap();
        bytes += message["data"].as_str().unwrap().len();
    }
    let (took, grown) = (start.elapsed(), most.saturating_sub(before));
    println!("{TIMES} reconnects: {took:?}, {bytes} bytes of output, {grown} bytes of memory");
    assert!(took < DEADLINE, "{took:?}");
    assert!(grown < 32 << 20, "the server grew by {grown} bytes");
}

#[tokio::test]
async fn a_piece_of_input_that_was_taken_is_not_taken_again() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "cat"})).await;
    let mut acknowledged = 0;
    for (data, offset) in [("abc", 0), ("abc", 0), ("bcde", 1), ("", 5), ("f\n", 5), ("abcdef\ng", 0)] {
        ws.send(json!({"event": "stdin", "data": data, "offset": offset})).await;
    }
    ws.send(json!({"event": "stdin", "data": "x", "offset": 100})).await;
    let mut output = String::new();
    // The gap is refused, and says where to go on.
    loop {
        let message = ws.next().await;
        match message["event"].as_str().unwrap() {
            "stdin_ack" => {
                let offset = message["offset"].as_u64().unwrap();
                assert!(offset >= acknowledged, "{message}");
                acknowledged = offset;
            }
            "stdout" => output += message["data"].as_str().unwrap(),
            "error" => {
                assert_eq!(message["code"], "stdin_gap", "{message}");
                break;
            }
            _ => assert_eq!(message["status"], "SANDBOX_STDIN_ERROR", "{message}"),
        }
    }
    ws.send(json!({"event": "stdin_eof"})).await;
    let outcome = ws.until_done().await;
    assert_eq!(output + outcome.ok(), "abcdef\ng");
}

#[tokio::test]
async fn input_with_an_offset_is_acknowledged() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "sleep 1000"})).await;
    ws.send(json!({"event": "stdin", "data": "äb", "offset": 0})).await;
    let ack = ws.next().await;
    assert_eq!((&ack["event"], &ack["offset"]), (&json!("stdin_ack"), &json!(3)), "{ack}");
    ws.send(json!({"event": "stdin", "data": "c", "offset": 3})).await;
    assert_eq!(ws.next().await["offset"], 4);
}

#[tokio::test]
async fn without_a_client_a_program_blocks_at_the_window_and_goes_on_at_the_next_attach() {
    let mut ws = Ws::create(shared()).await;
    let id = ws.sandbox_id.clone();
    let code = "import sys\nfor i in range(1 << 9): sys.stdout.write(''.join(f'{i * 1024 + k:031d}\\n' for k in range(1024)))";
    ws.start(json!({"language": "python", "code": code, "execution_id": "e"})).await;
    ws.vanish();
    let mut ws = Ws::attach(shared(), &id).await;
    ws.send(json!({"action": "reconnect", "stdout_offset": 0, "stderr_offset": 0})).await;
    assert_eq!(ws.next().await["event"], "resumed");
    let mut assembly = Assembly::default();
    let done = loop {
        let message = ws.next().await;
        if message["event"] != "stdout" {
            break message;
        }
        assembly.take(&message);
    };
    assert_eq!(done["exit_code"], 0, "{done}");
    let expected: String = (0..1 << 19).map(|i| format!("{i:031}\n")).collect();
    assert!(assembly.bytes == expected.as_bytes());
}

#[tokio::test]
async fn with_drop_oldest_a_program_never_waits_for_a_client_that_is_not_there() {
    let mut ws = Ws::create_with(shared(), json!({"detached_output": "drop_oldest"})).await;
    let id = ws.sandbox_id.clone();
    let code = "import sys\nsys.stdin.readline()\nfor i in range(1 << 10): sys.stdout.write(''.join(f'{i * 1024 + k:031d}\\n' for k in range(1024)))";
    ws.start(json!({"language": "python", "code": code, "execution_id": "e"})).await;
    ws.send(json!({"event": "stdin", "data": "\n", "offset": 0})).await;
    assert_eq!(ws.next().await["event"], "stdin_ack");
    ws.close().await;
    // Not a wait for something that could be seen from here: the time in which it has to end by itself.
    for wait in [1, 2, 4, 8, 16] {
        tokio::time::sleep(Duration::from_secs(wait)).await;
        ws = Ws::attach(shared(), &id).await;
        ws.repeats_allowed = true;
        ws.send(json!({"action": "reconnect", "execution_id": "e", "stdout_offset": 0, "stderr_offset": 0})).await;
        let (mut gone, mut end) = (false, 0);
        loop {
            let message = ws.next().await;
            match (message["event"].as_str().unwrap(), message["code"].as_str()) {
                ("error", Some("output_gone")) => gone = true,
                // It has to end without anybody who reads: whoever looks too early goes at once.
                ("resumed", _) if message["running"].as_bool().unwrap() => break,
                ("resumed", _) => {}
                ("stdout", _) => end = message["end"].as_u64().unwrap(),
                _ => {
                    assert_eq!(message["status"], "SANDBOX_EXECUTION_DONE", "{message}");
                    assert_eq!((gone, end), (true, 32 << 20), "the newest is kept, the oldest went");
                    return;
                }
            }
        }
        ws.close().await;
    }
    panic!("it did not end by itself");
}
