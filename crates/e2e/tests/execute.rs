//! Executions: what they see, how they end, what outlives them, and what is refused.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Ws, shared};
use serde_json::{Value, json};

#[tokio::test]
async fn an_execution_is_running_then_output_then_done() {
    let mut ws = Ws::create(shared()).await;
    // One write: Python's print makes two of it, which may come as two events.
    ws.send(json!({"language": "bash", "code": "echo hello", "execution_id": "run-1"})).await;
    ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
    let output = ws.next().await;
    assert_eq!(output, json!({"event": "stdout", "data": "hello\n", "offset": 0, "end": 6, "execution_id": "run-1"}));
    let done = ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    assert_eq!((&done["execution_id"], &done["exit_code"]), (&json!("run-1"), &json!(0)));
    assert!(done["duration_ms"].as_f64().is_some_and(|ms| ms > 0.0 && ms < 30_000.0), "{done}");
    assert!(done.get("signal").is_none_or(Value::is_null), "{done}");

    let outcome = ws.python("print('world')").await;
    assert_eq!(outcome.ok(), "world\n");
    let id = outcome.done["execution_id"].as_str().unwrap();
    assert!(!id.is_empty() && id != "run-1");
}

#[tokio::test]
async fn exit_codes_and_signals_are_told() {
    let mut ws = Ws::create(shared()).await;
    for (language, code, exit_code, signal) in [
        ("bash", "exit 7", Some(7), None),
        ("bash", "true", Some(0), None),
        ("bash", "no-such-command", Some(127), None),
        ("python", "import sys; sys.exit(3)", Some(3), None),
        ("python", "raise ValueError('x')", Some(1), None),
        ("python", "import os; os._exit(255)", Some(255), None),
        ("bash", "kill -SEGV $$", None, Some("SIGSEGV")),
        ("bash", "kill -KILL $$", None, Some("SIGKILL")),
        ("python", "import os; os.abort()", None, Some("SIGABRT")),
    ] {
        let outcome = ws.run(json!({"language": language, "code": code})).await;
        assert_eq!((outcome.exit_code(), outcome.signal()), (exit_code, signal), "{code}: {}", outcome.done);
    }
}

#[tokio::test]
async fn stderr_is_a_stream_of_its_own_with_its_own_offsets() {
    let mut ws = Ws::create(shared()).await;
    let outcome = ws.bash("echo out; echo error >&2; echo out2").await;
    assert_eq!((outcome.out(), outcome.err()), ("out\nout2\n", "error\n"));
    let outcome = ws.python("raise ValueError('broken')").await;
    assert!(outcome.err().contains("Traceback") && outcome.err().contains("ValueError: broken"), "{}", outcome.err());
    assert_eq!(outcome.out(), "");
}

#[tokio::test]
async fn code_runs_as_root_of_its_own_sandbox() {
    let mut ws = Ws::create(shared()).await;
    assert_eq!(ws.bash("id -u; echo $HOME; pwd").await.ok(), "0\n/root\n/root\n");
    assert_eq!(ws.python("import os; print(os.getuid(), os.environ['HOME'], os.getcwd())").await.ok(), "0 /root /root\n");
    let writable = ws.bash("for d in / /root /tmp /etc /usr/local/bin /var/lib /opt /home; do touch $d/mark && echo $d; done").await;
    assert_eq!(writable.ok().lines().count(), 8, "{:?}", writable.err());
    assert_eq!(
        ws.bash("printf '#!/bin/sh\\necho installed\\n' >/usr/local/bin/mine; chmod +x /usr/local/bin/mine; mine").await.ok(),
        "installed\n"
    );
}

#[tokio::test]
async fn code_sees_its_own_processes_only() {
    let mut ws = Ws::create(shared()).await;
    let seen = ws.bash("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls -l /proc/[0-9]*/exe 2>/dev/null").await;
    assert!(!seen.out().contains("sandboxer-agent"), "{}", seen.out());
}

#[tokio::test]
async fn environment_and_directory_of_a_request_come_before_those_of_the_sandbox() {
    let mut ws = Ws::create_with(shared(), json!({"env": {"A": "sandbox", "B": "sandbox"}, "cwd": "/usr"})).await;
    let request = json!({"language": "bash", "code": "echo $A $B $C; pwd", "env": {"B": "request", "C": "request"}, "cwd": "/var"});
    assert_eq!(ws.run(request).await.ok(), "sandbox request request\n/var\n");
    assert_eq!(ws.bash("echo $A $B $C; pwd").await.ok(), "sandbox sandbox\n/usr\n");
    let request = json!({"language": "python", "code": "import os; print(os.environ['B'], os.getcwd())", "env": {"B": "ü"}, "cwd": "/var"});
    assert_eq!(ws.run(request).await.ok(), "ü /var\n");
}

#[tokio::test]
async fn nothing_of_the_servers_environment_is_seen() {
    let mut ws = Ws::create(shared()).await;
    let environment = ws.bash("env; cat /proc/self/environ | tr '\\0' '\\n'").await;
    for name in ["SANDBOXER", "CARGO", "RUST"] {
        assert!(!environment.ok().contains(name), "{}", environment.out());
    }
    assert!(environment.out().contains("PATH="));
}

#[tokio::test]
async fn a_directory_that_is_not_there_is_an_execution_that_could_not_be_started() {
    let mut ws = Ws::create(shared()).await;
    for language in ["bash", "python"] {
        ws.send(json!({"language": language, "code": "", "cwd": "/no/such/directory"})).await;
        ws.expect_status("SANDBOX_EXECUTION_ERROR").await;
        let error = ws.expect_error("start_failed").await;
        assert!(error["message"].as_str().unwrap().contains("/no/such/directory"), "{error}");
        ws.expect_alive().await;
    }
}

#[tokio::test]
async fn every_execution_has_a_fresh_interpreter() {
    let mut ws = Ws::create(shared()).await;
    ws.python("x = 1; import os; os.environ['LEFT'] = 'y'; os.chdir('/tmp')").await;
    let outcome = ws.python("import os; print(os.environ.get('LEFT'), os.getcwd(), 'x' in globals())").await;
    assert_eq!(outcome.ok(), "None /root False\n");
    ws.bash("LEFT=x; export LEFT; cd /tmp; f() { echo f; }; umask 077; ulimit -n 64").await;
    assert_eq!(ws.bash("echo \"[$LEFT]\"; pwd; type f 2>/dev/null; umask").await.out(), "[]\n/root\n0022\n");
}

#[tokio::test]
async fn python_runs_code_as_it_runs_a_file() {
    let mut ws = Ws::create(shared()).await;
    let code = "
import sys, threading, atexit
atexit.register(lambda: print('at exit'))
if __name__ == '__main__':
    print(len(sys.argv), __name__)
def f():
    return f.__name__
print(f(), sys.stdin is not None, sys.flags.interactive)
threading.Thread(target=lambda: print('thread')).start()
open('/tmp/not-closed', 'w').write('flushed')
";
    assert_eq!(ws.python(code).await.ok(), "1 __main__\nf True 0\nthread\nat exit\n");
    assert_eq!(ws.bash("cat /tmp/not-closed").await.ok(), "flushed");
    let outcome = ws.python("def f(:\n").await;
    assert_eq!(outcome.exit_code(), Some(1));
    assert!(outcome.err().contains("SyntaxError"), "{}", outcome.err());
    let outcome = ws.python("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))").await;
    assert_eq!(outcome.ok(), "[1, 2]\n");
}

#[tokio::test]
async fn the_filesystem_is_shared_by_executions_of_both_languages() {
    let mut ws = Ws::create(shared()).await;
    ws.python("open('data', 'w').write('from python\\n')").await;
    assert_eq!(ws.bash("cat data; echo from bash >>data").await.ok(), "from python\n");
    assert_eq!(ws.python("print(open('/root/data').read(), end='')").await.ok(), "from python\nfrom bash\n");
}

#[tokio::test]
async fn sandboxes_do_not_see_each_other() {
    let (mut one, mut two) = (Ws::create(shared()).await, Ws::create(shared()).await);
    one.bash("echo secret >/tmp/mine; sleep 1000 & echo").await;
    let seen = two.bash("ls /tmp/mine; ps aux | grep -c '[s]leep 1000'").await;
    assert_eq!(seen.out(), "0\n");
}

#[tokio::test]
async fn a_background_process_outlives_its_execution_and_the_next_one_reaches_it() {
    let mut ws = Ws::create(shared()).await;
    let start = Instant::now();
    let outcome = ws.bash("mkdir /srv/www; echo page >/srv/www/index.html; cd /srv/www; python3 -m http.server 8000 & echo $!").await;
    let pid = outcome.ok().trim().to_owned();
    assert!(start.elapsed() < Duration::from_secs(15), "DONE waited for the background process");
    assert_eq!(ws.bash(&format!("kill -0 {pid} && echo there")).await.ok(), "there\n");
    assert_eq!(ws.bash("curl -s --retry 50 --retry-connrefused --retry-delay 0 http://127.0.0.1:8000/").await.ok(), "page\n");
    let ended = format!("kill {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.01; done; echo gone");
    assert_eq!(ws.bash(&ended).await.ok(), "gone\n");
}

#[tokio::test]
async fn done_comes_while_a_child_holds_stdout_and_the_child_neither_blocks_nor_breaks() {
    let mut ws = Ws::create(shared()).await;
    // Far more than any window or pipe holds, written after DONE.
    let code = "
import os, sys
print('main')
sys.stdout.flush()
if os.fork() == 0:
    os.setsid()
    while not os.path.exists('/tmp/go'): pass
    for i in range(24):
        os.write(1, b'x' * (1 << 20))
        os.write(2, b'y' * (1 << 20))
    open('/tmp/wrote', 'w').write('all')
";
    let outcome = ws.python(code).await;
    assert_eq!(outcome.ok(), "main\n");
    let outcome = ws.run(json!({"language": "bash", "code": "touch /tmp/go; until [ -s /tmp/wrote ]; do sleep 0.02; done; cat /tmp/wrote", "timeout": 25})).await;
    assert_eq!((outcome.out(), outcome.err()), ("all", ""));
}

#[tokio::test]
async fn all_output_of_the_main_process_comes_before_done() {
    let mut ws = Ws::create(shared()).await;
    for _ in 0..5 {
        let outcome = ws.python("import os\nos.write(1, b'a' * 300000)\nos.write(2, b'b' * 300000)\nos._exit(0)").await;
        assert_eq!((outcome.stdout.len(), outcome.stderr.len()), (300_000, 300_000));
    }
}

#[tokio::test]
async fn a_timeout_kills_the_tree_and_says_so() {
    let mut ws = Ws::create(shared()).await;
    let code = "setsid sleep 4242 & (sleep 4243 &) ; echo started; sleep 4244";
    let start = Instant::now();
    ws.start(json!({"language": "bash", "code": code, "timeout": 10, "execution_id": "slow"})).await;
    assert_eq!(ws.until_output("stdout", "started\n").await, "started\n");
    ws.expect_status("SANDBOX_EXECUTION_ERROR").await;
    ws.expect_error("timed_out").await;
    let done = ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    assert_eq!((&done["execution_id"], &done["signal"], &done["timed_out"]), (&json!("slow"), &json!("SIGKILL"), &json!(true)), "{done}");
    assert!((Duration::from_millis(9900)..Duration::from_secs(30)).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!(ws.bash("ps ax | grep -c '[s]leep 424'").await.out(), "0\n");
}

#[tokio::test]
async fn a_program_that_ends_in_time_is_not_touched_by_its_timeout() {
    let mut ws = Ws::create(shared()).await;
    let outcome = ws.run(json!({"language": "bash", "code": "sleep 0.1; echo in time", "timeout": 20})).await;
    assert_eq!(outcome.ok(), "in time\n");
    assert!(outcome.done.get("timed_out").is_none_or(|value| value == &json!(false) || value.is_null()), "{}", outcome.done);
}

#[tokio::test]
async fn an_unsupported_language_is_an_error_and_then_done() {
    let mut ws = Ws::create(shared()).await;
    for language in ["cobol", "", "Python", "python3"] {
        ws.send(json!({"language": language, "code": "x"})).await;
        ws.expect_status("SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR").await;
        ws.expect_error("unsupported_language").await;
        ws.expect_status("SANDBOX_EXECUTION_DONE").await;
    }
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_bad_execution_request_is_an_execution_error_that_names_the_field() {
    let mut ws = Ws::create(shared()).await;
    for (request, field) in [
        (json!({"language": "python"}), "code"),
        (json!({"language": "python", "code": 5}), "code"),
        (json!({"language": "python", "code": null}), "code"),
        (json!({"language": "bash", "code": "a\u{0}b"}), "code"),
        (json!({"code": "x"}), "language"),
        (json!({"language": 5, "code": "x"}), "language"),
        (json!({"language": "bash", "code": "x", "env": "A=b"}), "env"),
        (json!({"language": "bash", "code": "x", "env": {"A": 1}}), "env"),
        (json!({"language": "bash", "code": "x", "cwd": "tmp"}), "cwd"),
        (json!({"language": "bash", "code": "x", "timeout": "long"}), "timeout"),
        (json!({"language": "bash", "code": "x", "timeout": -1}), "timeout"),
        (json!({"language": "bash", "code": "x", "stdin": "no"}), "stdin"),
        (json!({"language": "bash", "code": "x", "tty": {"rows": "many", "cols": 80}}), "tty"),
        (json!({"language": "bash", "code": "x", "encoding": "rot13"}), "encoding"),
        (json!({"language": "bash", "code": "x", "execution_id": 5}), "execution_id"),
        (json!({"language": "bash", "code": "x", "execution_id": ""}), "execution_id"),
    ] {
        ws.send(request.clone()).await;
        ws.expect_status("SANDBOX_EXECUTION_ERROR").await;
        let error = ws.expect_error("invalid_field").await;
        assert!(error["message"].as_str().unwrap().contains(field), "{request}: {error}");
    }
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_second_request_while_one_runs_is_refused_and_the_first_goes_on() {
    let mut ws = Ws::create(shared()).await;
    ws.start(json!({"language": "bash", "code": "echo one; read -r line; echo two", "execution_id": "first"})).await;
    ws.until_output("stdout", "one\n").await;
    ws.send(json!({"language": "bash", "code": "touch /tmp/second", "execution_id": "second"})).await;
    ws.expect_status("SANDBOX_EXECUTION_ERROR").await;
    ws.expect_error("execution_in_progress").await;
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    let outcome = ws.until_done().await;
    assert_eq!((outcome.ok(), &outcome.done["execution_id"]), ("two\n", &json!("first")));
    assert_eq!(ws.bash("ls /tmp/second 2>/dev/null").await.out(), "");
}

/// The repeated request is answered by its output, from wherever, and its end. Nothing runs again.
#[tokio::test]
async fn a_repeated_execution_id_resumes_and_runs_nothing_twice() {
    let mut ws = Ws::create(shared()).await;
    let request = json!({"language": "bash", "code": "echo run >>/tmp/runs; echo out; read -r line; echo $line", "execution_id": "once"});
    ws.start(request.clone()).await;
    ws.until_output("stdout", "out\n").await;
    ws.repeats_allowed = true;
    // While it runs,
    ws.send(request.clone()).await;
    ws.send(json!({"event": "stdin", "data": "end\n"})).await;
    let outcome = ws.until_done().await;
    assert_eq!((&outcome.done["execution_id"], outcome.exit_code()), (&json!("once"), Some(0)));
    assert!(outcome.out().ends_with("end\n"), "{:?}", outcome.out());
    assert!(outcome.between.iter().all(|message| message["event"] != "error"), "{:?}", outcome.between);
    // and when it has ended.
    ws.send(request).await;
    let outcome = ws.until_done().await;
    assert_eq!((&outcome.done["execution_id"], outcome.exit_code()), (&json!("once"), Some(0)));
    assert!(outcome.between.iter().all(|message| message["event"] != "error"), "{:?}", outcome.between);
    ws.repeats_allowed = false;
    assert_eq!(ws.bash("cat /tmp/runs").await.ok(), "run\n");
}

/// A repeated request and the answer to the last ping cross on their way.
#[tokio::test]
async fn a_request_repeated_right_behind_the_end_is_answered_however_the_acknowledgement_comes() {
    let mut ws = Ws::create(shared()).await;
    ws.repeats_allowed = true;
    for number in 0..30 {
        let request = json!({"language": "bash", "code": "echo a; echo b >&2; echo c", "execution_id": format!("e{number}")});
        for _ in 0..3 {
            ws.send(request.clone()).await;
            let outcome = ws.until_done().await;
            assert_eq!((&outcome.done["execution_id"], outcome.exit_code()), (&request["execution_id"], Some(0)));
            assert!(outcome.between.iter().all(|message| message["event"] != "error"), "{:?}", outcome.between);
        }
    }
}

#[tokio::test]
async fn large_code_and_code_in_any_script_are_taken() {
    let mut ws = Ws::create(shared()).await;
    let padding = "# Füllung 🦀\n".repeat(400_000);
    assert_eq!(ws.python(&format!("{padding}print('ende 終')")).await.ok(), "ende 終\n");
    assert_eq!(ws.bash(&format!("{}echo 'ende 終'", &padding[..padding.len() / 4])).await.ok(), "ende 終\n");
}

#[tokio::test]
async fn extra_fields_of_a_request_are_ignored() {
    let mut ws = Ws::create(shared()).await;
    assert_eq!(ws.run(json!({"language": "bash", "code": "echo x", "of_tomorrow": [1, {"a": null}]})).await.ok(), "x\n");
}

#[tokio::test]
async fn many_executions_one_after_another_are_each_complete() {
    let mut ws = Ws::create(shared()).await;
    for number in 0..20 {
        let language = if number % 2 == 0 { "bash" } else { "python" };
        let code = if number % 2 == 0 { format!("echo {number}") } else { format!("print({number})") };
        assert_eq!(ws.run(json!({"language": language, "code": code})).await.ok(), format!("{number}\n"));
    }
}
