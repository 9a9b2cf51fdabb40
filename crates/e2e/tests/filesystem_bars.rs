//! A template pays: a sandbox with many files is there in a tenth of the time that installing them takes, while nobody stands still for long.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Server, Volume, Ws, count, soak};
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

#[tokio::test]
async fn creating_from_a_snapshot_takes_a_tenth_of_installing_and_nobody_stands_still_for_long() {
    let volume = Volume::default();
    let server = volume.filesystems().start();
    let mut ws = Ws::create_with(&server, json!({"limits": limits()})).await;
    // The image goes to the volume with the first one.
    ws.snapshot_filesystem("empty").await;
    let wheels = count(5, 20);
    let _ = ws.run(json!({"language": "python", "code": WHEELS, "env": {"WHEELS": wheels.to_string()}})).await.ok();
    let began = Instant::now();
    let _ = ws.bash(INSTALL).await.ok();
    let installing = began.elapsed();
    forget_peak(&server);
    let before = peak_kib(&server);
    let began = Instant::now();
    ws.snapshot_filesystem("installed").await;
    let snapshotting = began.elapsed();
    let held = held(&server);
    let began = Instant::now();
    let mut from = Ws::create_with(&server, json!({"limits": limits(), "filesystem_snapshot_name": "installed"})).await;
    let creating = began.elapsed();
    let grown = peak_kib(&server) - before;
    println!(
        "{wheels} wheels: installing {installing:?}, snapshot {snapshotting:?}, held {held:?}, create {creating:?}, memory {grown} KiB"
    );
    let seen = from.bash("python3 -c 'import bulk0, bulk4; print(bulk0.value)'; pip list 2>/dev/null | grep -c bulk").await;
    assert_eq!(seen.ok(), format!("1\n{wheels}\n"));
    // The tenth is promised of a tree that is worth a template.
    let times = if soak() { 10 } else { 2 };
    assert!(creating * times <= installing, "creating took {creating:?}, installing {installing:?}");
    assert!(held < Duration::from_millis(1500), "its processes stood still for {held:?}");
    // Of a whole MiB more than is allowed nobody can say whose it is; in a soak there is enough to tell.
    assert!(!soak() || grown <= 32 * 1024, "the server grew by {grown} KiB");
}
