//! The files of a sandbox become a template under a name: everything of them comes back, nothing else does, and nobody is harmed by it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_e2e::{DEADLINE, Server, User, Volume, Ws, count, eventually, floor_runsc};
use serde_json::json;

/// Every kind of entry that a layer can have, many times over, and deletions in what was there before.
const MAKE: &str = r#"
import os, random, sys
count = int(os.environ['COUNT'])
random.seed(7)
os.makedirs('/srv/tree')
os.chdir('/srv/tree')
names = ['plain', 'with space', 'ünïcode', 'a' * 200, 'new\nline', '-dash', '.hidden', '.wh.literal', 'back\\slash', 'trailing.']
kinds = ['file'] * 12 + ['empty', 'link', 'hard', 'fifo', 'sparse', 'dir', 'suid', 'xattr', 'owner', 'dangling']
made = []
for n in range(count):
    dir = f'd{n % 97}/{names[n % len(names)]}'
    os.makedirs(dir, exist_ok=True)
    path = f'{dir}/{n}-{names[(n // 7) % len(names)]}'[:250 + len(dir)]
    kind = kinds[n % len(kinds)]
    if kind == 'hard' and made:
        os.link(made[n % len(made)], path)
        continue
    if kind == 'link' or kind == 'dangling':
        os.symlink('../' * (n % 5) + ('x' * 180 if kind == 'dangling' else 'd1'), path)
        os.utime(path, ns=(n, 1_500_000_000_123_456_789 + n), follow_symlinks=False)
        continue
    if kind == 'fifo':
        os.mkfifo(path, 0o640)
    elif kind == 'dir':
        os.mkdir(path, 0o751)
    else:
        with open(path, 'wb') as f:
            if kind == 'sparse':
                f.truncate(700_000 + n)
                f.seek(300_000); f.write(b'middle' * 100)
            elif kind != 'empty':
                f.write(random.randbytes(random.choice([1, 100, 511, 512, 513, 3000])))
        if kind == 'file':
            made.append(path)
    if kind == 'owner':
        os.chown(path, 1000 + n, 3_000_000_000 - n)
    if kind == 'suid':
        os.chmod(path, 0o6755)
    if kind == 'xattr':
        os.setxattr(path, 'user.one', b'\x00\xff=\n' + str(n).encode())
        os.setxattr(path, 'user.two', b'v' * 2000)
    os.utime(path, ns=(n, 1_600_000_000_987_654_321 - n))
os.chmod('d0', 0o1777); os.chown('d1', 33, 44); os.setxattr('d2', 'user.dir', b'yes')
os.utime('d3', ns=(1, 2)); os.utime('d4', ns=(1, -1_500_000_000))
deep = '/srv/deep' + '/x' * 100
os.makedirs(deep); open(deep + '/bottom', 'w').write('here')
with open('/srv/large', 'wb') as f:
    for _ in range(20): f.write(random.randbytes(1 << 20))
with open('/srv/holes', 'wb') as f:
    f.truncate(64 << 20); f.seek(32 << 20); f.write(b"one"); f.seek((64 << 20) - 3); f.write(b'end')
os.remove('/etc/issue'); os.system('rm -r /usr/share/zoneinfo /etc/skel && mkdir /etc/skel && echo new > /etc/skel/new')
os.chmod('/etc/passwd', 0o600); open('/etc/hosts', 'a').write('10.0.0.1 added\n'); os.chown('/var/tmp', 5, 6)
os.system('mv /etc/profile.d /etc/moved')
"#;

/// All that can be told of all files, a line each. Inodes only tell which names are one file.
const LIST: &str = r#"
import hashlib, os, stat
seen = {}
def digest(path):
    h = hashlib.sha256()
    with open(path, 'rb') as f:
        while piece := f.read(1 << 20): h.update(piece)
    return h.hexdigest()[:16]
def line(path):
    s = os.lstat(path)
    kind = stat.S_IFMT(s.st_mode)
    first = seen.setdefault(s.st_ino, path) if s.st_nlink > 1 and kind != stat.S_IFDIR else path
    what = ''
    if kind == stat.S_IFLNK: what = os.readlink(path)
    if kind == stat.S_IFREG: what = f'{s.st_size} {digest(path) if first == path else ""}'
    xattrs = {} if kind == stat.S_IFLNK else {n: os.getxattr(path, n).hex() for n in sorted(os.listxattr(path))}
    nlink = 1 if kind == stat.S_IFDIR else s.st_nlink
    print(ascii(path), oct(s.st_mode), s.st_uid, s.st_gid, s.st_mtime_ns, nlink, ascii(first), ascii(what), xattrs)
for top in ['/srv', '/etc', '/usr/share', '/var/tmp', '/root', '/home', '/opt']:
    line(top)
    for dir, dirs, files in os.walk(top):
        dirs.sort()
        for name in sorted(dirs + files): line(os.path.join(dir, name))
"#;

async fn listed(ws: &mut Ws) -> String {
    ws.python(LIST).await.ok().to_owned()
}

fn expect_same(before: &str, after: &str) {
    let (before, after): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
    for (one, other) in before.iter().zip(&after) {
        assert_eq!(one, other);
    }
    assert_eq!(before.len(), after.len());
}

#[tokio::test]
async fn every_kind_of_entry_comes_back_at_another_users_server_as_it_was() {
    let volume = Volume::of(User::Ordinary);
    let (a, b) = (volume.filesystems().start(), volume.filesystems().user(User::Ordinary).start());
    let mut ws = Ws::create(&a).await;
    let entries = count(3_000, 20_000);
    let _ = ws.run(json!({"language": "python", "code": MAKE, "env": {"COUNT": entries.to_string()}})).await.ok();
    let before = listed(&mut ws).await;
    assert!(before.lines().count() > entries);
    ws.snapshot_filesystem("everything").await;
    expect_same(&before, &listed(&mut ws).await);

    let mut from = Ws::create_from(&b, "everything").await;
    expect_same(&before, &listed(&mut from).await);
    let gone = "ls /etc/issue /usr/share/zoneinfo /etc/profile.d 2>&1 | grep -c 'No such'; ls /etc/skel";
    assert_eq!(from.bash(gone).await.ok(), "3\nnew\n");

    // A snapshot of a sandbox that came from one stands on its own.
    let _ = from.bash("echo more > /srv/more; rm -r /srv/tree; echo back > /etc/issue").await.ok();
    from.snapshot_filesystem("second").await;
    let mut ws = Ws::create_from(&a, "second").await;
    assert_eq!(ws.bash("cat /srv/more /etc/issue; ls /srv; ls /etc/skel").await.ok(), "more\nback\ndeep\nholes\nlarge\nmore\nnew\n");
    volume.expect_private();
    assert!(
        std::fs::read_dir(volume.path())
            .unwrap()
            .all(|entry| { ["collect", "filesystem", "images", "packs"].contains(&entry.unwrap().file_name().to_str().unwrap()) })
    );
}

#[tokio::test]
async fn what_is_wrong_is_said_and_the_sandbox_goes_on() {
    let volume = Volume::default();
    let server = volume.filesystems().start();
    let mut ws = Ws::create(&server).await;
    for name in ["", ".hidden", "../escape", "a/b", "a b", "ü", &"x".repeat(65)] {
        let _ = ws.expect_no_filesystem_snapshot(json!({"action": "snapshot_filesystem", "name": name}), "invalid_name").await;
        let _ = Ws::expect_not_created(&server, json!({"filesystem_snapshot_name": name}), "invalid_name").await;
    }
    let message = Ws::expect_not_created(&server, json!({"filesystem_snapshot_name": "nowhere"}), "unknown_filesystem_snapshot").await;
    assert!(message.contains("nowhere"), "{message}");
    let _ = ws.bash("echo first > f").await.ok();
    ws.snapshot_filesystem("mine").await;
    let _ = ws.bash("echo second > f").await.ok();
    let again = json!({"action": "snapshot_filesystem", "name": "mine"});
    let message = ws.expect_no_filesystem_snapshot(again, "name_taken").await;
    assert!(message.contains("mine") && message.contains("replace"), "{message}");
    let mut old = Ws::create_from(&server, "mine").await;
    assert_eq!(old.bash("cat f").await.ok(), "first\n");
    ws.send(json!({"action": "snapshot_filesystem", "name": "mine", "replace": true})).await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
    let mut new = Ws::create_from(&server, "mine").await;
    assert_eq!(new.bash("cat f").await.ok(), "second\n");
    assert_eq!(old.bash("cat f").await.ok(), "first\n", "who has it keeps it");
    // It does not fit: that is said, and nothing is left of it.
    let _ = ws.bash("head -c 40000000 /dev/urandom > large").await.ok();
    ws.snapshot_filesystem("large").await;
    let small = json!({"filesystem_snapshot_name": "large", "limits": {"disk_mb": 16}});
    let message = Ws::expect_not_created(&server, small, "filesystem_snapshot_failed").await;
    assert!(message.contains("disk_mb"), "{message}");
    ws.expect_alive().await;
}

/// Writes numbers into two files, one after the other, as fast as it goes, and says how far it is.
const WRITER: &str = r#"
import os, sys, time
a = os.open('/root/a', os.O_CREAT | os.O_RDWR); b = os.open('/root/b', os.O_CREAT | os.O_RDWR)
n = 0
while not os.path.exists('/root/stop'):
    for _ in range(200):
        n += 1
        text = b'%012d' % n
        os.pwrite(a, text, 0); os.pwrite(b, text, 0)
    print(n, flush=True)
"#;

#[tokio::test]
async fn programs_stand_still_while_their_files_are_read_and_go_on_unharmed() {
    let volume = Volume::default();
    let server = volume.filesystems().start();
    let mut ws = Ws::create(&server).await;
    // Also processes in the background, threads, and one that somebody stopped: one of a session of its own, or it would take all of its group with it
    // when that is orphaned.
    let around = r#"
mkdir many; for i in $(seq 2000); do echo $i > many/$i; done
sleep 1000 & echo $! > sleeps; (while true; do date > /tmp/date; sleep 0.01; done) &
python3 -c 'import threading, time
for i in range(4): threading.Thread(target=time.sleep, args=(1000,)).start()' &
setsid sleep 1000 & stopped=$!; until [ -e /tmp/date ] && [ "$(cat /proc/$stopped/comm)" = sleep ]; do sleep 0.1; done
kill -STOP $stopped; echo $stopped > stopped
"#;
    let _ = ws.bash(around).await.ok();
    ws.start(json!({"language": "python", "code": WRITER})).await;
    ws.until_output("stdout", "\n").await;
    for turn in 0..count(5, 50) {
        ws.send(json!({"action": "snapshot_filesystem", "name": format!("turn-{turn}")})).await;
        let mut told = Vec::new();
        while told.last().is_none_or(|status| status != "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED") {
            let message = ws.next().await;
            match message["status"].as_str() {
                Some(status) => told.push(status.to_owned()),
                None => assert_eq!(message["event"], "stdout", "{message}"),
            }
        }
        assert_eq!(told, ["SANDBOX_FILESYSTEM_SNAPSHOT_CREATING", "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"]);
        let mut from = Ws::create_from(&server, &format!("turn-{turn}")).await;
        let numbers = from.bash("cat a; echo; cat b; echo").await.ok().to_owned();
        let numbers: Vec<u64> = numbers.lines().map(|line| line.parse().unwrap()).collect();
        assert!(numbers[0] == numbers[1] || numbers[0] == numbers[1] + 1, "of two moments: {numbers:?}");
        assert!(numbers[0] > 0);
    }
    // What is asked for meanwhile is run when they go on.
    ws.send(json!({"action": "kill_process"})).await;
    ws.until_done().await;
    ws.send(json!({"action": "snapshot_filesystem", "name": "last"})).await;
    ws.send(json!({"language": "bash", "code": "echo ran"})).await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
    let mut outcome = ws.until_done().await;
    if !outcome.between.iter().any(|message| message["status"] == "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED") {
        ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
    }
    outcome.between.clear();
    assert_eq!(outcome.ok(), "ran\n");
    let mut other = server.api(None, "GET", &format!("/v1/sandboxes/{}", ws.sandbox_id), &serde_json::Value::Null);
    assert_eq!(other.1["status"].take(), "ready");
    // Not by what it says: it is empty for a moment each time.
    let states = r#"for f in sleeps stopped; do awk '/^State/ {print $2}' /proc/$(cat $f)/status; done
before=$(stat -c %y /tmp/date); until [ "$before" != "$(stat -c %y /tmp/date)" ]; do sleep 0.1; done; echo flows"#;
    assert_eq!(ws.bash(states).await.ok(), "S\nT\nflows\n");
}

#[tokio::test]
async fn of_many_that_take_one_name_exactly_one_has_it() {
    let volume = Volume::default();
    let (a, b) = (volume.filesystems().start(), volume.filesystems().start());
    let mut sandboxes = Vec::new();
    for (number, server) in [&a, &b, &a, &b].into_iter().enumerate() {
        let mut ws = Ws::create(server).await;
        let _ = ws.bash(&format!("echo {number} > f; head -c 3000000 /dev/urandom > g")).await.ok();
        sandboxes.push(ws);
    }
    let attempts = sandboxes.into_iter().map(|mut ws| async move {
        ws.send(json!({"action": "snapshot_filesystem", "name": "one"})).await;
        ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
        let answer = ws.next().await;
        let made = answer["status"] == "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED";
        if !made {
            let _ = ws.expect_error("name_taken").await;
        }
        (made, ws)
    });
    let made = futures_util::future::join_all(attempts).await;
    let winners: Vec<usize> = (0..4).filter(|number| made[*number].0).collect();
    assert_eq!(winners.len(), 1, "{winners:?}");
    for server in [&a, &b] {
        let mut ws = Ws::create_from(server, "one").await;
        assert_eq!(ws.bash("cat f").await.ok(), format!("{}\n", winners[0]));
    }
}

#[tokio::test]
async fn who_creates_while_it_is_replaced_gets_the_old_one_or_the_new_one_whole() {
    let volume = Volume::default();
    let (a, b) = (volume.filesystems().start(), volume.filesystems().start());
    let mut ws = Ws::create(&a).await;
    let _ = ws.bash("for i in $(seq 300); do echo 0 > f$i; done").await.ok();
    ws.snapshot_filesystem("moving").await;
    let replacing = async {
        for version in 1..=count(6, 40) {
            let _ = ws.bash(&format!("for i in $(seq 300); do echo {version} > f$i; done")).await.ok();
            ws.send(json!({"action": "snapshot_filesystem", "name": "moving", "replace": true})).await;
            ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
            ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
        }
    };
    let creating = async {
        for _ in 0..count(10, 60) {
            let mut from = Ws::create_from(&b, "moving").await;
            let seen = from.bash("cat f* | sort -u | wc -l; ls f* | wc -l").await.ok().to_owned();
            assert_eq!(seen, "1\n300\n");
        }
    };
    tokio::join!(replacing, creating);
}

#[tokio::test]
async fn a_snapshot_outlives_the_version_of_runsc_in_both_directions() {
    let volume = Volume::default();
    let (new, old) = (volume.filesystems().start(), volume.filesystems().env("SANDBOXER_RUNSC", floor_runsc()).start());
    for (name, from, to) in [("up", &old, &new), ("down", &new, &old)] {
        let mut ws = Ws::create(from).await;
        let made = ws.run(json!({"language": "python", "code": MAKE, "env": {"COUNT": "500"}})).await;
        let _ = made.ok();
        let before = listed(&mut ws).await;
        ws.snapshot_filesystem(name).await;
        let mut ws = Ws::create_from(to, name).await;
        expect_same(&before, &listed(&mut ws).await);
    }
}

async fn running_writer(server: &Server) -> Ws {
    let mut ws = Ws::create(server).await;
    let many = "import os\nos.mkdir('many')\nfor i in range(3000): open(f'many/{i}', 'wb').write(os.urandom(20_000))";
    let _ = ws.python(many).await.ok();
    ws.start(json!({"language": "python", "code": WRITER, "execution_id": "writer"})).await;
    ws.until_output("stdout", "\n").await;
    ws
}

#[tokio::test]
async fn a_server_that_dies_while_it_makes_one_leaves_the_sandbox_going_and_no_snapshot() {
    let volume = Volume::default();
    let mut server = volume.filesystems().start();
    let mut ws = running_writer(&server).await;
    let id = ws.sandbox_id.clone();
    let packing = server.data_dir().join("packing");
    let on_their_way = || {
        std::fs::read_dir(&packing)
            .unwrap()
            .flatten()
            .any(|dir| std::fs::metadata(dir.path().join("layer.tar")).is_ok_and(|file| file.len() > 1_000_000))
    };
    let mut names = (0..5).map(|turn| format!("never-{turn}"));
    let name = loop {
        let name = names.next().expect("each was made before its files were seen");
        ws.send(json!({"action": "snapshot_filesystem", "name": name})).await;
        while ws.next().await["status"] != "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING" {}
        let told = async {
            loop {
                if let Some(status) = ws.next().await["status"].as_str() {
                    break status.to_owned();
                }
            }
        };
        tokio::select! {
            biased;
            () = eventually("the files are on their way", DEADLINE, on_their_way) => break name,
            // They are there for a short time only, which a busy machine may miss.
            status = told => assert_eq!(status, "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"),
        }
    };
    server.kill9();
    drop(ws);
    server.restart();
    let mut ws = Ws::attach(&server, &id).await;
    ws.may_repeat();
    ws.send(json!({"action": "reconnect", "execution_id": "writer"})).await;
    let resumed = ws.next().await;
    assert_eq!((&resumed["event"], &resumed["running"]), (&json!("resumed"), &json!(true)), "{resumed}");
    ws.until_output("stdout", "\n").await;
    ws.send(json!({"action": "kill_process"})).await;
    ws.until_done().await;
    let _ = Ws::expect_not_created(&server, json!({"filesystem_snapshot_name": name}), "unknown_filesystem_snapshot").await;
    ws.snapshot_filesystem(&name).await;
    assert_eq!(Ws::create_from(&server, &name).await.bash("ls many | wc -l").await.ok(), "3000\n");
}

#[tokio::test]
async fn a_checkpoint_waits_for_the_filesystem_snapshot_and_both_count() {
    let volume = Volume::default();
    let server = volume.options().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", volume.path().to_str().unwrap()).start();
    let mut ws = Ws::create_kept(&server).await;
    let _ = ws.bash("head -c 20000000 /dev/urandom > g; echo both > f").await.ok();
    let id = ws.sandbox_id.clone();
    ws.send(json!({"action": "snapshot_filesystem", "name": "both"})).await;
    ws.send(json!({"action": "checkpoint"})).await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATING").await;
    ws.expect_status("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED").await;
    ws.expect_status("SANDBOX_CHECKPOINTING").await;
    ws.expect_status("SANDBOX_CHECKPOINTED").await;
    ws.expect_close(1000).await;
    let (mut ws, _) = Ws::restore(&server, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "both\n");
    // One that was restored can be a template too, and one made from a template is saved like any other.
    ws.snapshot_filesystem("restored").await;
    let from = json!({"filesystem_snapshot_name": "restored", "enable_checkpoint": true});
    let mut ws = Ws::create_with(&server, from).await;
    let _ = ws.bash("echo more >> f").await.ok();
    let id = ws.checkpoint().await;
    let (mut ws, _) = Ws::restore(&server, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "both\nmore\n");
    volume.verify_quickly();
}
