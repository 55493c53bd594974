//! Impersonation headers: what a request asks to be, and the permissions that takes.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use http::HeaderMap;
use parking_lot::Mutex;
use serde_json::json;
use skiff_api::errors::Errors;
use skiff_api::node::Node;
use skiff_api::object_meta::domain_prefixed_path;
use skiff_meta::names;

use crate::request_header::{text, unescape};
use crate::{Attributes, UserInfo};

/// An identity that a request wants to act as, just as the headers say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Impersonation {
    wanted: UserInfo,
    /// What the name stands for.
    sort: Sort,
}

/// What an identity is, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Sort {
    Node(String),
    ServiceAccount { namespace: String, name: String },
    User,
}

impl Sort {
    fn of(user: &str) -> Sort {
        if let Some(name) = user.strip_prefix("system:node:")
            && names::dns1123_subdomain(name).is_empty()
        {
            return Sort::Node(name.to_owned());
        }
        let account = user.strip_prefix("system:serviceaccount:");
        if let Some((namespace, name)) = account.and_then(|rest| rest.split_once(':'))
            && names::dns1123_label(namespace).is_empty()
            && names::dns1123_subdomain(name).is_empty()
        {
            let (namespace, name) = (namespace.to_owned(), name.to_owned());
            return Sort::ServiceAccount { namespace, name };
        }
        Sort::User
    }
}

/// How the request may act as somebody else. All but the last also ask for a permission of this very request, and so
/// allow less than `impersonate` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// A service account as the node that its pod runs on.
    AssociatedNode,
    ArbitraryNode,
    ServiceAccount,
    UserInfo,
    Wide,
}

impl Mode {
    /// In upstream's order: the first that allows it decides.
    const ALL: [Mode; 5] = [
        Mode::AssociatedNode,
        Mode::ArbitraryNode,
        Mode::ServiceAccount,
        Mode::UserInfo,
        Mode::Wide,
    ];

    fn verb(self) -> &'static str {
        match self {
            Mode::AssociatedNode => "impersonate:associated-node",
            Mode::ArbitraryNode => "impersonate:arbitrary-node",
            Mode::ServiceAccount => "impersonate:serviceaccount",
            Mode::UserInfo => "impersonate:user-info",
            Mode::Wide => "impersonate",
        }
    }
}

/// Which way last worked for whom: it is tried first, and its refusal is the one that is told.
#[derive(Default)]
pub struct Impersonations(Mutex<HashMap<u64, Mode>>);

/// So many users are remembered; then all are forgotten.
const REMEMBERED: usize = 10_000;

impl Impersonations {
    fn last(&self, user: &UserInfo) -> Option<Mode> {
        self.0.lock().get(&hash(&user.name)).copied()
    }

    fn worked(&self, user: &UserInfo, mode: Mode) {
        let mut modes = self.0.lock();
        if modes.len() >= REMEMBERED {
            modes.clear();
        }
        modes.insert(hash(&user.name), mode);
    }
}

/// Two users of one hash only have their ways tried in another order.
fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// Who the request acts as, and the verb of the narrow permission that allowed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Impersonated {
    pub user: UserInfo,
    pub constraint: Option<&'static str>,
}

/// Many parts of one sort are asked for at once first, by a narrow permission for all of them.
const MANY: usize = 4;

impl Impersonation {
    /// Finds a way to act as the identity. `check` asks for one permission of the real user, or refuses it for the reason
    /// that is given. The refusal of the first way that fits is that of all.
    pub fn authorize<E>(
        &self,
        requestor: &UserInfo,
        request: &Attributes<'_>,
        ways: &Impersonations,
        check: impl Fn(&Attributes<'_>, Option<&str>) -> Result<(), E>,
    ) -> Result<Impersonated, E> {
        let mut first = None;
        let last = ways.last(requestor);
        let others = Mode::ALL.into_iter().filter(|mode| Some(*mode) != last);
        for mode in last.into_iter().chain(others) {
            if !self.fits(mode, requestor) {
                continue;
            }
            match self.try_mode(mode, request, &check) {
                Ok(user) => {
                    if last != Some(mode) {
                        ways.worked(requestor, mode);
                    }
                    let constraint = (mode != Mode::Wide).then(|| mode.verb());
                    return Ok(Impersonated { user, constraint });
                }
                Err(refusal) => first = first.or(Some(refusal)),
            }
        }
        Err(first.expect("the wide way fits everybody, and has refused"))
    }

    fn fits(&self, mode: Mode, requestor: &UserInfo) -> bool {
        let wanted = &self.wanted;
        let only_name = wanted.uid.is_empty() && wanted.groups.is_empty() && wanted.extra.is_empty();
        match (mode, &self.sort) {
            (Mode::AssociatedNode, Sort::Node(node)) => {
                let runs_on = requestor.extra.get(crate::NODE_NAME_KEY).map(Vec::as_slice);
                let account = matches!(Sort::of(&requestor.name), Sort::ServiceAccount { .. });
                only_name && account && runs_on == Some(std::slice::from_ref(node))
            }
            (Mode::ArbitraryNode, Sort::Node(_)) | (Mode::ServiceAccount, Sort::ServiceAccount { .. }) => {
                only_name
            }
            (Mode::UserInfo, Sort::User) | (Mode::Wide, _) => true,
            _ => false,
        }
    }

    fn try_mode<E>(
        &self,
        mode: Mode,
        request: &Attributes<'_>,
        check: &impl Fn(&Attributes<'_>, Option<&str>) -> Result<(), E>,
    ) -> Result<UserInfo, E> {
        let narrow = mode != Mode::Wide;
        if let Some(sort) = mode.verb().strip_prefix("impersonate:") {
            let verb = format!("impersonate-on:{sort}:{}", request.verb);
            check(
                &Attributes {
                    verb: &verb,
                    ..*request
                },
                None,
            )?;
        }
        let mut user = self.wanted.clone();
        let of = |group, resource| Attributes {
            verb: mode.verb(),
            is_resource: true,
            group,
            version: "v1",
            resource,
            ..Attributes::default()
        };
        let group = if narrow { "authentication.k8s.io" } else { "" };
        match &self.sort {
            Sort::Node(name) if narrow => {
                // Who may be the node it runs on may be that wherever it runs.
                let name = if mode == Mode::AssociatedNode { "*" } else { name };
                check(
                    &Attributes {
                        name,
                        ..of(group, "nodes")
                    },
                    None,
                )?;
                user.groups = vec![crate::NODES_GROUP.to_owned()];
            }
            Sort::ServiceAccount { namespace, name } => {
                let account = Attributes {
                    namespace,
                    name,
                    ..of(group, "serviceaccounts")
                };
                check(&account, None)?;
                if user.groups.is_empty() {
                    user.groups = UserInfo::service_account(namespace, name).groups;
                }
            }
            _ => {
                let name = self.wanted.name.as_str();
                check(
                    &Attributes {
                        name,
                        ..of(group, "users")
                    },
                    None,
                )?;
            }
        }
        if !self.wanted.uid.is_empty() {
            let name = self.wanted.uid.as_str();
            check(
                &Attributes {
                    name,
                    ..of("authentication.k8s.io", "uids")
                },
                None,
            )?;
        }
        self.groups(narrow, &of(group, "groups"), check)?;
        self.extra(narrow, &of("authentication.k8s.io", "userextras"), check)?;
        if user.name == crate::ANONYMOUS {
            ensure_group(&mut user, crate::UNAUTHENTICATED_GROUP);
        } else if !user.in_group(crate::UNAUTHENTICATED_GROUP) {
            // Who is said to be unauthenticated is not made an authenticated one.
            ensure_group(&mut user, crate::AUTHENTICATED_GROUP);
        }
        Ok(user)
    }

    fn groups<E>(
        &self,
        narrow: bool,
        of: &Attributes<'_>,
        check: &impl Fn(&Attributes<'_>, Option<&str>) -> Result<(), E>,
    ) -> Result<(), E> {
        let groups = &self.wanted.groups;
        if narrow && groups.iter().any(String::is_empty) {
            check(of, Some("impersonating the empty string group is not allowed"))?;
        }
        if narrow && self.wanted.in_group(crate::MASTERS_GROUP) {
            let name = crate::MASTERS_GROUP;
            let why = "impersonating the system:masters group is not allowed";
            check(&Attributes { name, ..*of }, Some(why))?;
        }
        if narrow && groups.len() >= MANY && check(&Attributes { name: "*", ..*of }, None).is_ok() {
            return Ok(());
        }
        groups
            .iter()
            .try_for_each(|name| check(&Attributes { name, ..*of }, None))
    }

    fn extra<E>(
        &self,
        narrow: bool,
        of: &Attributes<'_>,
        check: &impl Fn(&Attributes<'_>, Option<&str>) -> Result<(), E>,
    ) -> Result<(), E> {
        let extra = &self.wanted.extra;
        if narrow && let Some(why) = bad_extra(extra) {
            check(of, Some(&why))?;
        }
        let parts: usize = extra.values().map(Vec::len).sum();
        let all = Attributes {
            subresource: "*",
            name: "*",
            ..*of
        };
        if narrow && parts >= MANY && check(&all, None).is_ok() {
            return Ok(());
        }
        for (subresource, values) in extra {
            for name in values {
                let one = Attributes {
                    subresource,
                    name,
                    ..*of
                };
                check(&one, None)?;
            }
        }
        Ok(())
    }
}

/// What the narrow ways do not take in extra fields.
fn bad_extra(extra: &BTreeMap<String, Vec<String>>) -> Option<String> {
    for (key, values) in extra {
        if key.is_empty() {
            return Some("impersonating the empty string key in extra is not allowed".to_owned());
        }
        let shown = json!({"extra": {"key": key}});
        let mut errors = Errors::new();
        domain_prefixed_path(&Node::root(&shown).field("extra").field("key"), &mut errors);
        if let Some(why) = errors.into_vec().first() {
            return Some(format!(
                "impersonating an invalid key in extra is not allowed: {why}"
            ));
        }
        if values.iter().any(String::is_empty) {
            return Some("impersonating the empty string value in extra is not allowed".to_owned());
        }
    }
    None
}

fn ensure_group(user: &mut UserInfo, group: &str) {
    if !user.in_group(group) {
        user.groups.push(group.to_owned());
    }
}

/// Reads `Impersonate-User`, `-Group`, `-Uid` and `-Extra-*`. `Err` when groups or extras come without a user.
pub fn requested_impersonation(headers: &HeaderMap) -> Result<Option<Impersonation>, String> {
    let user = headers.get("impersonate-user").map(text).unwrap_or_default();
    let groups: Vec<String> = headers.get_all("impersonate-group").iter().map(text).collect();
    let uid = headers.get("impersonate-uid").map(text).unwrap_or_default();
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in headers {
        if let Some(key) = name.as_str().strip_prefix("impersonate-extra-") {
            let key = unescape(key).to_lowercase();
            extra.entry(key).or_default().push(text(value));
        }
    }
    if user.is_empty() {
        if groups.is_empty() && uid.is_empty() && extra.is_empty() {
            return Ok(None);
        }
        return Err(without_user(&uid, &groups, &extra));
    }
    Ok(Some(Impersonation {
        sort: Sort::of(&user),
        wanted: UserInfo {
            name: user,
            uid,
            groups,
            extra,
        },
    }))
}

/// COMPAT: upstream shows what it read as its language writes it.
fn without_user(uid: &str, groups: &[String], extra: &BTreeMap<String, Vec<String>>) -> String {
    let quote = skiff_meta::field::quote;
    let strings = |list: &[String]| {
        let quoted: Vec<String> = list.iter().map(|text| quote(text)).collect();
        format!("[]string{{{}}}", quoted.join(", "))
    };
    let groups = match groups {
        [] => "[]string(nil)".to_owned(),
        groups => strings(groups),
    };
    let extra = if extra.is_empty() {
        "map[string][]string(nil)".to_owned()
    } else {
        let entries: Vec<String> = extra
            .iter()
            .map(|(key, values)| format!("{}:{}", quote(key), strings(values)))
            .collect();
        format!("map[string][]string{{{}}}", entries.join(", "))
    };
    format!(
        "requested &user.DefaultInfo{{Name:\"\", UID:{}, Groups:{groups}, Extra:{extra}}} without impersonating a user name",
        quote(uid)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn parts_without_a_name_are_refused() {
        let mut headers = HeaderMap::new();
        assert_eq!(requested_impersonation(&headers), Ok(None));
        headers.insert("impersonate-group", HeaderValue::from_static("devs"));
        assert_eq!(
            requested_impersonation(&headers),
            Err(
                "requested &user.DefaultInfo{Name:\"\", UID:\"\", Groups:[]string{\"devs\"}, \
                 Extra:map[string][]string(nil)} without impersonating a user name"
                    .to_owned()
            )
        );
    }

    /// What a request with these headers ends in, for somebody who may do what `allowed` names: `verb resource/sub name`.
    fn outcome(requestor: &UserInfo, headers: &[(&'static str, &str)], allowed: &[&str]) -> String {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let request = Attributes {
            verb: "list",
            is_resource: true,
            resource: "pods",
            namespace: "ns",
            ..Attributes::default()
        };
        let check = |a: &Attributes<'_>, why: Option<&str>| {
            let resource = match (a.group, a.subresource) {
                (_, sub) if !sub.is_empty() => format!("{}/{sub}", a.resource),
                ("", _) => a.resource.to_owned(),
                (group, _) => format!("{}.{}", a.resource, group.split('.').next().unwrap()),
            };
            let asked = format!("{} {resource} {}", a.verb, a.name);
            match why {
                Some(why) => Err(why.to_owned()),
                None if allowed.contains(&asked.trim_end()) => Ok(()),
                None => Err(format!("no {asked}")),
            }
        };
        let found = requested_impersonation(&map).unwrap().unwrap();
        match found.authorize(requestor, &request, &Impersonations::default(), check) {
            Err(why) => why,
            Ok(Impersonated { user, constraint }) => {
                format!(
                    "{} of {} by {}",
                    user.name,
                    user.groups.join(","),
                    constraint.unwrap_or("all")
                )
            }
        }
    }

    #[test]
    fn each_part_needs_its_own_permission() {
        let admin = UserInfo::new("admin", ["g"]);
        let check = |headers: &[(&'static str, &str)], allowed: &[&str], expected: &str| {
            assert_eq!(outcome(&admin, headers, allowed), expected);
        };
        let jane = ("impersonate-user", "jane");
        let devs = ("impersonate-group", "devs");
        check(&[jane], &[], "no impersonate-on:user-info:list pods ");
        check(
            &[jane],
            &["impersonate users jane"],
            "jane of system:authenticated by all",
        );
        // Not ASCII, but not nobody either.
        check(
            &[("impersonate-user", "josé")],
            &["impersonate users josé"],
            "josé of system:authenticated by all",
        );
        check(
            &[
                jane,
                devs,
                ("impersonate-uid", "u"),
                ("impersonate-extra-example.com%2fa", "b"),
            ],
            &[
                "impersonate users jane",
                "impersonate uids.authentication u",
                "impersonate groups devs",
            ],
            "no impersonate-on:user-info:list pods ",
        );
        check(
            &[
                jane,
                devs,
                ("impersonate-uid", "u"),
                ("impersonate-extra-example.com%2fa", "b"),
            ],
            &[
                "impersonate users jane",
                "impersonate uids.authentication u",
                "impersonate groups devs",
                "impersonate userextras/example.com/a b",
            ],
            "jane of devs,system:authenticated by all",
        );
        check(
            &[("impersonate-user", "system:anonymous")],
            &["impersonate users system:anonymous"],
            "system:anonymous of system:unauthenticated by all",
        );
        // No name of an account: a user.
        check(
            &[("impersonate-user", "system:serviceaccount:ns:a:b")],
            &["impersonate serviceaccounts a:b"],
            "no impersonate-on:user-info:list pods ",
        );
        check(
            &[("impersonate-user", "system:serviceaccount:ns:a")],
            &["impersonate serviceaccounts a"],
            "system:serviceaccount:ns:a of system:serviceaccounts,system:serviceaccounts:ns,system:authenticated by all",
        );
    }

    #[test]
    fn narrow_permissions_are_tried_first() {
        let admin = UserInfo::new("admin", ["g"]);
        let check = |headers: &[(&'static str, &str)], allowed: &[&str], expected: &str| {
            assert_eq!(outcome(&admin, headers, allowed), expected);
        };
        let on = "impersonate-on:user-info:list pods";
        let jane = ("impersonate-user", "jane");
        let be_jane = "impersonate:user-info users.authentication jane";
        check(
            &[jane],
            &[on],
            "no impersonate:user-info users.authentication jane",
        );
        check(
            &[jane],
            &[on, be_jane],
            "jane of system:authenticated by impersonate:user-info",
        );
        let group = |name| ("impersonate-group", name);
        check(
            &[jane, group("a")],
            &[on, be_jane],
            "no impersonate:user-info groups.authentication a",
        );
        check(
            &[jane, group("system:masters")],
            &[
                on,
                be_jane,
                "impersonate:user-info groups.authentication system:masters",
            ],
            "impersonating the system:masters group is not allowed",
        );
        check(
            &[jane, group("")],
            &[on, be_jane],
            "impersonating the empty string group is not allowed",
        );
        let all = "impersonate:user-info groups.authentication *";
        check(
            &[jane, group("a"), group("b"), group("c")],
            &[on, be_jane, all],
            "no impersonate:user-info groups.authentication a",
        );
        check(
            &[jane, group("a"), group("b"), group("c"), group("d")],
            &[on, be_jane, all],
            "jane of a,b,c,d,system:authenticated by impersonate:user-info",
        );
        check(
            &[jane, ("impersonate-extra-bare", "x")],
            &[on, be_jane],
            "impersonating an invalid key in extra is not allowed: extra.key: Invalid value: \"bare\": must be a domain-prefixed path (such as \"acme.io/foo\")",
        );
        check(
            &[jane, ("impersonate-extra-a.io%2fb", "")],
            &[on, be_jane],
            "impersonating the empty string value in extra is not allowed",
        );
        check(
            &[("impersonate-user", "system:serviceaccount:ns:a")],
            &[
                "impersonate-on:serviceaccount:list pods",
                "impersonate:serviceaccount serviceaccounts.authentication a",
            ],
            "system:serviceaccount:ns:a of system:serviceaccounts,system:serviceaccounts:ns,system:authenticated by impersonate:serviceaccount",
        );
    }

    #[test]
    fn a_pod_may_be_let_be_its_node() {
        let mut agent = UserInfo::service_account("ns", "agent");
        let node = ("impersonate-user", "system:node:n1");
        let allowed = [
            "impersonate-on:associated-node:list pods",
            "impersonate:associated-node nodes.authentication *",
        ];
        let refused = "no impersonate-on:arbitrary-node:list pods ";
        assert_eq!(outcome(&agent, &[node], &allowed), refused);
        agent
            .extra
            .insert(crate::NODE_NAME_KEY.to_owned(), vec!["n1".to_owned()]);
        assert_eq!(
            outcome(&agent, &[node], &allowed),
            "system:node:n1 of system:nodes,system:authenticated by impersonate:associated-node"
        );
        assert_eq!(
            outcome(&agent, &[("impersonate-user", "system:node:n2")], &allowed),
            refused
        );
        // With groups of its own choice it is no node.
        assert_eq!(
            outcome(&agent, &[node, ("impersonate-group", "g")], &allowed),
            "no impersonate users system:node:n1"
        );
        let any = [
            "impersonate-on:arbitrary-node:list pods",
            "impersonate:arbitrary-node nodes.authentication n2",
        ];
        assert_eq!(
            outcome(&agent, &[("impersonate-user", "system:node:n2")], &any),
            "system:node:n2 of system:nodes,system:authenticated by impersonate:arbitrary-node"
        );
    }

    #[test]
    fn the_way_that_worked_is_tried_first() {
        let headers = |user: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("impersonate-user", http::HeaderValue::from_static(user));
            requested_impersonation(&headers).unwrap().unwrap()
        };
        let (ways, requestor) = (Impersonations::default(), UserInfo::new("me", ["g"]));
        let ask = |user: &'static str| {
            let request = Attributes {
                verb: "list",
                ..Attributes::default()
            };
            headers(user).authorize(&requestor, &request, &ways, |asked, _| match asked.name {
                "jane" if asked.verb == "impersonate" => Ok(()),
                _ => Err(asked.verb.to_owned()),
            })
        };
        assert_eq!(ask("joe"), Err("impersonate-on:user-info:list".to_owned()));
        assert!(ask("jane").is_ok());
        assert_eq!(ask("joe"), Err("impersonate".to_owned()));
    }
}
