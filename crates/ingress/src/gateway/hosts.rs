//! Hostnames as Gateway API compares them: a wildcard matches any number of labels, and the most specific name decides.

use std::collections::HashMap;

/// Which names a listener or a route is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    #[default]
    Any,
    /// `*.example.com` is kept as `example.com`.
    Wildcard(String),
    /// Lower case.
    Exact(String),
}

impl Host {
    /// Nothing is any host.
    pub fn parse(name: Option<&str>) -> Host {
        let name = name.unwrap_or_default().to_ascii_lowercase();
        match name.strip_prefix("*.") {
            _ if name.is_empty() => Host::Any,
            Some(parent) => Host::Wildcard(parent.to_owned()),
            None => Host::Exact(name),
        }
    }

    /// The names that both are for.
    pub fn intersect(&self, other: &Host) -> Option<Host> {
        match (self, other) {
            (Host::Any, host) | (host, Host::Any) => Some(host.clone()),
            (Host::Exact(a), Host::Exact(b)) => (a == b).then(|| self.clone()),
            (Host::Exact(name), Host::Wildcard(parent)) | (Host::Wildcard(parent), Host::Exact(name)) => {
                is_below(name, parent).then(|| Host::Exact(name.clone()))
            }
            (Host::Wildcard(a), Host::Wildcard(b)) if a == b || is_below(a, b) => Some(self.clone()),
            (Host::Wildcard(a), Host::Wildcard(b)) if is_below(b, a) => Some(other.clone()),
            (Host::Wildcard(_), Host::Wildcard(_)) => None,
        }
    }
}

/// Whether a name has labels before its parent.
fn is_below(name: &str, parent: &str) -> bool {
    let labels = name
        .strip_suffix(parent)
        .and_then(|labels| labels.strip_suffix('.'));
    labels.is_some_and(|labels| !labels.is_empty())
}

/// Something for each of several hosts.
#[derive(Clone, Debug)]
pub struct Hosts<T>(HashMap<Host, T>);

impl<T> Default for Hosts<T> {
    fn default() -> Self {
        Hosts(HashMap::new())
    }
}

impl<T> Hosts<T> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values()
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }

    /// What is there for a host, or is made for it.
    pub fn entry(&mut self, host: Host, make: impl FnOnce() -> T) -> &mut T {
        self.0.entry(host).or_insert_with(make)
    }

    /// All that a name matches, the most specific first. The name is in lower case.
    pub fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (Host, &'a T)> {
        let exact = std::iter::once_with(|| Host::Exact(name.to_owned()));
        let parents = name.match_indices('.').filter(|(at, _)| *at > 0);
        let wildcards = parents.map(|(at, _)| Host::Wildcard(name[at + 1..].to_owned()));
        let all = exact.chain(wildcards).chain([Host::Any]);
        all.filter_map(|host| {
            let found = self.0.get(&host)?;
            Some((host, found))
        })
    }

    /// The most specific of them.
    pub fn get<'a>(&'a self, name: &'a str) -> Option<(Host, &'a T)> {
        self.matching(name).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostnames_of_listeners_and_routes_intersect() {
        for (listener, route, expected) in [
            ("", "a.example", Some("a.example")),
            ("a.example", "", Some("a.example")),
            ("", "", Some("")),
            ("a.example", "A.Example", Some("a.example")),
            ("a.example", "b.example", None),
            ("*.example", "a.example", Some("a.example")),
            ("*.example", "a.b.example", Some("a.b.example")),
            ("*.example", "example", None),
            ("*.example", "anexample", None),
            ("a.example", "*.example", Some("a.example")),
            ("*.example", "*.b.example", Some("*.b.example")),
            ("*.b.example", "*.example", Some("*.b.example")),
            ("*.a.example", "*.b.example", None),
        ] {
            let found = Host::parse(Some(listener)).intersect(&Host::parse(Some(route)));
            assert_eq!(
                found,
                expected.map(|name| Host::parse(Some(name))),
                "{listener} {route}"
            );
        }
    }

    #[test]
    fn the_most_specific_host_comes_first() {
        let mut hosts = Hosts::default();
        for name in ["", "*.example", "*.b.example", "a.b.example"] {
            hosts.entry(Host::parse(Some(name)), || name);
        }
        let found = |name: &str| hosts.matching(name).map(|(_, found)| *found).collect::<Vec<_>>();
        assert_eq!(
            found("a.b.example"),
            ["a.b.example", "*.b.example", "*.example", ""]
        );
        assert_eq!(found("c.b.example"), ["*.b.example", "*.example", ""]);
        assert_eq!(found("b.example"), ["*.example", ""]);
        assert_eq!(found("example"), [""]);
        assert_eq!(found(".example"), [""]);
        assert_eq!(found(""), [""]);
    }
}
