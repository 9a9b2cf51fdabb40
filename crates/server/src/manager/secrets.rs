//! Tokens of sandboxes, and what is kept of them.

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

pub(super) fn same_secret(given: &str, sha256: &str) -> bool {
    hash(given).as_bytes().ct_eq(sha256.as_bytes()).into()
}

pub(super) fn new_token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn hash(secret: &str) -> String {
    Sha256::digest(secret.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
