//! Role-based access control in memory: bindings by subject, rules by role. The server feeds objects in as
//! its watch delivers them, so a new binding is in force as soon as the cache has it.

use crate::{Attributes, Decision, Rule, UserInfo};
use arc_swap::ArcSwap;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// Namespace ("" for cluster roles) and name.
type RoleKey = (String, String);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Binding {
    /// Empty for a ClusterRoleBinding.
    namespace: String,
    name: String,
    role: RoleKey,
    role_kind: String,
    subjects: Vec<String>,
}

/// What a request reads: never changed once published.
#[derive(Debug, Default)]
struct Snapshot {
    users: HashMap<String, Vec<Arc<Binding>>>,
    groups: HashMap<String, Vec<Arc<Binding>>>,
    roles: BTreeMap<RoleKey, Arc<Vec<Rule>>>,
}

#[derive(Debug, Default)]
struct Objects {
    bindings: BTreeMap<(String, String), Arc<Binding>>,
    roles: BTreeMap<RoleKey, Arc<Vec<Rule>>>,
}

#[derive(Debug, Default)]
pub struct Rbac {
    /// Held while a snapshot is rebuilt; readers never take it.
    objects: Mutex<Objects>,
    snapshot: ArcSwap<Snapshot>,
}

impl Rbac {
    /// Takes in changes: `Ok` an object of one of the four RBAC kinds, `Err` the (kind, namespace, name) of one
    /// that is gone. A batch is published at once.
    pub fn update<'a>(
        &self,
        changes: impl IntoIterator<Item = Result<&'a Value, (&'a str, &'a str, &'a str)>>,
    ) {
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        for change in changes {
            match change {
                Ok(object) => objects.insert(object),
                Err((kind, namespace, name)) => {
                    let key = (namespace.to_owned(), name.to_owned());
                    if kind.ends_with("Binding") {
                        objects.bindings.remove(&key);
                    } else {
                        objects.roles.remove(&key);
                    }
                }
            }
        }
        let mut snapshot = Snapshot {
            roles: objects.roles.clone(),
            ..Snapshot::default()
        };
        for binding in objects.bindings.values() {
            for subject in &binding.subjects {
                let (map, name) = match subject.split_once(':') {
                    Some(("u", name)) => (&mut snapshot.users, name),
                    Some((_, name)) => (&mut snapshot.groups, name),
                    None => continue,
                };
                map.entry(name.to_owned()).or_default().push(Arc::clone(binding));
            }
        }
        self.snapshot.store(Arc::new(snapshot));
    }

    /// Every request comes by here: what allows one is not put in words.
    pub fn authorize(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        self.decide(user, attributes, |_| String::new())
    }

    /// The same, with the reason why something is allowed.
    pub fn explain(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        self.decide(user, attributes, |binding| binding.allowing(user))
    }

    fn decide(
        &self,
        user: &UserInfo,
        attributes: &Attributes<'_>,
        because: impl Fn(&Binding) -> String,
    ) -> Decision {
        let snapshot = self.snapshot.load();
        let mut missing = Vec::new();
        for binding in snapshot.bindings_of(user) {
            if !binding.namespace.is_empty()
                && (!attributes.is_resource || binding.namespace != attributes.namespace)
            {
                continue;
            }
            let Some(rules) = snapshot.roles.get(&binding.role) else {
                missing.push(binding.missing_role());
                continue;
            };
            if rules.iter().any(|rule| rule.allows(attributes)) {
                return Decision {
                    reason: because(binding),
                    ..Decision::allow()
                };
            }
        }
        missing.dedup();
        let reason = match missing.as_slice() {
            [] => String::new(),
            [one] => format!("RBAC: {one}"),
            many => format!("RBAC: [{}]", many.join(", ")),
        };
        Decision::no_opinion(reason)
    }

    /// Every rule that holds for `user` in `namespace` ("" for the cluster scope).
    pub fn rules_for(&self, user: &UserInfo, namespace: &str) -> Vec<Rule> {
        let snapshot = self.snapshot.load();
        snapshot
            .bindings_of(user)
            .filter(|b| b.namespace.is_empty() || b.namespace == namespace)
            .filter_map(|b| snapshot.roles.get(&b.role))
            .flat_map(|rules| rules.iter().cloned())
            .collect()
    }
}

impl Snapshot {
    fn bindings_of<'a>(&'a self, user: &'a UserInfo) -> impl Iterator<Item = &'a Arc<Binding>> {
        let groups = user.groups.iter().filter_map(|group| self.groups.get(group));
        self.users.get(&user.name).into_iter().chain(groups).flatten()
    }
}

impl Binding {
    /// The first of the subjects that the user is.
    fn subject_of(&self, user: &UserInfo) -> String {
        let quote = skiff_meta::field::quote;
        let account = |name: &str| {
            let (namespace, name) = name.strip_prefix("system:serviceaccount:")?.split_once(':')?;
            Some(format!(
                "ServiceAccount {}",
                quote(&format!("{name}/{namespace}"))
            ))
        };
        let described = self
            .subjects
            .iter()
            .find_map(|subject| match subject.split_once(':')? {
                ("u", name) if name == user.name => {
                    Some(account(name).unwrap_or_else(|| format!("User {}", quote(name))))
                }
                ("g", group) if user.in_group(group) => Some(format!("Group {}", quote(group))),
                _ => None,
            });
        described.unwrap_or_default()
    }

    fn missing_role(&self) -> String {
        let kind = self.role_kind.to_lowercase();
        format!(
            "{kind}.rbac.authorization.k8s.io {} not found",
            skiff_meta::field::quote(&self.role.1)
        )
    }

    fn allowing(&self, user: &UserInfo) -> String {
        let (kind, place) = if self.namespace.is_empty() {
            ("ClusterRoleBinding", self.name.clone())
        } else {
            ("RoleBinding", format!("{}/{}", self.name, self.namespace))
        };
        let quote = skiff_meta::field::quote;
        format!(
            "RBAC: allowed by {kind} {} of {} {} to {}",
            quote(&place),
            self.role_kind,
            quote(&self.role.1),
            self.subject_of(user)
        )
    }
}

impl Objects {
    fn insert(&mut self, object: &Value) {
        let text = |pointer: &str| {
            object
                .pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let key = (text("/metadata/namespace"), text("/metadata/name"));
        match text("/kind").as_str() {
            "Role" | "ClusterRole" => {
                let rules: Vec<Rule> = object
                    .get("rules")
                    .and_then(|rules| serde_json::from_value(rules.clone()).ok())
                    .unwrap_or_default();
                self.roles.insert(key, Arc::new(rules));
            }
            "RoleBinding" | "ClusterRoleBinding" => {
                let role_kind = text("/roleRef/kind");
                let role_namespace = if role_kind == "Role" {
                    key.0.clone()
                } else {
                    String::new()
                };
                let subjects = object.get("subjects").and_then(Value::as_array);
                let subjects = subjects
                    .into_iter()
                    .flatten()
                    .filter_map(|s| subject(s, &key.0))
                    .collect();
                let binding = Binding {
                    namespace: key.0.clone(),
                    name: key.1.clone(),
                    role: (role_namespace, text("/roleRef/name")),
                    role_kind,
                    subjects,
                };
                self.bindings.insert(key, Arc::new(binding));
            }
            _ => {}
        }
    }
}

fn subject(subject: &Value, binding_namespace: &str) -> Option<String> {
    let text = |key: &str| subject.get(key).and_then(Value::as_str).unwrap_or_default();
    match text("kind") {
        "User" => Some(format!("u:{}", text("name"))),
        "Group" => Some(format!("g:{}", text("name"))),
        "ServiceAccount" => {
            let namespace = if text("namespace").is_empty() {
                binding_namespace
            } else {
                text("namespace")
            };
            Some(format!("u:system:serviceaccount:{namespace}:{}", text("name")))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fixture() -> Rbac {
        let rbac = Rbac::default();
        let objects = [
            json!({"kind":"ClusterRole","metadata":{"name":"view"},"rules":[{"verbs":["get","list"],"apiGroups":[""],"resources":["pods"]}]}),
            json!({"kind":"RoleBinding","metadata":{"namespace":"a","name":"v"},"roleRef":{"kind":"ClusterRole","name":"view"},
                "subjects":[{"kind":"User","name":"jane"},{"kind":"ServiceAccount","name":"bot"}]}),
            json!({"kind":"ClusterRoleBinding","metadata":{"name":"gone"},"roleRef":{"kind":"ClusterRole","name":"nope"},
                "subjects":[{"kind":"Group","name":"devs"}]}),
        ];
        rbac.update(objects.iter().map(Ok));
        rbac
    }

    fn list_pods(namespace: &str) -> Attributes<'_> {
        Attributes {
            verb: "list",
            is_resource: true,
            resource: "pods",
            namespace,
            ..Attributes::default()
        }
    }

    #[test]
    fn bindings_hold_in_their_namespace() {
        let rbac = fixture();
        let jane = UserInfo::new("jane", [] as [&str; 0]);
        assert!(rbac.authorize(&jane, &list_pods("a")).allowed);
        assert_eq!(
            rbac.explain(&jane, &list_pods("a")).reason,
            "RBAC: allowed by RoleBinding \"v/a\" of ClusterRole \"view\" to User \"jane\""
        );
        assert!(!rbac.authorize(&jane, &list_pods("b")).allowed);
        assert!(!rbac.authorize(&jane, &list_pods("")).allowed);
        assert!(
            rbac.authorize(&UserInfo::service_account("a", "bot"), &list_pods("a"))
                .allowed
        );
        rbac.update([Err(("RoleBinding", "a", "v"))]);
        assert!(!rbac.authorize(&jane, &list_pods("a")).allowed);
    }

    #[test]
    fn a_missing_role_is_named() {
        let decision = fixture().authorize(&UserInfo::new("x", ["devs"]), &list_pods("a"));
        assert_eq!(
            decision.reason,
            "RBAC: clusterrole.rbac.authorization.k8s.io \"nope\" not found"
        );
    }
}
