//! Impersonation headers: what a request asks to be, and the permissions that takes.

use crate::{Attributes, UserInfo};
use http::HeaderMap;
use std::collections::BTreeMap;

/// An identity that a request wants to act as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Impersonation {
    pub user: UserInfo,
    /// (group, resource, subresource, namespace, name) of each `impersonate` permission needed.
    checks: Vec<[String; 5]>,
    /// The narrower way in: what is impersonated, and the verb that it takes.
    mode: Mode,
}

/// What sort of identity is taken on. Each has a verb of its own, which allows less than `impersonate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Node,
    ServiceAccount,
    User,
}

impl Impersonation {
    /// What the real user must be allowed, each on its own.
    pub fn checks(&self) -> impl Iterator<Item = Attributes<'_>> {
        self.with_verb("impersonate")
    }

    fn with_verb<'a>(&'a self, verb: &'a str) -> impl Iterator<Item = Attributes<'a>> {
        self.checks.iter().map(
            move |[group, resource, subresource, namespace, name]| Attributes {
                verb,
                is_resource: true,
                group,
                resource,
                subresource,
                namespace,
                name,
                ..Attributes::default()
            },
        )
    }

    /// The verb by which a request of `verb` may be made in this impersonation, without all that `impersonate` allows.
    /// `None`: only the wide permission will do.
    pub fn constrained_verb(&self, verb: &str) -> Option<String> {
        let only_name = self.checks.len() == 1;
        let mode = match self.mode {
            Mode::Node if only_name => "arbitrary-node",
            Mode::ServiceAccount if only_name => "serviceaccount",
            Mode::User => "user-info",
            _ => return None,
        };
        Some(format!("impersonate-on:{mode}:{verb}"))
    }

    /// Whether the narrow permissions for the identity itself are there.
    pub fn constrained(&self, mut allowed: impl FnMut(&Attributes<'_>) -> bool) -> bool {
        let verb = match self.mode {
            Mode::Node => "impersonate:arbitrary-node",
            Mode::ServiceAccount => "impersonate:serviceaccount",
            Mode::User => "impersonate:user-info",
        };
        self.with_verb(verb).all(|mut attributes| {
            attributes.group = "authentication.k8s.io";
            if self.mode == Mode::Node && attributes.resource == "users" {
                attributes.resource = "nodes";
                attributes.name = attributes.name.trim_start_matches("system:node:");
            }
            // Nobody becomes an administrator this way.
            let privileged = attributes.resource == "groups" && attributes.name == crate::MASTERS_GROUP;
            !privileged && !attributes.name.is_empty() && allowed(&attributes)
        })
    }
}

/// Reads `Impersonate-User`, `-Group`, `-Uid` and `-Extra-*`. `Err` when groups or extras come without a user.
pub fn requested_impersonation(headers: &HeaderMap) -> Result<Option<Impersonation>, String> {
    let text = |value: &http::HeaderValue| value.to_str().ok().map(str::to_owned);
    let user = headers.get("impersonate-user").and_then(text).unwrap_or_default();
    let groups: Vec<String> = headers
        .get_all("impersonate-group")
        .iter()
        .filter_map(text)
        .collect();
    let uid = headers.get("impersonate-uid").and_then(text).unwrap_or_default();
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in headers {
        if let (Some(key), Some(value)) = (name.as_str().strip_prefix("impersonate-extra-"), text(value)) {
            let key = crate::request_header::unescape(key).to_lowercase();
            extra.entry(key).or_default().push(value);
        }
    }
    if user.is_empty() {
        if groups.is_empty() && uid.is_empty() && extra.is_empty() {
            return Ok(None);
        }
        return Err(without_user(&uid, &groups, &extra));
    }
    let own = |parts: [&str; 5]| parts.map(str::to_owned);
    let mut checks = Vec::new();
    let mut acting = match user
        .strip_prefix("system:serviceaccount:")
        .and_then(|rest| rest.split_once(':'))
    {
        Some((namespace, name)) => {
            checks.push(own(["", "serviceaccounts", "", namespace, name]));
            UserInfo::service_account(namespace, name)
        }
        None => {
            checks.push(own(["", "users", "", "", &user]));
            UserInfo {
                name: user.clone(),
                ..UserInfo::default()
            }
        }
    };
    for group in &groups {
        checks.push(own(["", "groups", "", "", group]));
    }
    for (key, values) in &extra {
        for value in values {
            checks.push(own(["authentication.k8s.io", "userextras", key, "", value]));
        }
    }
    if !uid.is_empty() {
        checks.push(own(["authentication.k8s.io", "uids", "", "", &uid]));
    }
    if !groups.is_empty() {
        acting.groups = groups;
    }
    let everyone = if acting.name == crate::ANONYMOUS {
        crate::UNAUTHENTICATED_GROUP
    } else {
        crate::AUTHENTICATED_GROUP
    };
    // Who is said to be unauthenticated is not made an authenticated one.
    if !acting.in_group(everyone) && !acting.in_group(crate::UNAUTHENTICATED_GROUP) {
        acting.groups.push(everyone.to_owned());
    }
    acting.uid = uid;
    acting.extra = extra;
    let mode = match acting.name.as_str() {
        name if name.starts_with("system:node:") => Mode::Node,
        name if name.starts_with("system:serviceaccount:") => Mode::ServiceAccount,
        _ => Mode::User,
    };
    Ok(Some(Impersonation {
        user: acting,
        checks,
        mode,
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
    fn each_part_needs_its_own_permission() {
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
        headers.insert("impersonate-user", HeaderValue::from_static("jane"));
        let found = requested_impersonation(&headers).unwrap().unwrap();
        assert_eq!(found.user.groups, ["devs", "system:authenticated"]);
        let checks: Vec<_> = found
            .checks()
            .map(|c| (c.resource.to_owned(), c.name.to_owned()))
            .collect();
        assert_eq!(
            checks,
            [("users".into(), "jane".into()), ("groups".into(), "devs".into())]
        );
    }
}
