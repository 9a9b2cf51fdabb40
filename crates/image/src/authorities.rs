//! Extra certificate authorities that programs in sandboxes trust, such as a company's own.

use std::{fs, io, path::Path, sync::Arc};

use crate::error::{Doing, Error, Result};
use crate::tree::{Meta, Tree};
use sandboxer_layer::EntryPath;

/// The file that OpenSSL, GnuTLS, curl, Python and apt read on most distributions.
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";
/// Where `update-ca-certificates` looks, so that it keeps them.
const SOURCE: &str = "usr/local/share/ca-certificates/sandboxer-extra.crt";
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
const MAX_BYTES: u64 = 1 << 20;
/// The largest bundle of an image that is extended.
const MAX_BUNDLE_BYTES: u64 = 8 << 20;

/// Certificates in PEM form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraAuthorities(Arc<str>);

impl ExtraAuthorities {
    /// Reads a file of certificates.
    ///
    /// # Errors
    /// The file can't be read, is too large, has no certificate, or holds anything secret.
    pub fn read(path: &Path) -> Result<Self> {
        let reading = || format!("read {}", path.display());
        let size = fs::metadata(path).doing(reading)?.len();
        if size > MAX_BYTES {
            return Err(refused(path, format!("it has {size} bytes, and {MAX_BYTES} are the most")));
        }
        Self::parse(&fs::read_to_string(path).doing(reading)?).map_err(|why| refused(path, why.to_owned()))
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        if text.contains("PRIVATE KEY-----") {
            return Err("it holds a private key, which every sandbox could read; give certificates only");
        }
        let certificates = text.matches(BEGIN).count();
        if certificates == 0 || certificates != text.matches(END).count() {
            return Err("it holds no whole certificate in PEM form");
        }
        let mut text = text.to_owned();
        if !text.ends_with('\n') {
            text.push('\n');
        }
        Ok(Self(text.into()))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Adds them to what a system tree trusts.
    pub(crate) fn add_to(&self, tree: &mut Tree) -> Result<()> {
        let meta = Meta::with_mode(0o644);
        tree.write_file(&path_of(SOURCE)?, meta, &mut self.as_bytes())?;
        // A bundle that is a link, as in some distributions, has no place that could be trusted.
        let Some(mut bundle) = tree.read_file(&path_of(BUNDLE)?, MAX_BUNDLE_BYTES)? else { return Ok(()) };
        if bundle.last().is_some_and(|last| *last != b'\n') {
            bundle.push(b'\n');
        }
        bundle.extend_from_slice(self.as_bytes());
        tree.write_file(&path_of(BUNDLE)?, meta, &mut io::Cursor::new(bundle))?;
        Ok(())
    }
}

fn refused(path: &Path, why: String) -> Error {
    Error::refused(format!("the file of certificates {}", path.display()), why)
}

fn path_of(path: &str) -> Result<EntryPath> {
    EntryPath::parse(path.as_bytes()).map_err(|fault| Error::refused(path, fault.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----";

    #[test]
    fn only_whole_certificates_are_taken() {
        assert!(ExtraAuthorities::parse(CERTIFICATE).is_ok());
        let key = format!("{CERTIFICATE}\n-----BEGIN EC PRIVATE KEY-----\nAA==\n-----END EC PRIVATE KEY-----\n");
        for bad in ["", "text", "-----BEGIN CERTIFICATE-----\nAAAA\n", key.as_str()] {
            assert!(ExtraAuthorities::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn authorities_are_added_behind_those_of_the_image() {
        let extra = ExtraAuthorities::parse(CERTIFICATE).unwrap();
        let root = tempfile::tempdir().unwrap();
        let mut tree = Tree::open(root.path()).unwrap();
        tree.write_file(&path_of(BUNDLE).unwrap(), Meta::with_mode(0o644), &mut &b"theirs"[..]).unwrap();
        extra.add_to(&mut tree).unwrap();
        let bundle = fs::read_to_string(root.path().join(BUNDLE)).unwrap();
        assert_eq!(bundle, format!("theirs\n{CERTIFICATE}\n"));
        assert_eq!(fs::read_to_string(root.path().join(SOURCE)).unwrap(), format!("{CERTIFICATE}\n"));
    }

    #[test]
    fn linked_bundle_of_an_image_is_not_followed() {
        let extra = ExtraAuthorities::parse(CERTIFICATE).unwrap();
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        fs::create_dir_all(root.path().join("etc/ssl/certs")).unwrap();
        std::os::unix::fs::symlink(outside.path(), root.path().join(BUNDLE)).unwrap();
        extra.add_to(&mut Tree::open(root.path()).unwrap()).unwrap();
        assert_eq!(fs::read(outside.path()).unwrap(), b"");
        assert!(fs::symlink_metadata(root.path().join(BUNDLE)).unwrap().is_symlink());
    }
}
