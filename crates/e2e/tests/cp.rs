//! `sandboxer cp`, as a user has it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    ffi::OsStr,
    fs,
    io::Write as _,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    process::{Command, Output, Stdio},
};

use sandboxer_e2e::{Server, Ws, shared, stderr_of, stdout_of};
use serde_json::Value;

fn cp(server: &Server, arguments: &[&OsStr]) -> Command {
    let mut command = sandboxer_e2e::command();
    command.arg("cp").args(arguments).args(["--server", &format!("http://{}", server.address())]);
    command
}

fn copy(server: &Server, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> Output {
    cp(server, &[from.as_ref(), to.as_ref()]).output().unwrap()
}

fn copied(server: &Server, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) {
    let output = copy(server, from, to);
    assert!(output.status.success(), "{}", stderr_of(&output));
    assert_eq!((stdout_of(&output), stderr_of(&output)), (String::new(), String::new()), "nothing is said where nobody looks");
}

fn refused(server: &Server, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> String {
    let output = copy(server, from, to);
    assert_eq!(output.status.code(), Some(1));
    stderr_of(&output)
}

#[tokio::test]
async fn files_and_directories_are_copied_in_and_out() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let id = ws.sandbox_id.clone();
    let there = |path: &str| format!("{id}:{path}");
    let place = tempfile::tempdir().unwrap();
    let local = |name: &str| place.path().join(name);
    let content: Vec<u8> = (0..700_000_u32).map(|n| (n / 3) as u8).collect();
    fs::write(local("a file\nof two lines"), &content).unwrap();
    fs::set_permissions(local("a file\nof two lines"), fs::Permissions::from_mode(0o750)).unwrap();
    copied(server, local("a file\nof two lines"), there("/root/"));
    copied(server, local("a file\nof two lines"), there("/srv/new/name"));
    assert_eq!(ws.bash("stat -c '%a %s' /root/a* /srv/new/name").await.ok(), "750 700000\n750 700000\n");
    copied(server, there("/root/a file\nof two lines"), local("back"));
    assert_eq!((fs::read(local("back")).unwrap(), fs::metadata(local("back")).unwrap().mode() & 0o777), (content, 0o750));

    // A directory: as a new one, into one that is there, and what is in it.
    fs::create_dir_all(local("tree/sub")).unwrap();
    fs::write(local("tree/sub/f"), "f").unwrap();
    symlink("nowhere", local("tree/link")).unwrap();
    let sparse = fs::File::create(local("tree/sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    copied(server, local("tree"), there("/root/one"));
    copied(server, local("tree"), there("/root/one"));
    copied(server, format!("{}/.", local("tree").display()), there("/root/one/sub"));
    let seen =
        ws.bash("cd one; find . -type f -o -type l | sort; stat -c '%U %s' sparse; readlink link; du -m . | tail -1 | cut -f1").await;
    let expected = "./link\n./sparse\n./sub/f\n./sub/link\n./sub/sparse\n./sub/sub/f\n./tree/link\n./tree/sparse\n./tree/sub/f\nroot 67108864\nnowhere\n";
    assert!(seen.ok().starts_with(expected), "{}", seen.ok());
    copied(server, there("/root/one/tree"), local("out"));
    assert_eq!(fs::read(local("out/sub/f")).unwrap(), b"f");
    assert_eq!(fs::read_link(local("out/link")).unwrap(), std::path::Path::new("nowhere"));
    let holes = fs::metadata(local("out/sparse")).unwrap();
    assert!(holes.len() == 64 << 20 && holes.blocks() < 1000, "{} blocks", holes.blocks());
    copied(server, there("/root/one/tree"), place.path());
    assert!(local("tree/sub/f").exists());

    // Streams, the beginning of an id, and JSON.
    let mut child = cp(server, &["-".as_ref(), there("/root/piped").as_ref()]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through a pipe").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(copy(server, there("/root/piped"), "-").stdout, b"through a pipe");
    let output = cp(server, &["--json".as_ref(), local("back").as_ref(), format!("{}:/root/x", &id[..13]).as_ref()]).output().unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr_of(&output)));
    assert_eq!((told["path"].as_str(), told["size"].as_u64()), (Some("/root/x"), Some(700_000)));
}

#[tokio::test]
async fn what_can_not_be_copied_is_told() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let id = ws.sandbox_id.clone();
    let there = |path: &str| format!("{id}:{path}");
    let place = tempfile::tempdir().unwrap();
    let local = |name: &str| place.path().join(name);
    symlink("b", local("a")).unwrap();
    symlink("a", local("b")).unwrap();
    nix::unistd::mkfifo(&local("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::write(local("f"), "f").unwrap();
    let _ = ws.bash("ln -s b a; ln -s a b; mkfifo fifo").await.ok();
    assert!(refused(server, local("a"), there("/root/x")).contains("symbolic links"));
    assert!(refused(server, local("fifo"), there("/root/x")).contains("neither a file nor a directory"));
    assert!(refused(server, local("none"), there("/root/x")).contains("No such file"));
    assert!(refused(server, local("f"), there("relative")).contains("absolute"));
    assert!(refused(server, there("/root/a"), local("x")).contains("symbolic links"));
    assert!(refused(server, there("/root/fifo"), local("x")).contains("neither a file nor a directory"));
    assert!(refused(server, there("/root/none"), local("x")).contains("no such file"));
    assert!(refused(server, "00000000-0000-4000-8000-000000000000:/x", local("x")).contains("no such sandbox"));
    assert!(refused(server, "ffffffff:/x", local("x")).contains("begins with"));
    for (from, to) in [("f", "g"), ("aa:/x", "bb:/y")] {
        assert_eq!(copy(server, from, to).status.code(), Some(64));
    }
    let left: Vec<_> = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 4, "{left:?}");
    assert_eq!(ws.bash("ls | sort | tr '\\n' ' '").await.ok().trim(), "a b fifo");
}
