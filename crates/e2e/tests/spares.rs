//! Interpreters that wait: what runs in one can't tell, none is used twice or lost, copies don't share their luck, and nothing gets slower.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeSet,
    process::Command,
    time::{Duration, Instant},
};

use sandboxer_e2e::{DEADLINE, Options, Server, Volume, Ws, eventually, http, soak};
use serde_json::{Value, json};

const BY_SPARE: &str = "sandboxer_executions_by_spare_total";
const BASH: &str = include_str!("spares/bash.txt");
const PYTHON: &str = include_str!("spares/python.txt");

/// What some of the programs find in the sandbox.
const PREPARE: &str = r#"
mkdir -p /tmp/shadow /tmp/shadow2 /tmp/shadow3 /tmp/shadow4 /tmp/late /tmp/broken /tmp/beside/package /tmp/custom "/tmp/odd 'dir\" \$x"
echo 'mine = 1' >/tmp/shadow/json.py
echo 'raise ImportError("shadowed")' >/tmp/shadow2/selectors.py
echo 'mine = 3' >/tmp/shadow3/asyncio.py
echo 'mine = 4' >/tmp/shadow4/enum.py
printf 'x = (\n\nfirst\n' >/tmp/broken/broken.py
printf 'def f():\n    raise ValueError("while importing")\nf()\n' >/tmp/broken/fails.py
echo 'import circle_b; a = 1; circle_b.later()' >/tmp/broken/circle_a.py
printf 'from circle_a import a\ndef later(): pass\n' >/tmp/broken/circle_b.py
echo 'answer = 42' >/tmp/beside/helper.py
touch /tmp/beside/package/__init__.py
echo 'name = __name__' >/tmp/beside/package/part.py
echo 'print("customized")' >/tmp/custom/sitecustomize.py
echo 'from_env=yes; echo from $BASH_SOURCE' >/tmp/bash_env
"#;

/// A program and what is asked for besides.
struct Program {
    name: &'static str,
    request: Value,
    input: Option<String>,
}

fn programs(language: &str, text: &'static str) -> Vec<Program> {
    let parse = |part: &'static str| {
        let (head, code) = part.split_once('\n').unwrap();
        let (name, more) = head.find('{').map_or((head, "{}"), |at| head.split_at(at));
        let mut request: Value = serde_json::from_str(more).unwrap();
        let input = request.as_object_mut().unwrap().remove("input").map(|input| input.as_str().unwrap().to_owned());
        request["language"] = json!(language);
        request["code"] = json!(code);
        Program { name: name.trim(), request, input }
    };
    text.split("### ").skip(1).map(parse).collect()
}

/// Everything that a client can tell of a program.
#[derive(PartialEq, Eq, Debug)]
struct Seen {
    stdout: String,
    stderr: String,
    end: Value,
}

/// Without what differs from one sandbox and one start to the next in any case: the number in the script's path, addresses, the host's name.
fn normal(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let mut rest = text.as_str();
    let mut out = String::new();
    while let Some((at, mark)) = ["/exec/", "0x", "sandbox-"].iter().filter_map(|mark| Some((rest.find(mark)?, *mark))).min() {
        let (before, after) = rest.split_at(at + mark.len());
        out.push_str(before);
        out.push('N');
        rest = after.trim_start_matches(|c: char| if mark == "/exec/" { c.is_ascii_digit() } else { c.is_ascii_hexdigit() });
    }
    out.push_str(rest);
    out
}

async fn run(ws: &mut Ws, program: &Program) -> Seen {
    ws.send(program.request.clone()).await;
    let first = ws.next().await;
    if first["status"] != "SANDBOX_EXECUTION_RUNNING" {
        let error = ws.next().await;
        let end = json!([first["status"], error["event"], error["code"], error["message"]]);
        return Seen { stdout: String::new(), stderr: String::new(), end };
    }
    if let Some(input) = &program.input {
        ws.send(json!({"event": "stdin", "data": input})).await;
        ws.send(json!({"event": "stdin_eof"})).await;
    }
    let outcome = ws.until_done().await;
    if program.input.is_some() {
        // One that has ended before its input came leaves answers to that behind.
        ws.send(json!({"action": "nothing"})).await;
        while ws.next().await["code"] != "unknown_action" {}
    }
    let end = json!([outcome.exit_code(), outcome.signal()]);
    Seen { stdout: normal(&outcome.stdout), stderr: normal(&outcome.stderr), end }
}

fn server(spares: u32) -> Server {
    with(spares, Options::default()).start()
}

fn with(spares: u32, options: Options) -> Options {
    options.arg("--spare-interpreters").arg(spares.to_string())
}

/// Waits, in the sandbox, until a Python waits there with its modules loaded. Starts nothing, so that it is not in its way.
const UNTIL_WARM: &str = "for ((i = 0; i < 3000; i++)); do
    for p in /proc/[0-9]*; do { mapfile -d '' -t m <$p/maps; } 2>/dev/null && [[ $m == *_asyncio* ]] && exit; done
    read -r -t 0.01
done
exit 1";

async fn until_warm(ws: &mut Ws) {
    let outcome = ws.bash(UNTIL_WARM).await;
    assert_eq!(outcome.exit_code(), Some(0), "no Python ever waits with its modules loaded: {}", outcome.done);
}

/// So long nothing is asked for before the next interpreter is started.
const QUIET: Duration = Duration::from_millis(150);

/// Until one of this language has waited for its execution.
async fn until_by_spare(server: &Server, ws: &mut Ws, request: &Value) {
    let begun = Instant::now();
    let before = server.metric(BY_SPARE);
    while server.metric(BY_SPARE) <= before {
        assert!(begun.elapsed() < DEADLINE, "no interpreter ever waits");
        // None is started for whoever runs one program after the other.
        tokio::time::sleep(QUIET).await;
        ws.run(request.clone()).await;
    }
}

/// When an execution comes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Comes {
    /// As soon as the one before has ended: the interpreter is in the middle of its start.
    AtOnce,
    /// When a Python waits with all its modules.
    WhenWarm,
}

async fn compare(language: &str, text: &'static str, ways: &[Comes]) {
    let programs = programs(language, text);
    assert!(programs.len() >= 60);
    let (without, with) = (server(0), server(1));
    let (mut fresh, mut waiting) = (Ws::create(&without).await, Ws::create(&with).await);
    fresh.bash(PREPARE).await;
    waiting.bash(PREPARE).await;
    until_by_spare(&with, &mut waiting, &json!({"language": language, "code": ""})).await;
    // Each program comes one way, the next one another; all of them all ways where there is time for it.
    let passes = if soak() { ways.len() } else { 1 };
    for pass in 0..passes {
        let begun = with.metric(BY_SPARE);
        let mut waits = 0.0;
        let mut different = Vec::new();
        for (at, program) in programs.iter().enumerate() {
            let way = ways[(at + pass) % ways.len()];
            if way == Comes::WhenWarm {
                let before = with.metric(BY_SPARE);
                until_warm(&mut waiting).await;
                waits += with.metric(BY_SPARE) - before;
            }
            let (seen, wanted) = (run(&mut waiting, program).await, run(&mut fresh, program).await);
            if seen != wanted {
                different.push(format!("{} ({way:?})\n  without: {wanted:?}\n  with:    {seen:?}", program.name));
            }
        }
        assert!(different.is_empty(), "{} of {} differ:\n{}", different.len(), programs.len(), different.join("\n"));
        // Those with an unusual environment or directory get a fresh one.
        let by_spare = with.metric(BY_SPARE) - begun - waits;
        println!("{} {language} programs: no difference, {by_spare} by one that waited", programs.len());
        assert!(by_spare >= programs.len() as f64 * 0.7, "{by_spare} of {}", programs.len());
    }
    assert_eq!(without.metric(BY_SPARE), 0.0);
}

#[tokio::test]
async fn a_bash_that_waited_can_not_be_told_from_one_that_was_started() {
    compare("bash", BASH, &[Comes::AtOnce]).await;
}

#[tokio::test]
async fn a_python_that_waited_can_not_be_told_from_one_that_was_started() {
    compare("python", PYTHON, &[Comes::WhenWarm, Comes::AtOnce]).await;
}

/// What is done to all those that wait, whichever they are.
fn to_spares(what: &str) -> String {
    format!(
        "until grep -qs _asyncio /proc/[0-9]*/maps; do sleep 0.01; done
         for p in /proc/[0-9]*; do
             n=${{p##*/}}
             if [ $n != $$ ] && tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q 'exec/[0-9]*/main'; then kill -{what} $n && echo {what}; fi
         done"
    )
}

#[tokio::test]
async fn one_that_was_killed_or_stopped_while_it_waited_costs_its_execution_nothing_but_time() {
    let server = server(2);
    let mut ws = Ws::create(&server).await;
    for language in ["bash", "python"] {
        until_by_spare(&server, &mut ws, &json!({"language": language, "code": ""})).await;
    }
    let mut expected = 0;
    for what in ["STOP", "KILL", "STOP", "INT", "TERM"] {
        assert!(ws.bash(&to_spares(what)).await.ok().contains(what), "{what}");
        for language in ["python", "bash", "python", "bash"] {
            let code = if language == "bash" {
                "echo x >>/tmp/runs; wc -l </tmp/runs"
            } else {
                "open('/tmp/runs', 'a').write('x\\n'); print(len(open('/tmp/runs').readlines()))"
            };
            expected += 1;
            let outcome = ws.run(json!({"language": language, "code": code})).await;
            assert_eq!((outcome.ok(), outcome.err()), (&*format!("{expected}\n"), ""), "{what}, {language}");
        }
        // The more often nobody can use them, the later others are started; so one is used.
        for language in ["bash", "python"] {
            until_by_spare(&server, &mut ws, &json!({"language": language, "code": ""})).await;
        }
    }
}

#[tokio::test]
async fn one_that_the_guest_stopped_ends_when_its_user_has_it_signalled() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
    assert!(ws.bash(&to_spares("STOP")).await.ok().contains("STOP"));
    ws.send(json!({"language": "python", "code": "import time; time.sleep(60)"})).await;
    ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
    ws.send(json!({"action": "signal", "signal": "SIGUSR1"})).await;
    let outcome = ws.until_done().await;
    assert!(outcome.signal().is_some(), "{}", outcome.done);
    assert_eq!(ws.python("print(2)").await.ok(), "2\n");
}

/// All code that is there, a while after this has begun: that of another execution is removed not long after the next has begun.
const LEFT_OF_CODE: &str =
    "for i in {1..200}; do grep -qs 'a-[s]ecret' /run/sandboxer/exec/*/main.* || break; sleep 0.05; done; cat /run/sandboxer/exec/*/main.*";

/// Interpreters that know nothing of hooks take the places of those that do.
const UNHOOKED: &str = r#"
printf '#!/bin/sh\nexec /usr/bin/bash -p "$@"\n' >/usr/local/bin/bash
printf '#!/bin/sh\nexec /usr/bin/python3 -I "$@"\n' >/usr/local/bin/python3
chmod +x /usr/local/bin/bash /usr/local/bin/python3
"#;

/// Each leaves a line and says nothing, and ends in a way that those have that never began.
const SILENT: [(&str, &str, u64); 6] = [
    ("bash", "echo x >>/tmp/runs; exit 3", 7),
    ("bash", "echo x >>/tmp/runs; kill -9 $$", 9),
    ("bash", "echo x >>/tmp/runs; sleep 6", 12),
    ("python", "open('/tmp/runs', 'a').write('x\\n'); raise SystemExit(3)", 60),
    ("python", "open('/tmp/runs', 'a').write('x\\n'); import os; os.kill(os.getpid(), 9)", 70),
    ("python", "open('/tmp/runs', 'a').write('x\\n'); import time; time.sleep(6)", 80),
];

#[tokio::test]
async fn an_interpreter_that_does_not_wait_runs_each_program_once_and_soon_none_is_started_ahead() {
    let server = server(1);
    for (language, code, pause) in SILENT {
        let mut ws = Ws::create(&server).await;
        let _ = ws.bash(UNHOOKED).await.ok();
        // While one is being started.
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let before = server.metric(BY_SPARE);
        ws.run(json!({"language": language, "code": code})).await;
        println!("{language}: {} by one that was to wait", server.metric(BY_SPARE) - before);
        assert_eq!(ws.bash("wc -l </tmp/runs").await.ok(), "1\n", "{language}: {code}");
        let (begun, mut calm) = (Instant::now(), 0);
        // Longer than until the next is tried after one that failed.
        while calm < 5 {
            assert!(begun.elapsed() < DEADLINE, "they are started ahead again and again: {language}: {code}");
            let before = server.metric(BY_SPARE);
            for language in ["bash", "python"] {
                tokio::time::sleep(QUIET).await;
                ws.run(json!({"language": language, "code": ""})).await;
            }
            calm = if server.metric(BY_SPARE) > before { 0 } else { calm + 1 };
        }
    }
}

/// What nobody ever writes to, and what never ends, in place of the hooks; and an end to those that wait.
const NO_HOOKS: &str = "
cd /run/sandboxer/spare && rm -rf * && mkfifo hook.sh warm && ln -s /dev/zero sitecustomize.py || exit
for p in /proc/[0-9]*; do
    n=${p##*/}
    [ $n = $$ ] || { tr '\\0' ' ' <$p/cmdline | grep -q 'exec/[0-9]*/main' && kill -9 $n; } 2>/dev/null
done; :";

#[tokio::test]
async fn nobody_waits_for_what_the_guest_puts_in_place_of_the_hooks() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    for code in ["", NO_HOOKS] {
        // One that is started while its hook goes does not wait, and then no other of its language does.
        until_warm(&mut ws).await;
        let _ = ws.bash(code).await.ok();
        // Others are started, a while after.
        for language in ["bash", "python"] {
            until_by_spare(&server, &mut ws, &json!({"language": language, "code": ""})).await;
        }
    }
    until_warm(&mut ws).await;
    assert_eq!(ws.bash("cd /run/sandboxer/spare; stat -c %F hook.sh sitecustomize.py warm").await.ok(), "regular file\n".repeat(3));
}

/// Traces all Pythons that wait, and goes on doing so in the background.
const TRACE: &str = "
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
def waiting():
    for name in os.listdir('/proc'):
        try:
            if name.isdigit() and int(name) != os.getpid() and b'python3' in open(f'/proc/{name}/cmdline', 'rb').read().split(b'\\0')[0]:
                yield int(name)
        except OSError:
            pass
while not list(waiting()):
    time.sleep(0.01)
ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    found = [pid for pid in waiting() if pid != os.getppid()]
    # PTRACE_ATTACH
    os.write(done, b'x' * sum(libc.ptrace(16, pid, None, None) == 0 for pid in found) or b'0')
    time.sleep(3600)
print(os.read(ready, 10).decode())
";

#[tokio::test]
async fn one_that_the_guest_traces_or_tries_to_harms_no_execution() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
    // gVisor refuses it unless it is told otherwise; where it does not, the next execution must come out right all the same.
    let traced = ws.python(TRACE).await;
    assert!(["0\n", "x\n"].contains(&traced.ok()), "{}", traced.out());
    for round in 0..3 {
        assert_eq!(ws.python(&format!("print({round})")).await.ok(), format!("{round}\n"));
    }
}

#[tokio::test]
async fn a_program_that_is_handed_over_can_be_killed_and_signalled_at_once() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    for language in ["bash", "python"].repeat(3) {
        let code = if language == "bash" { "sleep 60" } else { "import time; time.sleep(60)" };
        ws.send(json!({"language": language, "code": code})).await;
        ws.send(json!({"action": "kill_process"})).await;
        // It may be killed before it is told to run.
        while ws.next().await["status"] != "SANDBOX_EXECUTION_DONE" {}
    }
    assert_eq!(ws.bash("pgrep -c sleep || true").await.out().trim(), "0");
    for language in ["bash", "python"].repeat(3) {
        // A signal is for the program; what it was just about to start may miss it.
        let code = if language == "bash" { "while :; do :; done" } else { "import time; time.sleep(60)" };
        ws.send(json!({"language": language, "code": code})).await;
        ws.expect_status("SANDBOX_EXECUTION_RUNNING").await;
        ws.send(json!({"action": "signal", "signal": "SIGTERM"})).await;
        let outcome = ws.until_done().await;
        assert_eq!(outcome.signal(), Some("SIGTERM"), "{}", outcome.done);
    }
}

/// What a process drew by chance.
const LUCK: [(&str, &str); 2] = [
    (
        "python",
        "import os, random, secrets, ssl, tempfile, uuid
print(random.random(), random.getrandbits(64), hash('text'), os.urandom(8).hex(), secrets.token_hex(8), ssl.RAND_bytes(8).hex())
print(uuid.uuid4(), uuid.uuid1(), next(tempfile._get_candidate_names()))",
    ),
    ("bash", "echo $RANDOM$RANDOM$RANDOM $SRANDOM $HOSTNAME"),
];

/// With what draws by chance among the modules that are imported ahead.
fn drawing(options: Options) -> Server {
    with(1, options).arg("--warm-modules").arg("random,uuid,secrets,ssl,tempfile,asyncio").start()
}

/// What each of these draws is another's of none.
async fn all_differ(sandboxes: &mut [Ws]) {
    for (language, code) in LUCK {
        let mut drawn = Vec::new();
        for sandbox in &mut *sandboxes {
            drawn.push(sandbox.run(json!({"language": language, "code": code})).await.ok().to_owned());
        }
        for at in 0..drawn[0].split_whitespace().count() {
            let numbers: BTreeSet<&str> = drawn.iter().map(|line| line.split_whitespace().nth(at).unwrap()).collect();
            assert_eq!(numbers.len(), drawn.len(), "{language}: {drawn:?}");
        }
    }
}

#[tokio::test]
async fn those_that_wait_are_saved_and_restored_and_copies_do_not_share_their_luck() {
    let volume = Volume::default();
    let server = drawing(volume.options());
    let mut ws = Ws::create_with(&server, json!({"enable_checkpoint": true})).await;
    until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
    until_warm(&mut ws).await;
    ws.send(json!({"action": "snapshot"})).await;
    ws.expect_status("SANDBOX_SNAPSHOT_CREATING").await;
    let saved = ws.expect_status("SANDBOX_SNAPSHOT_CREATED").await;
    let snapshot = saved["snapshot_id"].as_str().unwrap().to_owned();
    let made = http::json(server.address(), "POST", &format!("/v1/snapshots/{snapshot}/restore"), &[], &json!({"count": 3})).unwrap();
    assert_eq!(made.status, 201, "{}", made.body);
    let made = made.json();
    let mut copies = vec![ws];
    for copy in made["items"].as_array().unwrap() {
        copies.push(Ws::attach(&server, copy["id"].as_str().unwrap()).await);
    }
    all_differ(&mut copies).await;
    // There are others in each copy, after a while.
    for copy in &mut copies {
        for (language, code) in LUCK {
            until_by_spare(&server, copy, &json!({"language": language, "code": code})).await;
        }
        until_warm(copy).await;
    }
    all_differ(&mut copies).await;
    // The one they were made from goes on with its own, saved and restored.
    let original = copies.swap_remove(0);
    let id = original.sandbox_id.clone();
    original.checkpoint().await;
    let (mut original, _) = Ws::restore(&server, &id).await;
    for (language, code) in LUCK {
        let _ = original.run(json!({"language": language, "code": code})).await.ok();
        until_by_spare(&server, &mut original, &json!({"language": language, "code": code})).await;
    }
}

#[tokio::test]
async fn executions_back_to_back_are_run_once_each_in_order_and_not_slower_than_without() {
    let rounds = if soak() { 200 } else { 30 };
    let servers = [server(0), server(1)];
    let mut sandboxes = Vec::new();
    for server in &servers {
        let mut ws = Ws::create(server).await;
        let _ = ws.bash("true").await.ok();
        sandboxes.push(ws);
    }
    let mut took = [Duration::ZERO; 2];
    // Half of them each time, so that what else the machine does is done to both.
    for (at, from) in [(0, 1), (1, 1), (1, 1 + rounds / 2), (0, 1 + rounds / 2)] {
        for round in from..from + rounds / 2 {
            let (language, code) = if round % 3 == 0 {
                ("python", "open('/tmp/runs', 'a').write('x\\n'); print(len(open('/tmp/runs').readlines()))")
            } else {
                ("bash", "echo x >>/tmp/runs; mapfile lines </tmp/runs; echo ${#lines[@]}")
            };
            let begun = Instant::now();
            let outcome = sandboxes[at].run(json!({"language": language, "code": code})).await;
            took[at] += begun.elapsed();
            assert_eq!((outcome.ok(), outcome.err()), (&*format!("{round}\n"), ""));
        }
    }
    println!("{rounds} executions: {took:?} without and with");
    if soak() {
        assert!(took[1] <= took[0], "{took:?}");
    }
}

#[tokio::test]
async fn those_that_wait_do_not_count_as_processes_of_the_user() {
    let server = server(2);
    let mut ws = Ws::create_with(&server, json!({"limits": {"pids": 8}})).await;
    for language in ["bash", "python"] {
        until_by_spare(&server, &mut ws, &json!({"language": language, "code": ""})).await;
    }
    until_warm(&mut ws).await;
    // All eight, and not one more, while others wait. It goes on when it is told to: the place beside them of the one that runs it is taken back
    // a moment after its start.
    let fork = "import os, sys, time
print('ready', flush=True)
sys.stdin.readline()
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    pass
print(made + 1)
os.system('kill 0')";
    ws.start(json!({"language": "python", "code": fork})).await;
    ws.until_output("stdout", "ready\n").await;
    ws.send(json!({"event": "stdin", "data": "\n"})).await;
    let outcome = ws.until_done().await;
    assert_eq!(outcome.out(), "8\n", "{}", outcome.err());
}

/// Shows every environment that can be seen from a program, its own from its start among them.
const ENVIRONMENTS: &str =
    "for p in /proc/[0-9]*; do { mapfile -d '' -t all <$p/environ; } 2>/dev/null && printf '%s\\n' \"${all[@]}\"; done";

#[tokio::test]
async fn the_environment_of_one_execution_is_seen_by_no_other() {
    let server = server(1);
    let mut ws = Ws::create_with(&server, json!({"env": {"OF_THE_SANDBOX": "yes"}})).await;
    for language in ["bash", "python"] {
        let secret = json!({"language": language, "code": "", "env": {"TOKEN": "a-secret", "LOGNAME": "a-secret"}});
        until_by_spare(&server, &mut ws, &secret).await;
        // Until one that was started since was asked as well.
        let (begun, before) = (Instant::now(), server.metric(BY_SPARE));
        while server.metric(BY_SPARE) <= before {
            assert!(begun.elapsed() < DEADLINE, "no interpreter ever waits");
            tokio::time::sleep(QUIET).await;
            let seen = ws.bash(ENVIRONMENTS).await.ok().to_owned();
            assert!(seen.contains("OF_THE_SANDBOX=yes\n") && seen.contains("LOGNAME=root\n"), "{seen}");
            assert!(!seen.contains("secret"), "{seen}");
        }
    }
}

#[tokio::test]
async fn the_code_of_one_execution_is_seen_by_no_other() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    for language in ["bash", "python"] {
        let secret = json!({"language": language, "code": "# a-secret"});
        until_by_spare(&server, &mut ws, &secret).await;
        let (begun, before) = (Instant::now(), server.metric(BY_SPARE));
        while server.metric(BY_SPARE) <= before {
            assert!(begun.elapsed() < DEADLINE, "no interpreter ever waits");
            ws.run(secret.clone()).await;
            tokio::time::sleep(QUIET).await;
            // It is removed when the next one runs.
            let seen = ws.bash(LEFT_OF_CODE).await.ok().to_owned();
            assert!(seen.contains("for i in") && !seen.contains("secret"), "{seen}");
        }
    }
}

#[tokio::test]
async fn the_code_of_one_execution_is_seen_by_no_other_though_a_start_failed_between_them() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    for _ in 0..3 {
        until_by_spare(&server, &mut ws, &json!({"language": "bash", "code": "# a-secret"})).await;
        // The next one waits by now.
        tokio::time::sleep(QUIET).await;
        ws.send(json!({"language": "bash", "code": "# a-secret", "cwd": "/nowhere"})).await;
        while ws.next().await["code"] != "start_failed" {}
        let seen = ws.bash(LEFT_OF_CODE).await.ok().to_owned();
        assert!(seen.contains("for i in") && !seen.contains("secret"), "{seen}");
    }
}

#[tokio::test]
async fn nothing_of_the_hook_is_seen_where_python_has_no_modules_of_the_user() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("echo 'include-system-site-packages = false' >/usr/pyvenv.cfg").await.ok();
    let code = "import site; print(site.ENABLE_USER_SITE, type(site.execusercustomize).__name__, site.execusercustomize.__module__)";
    until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
    until_warm(&mut ws).await;
    let before = server.metric(BY_SPARE);
    assert_eq!(ws.python(code).await.ok(), "False function site\n");
    assert!(server.metric(BY_SPARE) > before);
}

const LEVEL: &str = "import ssl; print(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).security_level)";

#[tokio::test]
async fn what_was_changed_while_one_waited_is_seen_whatever_time_it_says() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    let there = |code: &str| json!({"language": "python", "code": code, "cwd": "/tmp/there"});
    let _ = ws.bash("mkdir /tmp/there; touch -d @0 /tmp/there").await.ok();
    until_by_spare(&server, &mut ws, &there("")).await;
    until_warm(&mut ws).await;
    // As an archive does that is unpacked once more.
    let _ = ws.bash("cd /tmp/there; echo 'it = 2' >helper.py; echo 'mine = 1' >json.py; touch -d @0 .").await.ok();
    assert_eq!(ws.run(there("import helper, json; print(helper.it, json.mine)")).await.ok(), "2 1\n");
    until_by_spare(&server, &mut ws, &there("")).await;
    until_warm(&mut ws).await;
    assert_ne!(ws.run(there(LEVEL)).await.ok(), "4\n");
    until_by_spare(&server, &mut ws, &there("")).await;
    until_warm(&mut ws).await;
    let settings = "mkdir -p /usr/lib/ssl /etc/ssl && printf 'openssl_conf = a\n[a]\nssl_conf = b\n[b]\nsystem_default = c\n[c]\nCipherString = DEFAULT:@SECLEVEL=4\n' >/usr/lib/ssl/openssl.cnf";
    let _ = ws.bash(settings).await.ok();
    assert_eq!(ws.run(there(LEVEL)).await.ok(), "4\n");
}

#[tokio::test]
async fn an_execution_that_has_to_be_started_leaves_those_that_wait_alone() {
    let server = server(1);
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("mkdir /tmp/there; ln -s /tmp/there /tmp/link").await.ok();
    until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
    until_warm(&mut ws).await;
    let waits = ws.bash("pgrep python3").await.ok().to_owned();
    for _ in 0..3 {
        let outcome = ws.run(json!({"language": "python", "code": "import os; print(os.getcwd())", "cwd": "/tmp/link"})).await;
        assert_eq!(outcome.ok(), "/tmp/there\n");
        tokio::time::sleep(QUIET).await;
        assert_eq!(ws.bash("pgrep python3").await.ok(), waits);
    }
}

/// Takes memory, all of it together or one piece after the other, and says how much.
fn takes(mib: u32) -> [String; 2] {
    let pieces = format!("data = [bytearray(1 << 20) for _ in range({mib})]\nprint(len(data))");
    [format!("data = bytearray({mib} << 20)\nprint(len(data) >> 20)"), pieces]
}

#[tokio::test]
async fn none_wait_where_they_are_turned_off_nor_in_a_small_sandbox() {
    for (spares, memory) in [(0, 512), (2, 128)] {
        let server = server(spares);
        let mut ws = Ws::create_with(&server, json!({"limits": {"memory_mb": memory, "disk_mb": 64}})).await;
        for _ in 0..2 {
            // Longer than it takes until one would be started.
            assert_eq!(ws.bash("sleep 0.5; pgrep -c 'bash|python3'").await.out(), "1\n");
            for code in takes(80) {
                assert_eq!(ws.python(&code).await.ok(), "80\n");
            }
        }
        assert_eq!(server.metric(BY_SPARE), 0.0);
    }
}

/// As much as fits without any that wait.
const MOST_MIB: u32 = 190;

#[tokio::test]
async fn those_that_wait_go_before_any_program_has_to() {
    for spares in [0, 1] {
        let server = server(spares);
        let mut ws = Ws::create_with(&server, json!({"limits": {"memory_mb": 256, "disk_mb": 64}})).await;
        for code in [takes(MOST_MIB), takes(MOST_MIB)].concat() {
            if spares > 0 {
                until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
                until_warm(&mut ws).await;
            }
            let outcome = ws.python(&code).await;
            assert_eq!((outcome.out(), &outcome.done["message"]), (format!("{MOST_MIB}\n").as_str(), &Value::Null), "{}", outcome.done);
        }
        // It is not only that nothing is watched. It stays there: on a loaded machine it takes a while until it is seen.
        let outcome = ws.python(&takes(400)[1].replace("print", "import time; time.sleep(10); print")).await;
        assert_eq!((outcome.out(), outcome.signal()), ("", Some("SIGKILL")), "{}", outcome.done);
    }
}

#[tokio::test]
async fn a_sandbox_that_is_full_of_processes_starts_no_more_of_them_whether_some_wait_or_not() {
    let mut said = Vec::new();
    for server in [server(0), server(1)] {
        let mut ws = Ws::create_with(&server, json!({"limits": {"pids": 6}})).await;
        let _ = ws.bash("true").await.ok();
        if !said.is_empty() {
            until_by_spare(&server, &mut ws, &json!({"language": "bash", "code": ""})).await;
            until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
        }
        ws.bash("for i in 1 2 3 4 5; do sleep 3600 >/dev/null 2>&1 </dev/null & done; sleep 0.01; sleep 3600 & :").await;
        let mut answers = Vec::new();
        for language in ["bash", "python"] {
            ws.send(json!({"language": language, "code": ""})).await;
            answers.push(ws.next().await["status"].clone());
            answers.push(ws.next().await["message"].clone());
        }
        said.push(answers);
    }
    assert_eq!(said[0], said[1]);
}

#[tokio::test]
async fn a_sandbox_from_the_pool_has_them_when_it_is_handed_out() {
    let server = with(1, Options::default().arg("--pool").arg("1")).start();
    server.filled(1, 0).await;
    let waiting = server.waiting();
    let id = waiting.first().unwrap();
    let runsc = server.data_dir().join("runsc");
    let processes = || {
        let listed = Command::new("runsc").arg("--root").arg(&runsc).args(["ps", id]).output().unwrap();
        String::from_utf8_lossy(&listed.stdout).into_owned()
    };
    eventually("interpreters wait", DEADLINE, || {
        let processes = processes();
        processes.contains("python3") && processes.contains("bash")
    })
    .await;
    let mut ws = Ws::create(&server).await;
    assert_eq!(ws.sandbox_id, *id);
    assert_eq!(ws.python("print(1)").await.ok(), "1\n");
    assert_eq!(ws.bash("[ $HOSTNAME = $(hostname) ] && echo $HOSTNAME").await.ok(), format!("sandbox-{}\n", id.split('-').next().unwrap()));
    assert_eq!(server.metric(BY_SPARE), 2.0);
}

#[tokio::test]
async fn what_is_made_from_a_template_draws_anew() {
    let volume = Volume::default();
    let server = drawing(volume.filesystems());
    let mut ws = Ws::create(&server).await;
    ws.snapshot_filesystem("one").await;
    eventually("a template is kept", DEADLINE, || server.metric("sandboxer_templates_total") >= 1.0).await;
    let mut made = Vec::new();
    for _ in 0..3 {
        made.push(Ws::create_from(&server, "one").await);
    }
    assert_eq!(server.metric("sandboxer_template_restores_total"), 3.0);
    all_differ(&mut made).await;
    let last = made.last_mut().unwrap();
    until_by_spare(&server, last, &json!({"language": "python", "code": ""})).await;
    all_differ(&mut made).await;
}

#[tokio::test]
async fn a_sandbox_that_goes_back_twice_does_not_draw_the_same_twice() {
    let volume = Volume::default();
    let server = drawing(volume.options());
    let mut ws = Ws::create(&server).await;
    until_by_spare(&server, &mut ws, &json!({"language": "python", "code": ""})).await;
    until_warm(&mut ws).await;
    ws.send(json!({"action": "snapshot"})).await;
    ws.expect_status("SANDBOX_SNAPSHOT_CREATING").await;
    let snapshot = ws.expect_status("SANDBOX_SNAPSHOT_CREATED").await["snapshot_id"].clone();
    let mut drawn = BTreeSet::new();
    ws.may_repeat();
    for _ in 0..2 {
        ws.send(json!({"action": "rollback", "snapshot_id": snapshot})).await;
        ws.expect_status("SANDBOX_RESTORING").await;
        ws.expect_status("SANDBOX_RUNNING").await;
        for (language, code) in LUCK {
            let line = ws.run(json!({"language": language, "code": code})).await.ok().to_owned();
            let mut words = line.split_whitespace().filter(|word| !word.starts_with("sandbox-"));
            assert!(words.all(|word| drawn.insert(word.to_owned())), "{line}: {drawn:?}");
        }
    }
}
