//! `sandboxer exec`, `attach`, `logs` and `kill`: programs in sandboxes that are there, as a user has them.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    ffi::OsString,
    fs,
    io::Write as _,
    os::unix::{ffi::OsStringExt as _, fs::PermissionsExt as _},
    process::Stdio,
    time::Duration,
};

use nix::sys::signal::Signal;
use sandboxer_e2e::{Cli, DEADLINE, Gate, Options, Running, Volume, Ws, eventually, free_address, shared, stderr_of, stdout_of};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arguments_reach_a_command_untouched_and_its_exit_code_comes_back() {
    let cli = Cli::new(shared());
    let id = cli.create(&["--env", "GREETING=hello world", "--metadata", "of=exec"]);
    let mut arguments: Vec<OsString> =
        ["", " ", "a\nb\n", "$(touch /root/never)", "`id`", "'\"\\", "*", "--help", "-t", "--json", "ü💥"].map(OsString::from).into();
    arguments.push(OsString::from_vec((1..=255).collect()));
    let program = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))";
    let line = ["exec", &id, "--", "python3", "-c", program].map(OsString::from).into_iter().chain(arguments.clone());
    let output = cli.output(line);
    let expected: Vec<Vec<u8>> = arguments.into_iter().map(OsString::into_vec).collect();
    assert_eq!(output.stdout, expected.join(&0), "{}", stderr_of(&output));
    assert_eq!(cli.fails(2, ["exec", &id, "--", "ls", "/root/never"]).matches("No such file").count(), 1);

    // The beginning of an id will do; codes as a shell tells them.
    let short = &id[..13];
    assert_eq!(cli.ok(["exec", short, "--", "printenv", "GREETING"]), "hello world\n");
    for (code, line) in [(3, "exit 3"), (137, "kill -9 $$"), (143, "kill $$")] {
        assert_eq!(cli.output(["exec", short, "--language", "bash", line]).status.code(), Some(code), "{line}");
    }
    assert!(cli.fails(127, ["exec", short, "--", "no-such-command"]).contains("not found"));
    assert!(cli.fails(126, ["exec", short, "--", "/etc/passwd"]).contains("ermission denied"));
    let output = cli.output(["exec", short, "-l", "python", "import sys; print('out'); print('err', file=sys.stderr)", "--env", "A=b"]);
    assert_eq!((stdout_of(&output), stderr_of(&output)), ("out\n".to_owned(), "err\n".to_owned()));
    assert_eq!(cli.ok(["exec", short, "--cwd", "/usr", "-e", "A=b c", "--", "bash", "-c", "pwd; echo $A"]), "/usr\nb c\n");
    let told: Value = serde_json::from_str(&cli.ok(["exec", short, "--json", "--", "echo", "hi"])).unwrap();
    assert_eq!((&told["stdout"], &told["exit_code"], &told["sandbox_id"]), (&json!("hi\n"), &json!(0), &json!(id)));
    assert!(cli.fails(137, ["exec", short, "--timeout", "0.3", "--", "sleep", "100"]).contains("0.3 s"));
    assert!(cli.ok(["exec", short, "-t", "--", "tty"]).contains("/dev/pts/"));
    let got: Value = serde_json::from_str(&cli.ok(["get", short, "--json"])).unwrap();
    assert_eq!((&got["id"], &got["metadata"]), (&json!(id), &json!({ "of": "exec" })));
    cli.ok(["rm", short]);
    assert!(!cli.tokens().join(&id).exists());
    assert!(cli.fails(125, ["exec", &id, "--", "true"]).contains("sandboxer ls"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_is_passed_on_byte_by_byte_and_ends_with_this_commands_own() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| (n / 7) as u8).collect();
    let mut child = cli.command(["exec", &id, "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let sent = content.clone();
    let writer = std::thread::spawn(move || input.write_all(&sent));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success() && output.stdout == content);
    assert_eq!(cli.ok(["exec", &id, "--no-stdin", "--", "cat"]), "");
    // The program itself from the standard input.
    let mut child = cli.command(["exec", &id, "-l", "python", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"print('from stdin')").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"from stdin\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_interrupt_is_the_programs_and_a_second_kills_it() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    let code = "
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print('ready', flush=True)
signal.sigwait([signal.SIGINT])
print('interrupted', flush=True)
while True: time.sleep(1)
";
    let mut running = cli.spawn(["exec", &id, "--language", "python", code]);
    running.printed(1).await;
    running.signal(Signal::SIGINT);
    running.printed(2).await;
    assert_eq!(running.stdout(), ["ready", "interrupted"]);
    running.signal(Signal::SIGINT);
    assert_eq!(running.exited().await.code(), Some(137));

    // Told to end, this command leaves, and the program goes on.
    let mut running = cli.spawn(["exec", &id, "--language", "python", code]);
    running.printed(1).await;
    assert!(cli.fails(125, ["exec", &id, "--", "true"]).contains("sandboxer kill"), "somebody is attached");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.exited().await.code(), Some(143));
    assert!(running.stderr().concat().contains("sandboxer attach"), "{:?}", running.stderr());
    assert!(cli.fails(125, ["exec", &id, "--", "true"]).contains("sandboxer attach"), "it is busy");
    cli.ok(["kill", &id]);
    assert_eq!(cli.ok(["exec", &id, "--", "echo", "free"]), "free\n");
    assert!(cli.fails(1, ["kill", &id]).contains("Nothing runs"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_unwatched_is_looked_at_without_taking_anything_and_come_back_to() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    assert_eq!(cli.ok(["logs", &id]), "", "nothing was ever run");
    assert!(cli.fails(125, ["attach", &id]).contains("nothing runs"));
    let code = "import sys\nprint('one', flush=True); print('two', file=sys.stderr, flush=True)\nfor line in sys.stdin: print('got', line, end='', flush=True)\nsys.exit(7)";
    // Detached it has no input, so it is begun otherwise.
    let mut ws = Ws::attach(shared(), &id).await;
    ws.start(json!({"language": "python", "code": code})).await;
    ws.vanish();
    let held = || {
        let output = cli.output(["logs", &id]);
        stdout_of(&output) == "one\n" && stderr_of(&output) == "two\n"
    };
    eventually("what it printed is held", DEADLINE, held).await;
    let again: Value = serde_json::from_str(&cli.ok(["logs", "--json", &id])).unwrap();
    assert_eq!((&again["stdout"], &again["stderr"]), (&json!("one\n"), &json!("two\n")), "looking takes nothing away");
    let mut running = cli.spawn(["attach", &id]);
    running.printed(1).await;
    running.say("hello\n");
    running.printed(2).await;
    drop(running.child.stdin.take());
    assert_eq!(running.exited().await.code(), Some(7));
    assert_eq!((running.stdout(), running.stderr()), (vec!["one".to_owned(), "got hello".to_owned()], vec!["two".to_owned()]));

    let execution = cli.ok(["exec", &id, "--detach", "--", "bash", "-c", "echo begun; sleep 1000"]);
    let mut following = cli.spawn(["logs", "--follow", &id]);
    following.printed(1).await;
    // From elsewhere, while somebody is attached.
    assert_eq!(cli.ok(["kill", &id]), execution);
    assert_eq!((following.exited().await.code(), following.stdout()), (Some(0), vec!["begun".to_owned()]));
    let mut running =
        cli.spawn(["exec", &id, "--", "bash", "-c", "trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.1; done"]);
    running.printed(1).await;
    cli.ok(["kill", "--signal", "TERM", &id]);
    assert_eq!((running.exited().await.code(), running.stdout()), (Some(9), vec!["ready".to_owned(), "term".to_owned()]));
}

/// Prints numbered lines until it gets something to read.
const COUNTING: &str = "
import select, sys
i = 0
while not select.select([sys.stdin], [], [], 0.01)[0]:
    print('out', i, flush=True)
    print('err', i, file=sys.stderr, flush=True)
    i += 1
print('stopped at', i)
";

async fn finish(mut running: Running) {
    running.prints_more(50).await;
    running.say("stop\n");
    assert_eq!(running.exited().await.code(), Some(0), "{:?}", running.stderr().last());
    let (mut stdout, stderr) = (running.stdout(), running.stderr());
    let last = stdout.pop().unwrap();
    assert_eq!(last, format!("stopped at {}", stdout.len()));
    for (number, (out, err)) in stdout.iter().zip(&stderr).enumerate() {
        assert_eq!((out, err), (&format!("out {number}"), &format!("err {number}")));
    }
    assert_eq!(stdout.len(), stderr.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_goes_on_through_every_restart_of_the_server_with_every_byte() {
    let volume = Volume::default();
    let mut a = volume.options().listen(Some(&free_address())).start();
    // However slow the disk is: what does not fit into the time is another promise.
    let mut b = volume.options().listen(Some(&free_address())).arg("--stop-grace").arg("60").start();
    let way = Gate::start(a.address()).await;
    let cli = Cli::at(&[way.address(), b.address()]);
    let id = cli.create(&["--checkpoint"]);
    let running = cli.spawn(["exec", &id, "--language", "python", COUNTING]);
    running.prints_more(50).await;
    a.usr2();
    a.restart();
    running.prints_more(50).await;
    a.kill9();
    a.restart();
    running.prints_more(50).await;
    // Its way to the first server is cut, and it goes on at the second, which has the sandbox handed over.
    way.cut();
    eventually("it is at the other one", DEADLINE, || b.view_of(&id).is_some()).await;
    running.prints_more(50).await;
    // The second is told to stop, and saves it; the first has it then.
    way.mend();
    b.term();
    b.exited().await;
    eventually("the first has it again", DEADLINE, || a.view_of(&id).is_some()).await;
    running.prints_more(50).await;
    finish(running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_is_opened_by_its_makers_key_or_its_token() {
    let server = Options::default().env("SANDBOXER_API_KEYS", "me:a-key-of-mine-0123456789,other:a-key-of-others-0123456").start();
    let cli = Cli::new(&server);
    assert!(cli.fails(1, ["ls"]).contains("SANDBOXER_API_KEY"));
    assert!(cli.fails(1, ["create", "--api-key", "wrong"]).contains("401"));
    let keys = tempfile::NamedTempFile::new().unwrap();
    fs::write(keys.path(), "# mine\nme:a-key-of-mine-0123456789\n").unwrap();
    let key = ["--api-key-file", keys.path().to_str().unwrap()];
    let made = |cli: &Cli, verb: &[&str]| cli.output(verb.iter().chain(&key));
    let id = stdout_of(&made(&cli, &["create"])).trim().to_owned();
    let file = cli.tokens().join(&id);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&file), mode(&cli.tokens())), (0o600, 0o700));
    let output = cli.output(["exec", &id, key[0], key[1], "--", "echo", "mine"]);
    assert_eq!(stdout_of(&output), "mine\n", "{}", stderr_of(&output));
    // The same key on another machine needs no token. Another key has to be told the token.
    let elsewhere = Cli::new(&server);
    assert_eq!(elsewhere.ok(["exec", &id, key[0], key[1], "--", "echo", "elsewhere"]), "elsewhere\n");
    let other = ["--api-key", "a-key-of-others-0123456"];
    let denied = elsewhere.fails(125, ["exec", &id, other[0], other[1], "--", "true"]);
    assert!(denied.contains("--token"), "{denied}");
    let token = fs::read_to_string(&file).unwrap();
    assert_eq!(elsewhere.ok(["exec", &id, other[0], other[1], "--token", token.trim(), "--", "echo", "told"]), "told\n");
    assert!(made(&cli, &["rm", &id]).status.success());
    assert!(!file.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_new_user_gets_wrong_first_is_told_with_what_to_do() {
    let nowhere: std::net::SocketAddr = free_address().parse().unwrap();
    let cli = Cli::at(&[nowhere]);
    for verb in [&["ls"][..], &["create"], &["get", "00000000-0000-4000-8000-000000000000"], &["kill", "abc"]] {
        let said = cli.fails(1, verb);
        assert!(said.contains("sandboxer serve") && said.contains(&nowhere.to_string()), "{said}");
    }
    for verb in [&["run", "-l", "bash", "true"][..], &["exec", "abc", "--", "true"], &["attach", "abc"]] {
        assert!(cli.fails(125, verb).contains("sandboxer serve"));
    }
    let cli = Cli::new(shared());
    let unknown = "00000000-0000-4000-8000-000000000000";
    for (code, verb) in [
        (1, &["get", unknown][..]),
        (1, &["rm", unknown]),
        (125, &["exec", unknown, "--", "true"]),
        (1, &["kill", unknown]),
        (1, &["get", "ffff"]),
    ] {
        assert!(cli.fails(code, verb).contains("sandboxer ls"), "{verb:?}");
    }
    assert!(cli.fails(125, ["run", "missing.py"]).contains("missing.py"));
    assert!(cli.fails(64, ["run", "ls"]).contains("--language"));
    assert!(cli.fails(64, ["exec", unknown, "ls"]).contains("put -- before it"));
    assert!(cli.fails(64, ["shell"]).contains("terminal"));
    assert!(cli.fails(1, ["ls", "--server", "ftp://x"]).contains("http://127.0.0.1:8080"));
    assert!(cli.fails(1, ["ls", "--api-key-file", "/nowhere/key"]).contains("/nowhere/key"));
    // Both kinds of address.
    let (one, two) = (cli.create(&[]), cli.create(&[]));
    let listed = cli.ok(["ls", "--server", &format!("ws://{}", shared().address())]);
    assert!(listed.contains(&one) && listed.contains(&two), "{listed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attach_to_a_finished_program_exits_as_it_did() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    assert_eq!(cli.output(["exec", &id, "-l", "bash", "echo mine; exit 7"]).status.code(), Some(7));
    // Its end was told before, and is told to every client that asks.
    for _ in 0..2 {
        let mut attached = cli.spawn(["attach", "--no-stdin", &id]);
        assert_eq!(attached.exited().await.code(), Some(7), "{:?}", attached.stderr());
    }
    assert_eq!(cli.ok(["exec", &id, "--", "echo", "free"]), "free\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_whose_reader_has_gone_ends_as_in_a_pipeline() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    for (program, kill) in [("exec yes", false), ("trap '' PIPE; while :; do echo y; done", true)] {
        let mut child = cli
            .command(["exec", "--no-stdin", &id, "--", "bash", "-c", program])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0; 2];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        assert_eq!(&first, b"y\n");
        // As `head -1` does.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let said = stderr_of(&output);
        assert_eq!((output.status.code(), said.contains("SIGPIPE"), said.contains("killed")), (Some(141), true, kill), "{said}");
        assert!(cli.fails(1, ["kill", &id]).contains("Nothing runs"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_a_rewind_lost_is_told_or_run_again() {
    /// Shorter than usual, so that it runs out while the test waits.
    const LEASE: Duration = Duration::from_secs(6);
    let volume = Volume::default();
    let (mut a, mut b, c) = (volume.serve_with_lease(LEASE), volume.serve_with_lease(LEASE), volume.serve());
    let cli = Cli::at(&[a.address(), b.address(), c.address()]);
    let id = cli.create(&["--checkpoint"]);
    assert_eq!(cli.ok(["exec", &id, "--", "echo", "of another program"]), "of another program\n");
    let saved = || volume.record(&id)["latest"].is_string() && volume.metadata(&id)["lastCheckpointedAt"].is_string();
    eventually("the disconnect is saved", DEADLINE, saved).await;
    // Of the first generation it does not end, and of a later one it does.
    let code = "generation=$(cat /run/sandboxer/generation); echo $generation; [ $generation -gt $1 ] || sleep 1000; exit 5";
    let program = |below: &'static str, more: &[&'static str]| {
        let options = [&["exec", "--no-stdin"], more, &[id.as_str()]].concat();
        cli.spawn([&options[..], &["--", "bash", "-c", code, "bash", below]].concat())
    };
    let mut lost = program("1", &[]);
    lost.printed(1).await;
    a.burn_down();
    assert_eq!(lost.exited().await.code(), Some(125), "{:?}", lost.stderr());
    assert_eq!(lost.stdout().len(), 1, "nothing of another program: {:?}", lost.stdout());
    assert!(lost.stderr().concat().contains("lost"), "{:?}", lost.stderr());

    let mut again = program("2", &["--rerun"]);
    again.printed(1).await;
    b.burn_down();
    assert_eq!(again.exited().await.code(), Some(5), "{:?}", again.stderr());
    assert_eq!(again.stdout().len(), 2, "{:?}", again.stdout());
    assert!(again.stderr().concat().contains("running it again"), "{:?}", again.stderr());
}
