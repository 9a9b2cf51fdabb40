//! What an address says of a file. Paths are bytes, so they are not read as text.

use axum::http::{HeaderMap, header};
use sandboxer_protocol::agent::{ByteRange, GuestPath, Raw};
use utoipa::IntoParams;

use super::super::ApiError;

/// For the document: where it is.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it is what the document says")]
pub(super) struct At {
    /// Absolute; as bytes, percent-encoded.
    #[param(min_length = 1, max_length = 4096)]
    path: String,
}

/// For the document: what may change meanwhile.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it is what the document says")]
pub(super) struct Live {
    /// Send what is being written to as far as it was there.
    #[param(nullable = false)]
    live: Option<bool>,
}

/// For the document: permissions.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it is what the document says")]
pub(super) struct Mode {
    /// In octal, such as `644`.
    #[param(nullable = false, pattern = "^[0-7]{1,4}$")]
    mode: Option<String>,
}

/// For the document: what is above it.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it is what the document says")]
pub(super) struct Parents {
    /// Make the directories that are missing.
    #[param(nullable = false)]
    parents: Option<bool>,
}

/// What was asked for, by name.
pub(super) struct Asked(Vec<(String, Raw)>);

impl Asked {
    pub(super) fn parse(query: Option<&str>) -> Result<Self, ApiError> {
        let mut found: Vec<(String, Raw)> = Vec::new();
        for part in query.unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let shown: String = name.chars().take(64).collect();
            let value = Raw::decoded(&value.replace('+', "%20")).ok_or_else(|| ApiError::bad(format!("{shown}: a broken escape.")))?;
            if found.iter().any(|(other, _)| other == name) {
                return Err(ApiError::bad(format!("{shown}: it is given twice.")));
            }
            found.push((name.to_owned(), value));
        }
        Ok(Self(found))
    }

    fn take(&mut self, name: &str) -> Option<Raw> {
        let at = self.0.iter().position(|(found, _)| found == name)?;
        Some(self.0.swap_remove(at).1)
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let text = self.take(name).map(|raw| String::from_utf8(raw.as_bytes().to_vec()));
        text.transpose().map_err(|_| ApiError::bad(format!("{name}: it is no text.")))
    }

    pub(super) fn path(&mut self) -> Result<GuestPath, ApiError> {
        self.path_of("path")
    }

    pub(super) fn path_of(&mut self, name: &str) -> Result<GuestPath, ApiError> {
        let raw = self.take(name).ok_or_else(|| ApiError::invalid(format!("{name}: it is needed.")))?;
        raw.try_into().map_err(|why| ApiError::invalid(format!("{name}: {why}.")))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.text(name)?.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ApiError::invalid(format!("{name}: true or false is needed."))),
        }
    }

    /// In octal, as everywhere.
    pub(super) fn mode(&mut self) -> Result<Option<u32>, ApiError> {
        mode_of(self.text("mode")?.as_deref())
    }

    pub(super) fn limit(&mut self, default: u32, most: u32) -> Result<u32, ApiError> {
        match self.text("limit")?.map(|text| text.parse()) {
            None => Ok(default),
            Some(Ok(limit)) if (1..=most).contains(&limit) => Ok(limit),
            Some(_) => Err(ApiError::bad(format!("limit: 1 to {most}."))),
        }
    }

    /// The last name of the page before.
    pub(super) fn cursor(&mut self) -> Result<Option<Raw>, ApiError> {
        self.text("cursor")?.as_deref().map(decode_cursor).transpose()
    }

    /// What is left is unknown, and a misspelt one that is ignored does something else than was wanted.
    pub(super) fn nothing_more(&self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                let shown: String = name.chars().take(64).collect();
                Err(ApiError::bad(format!("{shown:?}: there is no such parameter here.")))
            }
        }
    }
}

pub(super) fn mode_of(text: Option<&str>) -> Result<Option<u32>, ApiError> {
    let bad = || ApiError::invalid("mode: octal digits are needed, such as 644 or 755.");
    let Some(text) = text else { return Ok(None) };
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777 && !text.starts_with('+'));
    mode.map(Some).ok_or_else(bad)
}

pub(super) fn decode_cursor(text: &str) -> Result<Raw, ApiError> {
    let bad = || ApiError::bad("cursor: send the next_cursor of the page before as it is.");
    text.strip_prefix('.').and_then(Raw::decoded).filter(|name| !name.as_bytes().is_empty()).ok_or_else(bad)
}

pub(super) fn encode_cursor(name: &Raw) -> String {
    format!(".{}", name.encoded())
}

/// The part that is wanted. What is no single range of bytes asks for everything, as HTTP has it.
pub(super) fn range(headers: &HeaderMap) -> Option<ByteRange> {
    let text = headers.get(header::RANGE)?.to_str().ok()?;
    let (first, last) = text.trim().strip_prefix("bytes=")?.split_once('-')?;
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten();
    match (first.trim(), last.trim()) {
        ("", last) => Some(ByteRange::Last(number(last)?)),
        (first, "") => Some(ByteRange::From(number(first)?, None)),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(ByteRange::From(first, Some(last)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range_of(text: &str) -> Option<ByteRange> {
        range(&HeaderMap::from_iter([(header::RANGE, text.parse().unwrap())]))
    }

    #[test]
    fn ranges_are_read_as_http_has_them() {
        assert_eq!(range_of("bytes=0-"), Some(ByteRange::From(0, None)));
        assert_eq!(range_of("bytes=5-9"), Some(ByteRange::From(5, Some(9))));
        assert_eq!(range_of("bytes=-7"), Some(ByteRange::Last(7)));
        for other in
            ["bytes=", "bytes=-", "bytes=9-5", "bytes=1-2,4-5", "lines=1-2", "bytes=a-b", "bytes=+1-", "bytes=99999999999999999999-"]
        {
            assert_eq!(range_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_path_may_be_any_bytes_and_what_is_unknown_is_refused() {
        let mut asked = Asked::parse(Some("path=/a%0A%FF+b%2B&parents=true&mode=0750")).unwrap();
        assert_eq!(asked.path().unwrap().as_bytes(), b"/a\n\xff b+");
        assert!(asked.flag("parents").unwrap() && !asked.flag("recursive").unwrap());
        assert_eq!(asked.mode().unwrap(), Some(0o750));
        asked.nothing_more().unwrap();
        assert!(Asked::parse(Some("path=%")).is_err());
        assert!(Asked::parse(Some("path=/a&path=/b")).is_err());
        assert!(Asked::parse(Some("pth=/a")).unwrap().nothing_more().is_err());
        for bad in ["", "path=", "path=a", "path=/%00"] {
            assert!(Asked::parse(Some(bad)).unwrap().path().is_err(), "{bad}");
        }
        for bad in ["mode=", "mode=9", "mode=77777", "mode=-1", "mode=%FF", "mode=%2B644"] {
            assert!(Asked::parse(Some(bad)).unwrap().mode().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_cursor_comes_back_as_the_name_it_was() {
        let name = Raw::new(b"a&b%\xff\n".to_vec());
        let query = format!("cursor={}", Raw::new(encode_cursor(&name)).encoded());
        assert_eq!(Asked::parse(Some(&query)).unwrap().cursor().unwrap(), Some(name));
        assert!(Asked::parse(Some("cursor=x")).unwrap().cursor().is_err());
    }
}
