//! The guest's root: its file system, its devices, its view of processes.
//!
//! The tree may have been under a hostile guest before (its init was killed and started again): so the root is changed first, and
//! whatever is mounted after that resolves inside it.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink},
    path::Path,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::{Mode, SFlag, makedev, mknod},
    unistd::{chdir, pivot_root},
};

use crate::{memory, setup, sys};

/// Where code files go; also the only part of the guest's tree that init itself writes to.
pub(super) const RUN: &str = "/run/sandboxer";
const PROC_MEMINFO: &str = "/proc/meminfo";
const RUN_BYTES: u64 = 32 * 1024 * 1024;
const RUN_INODES: u64 = 4096;

const DEVICES: [(&str, u64, u64); 6] = [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Makes the overlay this process's root and fills in what a program expects to find there.
pub(super) fn enter() -> io::Result<()> {
    chdir(setup::ROOT)?;
    // The old root ends up on top of the new one and is taken off: no directory for it is needed.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    let closed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    // The guest may have put something else into these places. What it spoilt it goes without; the sandbox still answers.
    let mut failed = Vec::new();
    let mut attempt = |what: &'static str, result: io::Result<()>| {
        if let Err(error) = result {
            failed.push(format!("{what}: {error}"));
        }
    };
    attempt("/proc", directory("/proc").and_then(|()| sys::mount("proc", "/proc", closed, "")));
    attempt("/sys", directory("/sys").and_then(|()| sys::mount("sysfs", "/sys", closed | MsFlags::MS_RDONLY, "")));
    attempt("/dev", devices());
    attempt("/run", directory("/run").and_then(|()| directory(RUN)).and_then(|()| run_directory()));
    attempt("/tmp", directory("/tmp").and_then(|()| fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777))));
    for message in failed {
        eprintln!("sandboxer-agent init: {message}");
    }
    Ok(())
}

/// Puts a file in the place of `/proc/meminfo`, so that programs size themselves by the limit of the
/// sandbox and not by the machine. The agent keeps the file up to date.
pub(super) fn meminfo(limit: u64) -> io::Result<fs::File> {
    let file = Path::new(RUN).join("meminfo");
    let text = memory::shown(&fs::read_to_string(PROC_MEMINFO)?, limit, 0);
    let mut opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o444).open(&file)?;
    opened.write_all(text.as_bytes())?;
    mount(Some(&file), PROC_MEMINFO, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    Ok(opened)
}

/// Replaced at once, so that whoever reads or watches it sees the old one or the new one. The guest may have put anything there.
pub(super) fn write_generation(generation: u64) -> io::Result<()> {
    let (file, new) = (Path::new(RUN).join("generation"), Path::new(RUN).join(".generation.new"));
    let _ = fs::remove_file(&new);
    let mut opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new)?;
    opened.write_all(format!("{generation}\n").as_bytes())?;
    fs::rename(new, file)
}

fn run_directory() -> io::Result<()> {
    setup::mount_tmpfs(RUN, RUN_BYTES, Some(RUN_INODES), "mode=0755")?;
    // From the start, so that nobody sees by these whether something was run or waits.
    ["exec", "spare"].iter().try_for_each(|name| fs::create_dir(Path::new(RUN).join(name)))
}

/// A real directory at this path, whatever was there.
fn directory(path: &str) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => fs::remove_file(path)?,
        Err(_) => {}
    }
    fs::DirBuilder::new().mode(0o755).create(path)
}

fn devices() -> io::Result<()> {
    directory("/dev")?;
    sys::mount("tmpfs", "/dev", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "mode=0755,size=1m")?;
    let dev = Path::new("/dev");
    for (name, major, minor) in DEVICES {
        let path = dev.join(name);
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
    }
    for (name, target) in LINKS {
        symlink(target, dev.join(name))?;
    }
    fs::create_dir(dev.join("pts"))?;
    sys::mount("devpts", "/dev/pts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "newinstance,ptmxmode=0666")
        .or_else(|_| sys::mount("devpts", "/dev/pts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, ""))?;
    fs::create_dir(dev.join("shm"))?;
    sys::mount("tmpfs", "/dev/shm", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=1777,size=64m")
}
