//! URLs as Go reads request URIs: absolute, or an absolute path.

use std::sync::Arc;

use skiff_meta::field::quote;

use super::Native;
use crate::error::EvalError;
use crate::value::{Eval, Map, Value};

/// A parsed URL.
#[derive(Debug)]
pub struct Url {
    pub(crate) text: String,
    scheme: String,
    host: String,
    path: String,
    query: String,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let problem = |what: String| format!("parse {}: {what}", quote(text));
        if text.bytes().any(|c| c < 0x20 || c == 0x7f) {
            return Err(problem("net/url: invalid control character in URL".to_owned()));
        }
        if text.is_empty() {
            return Err(problem("empty url".to_owned()));
        }
        // COMPAT: a request has no fragment, so a `#` is a character like others.
        let (scheme, rest) = split_scheme(text).map_err(problem)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut url = Self {
            text: text.to_owned(),
            scheme: scheme.to_ascii_lowercase(),
            host: String::new(),
            path: String::new(),
            query: query.to_owned(),
        };
        if text == "*" {
            url.path = text.to_owned();
            return Ok(url);
        }
        if !rest.starts_with('/') {
            if !scheme.is_empty() {
                return Ok(url);
            }
            return Err(problem("invalid URI for request".to_owned()));
        }
        let mut path = rest;
        if (!scheme.is_empty() || !rest.starts_with("///"))
            && let Some(after) = rest.strip_prefix("//")
        {
            let end = after.find('/').unwrap_or(after.len());
            let (authority, tail) = after.split_at(end);
            url.host = parse_authority(authority).map_err(problem)?;
            path = tail;
        }
        unescape(path, false).map_err(problem)?;
        url.path = path.to_owned();
        Ok(url)
    }

    fn hostname(&self) -> &str {
        match self.host.strip_prefix('[').and_then(|host| host.split_once(']')) {
            Some((inside, _)) => inside,
            None => self.host.rsplit_once(':').map_or(&self.host, |(host, _)| host),
        }
    }

    fn port(&self) -> &str {
        let after = self.host.rfind(']').map_or(0, |end| end + 1);
        self.host[after..].rsplit_once(':').map_or("", |(_, port)| port)
    }

    fn escaped_path(&self) -> String {
        let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:@[]%/".contains(&c);
        if self.path.bytes().all(allowed) {
            return self.path.clone();
        }
        let mut escaped = String::new();
        for c in unescape(&self.path, false).unwrap_or_default() {
            if c.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&c) {
                escaped.push(char::from(c));
            } else {
                escaped.push_str(&format!("%{c:02X}"));
            }
        }
        escaped
    }

    fn query_map<'a>(&self) -> Eval<Value<'a>> {
        let mut keys: Vec<(String, Vec<Value<'a>>)> = Vec::new();
        for pair in self
            .query
            .split('&')
            .filter(|pair| !pair.is_empty() && !pair.contains(';'))
        {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let text = |part: &str| {
                let bytes = unescape(part, true).ok()?;
                Some(String::from_utf8_lossy(&bytes).into_owned())
            };
            let (Some(key), Some(value)) = (text(key), text(value)) else {
                continue;
            };
            match keys.iter_mut().find(|(known, _)| *known == key) {
                Some((_, values)) => values.push(Value::string(value)),
                None => keys.push((key, vec![Value::string(value)])),
            }
        }
        let mut map = Map::empty();
        for (key, values) in keys {
            map.insert(Value::string(key), Value::list(values))?;
        }
        Ok(Value::Map(map))
    }
}

fn split_scheme(text: &str) -> Result<(&str, &str), String> {
    for (at, c) in text.bytes().enumerate() {
        match c {
            b'a'..=b'z' | b'A'..=b'Z' => {}
            b'0'..=b'9' | b'+' | b'-' | b'.' if at > 0 => {}
            b':' if at == 0 => return Err("missing protocol scheme".to_owned()),
            b':' => return Ok((&text[..at], &text[at + 1..])),
            _ => break,
        }
    }
    Ok(("", text))
}

fn parse_authority(authority: &str) -> Result<String, String> {
    let host = match authority.rsplit_once('@') {
        Some((user, host)) => {
            let valid = |c: char| c.is_ascii_alphanumeric() || "-._:~!$&'()*+,;=%@".contains(c);
            if !user.chars().all(valid) {
                return Err("net/url: invalid userinfo".to_owned());
            }
            host
        }
        None => authority,
    };
    let port = if host.starts_with('[') {
        let Some(end) = host.rfind(']') else {
            return Err("missing ']' in host".to_owned());
        };
        &host[end + 1..]
    } else {
        host.rfind(':').map_or("", |colon| &host[colon..])
    };
    let valid_port = port.is_empty()
        || port
            .strip_prefix(':')
            .is_some_and(|digits| digits.bytes().all(|c| c.is_ascii_digit()));
    if !valid_port {
        return Err(format!("invalid port {} after host", quote(port)));
    }
    let mut bytes = host.bytes();
    while let Some(c) = bytes.next() {
        let allowed = c >= 0x80 || c.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]<>\"".contains(&c);
        if c == b'%' {
            // Only what is not ASCII may be escaped in a host.
            let escape: String = [bytes.next(), bytes.next()]
                .iter()
                .flatten()
                .map(|c| char::from(*c))
                .collect();
            if u8::from_str_radix(&escape, 16).is_ok_and(|byte| byte >= 0x80 || byte == b'%') {
                continue;
            }
            return Err(format!("invalid URL escape {}", quote(&format!("%{escape}"))));
        }
        if !allowed {
            return Err(format!(
                "invalid character {} in host name",
                quote(&char::from(c).to_string())
            ));
        }
    }
    Ok(host.to_owned())
}

fn unescape(text: &str, plus_is_space: bool) -> Result<Vec<u8>, String> {
    let bytes = text.as_bytes();
    let mut unescaped = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'%' => {
                let digit = |offset: usize| bytes.get(at + offset).and_then(|c| char::from(*c).to_digit(16));
                let (Some(high), Some(low)) = (digit(1), digit(2)) else {
                    let end = (at + 3).min(bytes.len());
                    let bad = String::from_utf8_lossy(&bytes[at..end]);
                    return Err(format!("invalid URL escape {}", quote(&bad)));
                };
                unescaped.push((high * 16 + low) as u8);
                at += 3;
            }
            b'+' if plus_is_space => {
                unescaped.push(b' ');
                at += 1;
            }
            c => {
                unescaped.push(c);
                at += 1;
            }
        }
    }
    Ok(unescaped)
}

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "url" => |_, args| match &args[0] {
            Value::String(text) => Url::parse(text)
                .map(|url| Value::Url(Arc::new(url)))
                .map_err(|problem| {
                    EvalError::new(format!(
                        "URL parse error during conversion from string: {problem}"
                    ))
                }),
            _ => Err(EvalError::no_such_overload()),
        },
        "isURL" => |_, args| match &args[0] {
            Value::String(text) => Ok(Value::Bool(Url::parse(text).is_ok())),
            _ => Err(EvalError::no_such_overload()),
        },
        "getScheme" => |_, args| part(args, |url| url.scheme.clone()),
        "getHost" => |_, args| part(args, |url| url.host.clone()),
        "getHostname" => |_, args| part(args, |url| url.hostname().to_owned()),
        "getPort" => |_, args| part(args, |url| url.port().to_owned()),
        "getEscapedPath" => |_, args| part(args, Url::escaped_path),
        "getQuery" => |_, args| match args {
            [Value::Url(url)] => url.query_map(),
            _ => Err(EvalError::no_such_overload()),
        },
        _ => return None,
    })
}

fn part<'a>(args: &[Value<'a>], of: fn(&Url) -> String) -> Eval<Value<'a>> {
    match args {
        [Value::Url(url)] => Ok(Value::string(of(url))),
        _ => Err(EvalError::no_such_overload()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fragment_is_none_in_a_request() {
        for (text, expected) in [
            ("https://example.com/a#b", Some(("example.com", "/a%23b", ""))),
            ("https://example.com/?x=1#f", Some(("example.com", "/", "x=1#f"))),
            ("http://#%blah$#@", None),
            ("http://a#b/c", None),
            ("#a", None),
        ] {
            let url = Url::parse(text).ok();
            let found = url
                .as_ref()
                .map(|url| (url.host.as_str(), url.escaped_path(), url.query.as_str()));
            let found = found
                .as_ref()
                .map(|(host, path, query)| (*host, path.as_str(), *query));
            assert_eq!(found, expected, "{text}");
        }
    }
}
