//! A template pays: a sandbox with many files is there in a tenth of the time that installing them takes, while nobody stands still for long.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{DEADLINE, Server, Volume, Ws, count, eventually, soak};
use serde_json::{Value, json};

/// Wheels as pip wants them, 500 files of 20 KB each.
const WHEELS: &str = r#"
import os, random, sys, zipfile
random.seed(1)
os.makedirs('/tmp/wheels')
for n in range(int(os.environ['WHEELS'])):
    name = f'bulk{n}'
    with zipfile.ZipFile(f'/tmp/wheels/{name}-1.0-py3-none-any.whl', 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:
        record = []
        def add(path, data):
            wheel.writestr(path, data)
            record.append(f'{path},,')
        for i in range(500):
            half = random.randbytes(10_000)
            add(f'{name}/part{i % 20}/data{i}.bin', half + half[:10_000].translate(bytes(255 - b for b in range(256))))
        add(f'{name}/__init__.py', 'value = 1\n')
        add(f'{name}-1.0.dist-info/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
        add(f'{name}-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        wheel.writestr(f'{name}-1.0.dist-info/RECORD', '\n'.join(record + [f'{name}-1.0.dist-info/RECORD,,']) + '\n')
"#;

const INSTALL: &str =
    "pip install --quiet --no-index --no-deps --break-system-packages --root-user-action=ignore /tmp/wheels/*.whl && rm -r /tmp/wheels";

/// The most that the server has ever had in memory, in KiB.
fn peak_kib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn forget_peak(server: &Server) {
    std::fs::write(format!("/proc/{}/clear_refs", server.pid()), "5").unwrap();
}

/// For how long the processes stood still, as the server's log has it.
fn held(server: &Server) -> Duration {
    let log = server.log();
    let text = log.rsplit_once("held_ms=").unwrap().1;
    Duration::from_millis(text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap())
}

fn limits() -> Value {
    json!({"memory_mb": 2048, "disk_mb": 1024, "cpus": 2})
}

/// Reads all files of the tree, as packing has to, and says how many microseconds that took.
const READ: &str = r#"
import os, sysconfig, time
began, count = time.monotonic(), 0
for dir, dirs, files in os.walk(sysconfig.get_path('purelib')):
    for name in files:
        count += 1
        fd = os.open(os.path.join(dir, name), os.O_RDONLY)
        size = os.fstat(fd).st_size
        os.listxattr(fd)
        os.read(fd, size + 1)
        os.close(fd)
assert count > 2000, count
print(int((time.monotonic() - began) * 1e6))
"#;

#[tokio::test]
async fn creating_from_a_snapshot_takes_a_tenth_of_installing_and_nobody_stands_still_for_long() {
    let volume = Volume::default();
    let serve = || volume.options().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", volume.path().to_str().unwrap()).start();
    let server = serve();
    let mut ws = Ws::create_with(&server, json!({"limits": limits()})).await;
    // The image goes to the volume with the first one.
    ws.snapshot_filesystem("empty").await;
    let wheels = count(5, 20);
    let _ = ws.run(json!({"language": "python", "code": WHEELS, "env": {"WHEELS": wheels.to_string()}})).await.ok();
    let began = Instant::now();
    let _ = ws.bash(INSTALL).await.ok();
    let installing = began.elapsed();
    let reading = Duration::from_micros(ws.python(READ).await.ok().trim().parse().unwrap());
    forget_peak(&server);
    let before = peak_kib(&server);
    let began = Instant::now();
    ws.snapshot_filesystem("installed").await;
    let snapshotting = began.elapsed();
    let held = held(&server);
    let from = json!({"limits": limits(), "filesystem_snapshot_name": "installed", "enable_checkpoint": true});
    // Where it was taken the first sandbox is a copy of a template already, which is made as soon as the snapshot is.
    let templates = || server.metric("sandboxer_templates_total");
    eventually("a template is kept", DEADLINE, || templates() >= 2.0).await;
    let began = Instant::now();
    let mut first = Ws::create_with(&server, from.clone()).await;
    let creating = began.elapsed();
    assert!(server.metric("sandboxer_template_restores_total") >= 1.0);
    let grown = peak_kib(&server) - before;
    // Elsewhere it is unpacked, and no installation either.
    let elsewhere = serve();
    let began = Instant::now();
    let mut other = Ws::create_with(&elsewhere, from.clone()).await;
    let unpacking = began.elapsed();
    println!(
        "{wheels} wheels: installing {installing:?}, reading {reading:?}, snapshot {snapshotting:?}, held {held:?}, create {creating:?}, \
         elsewhere {unpacking:?}, memory {grown} KiB"
    );
    println!(
        "{}",
        server
            .log()
            .lines()
            .filter(|line| line.contains("held_ms=") || line.contains("its files are there"))
            .collect::<Vec<_>>()
            .join("\n")
    );
    let look = "python3 -c 'import bulk0, bulk4; print(bulk0.value)'; pip list 2>/dev/null | grep -c bulk";
    for ws in [&mut first, &mut other] {
        assert_eq!(ws.bash(look).await.ok(), format!("1\n{wheels}\n"));
    }
    drop((other, elsewhere));

    // With the template cache, beside a plain restore of one that is as large.
    let saved = Ws::create_with(&server, from.clone()).await;
    let id = saved.checkpoint().await;
    let (mut copying, mut restoring) = (Duration::MAX, Duration::MAX);
    for _ in 0..count(2, 5) {
        let began = Instant::now();
        let mut copy = Ws::create_with(&server, from.clone()).await;
        copying = copying.min(began.elapsed());
        assert_eq!(copy.bash(look).await.ok(), format!("1\n{wheels}\n"));
        let began = Instant::now();
        let (restored, _) = Ws::restore(&server, &id).await;
        restoring = restoring.min(began.elapsed());
        restored.checkpoint().await;
    }
    println!("a copy of the template {copying:?}, a plain restore {restoring:?}");
    assert!(server.metric("sandboxer_template_restores_total") >= 2.0);

    if soak() {
        // The tenth is promised of a tree that is worth a template.
        assert!(creating * 10 <= installing, "creating took {creating:?}, installing {installing:?}");
        assert!(unpacking < installing, "unpacking took {unpacking:?}, installing {installing:?}");
        assert!(held < Duration::from_millis(1500), "its processes stood still for {held:?}");
        // Of a whole MiB more than is allowed nobody can say whose it is; here there is enough to tell.
        assert!(grown <= 32 * 1024, "the server grew by {grown} KiB");
        assert!(copying * 2 <= restoring * 3, "a copy took {copying:?}, a plain restore {restoring:?}");
    } else {
        // Every later one is promised to be as fast, and a disk that pauses does not pause for all of them.
        let creating = creating.min(copying);
        assert!(creating * 2 <= installing, "creating took {creating:?}, installing {installing:?}");
        let mut unpacking = unpacking;
        for _ in 0..3 {
            if unpacking < installing {
                break;
            }
            let elsewhere = serve();
            let began = Instant::now();
            let _other = Ws::create_with(&elsewhere, from.clone()).await;
            unpacking = unpacking.min(began.elapsed());
        }
        assert!(unpacking < installing, "unpacking took {unpacking:?}, installing {installing:?}");
        // How fast the machine is just now only the same work can tell: a program that reads all of these files once.
        let allowed = reading * 4 + Duration::from_secs(1);
        let mut held = held;
        for turn in 0..3 {
            if held < allowed {
                break;
            }
            // A disk that pauses holds them too.
            ws.snapshot_filesystem(&format!("again{turn}")).await;
            held = held.min(self::held(&server));
        }
        assert!(held < allowed, "its processes stood still for {held:?}; reading the same files took a program {reading:?}");
        assert!(copying < installing, "a copy took {copying:?}, installing {installing:?}");
    }
}
