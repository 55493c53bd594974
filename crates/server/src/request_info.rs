//! What a request asks for, read from its method, path and query alone: upstream's RequestInfo.
//! It decides nothing: whether the resource exists, or may be touched, is for later gates.

use http::Method;
use skiff_meta::selector::FieldSelector;

/// The request as authorization and routing see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    pub is_resource: bool,
    /// The decoded URL path.
    pub path: String,
    pub verb: String,
    pub group: String,
    pub version: String,
    pub namespace: String,
    pub resource: String,
    pub subresource: String,
    pub name: String,
    /// Of a list, a watch or a deletion of many: authorization may go by it.
    pub field_selector: String,
    pub label_selector: String,
    /// The parts from the resource on: resource, name, subresource, and what follows.
    pub parts: Vec<String>,
    /// The old form `/api/v1/watch/...`, which is a watch whatever the query says.
    pub watch_prefix: bool,
    /// `/namespaces//` with something behind it.
    pub unnamed_namespace: bool,
}

const NAMESPACE_SUBRESOURCES: [&str; 2] = ["status", "finalize"];

impl RequestInfo {
    /// Reads a request. An error is a path that starts like a resource path and then stops short.
    pub fn parse(method: &Method, path: &str, query: &str) -> Result<RequestInfo, String> {
        let decoded = percent_decode(path);
        let mut info = RequestInfo {
            verb: method.as_str().to_ascii_lowercase(),
            path: decoded.clone(),
            ..RequestInfo::default()
        };
        let trimmed = decoded.trim_matches('/');
        if trimmed.is_empty() {
            return Ok(info);
        }
        let parts: Vec<&str> = trimmed.split('/').collect();
        if parts.len() < 3 {
            return Ok(info);
        }
        let mut rest = match parts[0] {
            "api" => &parts[1..],
            "apis" => {
                if parts.len() < 4 {
                    return Ok(info);
                }
                info.group = parts[1].to_string();
                &parts[2..]
            }
            _ => return Ok(info),
        };
        info.is_resource = true;
        info.version = rest[0].to_string();
        rest = &rest[1..];

        if rest[0] == "watch" || rest[0] == "proxy" {
            if rest.len() < 2 {
                return Err(format!("unable to determine kind and namespace from url, {path}"));
            }
            info.verb = rest[0].to_string();
            info.watch_prefix = rest[0] == "watch";
            rest = &rest[1..];
        } else {
            info.verb = match method.as_str() {
                "POST" => "create",
                "GET" | "HEAD" => "get",
                "PUT" => "update",
                "PATCH" => "patch",
                "DELETE" => "delete",
                _ => "",
            }
            .to_string();
        }

        if rest[0] == "namespaces" && rest.len() > 1 {
            info.unnamed_namespace = rest.len() > 2 && rest[1].is_empty();
            info.namespace = rest[1].to_string();
            if rest.len() > 2 && !NAMESPACE_SUBRESOURCES.contains(&rest[2]) {
                rest = &rest[2..];
            }
        }
        info.parts = rest.iter().map(|part| part.to_string()).collect();
        if rest.len() >= 3 && info.verb != "proxy" {
            info.subresource = rest[2].to_string();
        }
        if rest.len() >= 2 {
            info.name = rest[1].to_string();
        }
        info.resource = rest[0].to_string();

        if info.name.is_empty() && info.verb == "get" {
            let watch = query_values(query, "watch")
                .next()
                .is_some_and(|value| !matches!(value.to_ascii_lowercase().as_str(), "false" | "0"));
            info.verb = if watch { "watch" } else { "list" }.to_string();
            if let Some(name) = exact_name(query) {
                info.name = name;
            }
        }
        if info.name.is_empty() && info.verb == "delete" {
            info.verb = "deletecollection".to_string();
        }
        if matches!(info.verb.as_str(), "list" | "watch" | "deletecollection") {
            info.field_selector = query_values(query, "fieldSelector").next().unwrap_or_default();
            info.label_selector = query_values(query, "labelSelector").next().unwrap_or_default();
        }
        Ok(info)
    }

    /// Requests that may stay open for long and are not counted against the in-flight limit.
    pub fn long_running(&self) -> bool {
        self.verb == "watch"
            || self.verb == "proxy"
            || self.path.starts_with("/debug/pprof/")
            || matches!(
                self.subresource.as_str(),
                "proxy" | "log" | "exec" | "attach" | "portforward"
            )
    }

    pub fn mutating(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch" | "head" | "options")
    }
}

/// The name that a list's field selector fixes; authorization by resource name then applies. Read as the list reads
/// it: a comma that is escaped does not begin another term.
fn exact_name(query: &str) -> Option<String> {
    let selector = query_values(query, "fieldSelector").next()?;
    let selector = FieldSelector::parse(&selector).ok()?;
    let name = selector.required_value("metadata.name")?;
    let fits = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '%']);
    fits.then(|| name.to_owned())
}

/// Splits a query into decoded pairs, in order.
pub fn query_pairs(query: &str) -> impl Iterator<Item = (String, String)> + '_ {
    // What Go cannot read it leaves out, and goes on.
    query
        .split('&')
        .filter(|pair| !pair.is_empty() && !pair.contains(';') && escapes_well(pair))
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (form_decode(key), form_decode(value))
        })
}

pub fn query_values<'a>(query: &'a str, key: &'a str) -> impl Iterator<Item = String> + 'a {
    query_pairs(query).filter_map(move |(k, value)| (k == key).then_some(value))
}

/// Whether two hexadecimal digits follow every percent sign.
fn escapes_well(text: &str) -> bool {
    text.split('%').skip(1).all(|rest| {
        rest.as_bytes()
            .get(..2)
            .is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    })
}

fn form_decode(text: &str) -> String {
    if text.contains('+') {
        percent_decode(&text.replace('+', " "))
    } else {
        percent_decode(text)
    }
}

/// Percent decoding; broken escapes are kept as they are, invalid UTF-8 is replaced.
pub fn percent_decode(text: &str) -> String {
    if !text.contains('%') {
        return text.to_string();
    }
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, uri: &str, expected: &str) {
        let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let info = RequestInfo::parse(&method, path, query).expect("parses");
        let got = format!(
            "{} {} g={} v={} ns={} r={} s={} n={}",
            info.is_resource,
            info.verb,
            info.group,
            info.version,
            info.namespace,
            info.resource,
            info.subresource,
            info.name
        );
        assert_eq!(got, expected, "{method} {uri}");
    }

    #[test]
    fn paths() {
        check("GET", "/", "false get g= v= ns= r= s= n=");
        check("GET", "/api/v1", "false get g= v= ns= r= s= n=");
        check("GET", "/apis/apps/v1", "false get g= v= ns= r= s= n=");
        check("GET", "/api/v1/pods", "true list g= v=v1 ns= r=pods s= n=");
        check(
            "GET",
            "/api/v1/pods?watch=true",
            "true watch g= v=v1 ns= r=pods s= n=",
        );
        check(
            "GET",
            "/api/v1/pods?watch=0",
            "true list g= v=v1 ns= r=pods s= n=",
        );
        check(
            "GET",
            "/api/v1/pods?fieldSelector=a%3Db,metadata.name%3Dx",
            "true list g= v=v1 ns= r=pods s= n=x",
        );
        check(
            "GET",
            "/api/v1/pods?fieldSelector=metadata.name!%3Da%5C,metadata.name%3Dx",
            "true list g= v=v1 ns= r=pods s= n=",
        );
        check("GET", "/api/v1/watch/pods", "true watch g= v=v1 ns= r=pods s= n=");
        check(
            "GET",
            "/api/v1/namespaces",
            "true list g= v=v1 ns= r=namespaces s= n=",
        );
        check(
            "GET",
            "/api/v1/namespaces/a",
            "true get g= v=v1 ns=a r=namespaces s= n=a",
        );
        check(
            "PUT",
            "/api/v1/namespaces/a/finalize",
            "true update g= v=v1 ns=a r=namespaces s=finalize n=a",
        );
        check(
            "POST",
            "/api/v1/namespaces/a/pods",
            "true create g= v=v1 ns=a r=pods s= n=",
        );
        check(
            "DELETE",
            "/api/v1/namespaces/a/pods",
            "true deletecollection g= v=v1 ns=a r=pods s= n=",
        );
        check(
            "PATCH",
            "/apis/apps/v1/namespaces/a/deployments/d/scale",
            "true patch g=apps v=v1 ns=a r=deployments s=scale n=d",
        );
        check(
            "GET",
            "/api/v1/pods?fieldSelector=metadata.name%3Dx",
            "true list g= v=v1 ns= r=pods s= n=x",
        );
        check(
            "GET",
            "/api/v1/namespaces/a/pods/p/log?follow=1",
            "true get g= v=v1 ns=a r=pods s=log n=p",
        );
        check("GET", "/healthz", "false get g= v= ns= r= s= n=");
    }

    #[test]
    fn broken_escapes_stay() {
        assert_eq!(percent_decode("%zz%4"), "%zz%4");
        assert_eq!(percent_decode("a%20b"), "a b");
        assert_eq!(percent_decode("%+1"), "%+1");
    }
}
