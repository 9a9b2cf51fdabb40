//! A bucket that is mounted as a directory is never used as one.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::process::{Command, Output};

use sandboxer_e2e::{Bucket, Store, sandboxer, stderr_of, stdout_of};

/// Mounts a file system of a kind, with a root and nothing in it, for one program.
const MOUNTED: &str = r#"
import ctypes, os, struct, subprocess, sys, threading
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
threading.Thread(target=serve, daemon=True).start()
code = subprocess.run(command).returncode
os._exit(code)
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
