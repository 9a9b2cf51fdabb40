//! Files that are read when a server starts, and when it takes up what an earlier one left.

use sandboxer_image::ImageRef;
use sandboxer_server::ApiKey;

/// The first line says what it is.
pub fn configuration(data: &[u8]) {
    let Some(end) = data.iter().position(|byte| *byte == b'\n') else { return };
    let (kind, content) = (&data[..end], &data[end + 1..]);
    match kind {
        b"keys" => text(content, keys),
        b"index" => rewritten(content, |json| sandboxer_image::fuzzing::index(json).ok()),
        b"record" => rewritten(content, sandboxer_server::fuzzing::record),
        b"ended" => {
            let _ = sandboxer_server::fuzzing::obituary(content);
        }
        b"tls" => {
            let _ = sandboxer_server::fuzzing::tls(content, content);
        }
        b"apt" => text(content, apt),
        b"image" => text(content, image),
        _ => {}
    }
}

fn text(content: &[u8], read: fn(&str)) {
    if let Ok(text) = std::str::from_utf8(content) {
        read(text);
    }
}

/// What was read and written again is read again, as the same.
fn rewritten(content: &[u8], rewrite: impl Fn(&[u8]) -> Option<Vec<u8>>) {
    if let Some(written) = rewrite(content) {
        assert_eq!(rewrite(&written).as_deref(), Some(&*written), "written down it is something else");
    }
}

fn keys(text: &str) {
    match ApiKey::parse_list(text) {
        Ok(keys) => {
            assert!(!keys.is_empty());
            let shown = format!("{keys:?}");
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
                let key = line.split_once(':').map_or(line, |(_, key)| key);
                // A name may hold what another line has as its key.
                let as_name = text.lines().filter_map(|line| line.trim().split_once(':')).any(|(name, _)| name.contains(key));
                assert!(key.len() >= 16, "a key that can be guessed");
                // What a hash is printed with may be guessed, too, if the key is nothing but such letters.
                assert!(as_name || !shown.contains(key) || key.bytes().all(|byte| byte.is_ascii_hexdigit()), "a key can be read in a log");
            }
        }
        Err(fault) => assert!(!fault.to_string().is_empty()),
    }
}

/// Each line goes into a file of apt's, one repository a line.
fn apt(text: &str) {
    for line in sandboxer_image::fuzzing::apt_lines(text) {
        assert!(line.starts_with("deb ") && !line.contains('\n'), "{line:?}");
    }
}

fn image(text: &str) {
    if let Ok(reference) = text.parse::<ImageRef>() {
        let shown = reference.to_string();
        assert!(!shown.contains('/') && !shown.starts_with('.') && shown.len() <= 256, "{shown:?} names a file elsewhere");
        assert_eq!(shown.parse::<ImageRef>().unwrap().to_string(), shown);
    }
}
