//! What a system tree needs before it becomes an image: what only a package manager wants goes, what a sandbox expects comes.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use crate::agent::AGENT;
use crate::error::{Error, Result};
use crate::tree::{Meta, Tree};
use sandboxer_layer::EntryPath;

const HOSTNAME: &str = "sandbox";
const HOSTS: &str = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n";

/// Left by the build: the host's own apt settings, and caches that would only grow the image.
const NOT_IN_IMAGE: [&str; 5] = ["etc/apt/apt.conf.d/99mmdebstrap", "var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log"];

/// The directories that every image has: mount points, and what programs take for granted.
const DIRECTORIES: [(&str, u32); 11] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("var", 0o755),
    ("var/log", 0o755),
    ("var/tmp", 0o1777),
];

/// For a tree made by mmdebstrap.
pub(crate) fn debian_tree(tree: &mut Tree) -> Result<()> {
    let nothing_kept = HashSet::new();
    for path in NOT_IN_IMAGE {
        tree.remove(&path_of(path)?, &nothing_kept)?;
    }
    for name in tree.names(&path_of("usr/lib")?)? {
        let python = name.to_string_lossy();
        if !python.starts_with("python3") {
            continue;
        }
        // The sandbox is the user's own, so pip may install into it. And each start of Python looks in vain for a reporter of crashes.
        for file in ["EXTERNALLY-MANAGED", "sitecustomize.py"] {
            tree.remove(&path_of(&format!("usr/lib/{python}/{file}"))?, &nothing_kept)?;
        }
        tree.remove(&path_of(&format!("etc/{python}/sitecustomize.py"))?, &nothing_kept)?;
        let compiled = path_of(&format!("usr/lib/{python}/__pycache__"))?;
        for name in tree.names(&compiled)?.iter().filter(|name| name.to_string_lossy().starts_with("sitecustomize.")) {
            tree.remove(&path_of(&format!("usr/lib/{python}/__pycache__/{}", name.to_string_lossy()))?, &nothing_kept)?;
        }
    }
    for (path, content) in [
        ("etc/hostname", format!("{HOSTNAME}\n")),
        ("etc/hosts", HOSTS.to_owned()),
        ("etc/resolv.conf", String::new()),
        ("etc/machine-id", String::new()),
    ] {
        tree.write_file(&path_of(path)?, Meta::with_mode(0o644), &mut content.as_bytes())?;
    }
    // apt wants its own directories back.
    for path in ["var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt"] {
        tree.make_dir(&path_of(path)?, Meta::with_mode(0o755))?;
    }
    for (path, mode) in DIRECTORIES {
        tree.make_dir(&path_of(path)?, Meta::with_mode(mode))?;
    }
    Ok(())
}

/// For an imported tree: only what is missing.
pub(crate) fn imported_tree(tree: &mut Tree) -> Result<()> {
    for (path, mode) in DIRECTORIES {
        let path = path_of(path)?;
        if !tree.exists(&path)? {
            tree.make_dir(&path, Meta::with_mode(mode))?;
        }
    }
    for (path, content) in [("etc/hostname", "sandbox\n"), ("etc/hosts", HOSTS), ("etc/resolv.conf", "")] {
        let path = path_of(path)?;
        if !tree.exists(&path)? {
            tree.write_file(&path, Meta::with_mode(0o644), &mut content.as_bytes())?;
        }
    }
    Ok(())
}

/// Lays out the image around its system tree: the agent and the mount points.
pub(crate) fn image_root(root: &Path, spares: Option<&str>) -> Result<Tree> {
    let mut tree = Tree::open(root)?;
    for (path, mode) in [
        ("rootfs", 0o755),
        ("sandboxer", 0o755),
        ("sandboxer/rw", 0o755),
        ("sandboxer/root", 0o755),
        ("sandboxer/cgroup", 0o755),
        ("proc", 0o555),
        ("dev", 0o755),
        ("sys", 0o555),
        ("tmp", 0o1777),
    ] {
        tree.make_dir(&path_of(path)?, Meta::with_mode(mode))?;
    }
    tree.write_file(&path_of("sandboxer/agent")?, Meta::with_mode(0o755), &mut io::Cursor::new(AGENT))?;
    if let Some(spares) = spares {
        tree.write_file(&path_of("sandboxer/spares.json")?, Meta::with_mode(0o644), &mut spares.as_bytes())?;
    }
    Ok(tree)
}

fn path_of(path: &str) -> Result<EntryPath> {
    EntryPath::parse(path.as_bytes()).map_err(|fault| Error::refused(path, fault.to_string()))
}
