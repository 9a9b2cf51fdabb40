//! Filesystem snapshots over HTTP and as commands, and as layers of container images that leave and enter.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, io::Write as _, net::TcpStream, path::Path, process::Command};

use sandboxer_e2e::{DEADLINE, Server, Volume, Ws, eventually, http, stderr_of, stdout_of};
use serde_json::{Value, json};

fn cli(server: &Server, arguments: &[&str]) -> Command {
    let mut command = sandboxer_e2e::command();
    command.arg("fs-snapshot").args(arguments).args(["--server", &format!("http://{}", server.address())]);
    command
}

/// What it printed; it succeeded.
fn said(server: &Server, arguments: &[&str]) -> String {
    let output = cli(server, arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr_of(&output));
    stdout_of(&output)
}

/// What it complained about; it failed.
fn complained(server: &Server, arguments: &[&str]) -> String {
    let output = cli(server, arguments).output().unwrap();
    assert!(!output.status.success(), "{arguments:?}");
    stderr_of(&output)
}

fn in_tar(archive: &Path) -> Vec<String> {
    let listed = Command::new("tar").arg("-tf").arg(archive).output().unwrap();
    assert!(listed.status.success(), "{}", stderr_of(&listed));
    stdout_of(&listed).lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn snapshots_are_made_listed_shown_and_removed_over_http_and_by_commands() {
    let volume = Volume::default();
    let server = volume.filesystems().start();
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("echo one > f; rm /etc/issue").await.ok();
    let path = format!("/v1/sandboxes/{}/filesystem-snapshot", ws.sandbox_id);
    let made = server.made(None, &path, &json!({"name": "one"}));
    assert_eq!((&made["name"], &made["sandbox_id"]), (&json!("one"), &json!(ws.sandbox_id)));
    assert!(made["entries"].as_u64() > Some(3) && made["size_bytes"].as_u64() > Some(100), "{made}");
    ws.expect_alive().await;
    let _ = server.refuses(None, "POST", &path, &json!({"name": "one"}), 409, "name_taken");
    let _ = server.refuses(None, "POST", &path, &json!({"name": "../x"}), 422, "invalid_name");
    let _ = server.refuses(None, "POST", &path, &json!({}), 422, "invalid_field");
    let nobody = "/v1/sandboxes/00000000-0000-4000-8000-000000000000/filesystem-snapshot";
    let _ = server.refuses(None, "POST", nobody, &json!({"name": "x"}), 404, "not_found");
    assert_eq!(server.found(None, "/v1/filesystem-snapshots/one"), made);

    assert_eq!(said(&server, &["create", &ws.sandbox_id, "two"]), "two\n");
    assert!(complained(&server, &["create", &ws.sandbox_id, "two"]).contains("already"));
    assert_eq!(said(&server, &["create", "--replace", &ws.sandbox_id, "two"]), "two\n");
    let listed: Value = serde_json::from_str(&said(&server, &["ls", "--json"])).unwrap();
    let names: Vec<&str> = listed["items"].as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["one", "two"]);
    assert!(said(&server, &["ls"]).contains("two") && said(&server, &["get", "two"]).contains("content_bytes"));
    let mut from = Ws::create_from(&server, "one").await;
    assert_eq!(said(&server, &["rm", "one"]), "");
    assert!(complained(&server, &["get", "one"]).contains("404"));
    let _ = server.refuses(None, "DELETE", "/v1/filesystem-snapshots/one", &Value::Null, 404, "not_found");
    assert_eq!(from.bash("cat f").await.ok(), "one\n");
    let _ = Ws::expect_not_created(&server, json!({"filesystem_snapshot_name": "one"}), "unknown_filesystem_snapshot").await;
}

#[tokio::test]
async fn a_snapshot_leaves_as_a_layer_and_a_layer_enters_as_a_snapshot() {
    let (volume, dir) = (Volume::default(), tempfile::tempdir().unwrap());
    // Twice this, and a GiB: more is no archive of files that a sandbox may have.
    let server = volume.filesystems().arg("--max-disk-mb").arg("512").start();
    let mut ws = Ws::create(&server).await;
    let _ = ws
        .bash("mkdir -p /opt/app; echo app > /opt/app/f; ln -s f /opt/app/l; rm -r /usr/share/zoneinfo; rm -r /etc/skel; mkdir /etc/skel")
        .await
        .ok();
    ws.snapshot_filesystem("app").await;
    let layer = dir.path().join("layer.tar");
    let _ = said(&server, &["export", "app", layer.to_str().unwrap()]);
    let names = in_tar(&layer);
    for name in ["./", "opt/app/f", "opt/app/l", "usr/share/.wh.zoneinfo", "etc/skel/.wh..wh..opq"] {
        assert!(names.iter().any(|found| found == name), "{name} is not in {names:?}");
    }

    // As it is, compressed, and made by somebody else.
    let gzip = Command::new("gzip").arg("-kc").arg(&layer).output().unwrap().stdout;
    fs::write(dir.path().join("layer.tar.gz"), gzip).unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("opt/app")).unwrap();
    fs::write(tree.join("opt/app/f"), "app\n").unwrap();
    std::os::unix::fs::symlink("f", tree.join("opt/app/l")).unwrap();
    fs::write(tree.join("opt/.wh.none"), "").unwrap();
    let other = dir.path().join("other.tar");
    assert!(Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&other).arg("opt").status().unwrap().success());
    for (name, file) in [("plain", "layer.tar"), ("gzip", "layer.tar.gz"), ("other", "other.tar")] {
        assert_eq!(said(&server, &["import", name, dir.path().join(file).to_str().unwrap()]), format!("{name}\n"));
        let mut from = Ws::create_from(&server, name).await;
        let deleted = if name == "other" { "0" } else { "1" };
        let look = "cat /opt/app/l; readlink /opt/app/l; ls /usr/share/zoneinfo 2>&1 | grep -c 'No such'; ls /etc/skel";
        assert_eq!(from.bash(look).await.ok().lines().take(3).collect::<Vec<_>>(), ["app", "f", deleted]);
    }

    // What is none is refused, and so is what is too much of one.
    let bad = dir.path().join("bad");
    fs::write(&bad, [7; 5000]).unwrap();
    assert!(complained(&server, &["import", "bad", bad.to_str().unwrap()]).contains("refused"));
    let mut cut = fs::read(&layer).unwrap();
    cut.truncate(cut.len() - 3000);
    fs::write(&bad, cut).unwrap();
    assert!(complained(&server, &["import", "bad", bad.to_str().unwrap()]).contains("cut off"));
    assert!(complained(&server, &["import", "plain", layer.to_str().unwrap()]).contains("already"));
    let climbing = dir.path().join("climbing.tar");
    assert!(Command::new("tar").args(["-P", "-C"]).arg(&tree).arg("-cf").arg(&climbing).arg("../bad").status().unwrap().success());
    assert!(complained(&server, &["import", "bad", climbing.to_str().unwrap()]).contains(".."));
    let zeros = Command::new("sh").args(["-c", "head -c 2200000 /dev/zero | gzip -1"]).output().unwrap().stdout;
    fs::write(&bad, zeros).unwrap();
    assert!(complained(&server, &["import", "bad", bad.to_str().unwrap()]).contains("behind its end"));
    fs::File::create(tree.join("huge")).unwrap().set_len(2_200_000_000).unwrap();
    let bomb = Command::new("sh").args(["-c", "tar -c huge | gzip -1"]).current_dir(&tree).output().unwrap().stdout;
    fs::write(&bad, bomb).unwrap();
    assert!(complained(&server, &["import", "bad", bad.to_str().unwrap()]).contains("200 times its own size"));
    let _ = server.refuses(None, "GET", "/v1/filesystem-snapshots/bad", &Value::Null, 404, "not_found");
    assert!(fs::read_dir(server.data_dir().join("packing")).unwrap().next().is_none(), "nothing is left of what was refused");
    ws.expect_alive().await;
}

/// An archive stays on the server's disk while it is sent, whatever the cache may hold.
#[tokio::test]
async fn slow_downloads_of_one_key_are_bounded() {
    const AT_ONCE: usize = 8;
    let volume = Volume::default();
    let server = volume.filesystems().start();
    let mut ws = Ws::create(&server).await;
    let _ = ws.bash("head -c 24M /dev/urandom > /root/noise").await.ok();
    let path = format!("/v1/sandboxes/{}/filesystem-snapshot", ws.sandbox_id);
    let _ = server.made(None, &path, &json!({"name": "large"}));
    let layer = "/v1/filesystem-snapshots/large/layer";
    let slow = || {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(format!("GET {layer} HTTP/1.1\r\nHost: {}\r\n\r\n", server.address()).as_bytes()).unwrap();
        // Its first byte is here, and the rest waits: it is more than the connection holds.
        assert_eq!(stream.peek(&mut [0]).unwrap(), 1);
        stream
    };
    let mut reading: Vec<TcpStream> = (0..AT_ONCE).map(|_| slow()).collect();
    let _ = server.refuses(None, "GET", layer, &Value::Null, 429, "rate_limited");
    reading.pop();
    let free = || http::request(server.address(), "GET", layer, &[]).unwrap().status == 200;
    eventually("a turn is free", DEADLINE, free).await;
}

#[tokio::test]
async fn names_belong_to_a_key_and_without_a_path_there_are_none() {
    let (volume, mut keys) = (Volume::default(), tempfile::NamedTempFile::new().unwrap());
    writeln!(keys, "one:0123456789abcdef-one\ntwo:0123456789abcdef-two").unwrap();
    let server = volume.filesystems().arg("--api-keys-file").arg(keys.path().to_str().unwrap()).start();
    let (one, two) = (Some(("X-API-Key", "0123456789abcdef-one")), Some(("X-API-Key", "0123456789abcdef-two")));
    let sandbox = server.made(one, "/v1/sandboxes", &json!({}));
    let path = format!("/v1/sandboxes/{}/filesystem-snapshot", sandbox["id"].as_str().unwrap());
    let _ = server.refuses(two, "POST", &path, &json!({"name": "mine"}), 404, "not_found");
    let _ = server.made(one, &path, &json!({"name": "mine"}));
    assert_eq!(server.found(two, "/v1/filesystem-snapshots")["items"], json!([]));
    for (method, path) in [("GET", ""), ("DELETE", ""), ("GET", "/layer")] {
        let _ = server.refuses(two, method, &format!("/v1/filesystem-snapshots/mine{path}"), &Value::Null, 404, "not_found");
    }
    let from = json!({"filesystem_snapshot_name": "mine"});
    let _ = server.refuses(two, "POST", "/v1/sandboxes", &from, 404, "unknown_filesystem_snapshot");
    let _ = server.made(one, "/v1/sandboxes", &from);
    let other = server.made(two, "/v1/sandboxes", &json!({}));
    let _ = server.made(two, &format!("/v1/sandboxes/{}/filesystem-snapshot", other["id"].as_str().unwrap()), &json!({"name": "mine"}));
    assert_eq!(server.found(two, "/v1/filesystem-snapshots/mine")["sandbox_id"], other["id"]);

    let without = sandboxer_e2e::shared();
    for (method, path) in
        [("GET", "/v1/filesystem-snapshots"), ("GET", "/v1/filesystem-snapshots/x"), ("DELETE", "/v1/filesystem-snapshots/x")]
    {
        let answer = http::request(without.address(), method, path, &[]).unwrap();
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (501, &json!("filesystem_snapshots_not_configured")));
    }
}
