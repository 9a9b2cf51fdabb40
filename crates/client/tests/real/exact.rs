//! Exact on both sides, over a network that fails and under a server that is killed.

use std::{net::TcpListener, time::Duration};

use sandboxer_client::{Execution, Options, OutputStream, Sandbox};
use sandboxer_e2e::{CutProxy, Fault, count, seed, shared};
use tokio::time::timeout;

use super::{DEADLINE, quick};

/// Numbered lines on both streams, and every line of input as a line of output. Says in a file that it ran.
const PROGRAM: &str = "
import sys, threading, time
open('/root/runs', 'a').write('ran\\n')
lock = threading.Lock()
def say(stream, text):
    with lock:
        stream.write(text + '\\n')
        stream.flush()
def lines(stream, name):
    for i in range(LINES):
        say(stream, f'{name} {i} äöü€😀 ' + 'x' * (i % 90))
        if i % 20 == 0: time.sleep(PAUSE)
threads = [threading.Thread(target=lines, args=a) for a in ((sys.stdout, 'out'), (sys.stderr, 'err'))]
for t in threads: t.start()
for line in sys.stdin: say(sys.stdout, 'echo ' + line.rstrip('\\n'))
for t in threads: t.join()
";

fn expected(name: &str, lines: usize) -> String {
    (0..lines).map(|i| format!("{name} {i} äöü€😀 {}\n", "x".repeat(i % 90))).collect()
}

/// Runs the program once and checks every byte of it.
async fn run_exactly(sandbox: &Sandbox, lines: usize, pause: f64, raw: bool) {
    let code = PROGRAM.replace("LINES", &lines.to_string()).replace("PAUSE", &pause.to_string());
    let mut run = timeout(DEADLINE, sandbox.run(Execution::python(code).raw(raw))).await.expect("it does not start").unwrap();
    let mut stdin = run.take_stdin();
    let feeding = tokio::spawn(async move {
        for line in 0..lines {
            stdin.write(format!("in {line} ✓\n")).await.unwrap();
            if line % 20 == 0 {
                tokio::time::sleep(Duration::from_secs_f64(pause)).await;
            }
        }
        stdin.eof().await.unwrap();
    });
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(piece) = timeout(DEADLINE, run.next()).await.expect("it hangs") {
        let collected = if piece.stream == OutputStream::Stdout { &mut stdout } else { &mut stderr };
        assert_eq!(piece.offset, collected.len() as u64);
        collected.extend_from_slice(&piece.data);
    }
    let exit = run.wait().await.unwrap();
    assert_eq!(exit.code, Some(0), "{}", String::from_utf8_lossy(&stderr));
    feeding.await.unwrap();
    let stdout = String::from_utf8(stdout).unwrap();
    let (echoes, lines_out): (Vec<&str>, Vec<&str>) = stdout.split_inclusive('\n').partition(|line| line.starts_with("echo "));
    assert!(lines_out.concat() == expected("out", lines), "stdout differs");
    assert!(String::from_utf8(stderr).unwrap() == expected("err", lines), "stderr differs");
    let echoed: String = (0..lines).map(|line| format!("echo in {line} ✓\n")).collect();
    assert!(echoes.concat() == echoed, "stdin differs");
}

async fn ran(sandbox: &Sandbox) -> usize {
    let output = sandbox.bash("cat /root/runs").await.unwrap().output().await.unwrap();
    String::from_utf8(output.stdout).unwrap().lines().count()
}

#[tokio::test]
async fn every_byte_arrives_once_over_a_failing_network() {
    let cuts = count(40, 500);
    let mut faults = [Fault::Cut; 12];
    faults[0] = Fault::HalfOpen;
    faults[1] = Fault::Silent(Duration::from_secs(5));
    // Some connections live long enough for the largest piece of output, or it would never arrive.
    let proxy = CutProxy::start(shared().address(), seed(), 300..150_000, &faults).await;
    let options = Options::default().connection(quick());
    let sandbox = Sandbox::create(&format!("http://{}", proxy.address()), options).await.unwrap();
    let mut runs = 0;
    while proxy.happened() < cuts {
        run_exactly(&sandbox, 800, 0.03, runs % 2 == 1).await;
        runs += 1;
    }
    println!("{} faults in {runs} executions", proxy.happened());
    proxy.heal();
    assert_eq!(ran(&sandbox).await, runs);
    sandbox.kill_sandbox().await.unwrap();
}

#[tokio::test]
async fn every_byte_arrives_once_under_a_server_that_is_killed() {
    // The same address after every start.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("127.0.0.1:{port}");
    let mut server = sandboxer_e2e::Options::default().listen(Some(&listen)).start();
    let sandbox = Sandbox::create(&format!("http://{listen}"), Options::default().connection(quick())).await.unwrap();
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let kills = count(3, 30);
    let killing = tokio::task::spawn_blocking(move || {
        for kill in 0..kills {
            std::thread::sleep(Duration::from_millis(700));
            if kill % 2 == 0 {
                server.kill9()
            } else {
                server.usr2()
            }
            server.restart();
        }
        let _ = stop.send(());
        server
    });
    let mut runs = 0;
    while stopped.try_recv().is_err() {
        run_exactly(&sandbox, 600, 0.1, false).await;
        runs += 1;
    }
    let server = killing.await.unwrap();
    assert_eq!(ran(&sandbox).await, runs);
    sandbox.kill_sandbox().await.unwrap();
    drop(server);
}
