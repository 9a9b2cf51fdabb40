//! Makes the image file.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::tree::LATEST_MTIME;

/// An image is known by its digest, so its filesystem needs no identity of its own.
const FIXED_UUID: &str = "5a9db0e4-0000-4000-8000-000000000001";

/// Writes `tree` into the EROFS file `image`. The same tree gives the same file, whoever makes it.
pub(crate) fn make(tree: &Path, image: &Path) -> Result<()> {
    let output = Command::new("mkfs.erofs")
        // gVisor maps files straight from the image: uncompressed, and no tails of files among the metadata.
        .args(["--quiet", "--all-root", "-E", "noinline_data", "-x-1", "-U", FIXED_UUID])
        .arg(image)
        .arg(tree)
        // As creation time, and as the latest time of any file. `-T` would give all files one time, and Python would take every .pyc for stale.
        .env("SOURCE_DATE_EPOCH", LATEST_MTIME.to_string())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| tool_error("mkfs.erofs", "erofs-utils", error))?;
    if output.status.success() {
        return Ok(());
    }
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Err(Error::ToolFailed { program: "mkfs.erofs", status: output.status.to_string(), output: text })
}

pub(crate) fn tool_error(program: &'static str, package: &'static str, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::ToolMissing { program, package },
        _ => Error::Io { doing: format!("start {program}"), source: error },
    }
}
