//! Extended attributes of open files, which have no safe wrapper here.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use sandboxer_layer::Xattr;

/// The overlay's own, which say how layers lie on each other.
const OVERLAY: &[u8] = b"trusted.overlay.";
pub(crate) const OPAQUE: &std::ffi::CStr = c"trusted.overlay.opaque";
/// What the kernel allows of names and of a value.
const MAX_LIST_BYTES: usize = 64 * 1024;
const MAX_VALUE_BYTES: usize = 64 * 1024;

/// Those of an archive: all but the overlay's.
pub(crate) fn is_kept(name: &[u8]) -> bool {
    !name.starts_with(OVERLAY)
}

/// Whether a file must not be without it. Others may be of a kind that this kernel does not have.
pub(crate) fn is_needed(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name == b"security.capability"
}

/// All that are kept, in order, and whether the overlay's say that the directory hides what is below.
pub(crate) fn read(file: BorrowedFd<'_>) -> io::Result<(Vec<Xattr>, bool)> {
    // SAFETY: without a buffer only the length is asked for.
    let length = unsafe { libc::flistxattr(file.as_raw_fd(), std::ptr::null_mut(), 0) };
    let length = match usize::try_from(length) {
        Ok(0) => return Ok((Vec::new(), false)),
        Ok(length) => length,
        Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::ENOTSUP) => return Ok((Vec::new(), false)),
        Err(_) => return Err(io::Error::last_os_error()),
    };
    let mut names = vec![0u8; length.min(MAX_LIST_BYTES)];
    // SAFETY: the buffer is as long as is said.
    let length = unsafe { libc::flistxattr(file.as_raw_fd(), names.as_mut_ptr().cast(), names.len()) };
    names.truncate(usize::try_from(length).map_err(|_| io::Error::last_os_error())?);
    let (mut found, mut opaque) = (Vec::new(), false);
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        opaque |= name == OPAQUE.to_bytes();
        if is_kept(name) {
            found.push(Xattr { name: name.to_vec(), value: get(file, name)? });
        }
    }
    found.sort_unstable();
    Ok((found, opaque))
}

fn get(file: BorrowedFd<'_>, name: &[u8]) -> io::Result<Vec<u8>> {
    let name = CString::new(name)?;
    let mut value = vec![0u8; MAX_VALUE_BYTES];
    // SAFETY: the name ends in a zero byte, and the buffer is as long as is said.
    let length = unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(usize::try_from(length).map_err(|_| io::Error::last_os_error())?);
    Ok(value)
}

pub(crate) fn set(file: BorrowedFd<'_>, name: &[u8], value: &[u8]) -> io::Result<()> {
    let name = CString::new(name)?;
    // SAFETY: the name ends in a zero byte, and the value is as long as is said.
    let result = unsafe { libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
