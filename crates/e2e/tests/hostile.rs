//! Guests that try everything hurt nobody but themselves: the server and a neighbour answer, the client has a reason, and the sandbox
//! goes on or is told to be dead. All of it for a server of root's and for one of an ordinary user.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{DEADLINE, Incoming, Server, User, Ws, as_both_users, count, http, shared_as};
use serde_json::{Value, json};

/// How the attack ended for its client.
#[derive(Debug)]
enum Ended {
    /// With `SANDBOX_EXECUTION_DONE`, and the sandbox goes on.
    Done(Value, String),
    /// With `SANDBOX_ERROR`, and the sandbox is gone.
    Dead(Value),
}

async fn attack(user: User, configuration: Value, language: &str, code: &str) -> (Ws, Ended) {
    attack_for(user, configuration, language, code, 12).await
}

/// So many seconds long at most.
async fn attack_for(user: User, configuration: Value, language: &str, code: &str, timeout: u32) -> (Ws, Ended) {
    let server = shared_as(user);
    let mut neighbour = Ws::create(server).await;
    let mut ws = Ws::create_with(server, configuration).await;
    ws.start(json!({"language": language, "code": code, "timeout": timeout})).await;
    let ended = until_ended(&mut ws).await;
    answers_within_a_second(server, &mut neighbour).await;
    match &ended {
        // Whatever it did to its sandbox, an execution there is answered.
        Ended::Done(..) => {
            ws.send(json!({"language": "bash", "code": "echo after", "timeout": 10})).await;
            until_ended(&mut ws).await;
        }
        Ended::Dead(_) => {
            let mut again = Ws::open(server, &format!("/attach/{}", ws.sandbox_id)).await;
            again.expect_status("SANDBOX_NOT_FOUND").await;
            again.expect_close(1011).await;
        }
    }
    answers_within_a_second(server, &mut neighbour).await;
    (ws, ended)
}

/// Reads on, however much comes.
async fn until_ended(ws: &mut Ws) -> Ended {
    let (mut output, start) = (String::new(), Instant::now());
    loop {
        let left = Duration::from_secs(60).saturating_sub(start.elapsed());
        let message = match ws.incoming_within(left).await {
            Some(Incoming::Message(message)) => message,
            Some(other) => panic!("the connection ended without a reason: {other:?}"),
            None => panic!("its client waits for ever"),
        };
        match (message["event"].as_str().unwrap(), message["status"].as_str()) {
            ("stdout" | "stderr", _) if output.len() < 100_000 => output += message["data"].as_str().unwrap(),
            ("stdout" | "stderr", _) => {}
            (_, Some("SANDBOX_EXECUTION_DONE")) => return Ended::Done(message, output),
            (_, Some("SANDBOX_ERROR")) => {
                assert!(message["reason"].is_string(), "{message}");
                assert_eq!(ws.next().await["event"], "error");
                ws.expect_close(4000).await;
                return Ended::Dead(message);
            }
            // Timed out, or could not be started in what is left of the sandbox.
            (_, Some("SANDBOX_EXECUTION_RUNNING" | "SANDBOX_EXECUTION_ERROR")) => {}
            ("error", _) if message["code"] == "timed_out" => {}
            ("error", _) => return Ended::Done(message, output),
            _ => panic!("{message}"),
        }
    }
}

/// Ten tries, since whatever else the machine does may take some: what an attack has left behind takes all of them.
async fn answers_within_a_second(server: &Server, neighbour: &mut Ws) {
    let mut took = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        assert_eq!(server.get("/healthz").status, 200);
        assert_eq!(http::try_get(server.address(), "/readyz", &[]).unwrap().status, 200);
        assert_eq!(neighbour.bash("echo neighbour").await.ok(), "neighbour\n");
        took.push(start.elapsed());
        if start.elapsed() < Duration::from_secs(1) {
            return;
        }
    }
    panic!("the neighbour took {took:?}");
}

async fn survives(user: User, language: &str, code: &str) -> String {
    let limits = json!({"limits": {"memory_mb": 512, "pids": 128, "disk_mb": 128}});
    // What it says at its end is looked at, however slow the machine is.
    match attack_for(user, limits, language, code, 30).await {
        (_, Ended::Done(_, output)) => output,
        (_, Ended::Dead(message)) => panic!("it was not to die of this: {message}"),
    }
}

async fn a_fork_meets_its_limit_with_an_error_that_the_program_sees(user: User) {
    let code = "
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(1000)
        made += 1
except OSError as error: print(made, error)
";
    let output = survives(user, "python", code).await;
    let made: usize = output.split(' ').next().and_then(|made| made.parse().ok()).unwrap_or(0);
    assert!((100..128).contains(&made) && output.contains("Resource temporarily unavailable"), "{output}");
}

/// It may take its sandbox along, but says so, and nobody else.
async fn a_fork_bomb_hurts_nobody_else(user: User) {
    let (mut ws, ended) = attack(user, json!({"limits": {"pids": 64}}), "bash", "f() { f | f & }; f 2>/dev/null; wait").await;
    if let Ended::Done(..) = ended {
        // It goes on in the background, until its sandbox does not.
        ws.send(json!({"action": "kill_sandbox"})).await;
        ws.expect_status("SANDBOX_KILLING").await;
        ws.expect_status("SANDBOX_KILLED").await;
    }
}

/// While it is still at it, too: the neighbour has its share of the machine, and the bomb's time is over when it is over.
async fn a_fork_bomb_ends_with_its_timeout_and_the_neighbour_answers_meanwhile(user: User) {
    const TIMEOUT: Duration = Duration::from_secs(4);
    let server = shared_as(user);
    let mut neighbour = Ws::create(server).await;
    let mut ws = Ws::create_with(server, json!({"limits": {"pids": 64}})).await;
    let bomb = json!({"language": "bash", "code": "f() { f | f; }; f 2>/dev/null", "timeout": TIMEOUT.as_secs()});
    ws.start(bomb).await;
    let begun = Instant::now();
    let ended = async {
        let ended = until_ended(&mut ws).await;
        (ended, begun.elapsed())
    };
    let answers = async {
        let mut answers = Vec::new();
        while begun.elapsed() < TIMEOUT {
            let asked = Instant::now();
            assert_eq!(neighbour.bash("echo neighbour").await.ok(), "neighbour\n");
            answers.push(asked.elapsed());
        }
        answers
    };
    let ((ended, took), answers) = tokio::join!(ended, answers);
    println!("{user:?}: ended after {took:?}, the neighbour's answers took {answers:?}: {ended:?}");
    assert!(took < TIMEOUT + Duration::from_secs(10), "ended after {took:?}: {ended:?}");
    // One may have waited for the disk; whoever waits for the bomb has no other answer.
    let slow = answers.iter().filter(|took| **took >= Duration::from_secs(3)).count();
    assert!(slow <= 1 && answers.len() - slow >= 2, "the neighbour waited: {answers:?}");
    let Ended::Done(done, _) = ended else { panic!("the sandbox died of it") };
    assert_eq!((&done["timed_out"], &done["signal"]), (&json!(true), &json!("SIGKILL")), "{done}");
    // All of it is gone once those that were killed have died: there is the one that looks, and maybe one that waits for the next program.
    let begun = Instant::now();
    loop {
        let left = ws.bash("ps -eo comm= >/tmp/seen; grep -c bash /tmp/seen").await.out().to_owned();
        if matches!(left.as_str(), "1\n" | "2\n") {
            break;
        }
        assert!(begun.elapsed() < DEADLINE, "{left}");
    }
}

async fn a_program_that_takes_all_memory_is_killed_with_a_reason_and_its_sandbox_goes_on(user: User) {
    let code = "b = []\nwhile True: b.append(bytearray(16 << 20))";
    let (mut ws, ended) = attack(user, json!({"limits": {"memory_mb": 256}}), "python", code).await;
    let Ended::Done(done, _) = ended else { panic!("{ended:?}") };
    assert_eq!(done["signal"], "SIGKILL", "{done}");
    assert!(done["message"].as_str().is_some_and(|message| message.contains("memory")), "{done}");
    ws.expect_alive().await;
}

async fn many_programs_that_take_all_memory_together_do_not_take_the_neighbours(user: User) {
    let code = "
import os, time
for _ in range(8):
    if os.fork() == 0:
        b = []
        while True:
            b.append(bytearray(8 << 20)); time.sleep(0.01)
for _ in range(8):
    try: os.wait()
    except ChildProcessError: break
print('survived')
";
    attack(user, json!({"limits": {"memory_mb": 256}}), "python", code).await;
}

async fn a_full_disk_is_an_error_of_the_program_and_can_be_emptied(user: User) {
    let output =
        survives(user, "bash", "dd if=/dev/zero of=/root/full bs=1M count=100000; rm -f /root/full; echo x >/root/again && echo emptied")
            .await;
    assert!(output.contains("No space left") && output.ends_with("emptied\n"), "{output}");
}

async fn empty_files_without_end_meet_a_limit_or_the_clock(user: User) {
    let code = "
import os, time
os.mkdir('/root/many'); end = time.time() + 8
try:
    i = 0
    while time.time() < end:
        os.close(os.open(f'/root/many/{i}', os.O_CREAT | os.O_WRONLY)); i += 1
    print('clock', i)
except OSError as e: print('limit', e)
";
    assert!(!survives(user, "python", code).await.is_empty());
}

async fn tiny_writes_without_end_are_carried_or_held_back(user: User) {
    let code = "import os, time\nend = time.time() + 3\nwhile time.time() < end:\n    for _ in range(1000): os.write(1, b'x')";
    survives(user, "python", code).await;
}

async fn garbage_into_every_descriptor_in_sight_breaks_nothing(user: User) {
    let code = "
import glob, os
for path in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/self/fd/*') + [f'/dev/fd/{i}' for i in range(64)]:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, os.urandom(4096)); os.close(fd)
    except OSError: pass
for fd in range(3, 1024):
    try: os.write(fd, os.urandom(4096))
    except OSError: pass
";
    survives(user, "python", code).await;
}

async fn killing_stopping_and_tracing_everything_in_sight_reaches_nobody_else(user: User) {
    survives(user, "bash", "kill -9 -1; kill -STOP 1; kill -9 1; echo still here").await;
    survives(user, "python", "import os\nfor pid in range(1, 400):\n    for s in (19, 9):\n        if pid != os.getpid():\n            try: os.kill(pid, s)\n            except OSError: pass\nprint('done')").await;
    let code = "
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in [int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]:
    libc.ptrace(16, pid, 0, 0)
    try: open(f'/proc/{pid}/mem', 'r+b').read(1)
    except OSError: pass
print('done')
";
    survives(user, "python", code).await;
}

async fn unlinking_and_mounting_over_everything_hurts_only_itself(user: User) {
    survives(user, "bash", "for d in / /proc /dev /tmp /root /usr /bin; do mount -t tmpfs none $d; mount --bind /tmp $d; umount -l $d; done 2>/dev/null; echo done").await;
    survives(user, "bash", "rm -rf --no-preserve-root / 2>/dev/null; echo done").await;
}

async fn opening_all_descriptors_meets_a_limit(user: User) {
    let code = "
import os
fds = []
try:
    while len(fds) < 300000: fds.append(os.open('/dev/null', os.O_RDONLY))
    print('opened', len(fds))
except OSError as e: os.write(1, f'limit {e.errno}\\n'.encode())
";
    assert!(survives(user, "python", code).await.contains("limit"));
}

async fn a_very_deep_directory_tree_does_no_harm(user: User) {
    let depth = count(5_000, 100_000);
    let code = format!(
        "import os\nos.chdir('/root')\ntry:\n    for i in range({depth}): os.mkdir('d'); os.chdir('d')\nexcept OSError as e: print(e)\nprint('deep')"
    );
    assert!(survives(user, "python", &code).await.ends_with("deep\n"));
}

async fn sockets_of_every_family_reach_nothing(user: User) {
    let port = shared_as(user).address().port();
    let code = format!(
        "
import socket
for family in range(64):
    for kind in (1, 2, 3, 5, 10):
        try: socket.socket(family, kind).close()
        except OSError: pass
for address in ('127.0.0.1', '::1', '10.0.0.1', '169.254.169.254', '1.1.1.1'):
    try:
        socket.create_connection((address, {port}), 1); print('REACHED', address)
    except OSError: pass
print('done')
"
    );
    assert_eq!(survives(user, "python", &code).await, "done\n");
}

async fn writes_to_proc_and_sys_change_nothing_outside(user: User) {
    let code = "
import glob, os
for path in glob.glob('/proc/sys/**', recursive=True) + glob.glob('/sys/**', recursive=True) + ['/proc/sysrq-trigger', '/proc/self/oom_score_adj', '/proc/1/oom_score_adj']:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK); os.write(fd, b'1\\n'); os.close(fd)
    except OSError: pass
print('done')
";
    assert!(survives(user, "python", code).await.ends_with("done\n"));
}

async fn a_setuid_binary_gains_nothing(user: User) {
    let output = survives(user, "bash", "cp /bin/bash /tmp/b; chmod 4755 /tmp/b; chown 0 /tmp/b; setpriv --reuid 1000 --clear-groups /tmp/b -p -c 'cat /proc/self/status | grep CapEff; ls /proc | grep -c \"^1$\"'; echo done").await;
    assert!(output.ends_with("done\n"), "{output}");
}

async fn a_sandbox_whose_namespace_was_ended_by_its_guest_says_so_and_takes_the_next_execution(user: User) {
    let mut ws = Ws::create(shared_as(user)).await;
    ws.bash("sleep 1000 & :").await;
    ws.start(json!({"language": "bash", "code": "kill -9 1; sleep 1000", "timeout": 10})).await;
    let Ended::Done(done, _) = until_ended(&mut ws).await else { panic!("the sandbox is gone") };
    assert!(done["signal"] == "SIGKILL" || done["timed_out"] == true, "{done}");
    // Also what earlier executions had left is gone, and the client is told.
    ws.expect_error("processes_lost").await;
    assert_eq!(ws.bash("ps ax | grep -c '[s]leep 1000'").await.out(), "0\n");
}

as_both_users!(
    a_fork_meets_its_limit_with_an_error_that_the_program_sees,
    a_fork_bomb_hurts_nobody_else,
    a_fork_bomb_ends_with_its_timeout_and_the_neighbour_answers_meanwhile,
    a_program_that_takes_all_memory_is_killed_with_a_reason_and_its_sandbox_goes_on,
    many_programs_that_take_all_memory_together_do_not_take_the_neighbours,
    a_full_disk_is_an_error_of_the_program_and_can_be_emptied,
    empty_files_without_end_meet_a_limit_or_the_clock,
    tiny_writes_without_end_are_carried_or_held_back,
    garbage_into_every_descriptor_in_sight_breaks_nothing,
    killing_stopping_and_tracing_everything_in_sight_reaches_nobody_else,
    unlinking_and_mounting_over_everything_hurts_only_itself,
    opening_all_descriptors_meets_a_limit,
    a_very_deep_directory_tree_does_no_harm,
    sockets_of_every_family_reach_nothing,
    writes_to_proc_and_sys_change_nothing_outside,
    a_setuid_binary_gains_nothing,
    a_sandbox_whose_namespace_was_ended_by_its_guest_says_so_and_takes_the_next_execution,
);
