//! A file as clients see it.

use sandboxer_protocol::agent::{FileAbout, FileKind, Raw};
use serde_json::{Map, Value, json};

/// The object of a file. Where its path is no text, it is shown as well as it can be, and `encoded_path` says it exactly.
pub(super) fn object(path: &Raw, about: Option<&FileAbout>) -> Value {
    let name = path.as_bytes().rsplit(|byte| *byte == b'/').find(|part| !part.is_empty()).unwrap_or(b"/");
    let mut fields = Map::new();
    fields.insert("path".to_owned(), json!(String::from_utf8_lossy(path.as_bytes())));
    fields.insert("name".to_owned(), json!(String::from_utf8_lossy(name)));
    if std::str::from_utf8(path.as_bytes()).is_err() {
        fields.insert("encoded_path".to_owned(), json!(path.encoded()));
    }
    if let Some(about) = about {
        let kind = match about.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "other",
        };
        fields.insert("kind".to_owned(), json!(kind));
        fields.insert("size".to_owned(), json!(about.size));
        fields.insert("mode".to_owned(), json!(format!("{:04o}", about.mode & 0o7777)));
        fields.insert("uid".to_owned(), json!(about.uid));
        fields.insert("gid".to_owned(), json!(about.gid));
        fields.insert("modified_at".to_owned(), json!(modified(about)));
        if let Some(target) = &about.target {
            fields.insert("target".to_owned(), json!(String::from_utf8_lossy(target.as_bytes())));
        }
    }
    Value::Object(fields)
}

/// None: a time that no calendar has.
fn modified(about: &FileAbout) -> Option<jiff::Timestamp> {
    let (seconds, nanos) = about.modified;
    jiff::Timestamp::new(seconds, i32::try_from(nanos).ok()?).ok()
}

/// Another one whenever the content may be.
pub(super) fn tag(about: &FileAbout) -> String {
    let (seconds, nanos) = about.modified;
    format!("\"{:x}-{seconds:x}-{nanos:x}\"", about.size)
}

pub(super) fn http_date(about: &FileAbout) -> Option<String> {
    let at = modified(about)?.to_zoned(jiff::tz::TimeZone::UTC);
    Some(at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_told_whatever_its_name_and_time() {
        let mut about =
            FileAbout { name: None, kind: FileKind::File, size: 3, mode: 0o644, uid: 0, gid: 0, modified: (784_111_777, 5), target: None };
        let shown = object(&Raw::new("/a/b\n"), Some(&about));
        assert_eq!((&shown["name"], &shown["mode"], &shown["kind"]), (&json!("b\n"), &json!("0644"), &json!("file")));
        assert!(shown.get("encoded_path").is_none());
        assert_eq!(object(&Raw::new(b"/\xff".to_vec()), None)["encoded_path"], json!("/%FF"));
        assert_eq!(object(&Raw::new("/"), None)["name"], json!("/"));
        assert_eq!(http_date(&about).unwrap(), "Sun, 06 Nov 1994 08:49:37 GMT");
        about.modified = (i64::MIN, 0);
        assert_eq!(object(&Raw::new("/a"), Some(&about))["modified_at"], Value::Null);
        assert_eq!(http_date(&about), None);
    }
}
