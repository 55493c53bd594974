//! What an answer says of its own address, as the client must see it: links and redirects to the target's own
//! host get the prefix of the proxy's path.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use http::{HeaderValue, Response, header, response::Parts};
use http_body_util::BodyExt;

use super::ProxyError;
use crate::body::{self, Answer, Body};

/// Pages are rewritten in memory; larger ones end in an error.
const PAGE_LIMIT: usize = 16 * 1024 * 1024;

/// The attributes that hold addresses, by tag.
const LINKS: [(&str, &[&str]); 25] = [
    ("a", &["href"]),
    ("applet", &["codebase"]),
    ("area", &["href"]),
    ("audio", &["src"]),
    ("base", &["href"]),
    ("blockquote", &["cite"]),
    ("body", &["background"]),
    ("button", &["formaction"]),
    ("command", &["icon"]),
    ("del", &["cite"]),
    ("embed", &["src"]),
    ("form", &["action"]),
    ("frame", &["longdesc", "src"]),
    ("head", &["profile"]),
    ("html", &["manifest"]),
    ("iframe", &["longdesc", "src"]),
    ("img", &["longdesc", "src", "usemap"]),
    ("input", &["src", "usemap", "formaction"]),
    ("ins", &["cite"]),
    ("link", &["href"]),
    ("object", &["classid", "codebase", "data", "usemap"]),
    ("q", &["cite"]),
    ("script", &["src"]),
    ("source", &["src"]),
    ("video", &["poster", "src"]),
];

pub struct Rewriter<'a> {
    pub prefix: &'a str,
    /// `host:port` of the target.
    pub target_host: String,
    /// The `Host` that the client asked for.
    pub client_host: String,
}

impl Rewriter<'_> {
    pub async fn answer(&self, mut parts: Parts, body: Body) -> Result<Answer, ProxyError> {
        let text = |name: header::HeaderName| {
            let value = parts.headers.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or("").to_string()
        };
        let location = text(header::LOCATION);
        if !location.is_empty() {
            if let Ok(value) = HeaderValue::from_str(&self.address(&location)) {
                parts.headers.insert(header::LOCATION, value);
            }
            return Ok(Response::from_parts(parts, body));
        }
        let content_type = text(header::CONTENT_TYPE);
        let encoding = text(header::CONTENT_ENCODING);
        let is_page = content_type.split(';').next().unwrap_or("").trim() == "text/html";
        if !is_page || self.prefix.is_empty() || !matches!(encoding.as_str(), "" | "gzip") {
            return Ok(Response::from_parts(parts, body));
        }
        let reach = |why: String| ProxyError::Reach(why);
        let bytes = read_page(body).await.map_err(reach)?;
        let page = if encoding == "gzip" {
            let mut plain = Vec::new();
            GzDecoder::new(bytes.as_slice())
                .take(PAGE_LIMIT as u64)
                .read_to_end(&mut plain)
                .map_err(|error| reach(error.to_string()))?;
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(&self.page(&plain))
                .and_then(|()| gzip.finish())
                .map_err(|error| reach(error.to_string()))?
        } else {
            self.page(&bytes)
        };
        parts.headers.insert(header::CONTENT_LENGTH, page.len().into());
        Ok(Response::from_parts(parts, body::full(page)))
    }

    /// One address, as the client must use it.
    fn address(&self, text: &str) -> String {
        let (host, path) = match text.split_once("//") {
            Some((scheme, rest)) if scheme.is_empty() || scheme.ends_with(':') => {
                let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
                (&rest[..end], &rest[end..])
            }
            _ => ("", text),
        };
        let elsewhere = !host.is_empty() && host != self.target_host && host != self.client_host;
        if elsewhere || !path.starts_with('/') {
            return text.to_string();
        }
        let origin = if host == self.client_host && !host.is_empty() {
            &text[..text.len() - path.len()]
        } else {
            ""
        };
        if path.starts_with(self.prefix) {
            return format!("{origin}{path}");
        }
        format!("{origin}{}{path}", self.prefix)
    }

    /// A page with its links rewritten. Everything but the values of link attributes stays byte for byte.
    fn page(&self, page: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(page.len() + 256);
        let mut at = 0;
        while let Some(open) = page[at..].iter().position(|byte| *byte == b'<').map(|p| p + at) {
            out.extend_from_slice(&page[at..open]);
            at = open;
            if page[at..].starts_with(b"<!--") {
                let end = find(&page[at..], b"-->").map_or(page.len(), |p| at + p + 3);
                out.extend_from_slice(&page[at..end]);
                at = end;
                continue;
            }
            let end = tag_end(page, at);
            self.tag(&page[at..end], &mut out);
            at = end;
        }
        out.extend_from_slice(&page[at..]);
        out
    }

    fn tag(&self, tag: &[u8], out: &mut Vec<u8>) {
        let name_end = (1..tag.len())
            .find(|i| !tag[*i].is_ascii_alphanumeric())
            .unwrap_or(tag.len());
        let name = String::from_utf8_lossy(&tag[1..name_end]).to_ascii_lowercase();
        let Some((_, links)) = LINKS.iter().find(|(known, _)| *known == name) else {
            return out.extend_from_slice(tag);
        };
        let mut at = name_end;
        out.extend_from_slice(&tag[..at]);
        while at < tag.len() {
            let start = at;
            while at < tag.len() && (tag[at].is_ascii_whitespace() || matches!(tag[at], b'/' | b'>')) {
                at += 1;
            }
            let key_start = at;
            while at < tag.len() && !tag[at].is_ascii_whitespace() && !matches!(tag[at], b'=' | b'>' | b'/') {
                at += 1;
            }
            let key = String::from_utf8_lossy(&tag[key_start..at]).to_ascii_lowercase();
            while at < tag.len() && tag[at].is_ascii_whitespace() {
                at += 1;
            }
            if at >= tag.len() || tag[at] != b'=' {
                at = at.max(start + 1);
                out.extend_from_slice(&tag[start..at.min(tag.len())]);
                continue;
            }
            at += 1;
            while at < tag.len() && tag[at].is_ascii_whitespace() {
                at += 1;
            }
            let quote = tag.get(at).copied().filter(|byte| matches!(byte, b'"' | b'\''));
            let value_start = at + usize::from(quote.is_some());
            let value_end = (value_start..tag.len())
                .find(|i| match quote {
                    Some(quote) => tag[*i] == quote,
                    None => tag[*i].is_ascii_whitespace() || tag[*i] == b'>',
                })
                .unwrap_or(tag.len());
            out.extend_from_slice(&tag[start..value_start.min(tag.len())]);
            let value = &tag[value_start.min(tag.len())..value_end];
            match std::str::from_utf8(value) {
                Ok(text) if links.contains(&key.as_str()) => {
                    out.extend_from_slice(self.address(text).as_bytes());
                }
                _ => out.extend_from_slice(value),
            }
            at = value_end;
            if quote.is_some() && at < tag.len() {
                out.push(tag[at]);
                at += 1;
            }
        }
    }
}

async fn read_page(mut body: Body) -> Result<Vec<u8>, String> {
    let mut page = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| error.to_string())?;
        if let Ok(data) = frame.into_data() {
            page.extend_from_slice(&data);
        }
        if page.len() > PAGE_LIMIT {
            return Err("the page is too large to rewrite its links".to_string());
        }
    }
    Ok(page)
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// Where the tag that opens at `open` ends; a `>` inside quotes does not end it.
fn tag_end(page: &[u8], open: usize) -> usize {
    let mut quote = None;
    for (index, byte) in page.iter().enumerate().skip(open) {
        match (quote, byte) {
            (None, b'>') => return index + 1,
            (None, b'"' | b'\'') => quote = Some(*byte),
            (Some(open), byte) if open == *byte => quote = None,
            _ => {}
        }
    }
    page.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewriter() -> Rewriter<'static> {
        Rewriter {
            prefix: "/api/v1/namespaces/a/pods/p/proxy",
            target_host: "10.0.0.1:80".to_string(),
            client_host: "api:6443".to_string(),
        }
    }

    #[test]
    fn addresses() {
        let check = |given: &str, expected: &str| assert_eq!(rewriter().address(given), expected, "{given}");
        check("/x", "/api/v1/namespaces/a/pods/p/proxy/x");
        check("/x/?a=b", "/api/v1/namespaces/a/pods/p/proxy/x/?a=b");
        check("x", "x");
        check("https://elsewhere/x", "https://elsewhere/x");
        check("http://10.0.0.1:80/x", "/api/v1/namespaces/a/pods/p/proxy/x");
        check(
            "https://api:6443/x",
            "https://api:6443/api/v1/namespaces/a/pods/p/proxy/x",
        );
        check(
            "/api/v1/namespaces/a/pods/p/proxy/x",
            "/api/v1/namespaces/a/pods/p/proxy/x",
        );
    }

    #[test]
    fn pages() {
        let check = |given: &str, expected: &str| {
            let got = rewriter().page(given.as_bytes());
            assert_eq!(String::from_utf8_lossy(&got), expected, "{given}");
        };
        check(
            "<a href=\"/rewriteme\">test</a>",
            "<a href=\"/api/v1/namespaces/a/pods/p/proxy/rewriteme\">test</a>",
        );
        check(
            "<p><IMG alt=x Src='/i.png' hidden><b href=\"/no\">",
            "<p><IMG alt=x Src='/api/v1/namespaces/a/pods/p/proxy/i.png' hidden><b href=\"/no\">",
        );
        check(
            "<!-- <a href=\"/x\"> --><a href=/y>",
            "<!-- <a href=\"/x\"> --><a href=/api/v1/namespaces/a/pods/p/proxy/y>",
        );
        for broken in ["<a href=", "<a href=\"/x", "<", "<a =", "<a / / >", "<a\t"] {
            rewriter().page(broken.as_bytes());
        }
    }
}
