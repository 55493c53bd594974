//! Where the call of a webhook goes, as upstream's client makes it of a `clientConfig`, and where a redirect leads from
//! there. It makes no connections.

use http::Uri;
use skiff_https::CallTarget;

/// Of the `url` of a `clientConfig`, and the URL as it is shown. It has neither query nor fragment: validation refuses
/// them.
pub fn of_url(url: &str, seconds: u64) -> Result<(CallTarget, String), String> {
    let uri: Uri = url.parse().map_err(|error| format!("{error}"))?;
    let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
    let path = clean(&decoded(uri.path()));
    let url = format!("https://{authority}{path}?timeout={seconds}s");
    Ok((CallTarget::of(&url)?, url))
}

/// Where the `Location` of an answer leads: to another server, or to another path of this one.
pub fn redirected(from: &CallTarget, location: &str) -> Result<CallTarget, String> {
    if let Some(rest) = location.strip_prefix("//") {
        return CallTarget::of(&format!("https://{rest}"));
    }
    if location.contains("://") {
        return CallTarget::of(location);
    }
    let mut place = from.clone();
    place.path = if location.starts_with('/') {
        location.to_owned()
    } else {
        // Beside the present one.
        let present = from.path.split('?').next().unwrap_or("/");
        let folder = present.rfind('/').map_or("/", |at| &present[..=at]);
        format!("{folder}{location}")
    };
    Ok(place)
}

/// A path without empty parts, `.`, `..` and the slash at its end, percent-encoded where a URL asks for it.
pub fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let mut clean = String::new();
    for part in parts {
        clean.push('/');
        for byte in part.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte) {
                clean.push(char::from(byte));
            } else {
                clean.push_str(&format!("%{byte:02X}"));
            }
        }
    }
    if clean.is_empty() {
        clean.push('/');
    }
    clean
}

/// Percent-encoded bytes as they are meant; what is no such encoding stays.
fn decoded(path: &str) -> String {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let hex = after
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match hex {
            Some(byte) if first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_as_upstreams_client_makes_them() {
        let check = |url: &str, path: &str| {
            let (place, shown) = of_url(url, 5).unwrap();
            assert_eq!(place.path, format!("{path}?timeout=5s"), "{url}");
            assert_eq!(shown, format!("https://127.0.0.1:1{path}?timeout=5s"));
        };
        check("https://127.0.0.1:1//failing", "/failing");
        check("https://127.0.0.1:1/a/", "/a");
        check("https://127.0.0.1:1/a/../b", "/b");
        check("https://127.0.0.1:1/../b", "/b");
        check("https://127.0.0.1:1/a%2Fb", "/a/b");
        check("https://127.0.0.1:1/a%20b/", "/a%20b");
        check("https://127.0.0.1:1", "/");
        check("https://127.0.0.1:1/", "/");
        check("https://127.0.0.1:1/a//b/./c", "/a/b/c");
        // The path of a service is taken as it is written.
        assert_eq!(clean("a%20b/"), "/a%2520b");
        assert_eq!(clean(""), "/");
    }

    #[test]
    fn redirects_lead_to_paths_and_to_servers() {
        let (place, _) = of_url("https://one:8443/a/b", 5).unwrap();
        let check = |location: &str, address: &str, path: &str| {
            let to = redirected(&place, location).unwrap();
            assert_eq!((&*to.address, &*to.path), (address, path), "{location}");
        };
        check("/ok", "one:8443", "/ok");
        check("ok", "one:8443", "/a/ok");
        check("ok/x", "one:8443", "/a/ok/x");
        check("//two/ok", "two:443", "/ok");
        check("/ok?x=1", "one:8443", "/ok?x=1");
        check("https://two/ok", "two:443", "/ok");
        check("https://two:1/ok", "two:1", "/ok");
        assert!(redirected(&place, "https://two two/ok").is_err());
    }
}
