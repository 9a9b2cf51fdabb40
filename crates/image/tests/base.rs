//! The base image as `make test` builds it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use sandboxer_image::{AGENT, ImageStore, Silent};

#[test]
fn the_base_image_holds_a_usable_system_and_the_agent_beside_it() {
    let Some(images) = std::env::var_os("SANDBOXER_IMAGE_DIR") else {
        eprintln!("not run: SANDBOXER_IMAGE_DIR is not set (make test sets it)");
        return;
    };
    let store = ImageStore::open(images).unwrap();
    let image = store.ensure_base(&Silent).unwrap();
    assert_eq!(store.verify(&image.digest.clone().into()).unwrap().path, image.path);

    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("image");
    let extracted = Command::new("fsck.erofs").arg(format!("--extract={}", root.display())).arg(&image.path).output().unwrap();
    assert!(extracted.status.success(), "{}", String::from_utf8_lossy(&extracted.stderr));

    assert_eq!(fs::read(root.join("sandboxer/agent")).unwrap(), AGENT);
    let system = root.join("rootfs");
    for program in ["python3", "python", "pip", "bash", "ps", "unshare", "curl", "git", "ls"] {
        assert!(fs::symlink_metadata(system.join("usr/bin").join(program)).is_ok(), "{program}");
    }
    assert_eq!(fs::read_to_string(system.join("etc/hostname")).unwrap(), "sandbox\n");
    assert!(fs::read_to_string(system.join("etc/hosts")).unwrap().contains("localhost"));
    assert_eq!(fs::metadata(system.join("tmp")).unwrap().permissions().mode() & 0o7777, 0o1777);
    for gone in ["usr/share/man", "var/lib/apt/lists", "var/cache/apt"] {
        assert!(!has_files(&system.join(gone)), "{gone}");
    }
    assert!(!system.join("sandboxer").exists(), "the agent is no part of what user code sees");

    // Times are kept, else Python would compile every module at every start.
    let library = fs::read_dir(system.join("usr/lib")).unwrap().map(|entry| entry.unwrap().path());
    let library = library.filter(|path| path.join("os.py").exists()).last().unwrap();
    let compiled = fs::read_dir(library.join("__pycache__")).unwrap().map(|entry| entry.unwrap().path());
    let compiled =
        fs::read(compiled.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("os.")).last().unwrap()).unwrap();
    let source_time =
        fs::metadata(library.join("os.py")).unwrap().modified().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert_eq!(u64::from(u32::from_le_bytes(compiled[8..12].try_into().unwrap())), source_time);
}

fn has_files(path: &std::path::Path) -> bool {
    let Ok(entries) = fs::read_dir(path) else { return false };
    entries.map(|entry| entry.unwrap()).any(|entry| !entry.file_type().unwrap().is_dir() || has_files(&entry.path()))
}
