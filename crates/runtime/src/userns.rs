//! A user namespace of one's own, so that an ordinary user's server can run runsc as "root".

use std::{fs, io};

use nix::{
    errno::Errno,
    sched::{CloneFlags, unshare},
    unistd::{getegid, geteuid},
};

const CAP_SYS_ADMIN: u32 = 21;

/// Why there is no user namespace. The text names the remedy.
#[derive(Debug, thiserror::Error)]
#[error("an ordinary user's server needs a user namespace, and could not make one ({what}): {remedy}")]
pub struct UserNamespaceError {
    what: String,
    remedy: &'static str,
}

/// Where this process stands after [`enter_if_needed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privilege {
    /// Root of the machine (or of the container that this runs in).
    Root,
    /// Root of its own user namespace, with one user and one group in it.
    OwnNamespace,
}

/// Enters a user and a mount namespace of its own unless this is root. Call it in `main` before any thread exists.
///
/// # Errors
/// The kernel or a policy forbids it.
pub fn enter_if_needed() -> Result<Privilege, UserNamespaceError> {
    let (uid, gid) = (geteuid(), getegid());
    if uid.is_root() && has_sys_admin() {
        return Ok(if maps_everybody() { Privilege::Root } else { Privilege::OwnNamespace });
    }
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).map_err(|errno| failed(format!("unshare: {errno}"), Some(errno)))?;
    // A user without privileges may map the groups only after giving up to change them.
    for (file, text) in [("setgroups", "deny".to_owned()), ("uid_map", format!("0 {uid} 1")), ("gid_map", format!("0 {gid} 1"))] {
        fs::write(format!("/proc/self/{file}"), text)
            .map_err(|error| failed(format!("/proc/self/{file}: {error}"), error.raw_os_error().map(Errno::from_raw)))?;
    }
    Ok(Privilege::OwnNamespace)
}

fn has_sys_admin() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| effective_capabilities(&status) & (1 << CAP_SYS_ADMIN) != 0)
}

fn effective_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

fn maps_everybody() -> bool {
    fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().nth(2).and_then(|count| count.parse().ok()) > Some(1u32))
}

fn failed(what: String, errno: Option<Errno>) -> UserNamespaceError {
    UserNamespaceError { what, remedy: remedy(errno, |name| fs::read_to_string(format!("/proc/sys/{name}"))) }
}

fn remedy(errno: Option<Errno>, sysctl: impl Fn(&str) -> io::Result<String>) -> &'static str {
    let is = |name: &str, value: &str| sysctl(name).is_ok_and(|text| text.trim() == value);
    if errno == Some(Errno::EINVAL) {
        "it must be called before any thread exists, which is a fault of this program"
    } else if is("kernel/apparmor_restrict_unprivileged_userns", "1") {
        "AppArmor restricts user namespaces here (as Ubuntu does since 23.10); allow them by `sudo sysctl -w \
         kernel.apparmor_restrict_unprivileged_userns=0`, or give this binary an AppArmor profile with `userns,`"
    } else if is("kernel/unprivileged_userns_clone", "0") {
        "they are switched off here; allow them by `sudo sysctl -w kernel.unprivileged_userns_clone=1`"
    } else if is("user/max_user_namespaces", "0") || errno == Some(Errno::ENOSPC) {
        "too few are allowed here; raise it by `sudo sysctl -w user.max_user_namespaces=10000`"
    } else {
        "in a container, its seccomp profile may forbid it: start it with `--security-opt seccomp=unconfined`, or run as root"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_fits_the_obstacle() {
        let ubuntu = |name: &str| if name.contains("apparmor") { Ok("1\n".to_owned()) } else { Err(io::ErrorKind::NotFound.into()) };
        assert!(remedy(Some(Errno::EACCES), ubuntu).contains("AppArmor"));
        let none = |_: &str| Ok("0\n".to_owned());
        assert!(remedy(Some(Errno::ENOSPC), none).contains("unprivileged_userns_clone=1"));
        let nothing = |_: &str| Err(io::ErrorKind::NotFound.into());
        assert!(remedy(Some(Errno::EPERM), nothing).contains("seccomp"));
        assert!(remedy(Some(Errno::ENOSPC), nothing).contains("max_user_namespaces"));
    }

    #[test]
    fn capabilities_are_read() {
        assert_eq!(effective_capabilities("Name:\tx\nCapEff:\t0000000000200000\n"), 1 << CAP_SYS_ADMIN);
        assert_eq!(effective_capabilities(""), 0);
    }
}
