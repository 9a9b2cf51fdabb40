//! Single files and directories of a sandbox over HTTP: they go in and come out as they are, and what goes wrong is told.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, io::Write as _, path::Path, process::Command};

use sandboxer_e2e::{Files, Options, Ws, count, http, runsc_exec, sha256, shared, stderr_of};
use serde_json::{Value, json};

/// Bytes in which no two pieces are alike.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
    .take(length)
    .collect()
}

fn names(list: &Value) -> Vec<&str> {
    list["items"].as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn files_go_in_and_come_out_as_they_are() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    for (name, size) in [("empty", 0), ("one", 1), ("piece", 256 * 1024), ("more", 3_000_001)] {
        let (path, content) = (format!("/root/in/{name}"), noise(size));
        let put = files.put(&path, "&parents=true", &content);
        assert_eq!((&put["path"], &put["size"], &put["kind"], &put["mode"]), (&json!(path), &json!(size), &json!("file"), &json!("0644")));
        let seen = ws.bash(&format!("sha256sum < {path} | cut -d' ' -f1")).await;
        assert_eq!(seen.ok().trim(), sha256(&content));
        assert_eq!(files.get(&path), content);
    }
    // What a program wrote, where no layer is, and on what is mounted.
    let _ = ws.bash("echo program > /root/out; echo shared > /dev/shm/s; chmod 700 /root/out").await.ok();
    assert_eq!((files.get("/root/out"), files.get("/dev/shm/s")), (b"program\n".to_vec(), b"shared\n".to_vec()));
    assert_eq!(files.put("/root/out", "", b"replaced")["mode"], json!("0700"));
    assert_eq!(files.put("/root/script", "&mode=755", b"#!/bin/bash\necho ran\n")["mode"], json!("0755"));
    assert_eq!(ws.bash("cat out; ./script").await.ok(), "replacedran\n");
    assert!(!files.get("/etc/passwd").is_empty() && !files.get("/bin/bash").is_empty());
    // Any name that Unix allows.
    for name in ["a line\nand another", "100%+1&x=y?#", "ä ö", "-rf", "."] {
        let path = format!("/root/names/{name}");
        if name != "." {
            let put = files.put(&path, "&parents=true", name.as_bytes());
            assert_eq!(put["name"], json!(name));
            assert_eq!(files.get(&path), name.as_bytes());
        }
    }
    assert_eq!(ws.bash("printf '%s|' /root/names/*").await.ok().matches('|').count(), 4);
    let raw = files.put(b"/root/names/\xff\xfe", "", b"raw");
    assert_eq!(raw["encoded_path"], json!("/root/names/%FF%FE"));
    assert_eq!(files.get(b"/root/names/\xff\xfe"), b"raw");
    // Parts, as HTTP has them.
    let content = noise(3_000_001);
    for (range, part, told) in [
        ("bytes=0-9", &content[..10], "bytes 0-9/3000001"),
        ("bytes=2000000-", &content[2_000_000..], "bytes 2000000-3000000/3000001"),
        ("bytes=-5", &content[2_999_996..], "bytes 2999996-3000000/3000001"),
        ("bytes=2999999-99999999", &content[2_999_999..], "bytes 2999999-3000000/3000001"),
    ] {
        let answer = files.range("/root/in/more", range);
        assert_eq!((answer.status, answer.header("content-range")), (206, Some(told)));
        assert!(answer.bytes == part, "{range}");
    }
    let beyond = files.range("/root/in/more", "bytes=3000001-");
    assert_eq!((beyond.status, beyond.header("content-range")), (416, Some("bytes */3000001")));
    assert_eq!(files.range("/root/in/more", "bytes=1-2,5-6").status, 200);
    let head = files.call("HEAD", "", "/root/in/more", "", b"");
    assert_eq!((head.status, head.header("content-length")), (200, Some("3000001")));
    let tag = head.header("etag").unwrap().to_owned();
    let _ = ws.bash("echo >> /root/in/more").await.ok();
    assert_ne!(files.call("HEAD", "", "/root/in/more", "", b"").header("etag"), Some(tag.as_str()));
    ws.expect_alive().await;
}

#[tokio::test]
async fn directories_are_made_listed_in_pages_renamed_and_removed() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    let made = files.call("POST", "/mkdir", "/srv/a/b", "&parents=true&mode=750", b"");
    assert_eq!((made.status, &made.json()["mode"], &made.json()["kind"]), (201, &json!("0750"), &json!("directory")));
    let _ = files.refuses("POST", "/mkdir", "/srv/a/b", "", 409, "file_exists");
    let _ = files.refuses("POST", "/mkdir", "/srv/x/y", "", 404, "file_not_found");
    let _ = ws.bash("cd /srv/a/b; touch $(seq -f %04g 0 249); ln -s ../c link; mkfifo fifo; touch -d 1994-11-06T08:49:37Z 0000").await.ok();
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = files.object("/list", "/srv/a/b", &format!("&limit=100{cursor}"));
        all.extend(names(&page).into_iter().map(str::to_owned));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={}", sandboxer_e2e::encoded(next));
    }
    assert_eq!((all.len(), all.is_sorted(), all[0].as_str()), (252, true, "0000"));
    let first = &files.object("/list", "/srv/a/b", "&limit=1")["items"][0];
    assert_eq!((&first["path"], &first["modified_at"]), (&json!("/srv/a/b/0000"), &json!("1994-11-06T08:49:37Z")));
    assert_eq!(files.object("/stat", "/srv/a/b/link", "")["target"], json!("../c"));
    assert_eq!(files.object("/stat", "/srv/a/b/fifo", "")["kind"], json!("other"));
    assert_eq!(files.object("/stat", "/", "")["kind"], json!("directory"));
    let _ = files.refuses("GET", "/stat", "/srv/a/b/link", "&follow=true", 404, "file_not_found");
    let moved = files.call("POST", "/rename", "/srv/a/b", "&to=/srv/c", b"");
    assert_eq!((moved.status, &moved.json()["path"]), (200, &json!("/srv/c")));
    let _ = files.refuses("POST", "/rename", "/srv/a/b", "&to=/srv/d", 404, "file_not_found");
    let _ = files.refuses("POST", "/rename", "/srv/c/0001", "&to=/srv/c/0002", 409, "file_exists");
    assert_eq!(files.call("POST", "/rename", "/srv/c/0001", "&to=/srv/c/0002&replace=true", b"").status, 200);
    assert_eq!(files.call("DELETE", "", "/srv/c/0003", "", b"").status, 204);
    let _ = files.refuses("DELETE", "", "/srv/c", "", 409, "not_empty");
    assert_eq!(files.call("DELETE", "", "/srv/c", "&recursive=true", b"").status, 204);
    // Of the image, too.
    assert_eq!(files.call("DELETE", "", "/etc/skel", "&recursive=true", b"").status, 204);
    assert_eq!(ws.bash("ls -A /srv/a; ls -d /srv/c /etc/skel 2>&1 | grep -c 'No such'").await.ok(), "2\n");
}

#[tokio::test]
async fn what_goes_wrong_is_told() {
    let server = shared();
    let mut ws = Ws::create_with(server, json!({"limits": {"disk_mb": 16}})).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    let _ = ws.bash("ln -s b a; ln -s a b; mkdir d; mkfifo fifo; echo old > f").await.ok();
    for (path, status, code) in [
        ("/root/none", 404, "file_not_found"),
        ("/root/d", 409, "is_a_directory"),
        ("/", 409, "is_a_directory"),
        ("/root/f/x", 409, "not_a_directory"),
        ("/root/a", 409, "too_many_links"),
        ("/root/fifo", 409, "not_a_file"),
        ("/dev/zero", 409, "not_a_file"),
        ("/proc/1/environ", 409, "not_a_file"),
        ("relative", 422, "invalid_field"),
        ("/zero\0byte", 422, "invalid_field"),
    ] {
        let message = files.refuses("GET", "", path, "", status, code);
        assert!(code == "invalid_field" || message.starts_with(path), "{message}");
    }
    for (path, status, code) in [
        ("/root/none/f", 404, "file_not_found"),
        ("/root/d", 409, "is_a_directory"),
        ("/root/a", 409, "too_many_links"),
        ("/root/fifo", 409, "not_a_file"),
        ("/dev/null", 409, "not_a_file"),
        ("/proc/sys/kernel/hostname", 409, "not_a_file"),
    ] {
        let _ = files.refuses("PUT", "", path, "", status, code);
    }
    let _ = files.refuses("PUT", "", &format!("/root/{}", "n".repeat(256)), "", 422, "path_too_long");
    let _ = files.refuses("GET", "/list", "/root/f", "", 409, "not_a_directory");
    let _ = files.refuses("GET", "/archive", "/root/f", "", 409, "not_a_directory");
    let _ = files.refuses("DELETE", "", "/", "&recursive=true", 403, "permission_denied");
    for (more, status, code) in [("&pth=x", 400, "bad_request"), ("&path=/x", 400, "bad_request"), ("&live=yes", 422, "invalid_field")] {
        let _ = files.refuses("GET", "", "/root/f", more, status, code);
    }
    let _ = files.refuses("PUT", "", "/root/f", "&mode=999", 422, "invalid_field");
    // Too much for the disk: the old file stays, and nothing of the new one.
    let answer = files.call("PUT", "", "/root/f", "", &noise(40 << 20));
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (413, &json!("no_space")));
    assert_eq!(
        ws.bash("cat f; ls -A | grep -c sandboxer; [ $(df --output=used -m / | tail -1) -lt 3 ] && echo free").await.ok(),
        "old\n0\nfree\n"
    );
    // Nobody's.
    let nobody = Files::of(server, "00000000-0000-4000-8000-000000000000");
    let _ = nobody.refuses("GET", "", "/f", "", 404, "not_found");
    let wrong = http::request(server.address(), "POST", &format!("/v1/sandboxes/{}/files?path=/f", ws.sandbox_id), &[]).unwrap();
    assert_eq!(wrong.status, 405);
    ws.expect_alive().await;
}

#[tokio::test]
async fn no_path_and_no_link_leads_out_of_the_sandbox() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    let _ = ws
        .bash("ln -s ../../../../../../../../sandboxer up; ln -s /proc/1/root/sandboxer proc; ln -s /../../rootfs image; ln -s / self; echo mine > mine")
        .await
        .ok();
    let host = fs::read("/etc/hostname").unwrap_or_default();
    for path in ["/../../../etc/hostname", "/root/self/../../../../etc/hostname"] {
        let answer = files.call("GET", "", path, "", b"");
        assert!(answer.status == 404 || answer.bytes != host || host.is_empty(), "{path}");
    }
    for path in ["/root/up/agent", "/root/proc/agent", "/root/image/etc/passwd", "/sandboxer/agent", "/../sandboxer/rw/upper"] {
        let _ = files.refuses("GET", "", path, "", 404, "file_not_found");
    }
    assert_eq!(files.get("/root/self/root/self/root/mine"), b"mine\n");
    assert_eq!(names(&files.object("/list", "/../..", "&limit=1000")), names(&files.object("/list", "/", "&limit=1000")));
    // What a link leads to is written, inside.
    let _ = files.put("/root/up", "", b"mine too");
    assert_eq!(ws.bash("cat /sandboxer").await.ok(), "mine too");
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_directory_goes_out_and_in_as_an_archive() {
    let server = shared();
    let mut ws = Ws::create(server).await;
    let files = Files::of(server, &ws.sandbox_id.clone());
    let make = "mkdir -p t/sub/empty; cd t; echo one > sub/one; chmod 640 sub/one; chown 7:8 sub/one; ln -s nowhere dangling; ln sub/one twin
        truncate -s 64M sparse; echo x | dd of=sparse bs=1 seek=30000000 conv=notrunc status=none; printf 'a\\nb' > $'line\\nbreak'; mkfifo fifo
        mkdir .hidden; touch -d 1994-11-06T08:49:37Z sub/empty; setfattr -n user.note -v hi sub/one 2>/dev/null; true";
    let _ = ws.bash(make).await.ok();
    let archive = files.call("GET", "/archive", "/root/t", "", b"");
    assert_eq!((archive.status, archive.header("content-type")), (200, Some("application/x-tar")));
    assert!(archive.bytes.len() < 1 << 20, "holes are left out: {}", archive.bytes.len());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.tar");
    fs::write(&file, &archive.bytes).unwrap();
    let unpacked = Command::new("tar").arg("-C").arg(dir.path()).arg("-xf").arg(&file).output().unwrap();
    assert!(unpacked.status.success(), "{}", stderr_of(&unpacked));
    assert_eq!(fs::read(dir.path().join("twin")).unwrap(), b"one\n");
    assert_eq!(fs::metadata(dir.path().join("sparse")).unwrap().len(), 64 << 20);
    let back = files.call("PUT", "/archive", "/root/back/here", "&parents=true", &archive.bytes);
    assert_eq!(back.status, 200, "{}", back.body);
    let look = "cd /root/$1; find . ! -type d -printf '%P %y %m %U:%G %s %l %TY\\n' | sort; find . -mindepth 1 -type d -printf '%P %m %TY\\n' | sort; stat -c %h twin; md5sum sparse";
    let of = |tree: &str| look.replace("$1", tree);
    let (before, after) = (ws.bash(&of("t")).await, ws.bash(&of("back/here")).await);
    assert_eq!(before.ok(), after.ok());

    // Made by somebody else, onto what is there: the directory itself stays what it is.
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/one"), "two").unwrap();
    let other = dir.path().join("other.tar");
    assert!(Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&other).arg(".").status().unwrap().success());
    let _ = ws.bash("chmod 1777 t").await.ok();
    assert_eq!(files.call("PUT", "/archive", "/root/t", "", &fs::read(&other).unwrap()).status, 200);
    assert_eq!(ws.bash("cat t/sub/one t/twin; stat -c %a t").await.ok(), "twoone\n1777\n");

    // What means harm, and what is none.
    let evil = |arguments: &[&str], prepare: &dyn Fn(&Path)| {
        let place = tempfile::tempdir().unwrap();
        prepare(place.path());
        let file = place.path().join("evil.tar");
        assert!(Command::new("tar").arg("-C").arg(place.path()).arg("-Pcf").arg(&file).args(arguments).status().unwrap().success());
        fs::read(file).unwrap()
    };
    let climbs = evil(&["--transform=s,^f,../../planted,", "f"], &|dir| fs::write(dir.join("f"), "x").unwrap());
    let absolute = evil(&["--transform=s,^f,/root/planted,", "f"], &|dir| fs::write(dir.join("f"), "x").unwrap());
    let through = evil(&["--transform=s,^f,back/planted,", "back", "f"], &|dir| {
        std::os::unix::fs::symlink("/root", dir.join("back")).unwrap();
        fs::write(dir.join("f"), "x").unwrap();
    });
    let linked = evil(&["--transform=s,^g,../../root/mine,", "f", "g"], &|dir| {
        fs::write(dir.join("f"), "x").unwrap();
        fs::hard_link(dir.join("f"), dir.join("g")).unwrap();
    });
    let deletes = evil(&[".wh.sub"], &|dir| fs::write(dir.join(".wh.sub"), "").unwrap());
    for archive in [climbs, absolute, through, linked, deletes, vec![7; 5000], archive.bytes[..3000].to_vec()] {
        let answer = files.call("PUT", "/archive", "/root/victim", "&parents=true", &archive);
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (422, &json!("bad_archive")), "{}", answer.body);
    }
    assert_eq!(ws.bash("ls -A / /root /root/back | grep -c planted; ls -d t/sub").await.out(), "0\nt/sub\n");
    // All of a sandbox, but not what is mounted in it.
    let all = files.call("GET", "/archive", "/", "", b"");
    assert!(all.status == 200 && all.bytes.len() > 50 << 20);
    ws.expect_alive().await;
}

/// gVisor follows a link in spite of `O_NOFOLLOW` where a directory is asked for, and it does so from
/// the agent's root: a guest that swaps a new directory for a link must gain nothing by it.
#[tokio::test]
async fn racing_guest_keeps_an_archive_inside_its_root() {
    let server = Options::default().start();
    let mut ws = Ws::create(&server).await;
    let files = Files::of(&server, &ws.sandbox_id.clone());
    let race = "
import os, shutil, time
os.makedirs('/root/race'); os.chdir('/root/race'); print('racing', flush=True)
while True:
    try: os.rmdir('d'); os.symlink('/tmp', 'd')
    except FileNotFoundError: continue
    except OSError: shutil.rmtree('d', ignore_errors=True); continue
    time.sleep(0.0005)
    os.unlink('d')
";
    ws.start(json!({"language": "python", "code": race})).await;
    ws.until_output("stdout", "racing\n").await;
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..8 {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(0);
        archive.append_data(&mut header, format!("d/escaped-{number}"), &[][..]).unwrap();
    }
    let archive = archive.into_inner().unwrap();
    for _ in 0..count(1000, 50_000) {
        let answer = files.call("PUT", "/archive", "/root/race", "", &archive);
        assert!(matches!(answer.status, 200 | 404 | 409 | 422 | 500), "{} {}", answer.status, answer.body);
    }
    // The agent's own root has no shell: what is listed there is listed by the image's own `ls`.
    let library = "/rootfs/usr/lib/x86_64-linux-gnu";
    let loader = format!("{library}/ld-linux-x86-64.so.2");
    let listing = [&loader, "--library-path", library, "/rootfs/usr/bin/ls", "-A", "/tmp", "/"];
    let listed = runsc_exec(&server, &ws.sandbox_id, &listing);
    assert!(listed.contains("/tmp:\n") && listed.contains("rootfs"), "{listed}");
    assert!(!listed.contains("escaped"), "the archive left the guest's root: {listed}");
    ws.send(json!({"action": "kill_process"})).await;
    ws.until_done().await;
    ws.expect_alive().await;
}

#[tokio::test]
async fn files_belong_to_the_key_of_their_sandbox() {
    let mut keys = tempfile::NamedTempFile::new().unwrap();
    writeln!(keys, "one:0123456789abcdef-one\ntwo:0123456789abcdef-two").unwrap();
    let server = sandboxer_e2e::Options::default().arg("--api-keys-file").arg(keys.path().to_str().unwrap()).start();
    let (one, two) = (Some(("X-API-Key", "0123456789abcdef-one")), Some(("X-API-Key", "0123456789abcdef-two")));
    let sandbox = server.made(one, "/v1/sandboxes", &json!({}));
    let path = format!("/v1/sandboxes/{}/files", sandbox["id"].as_str().unwrap());
    assert_eq!(server.found(one, &format!("{path}/stat?path=/root"))["kind"], json!("directory"));
    for (method, address) in [
        ("GET", format!("{path}?path=/etc/passwd")),
        ("GET", format!("{path}/list?path=/")),
        ("DELETE", format!("{path}?path=/etc/passwd")),
        ("POST", format!("{path}/mkdir?path=/x")),
        ("PUT", format!("{path}?path=/x")),
    ] {
        let _ = server.refuses(two, method, &address, &Value::Null, 404, "not_found");
        let _ = server.refuses(None, method, &address, &Value::Null, 401, "unauthorized");
    }
}
