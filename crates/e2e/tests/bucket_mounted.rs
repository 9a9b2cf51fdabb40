//! A bucket that is mounted as a directory is never used as one.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::process::{Command, Output};

use sandboxer_e2e::{Bucket, Options, Store, Ws, sandboxer, stderr_of, stdout_of};

/// Mounts a file system of a kind, with a root and nothing in it, for one program, and becomes it.
const MOUNTED: &str = r#"
import ctypes, os, struct, sys
kind, source, target, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
call("unshare", 0x20000)
call("mount", None, b"/", None, 0x44000, None)
fuse = os.open("/dev/fuse", os.O_RDWR)
call("mount", source.encode(), target.encode(), kind.encode(), 0, b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse)
def serve():
    while True:
        try:
            asked = os.read(fuse, 1 << 20)
        except OSError:
            return
        _, operation, unique = struct.unpack_from("<IIQ", asked)
        error, answer = 0, b""
        if operation == 26:
            answer = struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 4096, 1, 1, 0, 0)
        elif operation == 3:
            answer = struct.pack("<QII6Q10I", 60, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
        elif operation in (2, 36, 42):
            continue
        else:
            error = -38
        os.write(fuse, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)
program = os.getpid()
if os.fork() == 0:
    # Ends with the program, and keeps nothing of it open.
    call("prctl", 1, 9, 0, 0, 0)
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if os.getppid() == program:
        serve()
    os._exit(0)
os.close(fuse)
os.execv(command[0], command)
"#;

fn mounted(kind: &str, source: &str, target: &std::path::Path, arguments: &[&str], environment: &[(&str, String)]) -> Output {
    let mut command = Command::new("python3");
    command.args(["-c", MOUNTED, kind, source]).arg(target).arg(sandboxer()).args(arguments).arg("--checkpoint-path").arg(target);
    command.envs(environment.iter().cloned()).output().unwrap()
}

#[test]
fn where_the_mount_table_does_not_name_the_bucket_the_server_says_which_url_to_use() {
    let dir = tempfile::tempdir().unwrap();
    let home = tempfile::tempdir().unwrap();
    let data = home.path().to_str().unwrap();
    for (kind, source) in [("fuse.s3fs", "s3fs"), ("fuse", "mountpoint-s3"), ("fuse.rclone", "work:some-bucket")] {
        let refused = mounted(kind, source, dir.path(), &["serve", "--listen", "127.0.0.1:0", "--data-dir", data], &[]);
        let said = stderr_of(&refused);
        assert_eq!(refused.status.code(), Some(64), "{said}");
        assert!(said.contains("has no atomic operations; use its URL instead: s3://"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_it_does_the_bucket_is_used_by_its_url() {
    let bucket = Bucket::start_on(Store::Google).await;
    let dir = tempfile::tempdir().unwrap();
    let environment = bucket.environment();
    let path = dir.path().to_owned();
    let listed =
        tokio::task::spawn_blocking(move || mounted("fuse.gcsfuse", Bucket::NAME, &path, &["store", "ls"], &environment)).await.unwrap();
    assert!(listed.status.success(), "{}{}", stdout_of(&listed), stderr_of(&listed));
    assert!(bucket.requests().keys().any(|request| request.starts_with("LIST")), "{:?}", bucket.requests());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_on_a_mounted_bucket_keeps_its_sandboxes_there_by_the_url_and_says_so() {
    let bucket = Bucket::start_on(Store::Google).await;
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().to_str().unwrap();
    let options = Options::default().under(&["python3", "-c", MOUNTED, "fuse.gcsfuse", Bucket::NAME, target]);
    let options = bucket.environment().into_iter().fold(options, |options, (name, value)| options.env(name, value));
    let a = options.arg("--checkpoint-path").arg(target).start();
    let told = format!("{target} is a mounted bucket, which has no atomic operations: it is used by its URL, gs://{}", Bucket::NAME);
    assert!(a.log().contains(&told), "{}", a.log());

    let mut ws = Ws::create_kept(&a).await;
    let _ = ws.bash("echo kept > f").await.ok();
    let id = ws.checkpoint().await;
    let written = bucket.requests();
    for kind in ["PUT locks", "PUT packs", "PUT checkpoints"] {
        assert!(written.contains_key(kind), "{kind}: {written:?}");
    }
    // It is there for a server that is told the URL.
    let options = bucket.environment().into_iter().fold(Options::default(), |options, (name, value)| options.env(name, value));
    let b = options.arg("--checkpoint-path").arg(format!("gs://{}", Bucket::NAME)).start();
    let (mut ws, running) = Ws::reach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}
