//! Which paths an archive may name. Pure, so that it can be fuzzed.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const MAX_PATH_BYTES: usize = 4096;
const MAX_COMPONENT_BYTES: usize = 255;
/// Bounds recursion and open directories, not what is useful.
const MAX_DEPTH: usize = 128;

/// A path inside a layer or an image: relative, without `.` and `..`, bounded. Empty is the root itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryPath(PathBuf);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathFault {
    #[error("an empty path")]
    Empty,
    #[error("an absolute path")]
    Absolute,
    #[error("a path with .. in it")]
    ParentDir,
    #[error("a path with a NUL byte in it")]
    Nul,
    #[error("a path that is too long")]
    TooLong,
    #[error("a path that is too deep")]
    TooDeep,
    #[error("a symbolic link that points outside the image")]
    LinkLeaves,
}

impl EntryPath {
    /// Checks the path of an archive's entry, or the target of a hard link in it.
    pub fn parse(bytes: &[u8]) -> Result<Self, PathFault> {
        if bytes.is_empty() {
            return Err(PathFault::Empty);
        }
        check_bytes(bytes)?;
        if bytes.starts_with(b"/") {
            return Err(PathFault::Absolute);
        }
        let mut path = PathBuf::new();
        let mut depth = 0;
        for component in bytes.split(|byte| *byte == b'/') {
            match component {
                b"" | b"." => {}
                b".." => return Err(PathFault::ParentDir),
                name if name.len() > MAX_COMPONENT_BYTES => return Err(PathFault::TooLong),
                name => {
                    depth += 1;
                    path.push(OsStr::from_bytes(name));
                }
            }
        }
        if depth > MAX_DEPTH {
            return Err(PathFault::TooDeep);
        }
        Ok(Self(path))
    }

    /// The root itself.
    pub fn root() -> Self {
        Self(PathBuf::new())
    }

    pub fn as_path(&self) -> &Path {
        &self.0
    }

    pub fn is_root(&self) -> bool {
        self.0.as_os_str().is_empty()
    }

    /// The directory that it is in, and its name there; nothing for the root.
    pub fn split(&self) -> Option<(&Path, &OsStr)> {
        Some((self.0.parent()?, self.0.file_name()?))
    }

    /// As it stands in an archive.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_os_str().as_bytes()
    }

    /// Its last component; none for the root.
    pub fn name(&self) -> Option<&[u8]> {
        self.0.file_name().map(OsStrExt::as_bytes)
    }

    /// The entry of this name in the same directory.
    pub fn sibling(&self, name: &OsStr) -> Self {
        Self(self.0.with_file_name(name))
    }

    pub fn parent(&self) -> Self {
        Self(self.0.parent().map(Path::to_path_buf).unwrap_or_default())
    }
}

impl fmt::Display for EntryPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "/{}", self.0.display())
    }
}

/// Checks where a symbolic link at `link` points. An absolute target means the image's own root once the image is in use; a relative one may not climb
/// above it. Nothing here ever follows a link, so this is about what the image says, not about our own safety.
pub fn check_symlink_target(link: &EntryPath, target: &[u8]) -> Result<(), PathFault> {
    if target.is_empty() {
        return Err(PathFault::Empty);
    }
    check_bytes(target)?;
    let mut depth = if target.starts_with(b"/") { 0 } else { link.0.components().count().saturating_sub(1) };
    for component in target.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => depth = depth.checked_sub(1).ok_or(PathFault::LinkLeaves)?,
            name if name.len() > MAX_COMPONENT_BYTES => return Err(PathFault::TooLong),
            _ => depth += 1,
        }
    }
    Ok(())
}

fn check_bytes(bytes: &[u8]) -> Result<(), PathFault> {
    if bytes.len() >= MAX_PATH_BYTES {
        return Err(PathFault::TooLong);
    }
    if bytes.contains(&0) {
        return Err(PathFault::Nul);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_points_outside_is_refused() {
        let long = vec![b'a'; 256];
        let deep = b"d/".repeat(129);
        let cases: [(&[u8], PathFault); 9] = [
            (b"", PathFault::Empty),
            (b"/etc/passwd", PathFault::Absolute),
            (b"//etc", PathFault::Absolute),
            (b"..", PathFault::ParentDir),
            (b"a/../../b", PathFault::ParentDir),
            (b"a/..", PathFault::ParentDir),
            (b"a\0b", PathFault::Nul),
            (&long, PathFault::TooLong),
            (&deep, PathFault::TooDeep),
        ];
        for (path, fault) in cases {
            assert_eq!(EntryPath::parse(path), Err(fault), "{}", String::from_utf8_lossy(path));
        }
    }

    #[test]
    fn what_stays_inside_is_normalised() {
        for (given, clean) in [("./", ""), (".", ""), ("a", "a"), ("./a//b/./c/", "a/b/c"), ("..a/b..", "..a/b..")] {
            assert_eq!(EntryPath::parse(given.as_bytes()).unwrap().as_path(), Path::new(clean));
        }
    }

    #[test]
    fn a_link_may_not_climb_above_the_root() {
        let link = EntryPath::parse(b"usr/bin/tool").unwrap();
        for good in ["tool2", "../lib/x", "../../etc/x", "/etc/alternatives/tool", "/", "../.."] {
            assert_eq!(check_symlink_target(&link, good.as_bytes()), Ok(()), "{good}");
        }
        for bad in ["../../../etc/shadow", "/..", "/a/../../b", "../../x/../../y"] {
            assert_eq!(check_symlink_target(&link, bad.as_bytes()), Err(PathFault::LinkLeaves), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn an_accepted_path_has_plain_components_only(bytes in prop::collection::vec(prop_oneof![Just(b'/'), Just(b'.'), any::<u8>()], 0..200)) {
            if let Ok(path) = EntryPath::parse(&bytes) {
                prop_assert!(path.as_path().components().all(|part| matches!(part, Component::Normal(_))));
                prop_assert_eq!(EntryPath::parse(format!("./{}", path.as_path().display()).as_bytes()).is_ok(), true);
            }
        }

        #[test]
        fn an_accepted_link_resolves_inside(target in "[a./]{0,40}") {
            let link = EntryPath::parse(b"x/y/link").unwrap();
            if check_symlink_target(&link, target.as_bytes()).is_ok() {
                let mut depth = if target.starts_with('/') { 0i32 } else { 2 };
                for part in target.split('/') {
                    depth += match part { "" | "." => 0, ".." => -1, _ => 1 };
                    prop_assert!(depth >= 0);
                }
            }
        }
    }
}
