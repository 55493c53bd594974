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
}

impl Impersonation {
    /// What the real user must be allowed, each on its own.
    pub fn checks(&self) -> impl Iterator<Item = Attributes<'_>> {
        self.checks
            .iter()
            .map(|[group, resource, subresource, namespace, name]| Attributes {
                verb: "impersonate",
                is_resource: true,
                group,
                resource,
                subresource,
                namespace,
                name,
                ..Attributes::default()
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
            extra.entry(key.to_owned()).or_default().push(value);
        }
    }
    if user.is_empty() {
        if groups.is_empty() && uid.is_empty() && extra.is_empty() {
            return Ok(None);
        }
        return Err("requested groups, uid or extra without impersonating a user".to_owned());
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
    if !acting.in_group(everyone) {
        acting.groups.push(everyone.to_owned());
    }
    acting.uid = uid;
    acting.extra = extra;
    Ok(Some(Impersonation { user: acting, checks }))
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
        assert!(requested_impersonation(&headers).is_err());
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
