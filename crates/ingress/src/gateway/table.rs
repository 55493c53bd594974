//! The route table of Gateway API: by address, port and host, which rule a request follows. It is pure, and knows no
//! object.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use http::{HeaderMap, Method};
use regex::Regex;
use rustls::ServerConfig;

use super::filters::Filters;
use super::hosts::{Host, Hosts};
use crate::backend::Backend;
use crate::table::Retry;

/// Where a connection came in: the address, if that is one Gateway's own, and the port of the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenAddress {
    pub address: Option<IpAddr>,
    pub port: u16,
}

/// How a rule compares a path. Expressions are anchored at both ends.
#[derive(Clone, Debug)]
pub enum PathRule {
    Exact(String),
    /// By elements; kept without the slash at its end.
    Prefix(String),
    Regex(Regex),
    /// A method of any gRPC service.
    GrpcMethod(String),
}

impl PathRule {
    pub fn prefix(path: &str) -> PathRule {
        PathRule::Prefix(path.trim_end_matches('/').to_owned())
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            PathRule::Exact(exact) => path == exact,
            PathRule::Prefix(prefix) => path
                .strip_prefix(prefix.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/')),
            PathRule::Regex(regex) => regex.is_match(path),
            PathRule::GrpcMethod(method) => path.rsplit_once('/').is_some_and(|(_, last)| last == method),
        }
    }

    /// An exact path first, then the longer prefix.
    fn rank(&self) -> (u8, usize) {
        match self {
            PathRule::Exact(path) => (3, path.len()),
            PathRule::Prefix(path) => (2, path.len()),
            PathRule::Regex(regex) => (1, regex.as_str().len()),
            PathRule::GrpcMethod(method) => (1, method.len()),
        }
    }
}

/// Of a header or a query parameter that is compared with an expression; longer ones match none.
const MAX_COMPARED: usize = 4096;

#[derive(Clone, Debug)]
pub enum TextRule {
    Exact(String),
    Regex(Regex),
}

impl TextRule {
    fn matches(&self, text: &str) -> bool {
        match self {
            TextRule::Exact(exact) => text == exact,
            TextRule::Regex(regex) => text.len() <= MAX_COMPARED && regex.is_match(text),
        }
    }
}

/// A match of a rule.
#[derive(Clone, Debug)]
pub struct Match {
    pub path: PathRule,
    pub method: Option<Method>,
    pub headers: Vec<(HeaderName, TextRule)>,
    pub query: Vec<(String, TextRule)>,
}

/// What decides between two matches of one request that are equally specific: the older route, then its name, then the
/// earlier rule and match.
pub type Age = (Option<jiff::Timestamp>, String, usize, usize);

#[derive(Clone, Debug)]
pub struct Entry {
    pub matched: Match,
    pub age: Age,
    pub rule: Arc<Rule>,
}

impl Entry {
    fn order(&self) -> impl Ord + use<> {
        let Match {
            path,
            method,
            headers,
            query,
        } = &self.matched;
        let specific = (path.rank(), method.is_some(), headers.len(), query.len());
        (Reverse(specific), self.age.clone())
    }

    fn matches(&self, request: &RequestHead<'_>) -> bool {
        let Match {
            path,
            method,
            headers,
            query,
        } = &self.matched;
        path.matches(request.path)
            && method.as_ref().is_none_or(|method| method == request.method)
            && headers.iter().all(|(name, rule)| {
                header_text(request.headers, name).is_some_and(|text| rule.matches(&text))
            })
            && query
                .iter()
                .all(|(name, rule)| parameter(request.query, name).is_some_and(|text| rule.matches(&text)))
    }

    /// The prefix that was matched, which filters may replace.
    pub fn prefix(&self) -> &str {
        match &self.matched.path {
            PathRule::Prefix(prefix) => prefix,
            _ => "",
        }
    }
}

/// The header's values as one text.
fn header_text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let values: Vec<&str> = headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .collect();
    (!values.is_empty()).then(|| values.join(","))
}

/// The first value of a parameter, without its escapes.
fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = query
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.find_map(|(key, value)| (unescaped(key) == name).then(|| unescaped(value)))
}

fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        let escape = tail
            .get(..2)
            .filter(|_| *first == b'%')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(match (first, escape) {
            (_, Some(byte)) => {
                rest = &tail[2..];
                byte
            }
            (b'+', None) => b' ',
            (byte, None) => *byte,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What happens to the requests that a rule matches.
#[derive(Clone, Debug, Default)]
pub struct Rule {
    pub filters: Filters,
    pub backends: Vec<WeightedBackend>,
    /// For everything, from the request to the end of its response.
    pub request_timeout: Option<Duration>,
    /// For the head of one backend's response; `None`: as long as it takes.
    pub backend_timeout: Option<Duration>,
    pub retry: Option<Retry>,
    pub is_grpc: bool,
}

impl Rule {
    /// A backend by weight; `chance` is of 0 to 1. `None`: there is none that could answer.
    pub fn choose(&self, chance: f64) -> Option<&WeightedBackend> {
        let total: u64 = self.backends.iter().map(|each| u64::from(each.weight)).sum();
        let mut left = (chance * total as f64) as u64;
        self.backends.iter().find(|each| {
            let weight = u64::from(each.weight);
            let found = left < weight;
            left = left.saturating_sub(weight);
            found
        })
    }
}

#[derive(Clone, Debug)]
pub struct WeightedBackend {
    pub weight: u32,
    /// `None`: what the rule names cannot be a backend (500).
    pub backend: Option<Arc<Backend>>,
    pub filters: Filters,
}

/// The rules of one listener, by host.
#[derive(Clone, Debug, Default)]
pub struct HttpRoutes(Hosts<Vec<Arc<Entry>>>);

impl HttpRoutes {
    pub fn add(&mut self, host: Host, entry: Entry) {
        self.0.entry(host, Vec::new).push(Arc::new(entry));
    }

    fn sort(&mut self) {
        for entries in self.0.values_mut() {
            entries.sort_by_cached_key(|entry| entry.order());
        }
    }

    fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    fn find(&self, request: &RequestHead<'_>) -> Option<Arc<Entry>> {
        let of_hosts = self.0.matching(request.host);
        let mut matched =
            of_hosts.filter_map(|(_, entries)| entries.iter().find(|entry| entry.matches(request)));
        matched.next().cloned()
    }
}

/// A listener with TLS, by the name that clients ask for.
#[derive(Clone, Debug)]
pub enum SecureListener {
    /// HTTPS.
    Http {
        config: Arc<ServerConfig>,
        routes: HttpRoutes,
    },
    /// TLSRoutes: bytes are passed on as they are, or decrypted if there is a configuration.
    Tcp {
        config: Option<Arc<ServerConfig>>,
        routes: Hosts<Arc<Rule>>,
    },
}

#[derive(Clone, Debug, Default)]
pub struct Port {
    pub plain: Hosts<HttpRoutes>,
    pub secure: Hosts<SecureListener>,
}

/// What routes look at of a request.
pub struct RequestHead<'a> {
    /// Lower case, without a port.
    pub host: &'a str,
    /// As `crate::table::normalized`.
    pub path: &'a str,
    pub query: &'a str,
    pub method: &'a Method,
    pub headers: &'a HeaderMap,
}

/// What the table knows of a request.
#[derive(Debug)]
pub enum Found {
    Route(Arc<Entry>),
    /// The connection was made for another listener.
    Misdirected,
    Nothing,
}

#[derive(Clone, Debug, Default)]
pub struct GatewayTable {
    ports: HashMap<ListenAddress, Port>,
    /// Addresses that are one Gateway's own.
    own: HashSet<IpAddr>,
}

impl GatewayTable {
    pub fn add_address(&mut self, address: IpAddr) {
        self.own.insert(address);
    }

    pub fn port_mut(&mut self, socket: ListenAddress) -> &mut Port {
        self.ports.entry(socket).or_default()
    }

    /// To be called once, when all is added.
    pub fn sort(&mut self) {
        for port in self.ports.values_mut() {
            let secure = port.secure.values_mut().filter_map(|listener| match listener {
                SecureListener::Http { routes, .. } => Some(routes),
                SecureListener::Tcp { .. } => None,
            });
            for routes in port.plain.values_mut().chain(secure) {
                routes.sort();
            }
        }
    }

    pub fn len(&self) -> usize {
        let of_port = |port: &Port| {
            let plain: usize = port.plain.values().map(HttpRoutes::len).sum();
            let secure = port.secure.values().map(|listener| match listener {
                SecureListener::Http { routes, .. } => routes.len(),
                SecureListener::Tcp { routes, .. } => routes.values().count(),
            });
            plain + secure.sum::<usize>()
        };
        self.ports.values().map(of_port).sum()
    }

    /// Which listeners a connection to this address and port meets.
    pub fn socket(&self, address: IpAddr, port: u16) -> ListenAddress {
        let address = Some(address.to_canonical()).filter(|address| self.own.contains(address));
        ListenAddress { address, port }
    }

    pub fn port(&self, socket: ListenAddress) -> Option<&Port> {
        self.ports.get(&socket)
    }

    /// `secure` is the listener of the connection, if it has TLS.
    pub fn find(&self, socket: ListenAddress, secure: Option<&Host>, request: &RequestHead<'_>) -> Found {
        let Some(port) = self.ports.get(&socket) else {
            return Found::Nothing;
        };
        let routes = match secure {
            None => port.plain.get(request.host).map(|(_, routes)| routes),
            Some(connected) => match port.secure.get(request.host) {
                Some((host, SecureListener::Http { routes, .. })) if host == *connected => Some(routes),
                None => None,
                Some(_) => return Found::Misdirected,
            },
        };
        match routes.and_then(|routes| routes.find(request)) {
            Some(entry) => Found::Route(entry),
            None => Found::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(second: i64, route: &str, rule: usize) -> Age {
        let created = jiff::Timestamp::from_second(second).expect("a time");
        (Some(created), route.to_owned(), rule, 0)
    }

    fn path(text: &str) -> PathRule {
        match text.split_at(1) {
            ("=", rest) => PathRule::Exact(rest.to_owned()),
            ("~", rest) => PathRule::Regex(Regex::new(&format!("^(?:{rest})$")).expect("an expression")),
            _ => PathRule::prefix(text),
        }
    }

    fn bare(text: &str) -> Match {
        Match {
            path: path(text),
            method: None,
            headers: Vec::new(),
            query: Vec::new(),
        }
    }

    const SOCKET: ListenAddress = ListenAddress {
        address: None,
        port: 80,
    };

    /// The name of the route that answers; names are kept in the ages.
    fn found(table: &GatewayTable, request: &RequestHead<'_>) -> Option<String> {
        match table.find(SOCKET, None, request) {
            Found::Route(entry) => Some(entry.age.1.clone()),
            _ => None,
        }
    }

    fn table(entries: Vec<(&str, &str, Match, i64)>) -> GatewayTable {
        let mut table = GatewayTable::default();
        for (number, (name, host, matched, created)) in entries.into_iter().enumerate() {
            let routes = table.port_mut(SOCKET).plain.entry(Host::Any, HttpRoutes::default);
            let entry = Entry {
                matched,
                age: age(created, name, number),
                rule: Arc::default(),
            };
            routes.add(Host::parse(Some(host)), entry);
        }
        table.sort();
        table
    }

    #[test]
    fn more_specific_matches_come_first() {
        let header = |name: &'static str, value: &str| {
            (HeaderName::from_static(name), TextRule::Exact(value.to_owned()))
        };
        let table = table(vec![
            ("root", "", bare("/"), 1),
            ("regex", "", bare("~/a/long/[a-z]+"), 1),
            ("prefix", "", bare("/a"), 2),
            ("longer", "", bare("/a/b"), 3),
            ("exact", "", bare("=/a/b"), 4),
            (
                "method",
                "",
                Match {
                    method: Some(Method::POST),
                    ..bare("/a")
                },
                5,
            ),
            (
                "header",
                "",
                Match {
                    headers: vec![header("x-v", "1")],
                    ..bare("/a")
                },
                6,
            ),
            (
                "two headers",
                "",
                Match {
                    headers: vec![header("x-v", "1"), header("x-w", "2,3")],
                    ..bare("/a")
                },
                7,
            ),
            (
                "query",
                "",
                Match {
                    query: vec![("q r".to_owned(), TextRule::Exact("x y".to_owned()))],
                    ..bare("/a")
                },
                8,
            ),
            ("host", "h.example", bare("/a"), 9),
            ("wildcard", "*.example", bare("/a/b"), 9),
        ]);
        let check =
            |method: Method, host: &str, target: &str, headers: &[(&'static str, &'static str)], expected| {
                let (path, query) = target.split_once('?').unwrap_or((target, ""));
                let headers = headers
                    .iter()
                    .map(|(name, value)| {
                        (
                            HeaderName::from_static(name),
                            http::HeaderValue::from_static(value),
                        )
                    })
                    .fold(HeaderMap::new(), |mut map, (name, value)| {
                        map.append(name, value);
                        map
                    });
                let request = RequestHead {
                    host,
                    path,
                    query,
                    method: &method,
                    headers: &headers,
                };
                assert_eq!(
                    found(&table, &request).as_deref(),
                    expected,
                    "{method} {host}{target}"
                );
            };
        check(Method::GET, "", "/", &[], Some("root"));
        check(Method::GET, "", "/ab", &[], Some("root"));
        check(Method::GET, "", "/a", &[], Some("prefix"));
        check(Method::GET, "", "/a/long/x", &[], Some("prefix"));
        check(Method::GET, "", "/a/b", &[], Some("exact"));
        check(Method::GET, "", "/a/b/c", &[], Some("longer"));
        check(Method::POST, "", "/a", &[], Some("method"));
        check(Method::GET, "", "/a", &[("x-v", "1")], Some("header"));
        check(Method::GET, "", "/a", &[("x-v", "2")], Some("prefix"));
        let both = [("x-v", "1"), ("x-w", "2"), ("x-w", "3")];
        check(Method::GET, "", "/a", &both, Some("two headers"));
        check(Method::GET, "", "/a?z&q+r=x%20y", &[], Some("query"));
        check(Method::GET, "", "/a?q%20r=x%2", &[], Some("prefix"));
        check(Method::GET, "h.example", "/a/b", &[], Some("host"));
        check(Method::GET, "i.example", "/a/b", &[], Some("wildcard"));
        check(Method::GET, "i.example", "/a", &[], Some("prefix"));
        check(Method::GET, "h.example", "/", &[], Some("root"));
    }

    #[test]
    fn the_older_route_wins_then_its_name_then_the_earlier_rule() {
        let headers = HeaderMap::new();
        let request = RequestHead {
            host: "",
            path: "/",
            query: "",
            method: &Method::GET,
            headers: &headers,
        };
        let young = table(vec![("young", "", bare("/"), 2), ("old", "", bare("/"), 1)]);
        assert_eq!(found(&young, &request).as_deref(), Some("old"));
        let named = table(vec![("d/b", "", bare("/"), 1), ("d/a", "", bare("/"), 1)]);
        assert_eq!(found(&named, &request).as_deref(), Some("d/a"));
    }

    #[test]
    fn an_address_of_its_own_shares_nothing() {
        let own: IpAddr = "192.0.2.1".parse().expect("an address");
        let mut table = table(vec![("shared", "", bare("/"), 1)]);
        table.add_address(own);
        let shared: IpAddr = "192.0.2.2".parse().expect("an address");
        assert_eq!(table.socket(shared, 80), SOCKET);
        let mapped: IpAddr = "::ffff:192.0.2.1".parse().expect("an address");
        let socket = table.socket(mapped, 80);
        assert_eq!(socket.address, Some(own));
        assert!(table.port(socket).is_none());
    }

    #[test]
    fn backends_are_chosen_by_weight() {
        let weighted = |weight| WeightedBackend {
            weight,
            backend: None,
            filters: Filters::default(),
        };
        let rule = Rule {
            backends: vec![weighted(1), weighted(0), weighted(3)],
            ..Rule::default()
        };
        let weights = [0.0, 0.24, 0.25, 0.99].map(|chance| rule.choose(chance).map(|each| each.weight));
        assert_eq!(weights, [Some(1), Some(1), Some(3), Some(3)]);
        assert!(Rule::default().choose(0.5).is_none());
        let none = Rule {
            backends: vec![weighted(0)],
            ..Rule::default()
        };
        assert!(none.choose(0.0).is_none());
    }
}
