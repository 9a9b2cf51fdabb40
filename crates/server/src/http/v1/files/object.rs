//! A file as clients see it.

use jiff::Timestamp;
use sandboxer_protocol::agent::{FileAbout, FileKind, Raw};
use serde::Serialize;
use utoipa::ToSchema;

/// A file, a directory, a link, or something else that has a path.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = File)]
pub(in crate::http::v1) struct FileObject {
    /// With U+FFFD for what is no UTF-8.
    path: String,
    /// The last part of it.
    name: String,
    /// The path exactly, percent-encoded, where it is no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    encoded_path: Option<String>,
    #[serde(flatten)]
    #[schema(value_type = Facts)]
    facts: Option<Facts>,
}

/// What is known of it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = FileFacts)]
pub(in crate::http::v1) struct Facts {
    /// `file`, `directory`, `symlink` or `other`.
    #[schema(required = false)]
    kind: &'static str,
    #[schema(required = false)]
    size: u64,
    /// In octal, such as `0644`.
    #[schema(required = false)]
    mode: String,
    #[schema(required = false)]
    uid: u32,
    #[schema(required = false)]
    gid: u32,
    /// Null: a time that no calendar has.
    #[schema(value_type = Option<String>, format = DateTime, required = false)]
    modified_at: Option<Timestamp>,
    /// Of a link: where it leads to.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    target: Option<String>,
}

/// The object of a file. Where its path is no text, it is shown as well as it can be, and `encoded_path` says it exactly.
pub(super) fn object(path: &Raw, about: Option<&FileAbout>) -> FileObject {
    let name = path.as_bytes().rsplit(|byte| *byte == b'/').find(|part| !part.is_empty()).unwrap_or(b"/");
    FileObject {
        path: String::from_utf8_lossy(path.as_bytes()).into_owned(),
        name: String::from_utf8_lossy(name).into_owned(),
        encoded_path: std::str::from_utf8(path.as_bytes()).is_err().then(|| path.encoded()),
        facts: about.map(Facts::from),
    }
}

impl From<&FileAbout> for Facts {
    fn from(about: &FileAbout) -> Self {
        Self {
            kind: match about.kind {
                FileKind::File => "file",
                FileKind::Directory => "directory",
                FileKind::Symlink => "symlink",
                FileKind::Other => "other",
            },
            size: about.size,
            mode: format!("{:04o}", about.mode & 0o7777),
            uid: about.uid,
            gid: about.gid,
            modified_at: modified(about),
            target: about.target.as_ref().map(|target| String::from_utf8_lossy(target.as_bytes()).into_owned()),
        }
    }
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
    use serde_json::{Value, json};

    use super::*;

    fn shown(path: impl AsRef<[u8]>, about: Option<&FileAbout>) -> Value {
        json!(object(&Raw::new(path.as_ref()), about))
    }

    #[test]
    fn a_file_is_told_whatever_its_name_and_time() {
        let mut about =
            FileAbout { name: None, kind: FileKind::File, size: 3, mode: 0o644, uid: 0, gid: 0, modified: (784_111_777, 5), target: None };
        let file = shown("/a/b\n", Some(&about));
        assert_eq!((&file["name"], &file["mode"], &file["kind"]), (&json!("b\n"), &json!("0644"), &json!("file")));
        assert!(file.get("encoded_path").is_none());
        assert_eq!(shown(b"/\xff", None)["encoded_path"], json!("/%FF"));
        assert_eq!(shown("/", None)["name"], json!("/"));
        assert_eq!(http_date(&about).unwrap(), "Sun, 06 Nov 1994 08:49:37 GMT");
        about.modified = (i64::MIN, 0);
        assert_eq!(shown("/a", Some(&about))["modified_at"], Value::Null);
        assert_eq!(http_date(&about), None);
    }
}
