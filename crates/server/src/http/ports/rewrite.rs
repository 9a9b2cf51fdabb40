//! What changes in requests and answers that pass through a port.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, header};

/// What stands before every path of the program inside, as it is seen from outside.
#[derive(Debug)]
pub(super) struct Prefix(String);

impl Prefix {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// As it is seen from outside.
    pub(super) fn add(&self, path: &str) -> String {
        format!("{}{path}", self.0)
    }

    /// As it is inside, with the slash that it begins with.
    pub(super) fn strip<'a>(&self, path: &'a str) -> &'a str {
        // Something stands there in other words, such as with an escaped digit: then it is cut by its count.
        path.strip_prefix(self.0.as_str()).unwrap_or_else(|| {
            let behind = self.0.matches('/').count();
            path.match_indices('/').nth(behind).map_or("", |(at, _)| &path[at..])
        })
    }
}

/// Takes a parameter out of a query: its value, and the rest.
pub(super) fn without_parameter(query: Option<&str>, name: &str) -> (Option<String>, Option<String>) {
    let Some(query) = query else { return (None, None) };
    let mut found = None;
    let rest: Vec<&str> = query
        .split('&')
        .filter(|pair| match pair.split_once('=') {
            Some((key, value)) if key == name => {
                found = Some(value.to_owned());
                false
            }
            _ => *pair != name,
        })
        .collect();
    (found, Some(rest.join("&")).filter(|rest| !rest.is_empty()))
}

/// What a request wants its connection to become.
pub(super) fn upgrade_of(headers: &HeaderMap) -> Option<String> {
    let words = |name: HeaderName| headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let asked = words(header::CONNECTION).any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    let to = words(header::UPGRADE).next()?.trim().to_owned();
    asked.then_some(to)
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    lines.flat_map(|line| line.split(';')).map(str::trim).filter(|cookie| !cookie.is_empty())
}

pub(super) fn cookie(headers: &HeaderMap, name: &str) -> Option<String> {
    cookies(headers).find_map(|cookie| cookie.split_once('=').filter(|(found, _)| *found == name).map(|(_, value)| value.to_owned()))
}

/// What the server itself set is not for the program inside.
pub(super) fn remove_cookie(headers: &mut HeaderMap, name: &str) {
    let rest: Vec<String> = cookies(headers).filter(|cookie| cookie.split('=').next() != Some(name)).map(str::to_owned).collect();
    headers.remove(header::COOKIE);
    if let Ok(rest) = HeaderValue::from_str(&rest.join("; "))
        && !rest.is_empty()
    {
        headers.insert(header::COOKIE, rest);
    }
}

/// Leaves a referer only where it is a page of the same port, and without the link in it.
pub(super) fn own_referer(headers: &mut HeaderMap, prefix: &Prefix, link: &str) {
    let Some(referer) = headers.remove(header::REFERER) else { return };
    let own = || {
        let referer: Uri = referer.to_str().ok()?.parse().ok()?;
        let (from, host) = (referer.authority()?, headers.get(header::HOST)?.to_str().ok()?);
        let below = referer.path().strip_prefix(prefix.text())?;
        if !from.as_str().eq_ignore_ascii_case(host) || !(below.is_empty() || below.starts_with('/')) {
            return None;
        }
        let (_, query) = without_parameter(referer.query(), link);
        let query = query.map(|query| format!("?{query}")).unwrap_or_default();
        HeaderValue::from_str(&format!("{}://{from}{}{query}", referer.scheme_str()?, referer.path())).ok()
    };
    if let Some(own) = own() {
        headers.insert(header::REFERER, own);
    }
}

/// What the program inside may not say for all of the server's host, and what it says of its own paths.
pub(super) fn response(headers: &mut HeaderMap, prefix: &Prefix) {
    headers.remove(header::STRICT_TRANSPORT_SECURITY);
    headers.remove("x-sandboxer-refused");
    // These hold for a whole origin, or for all names of a domain, and so for the ports of others.
    for name in ["clear-site-data", "nel", "report-to", "reporting-endpoints", "alt-svc"] {
        headers.remove(name);
    }
    let set: Vec<HeaderValue> =
        headers.get_all(header::SET_COOKIE).iter().filter_map(|value| own_cookie(value.to_str().ok()?, prefix)).collect();
    headers.remove(header::SET_COOKIE);
    for cookie in set {
        headers.append(header::SET_COOKIE, cookie);
    }
    if prefix.text().is_empty() {
        return;
    }
    headers.remove("service-worker-allowed");
    if let Some(to) = headers.get(header::LOCATION).and_then(|to| to.to_str().ok())
        && to.starts_with('/')
        && !to.starts_with("//")
        && let Ok(to) = HeaderValue::from_str(&prefix.add(to))
    {
        headers.insert(header::LOCATION, to);
    }
}

/// A cookie is for what is below the prefix, and for nobody else.
fn own_cookie(cookie: &str, prefix: &Prefix) -> Option<HeaderValue> {
    let mut parts = cookie.split(';').map(str::trim);
    let mut text = parts.next()?.to_owned();
    if text.split('=').next().map(str::trim) == Some(super::COOKIE) {
        return None;
    }
    let mut path = "/".to_owned();
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let (name, value) = (name.trim(), value.trim());
        if name.eq_ignore_ascii_case("path") {
            if value.starts_with('/') {
                value.clone_into(&mut path);
            }
        } else if !name.eq_ignore_ascii_case("domain") {
            text += "; ";
            text += part;
        }
    }
    HeaderValue::from_str(&format!("{text}; Path={}", prefix.add(&path))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(HeaderName::from_static(name), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_link_is_taken_out_of_the_query_and_the_cookie_out_of_the_cookies() {
        let taken = |query| without_parameter(Some(query), "link");
        assert_eq!(taken("a=1&link=x.y&b=2"), (Some("x.y".to_owned()), Some("a=1&b=2".to_owned())));
        assert_eq!(taken("link=x"), (Some("x".to_owned()), None));
        assert_eq!(taken("linked=x"), (None, Some("linked=x".to_owned())));
        let mut both = headers(&[("cookie", "a=1; ours=x; b=2"), ("cookie", "ours=y; c=3")]);
        assert_eq!(cookie(&both, "ours").as_deref(), Some("x"));
        remove_cookie(&mut both, "ours");
        assert_eq!(both[header::COOKIE], "a=1; b=2; c=3");
        let mut only = headers(&[("cookie", "ours=x")]);
        remove_cookie(&mut only, "ours");
        assert!(only.is_empty());
    }

    #[test]
    fn a_program_sets_cookies_and_leads_only_below_its_own_path() {
        let prefix = Prefix::new("/p/8000".to_owned());
        let mut said = headers(&[
            ("set-cookie", "a=1; Path=/; Domain =example.com; HttpOnly"),
            ("set-cookie", "sandboxer_port=x"),
            ("nel", "{}"),
            ("report-to", "{}"),
            ("set-cookie", "b=2"),
            ("set-cookie", "c=3; path=/app; Secure"),
            ("location", "/login?x"),
            ("strict-transport-security", "max-age=1"),
            ("clear-site-data", "\"*\""),
        ]);
        response(&mut said, &prefix);
        let set: Vec<_> = said.get_all(header::SET_COOKIE).iter().map(|value| value.to_str().unwrap()).collect();
        assert_eq!(set, ["a=1; HttpOnly; Path=/p/8000/", "b=2; Path=/p/8000/", "c=3; Secure; Path=/p/8000/app"]);
        assert_eq!(said[header::LOCATION], "/p/8000/login?x");
        assert_eq!(said.len(), 4);
        for elsewhere in ["//evil.example/", "https://example.com/", "relative"] {
            let mut said = headers(&[("location", elsewhere)]);
            response(&mut said, &prefix);
            assert_eq!(said[header::LOCATION], elsewhere);
        }
    }

    #[test]
    fn a_referer_stays_within_its_port_and_without_a_link() {
        let prefix = Prefix::new("/p/8000".to_owned());
        let passed = |referer: &str| {
            let mut all = headers(&[("host", "here:80"), ("referer", referer)]);
            own_referer(&mut all, &prefix, "link");
            all.get(header::REFERER).map(|referer| referer.to_str().unwrap().to_owned())
        };
        assert_eq!(passed("http://here:80/p/8000/a?link=x&b=c").as_deref(), Some("http://here:80/p/8000/a?b=c"));
        assert_eq!(passed("http://here:80/p/8000/?link=x").as_deref(), Some("http://here:80/p/8000/"));
        for other in ["http://here:80/p/80001/a", "http://here:80/", "http://there/p/8000/a", "http://here:80/p/8000", "nonsense"] {
            assert!(passed(other).is_none_or(|passed| passed == "http://here:80/p/8000"), "{other}");
        }
    }

    #[test]
    fn a_path_is_cut_where_the_port_ends() {
        let prefix = Prefix::new("/v1/sandboxes/x/ports/80".to_owned());
        assert_eq!(prefix.strip("/v1/sandboxes/x/ports/80/a/b"), "/a/b");
        assert_eq!(prefix.strip("/v1/sandboxes/x/ports/80"), "");
        assert_eq!(prefix.strip("/v1/sandboxes/%78/ports/80/a"), "/a");
        assert_eq!(Prefix::new(String::new()).strip("/a"), "/a");
    }

    #[test]
    fn only_who_asks_for_it_twice_is_upgraded() {
        let asked = |pairs: &[(&'static str, &str)]| upgrade_of(&headers(pairs));
        assert_eq!(asked(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]).as_deref(), Some("websocket"));
        assert_eq!(asked(&[("upgrade", "websocket")]), None);
        assert_eq!(asked(&[("connection", "Upgrade")]), None);
    }
}
