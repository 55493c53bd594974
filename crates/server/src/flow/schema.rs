//! A FlowSchema made ready for matching: which requests it takes, to which priority level, and what makes a flow.

use std::sync::Arc;

use serde_json::Value;
use skiff_auth::UserInfo;
use skiff_registry::object;

use crate::request_info::RequestInfo;

pub struct Schema {
    pub name: String,
    pub uid: String,
    pub precedence: i64,
    pub level: Arc<str>,
    by: Distinguisher,
    rules: Vec<Rule>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Distinguisher {
    None,
    User,
    Namespace,
}

struct Rule {
    subjects: Vec<Subject>,
    resources: Vec<ResourceRule>,
    paths: Vec<PathRule>,
}

enum Subject {
    User(String),
    Group(String),
    /// Namespace and name, which may be `*`.
    ServiceAccount(String, String),
}

struct ResourceRule {
    verbs: Vec<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    cluster_scope: bool,
    namespaces: Vec<String>,
}

struct PathRule {
    verbs: Vec<String>,
    paths: Vec<String>,
}

impl Schema {
    pub fn read(value: &Value) -> Schema {
        let spec = &value["spec"];
        Schema {
            name: object::name(value).to_string(),
            uid: object::uid(value).to_string(),
            precedence: spec["matchingPrecedence"].as_i64().unwrap_or(1000),
            level: text(&spec["priorityLevelConfiguration"]["name"]).into(),
            by: match spec["distinguisherMethod"]["type"].as_str() {
                Some("ByUser") => Distinguisher::User,
                Some("ByNamespace") => Distinguisher::Namespace,
                _ => Distinguisher::None,
            },
            rules: each(&spec["rules"], |rule| Rule {
                subjects: each(&rule["subjects"], |subject| match subject["kind"].as_str() {
                    Some("User") => Subject::User(text(&subject["user"]["name"])),
                    Some("ServiceAccount") => Subject::ServiceAccount(
                        text(&subject["serviceAccount"]["namespace"]),
                        text(&subject["serviceAccount"]["name"]),
                    ),
                    _ => Subject::Group(text(&subject["group"]["name"])),
                }),
                resources: each(&rule["resourceRules"], |rule| ResourceRule {
                    verbs: each(&rule["verbs"], text),
                    groups: each(&rule["apiGroups"], text),
                    resources: each(&rule["resources"], text),
                    cluster_scope: rule["clusterScope"] == true,
                    namespaces: each(&rule["namespaces"], text),
                }),
                paths: each(&rule["nonResourceRules"], |rule| PathRule {
                    verbs: each(&rule["verbs"], text),
                    paths: each(&rule["nonResourceURLs"], text),
                }),
            }),
        }
    }

    pub fn matches(&self, user: &UserInfo, info: &RequestInfo) -> bool {
        self.rules.iter().any(|rule| {
            rule.subjects.iter().any(|subject| subject.matches(user))
                && if info.is_resource {
                    rule.resources.iter().any(|rule| rule.matches(info))
                } else {
                    rule.paths.iter().any(|rule| rule.matches(info))
                }
        })
    }

    /// What tells this request's flow from others of the same schema.
    pub fn flow<'a>(&self, user: &'a UserInfo, info: &'a RequestInfo) -> &'a str {
        match self.by {
            Distinguisher::None => "",
            Distinguisher::User => &user.name,
            Distinguisher::Namespace => &info.namespace,
        }
    }
}

impl Subject {
    fn matches(&self, user: &UserInfo) -> bool {
        match self {
            Subject::User(name) => name == "*" || *name == user.name,
            Subject::Group(name) => name == "*" || user.in_group(name),
            Subject::ServiceAccount(namespace, name) => user
                .name
                .strip_prefix("system:serviceaccount:")
                .and_then(|rest| rest.split_once(':'))
                .is_some_and(|(of, account)| of == namespace && (name == "*" || account == name)),
        }
    }
}

impl ResourceRule {
    fn matches(&self, info: &RequestInfo) -> bool {
        let resource = || {
            has(&self.resources, &info.resource) && info.subresource.is_empty()
                || self.resources.iter().any(|known| {
                    known == "*"
                        || known.split_once('/').is_some_and(|(resource, sub)| {
                            resource == info.resource && sub == info.subresource
                        })
                })
        };
        let scope = || {
            if info.namespace.is_empty() {
                self.cluster_scope
            } else {
                has(&self.namespaces, &info.namespace)
            }
        };
        has(&self.verbs, &info.verb) && has(&self.groups, &info.group) && resource() && scope()
    }
}

impl PathRule {
    fn matches(&self, info: &RequestInfo) -> bool {
        has(&self.verbs, &info.verb)
            && self.paths.iter().any(|known| {
                known == "*"
                    || *known == info.path
                    || known
                        .strip_suffix('*')
                        .is_some_and(|prefix| info.path.starts_with(prefix))
            })
    }
}

fn has(list: &[String], wanted: &str) -> bool {
    list.iter().any(|known| known == "*" || known == wanted)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("").to_string()
}

fn each<T>(list: &Value, make: impl FnMut(&Value) -> T) -> Vec<T> {
    list.as_array().into_iter().flatten().map(make).collect()
}

#[cfg(test)]
mod tests {
    use super::super::objects;
    use super::*;

    #[test]
    fn upstreams_schemas() {
        let mut schemas: Vec<Schema> = objects::all()
            .iter()
            .filter(|object| object["kind"] == "FlowSchema")
            .map(Schema::read)
            .collect();
        schemas.sort_by_key(|schema| schema.precedence);
        let check = |user: &UserInfo, method: &str, path: &str, expected: &str| {
            let method = http::Method::from_bytes(method.as_bytes()).expect("a method");
            let info = RequestInfo::parse(&method, path, "").expect("parses");
            let found = schemas
                .iter()
                .find(|schema| schema.matches(user, &info))
                .expect("one");
            let got = format!("{} {}", found.name, found.flow(user, &info));
            assert_eq!(got.trim_end(), expected, "{} {method} {path}", user.name);
        };
        let admin = UserInfo::new("admin", ["system:masters"]);
        let node = UserInfo::new("system:node:n", ["system:nodes"]);
        let manager = UserInfo::new("system:kube-controller-manager", [] as [&str; 0]);
        let controller = UserInfo::service_account("kube-system", "job-controller");
        let pod = UserInfo::service_account("a", "default");
        check(&admin, "GET", "/healthz", "exempt");
        check(&UserInfo::anonymous(), "GET", "/healthz", "probes");
        check(
            &UserInfo::anonymous(),
            "GET",
            "/api",
            "global-default system:anonymous",
        );
        check(
            &node,
            "PATCH",
            "/api/v1/nodes/n/status",
            "system-node-high system:node:n",
        );
        check(
            &node,
            "GET",
            "/api/v1/namespaces/a/pods/p",
            "system-nodes system:node:n",
        );
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/l";
        check(
            &manager,
            "PUT",
            leases,
            "system-leader-election system:kube-controller-manager",
        );
        check(&manager, "DELETE", leases, "kube-controller-manager kube-system");
        check(
            &controller,
            "GET",
            "/api/v1/namespaces/a/pods",
            "kube-system-service-accounts a",
        );
        check(
            &pod,
            "GET",
            "/api/v1/pods",
            "service-accounts system:serviceaccount:a:default",
        );
    }

    #[test]
    fn subjects_and_rules_are_met_in_full() {
        let schema = |subject: Value, rule: Value| {
            Schema::read(
                &serde_json::json!({"spec": {"rules": [{"subjects": [subject], "resourceRules": [rule]}]}}),
            )
        };
        let everybody = || serde_json::json!({"kind": "Group", "group": {"name": "*"}});
        let everything = || serde_json::json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true, "namespaces": ["*"]});
        let check = |schema: &Schema, user: &UserInfo, path: &str, expected: bool| {
            let info = RequestInfo::parse(&http::Method::GET, path, "").expect("parses");
            assert_eq!(schema.matches(user, &info), expected, "{} {path}", user.name);
        };
        let account = |namespace: &str, name: &str| UserInfo::service_account(namespace, name);
        let subject = |name: &str| serde_json::json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "a", "name": name}});
        let pods = "/api/v1/namespaces/a/pods";
        for (wanted, user, expected) in [
            ("x", account("a", "x"), true),
            ("x", account("a", "y"), false),
            ("x", account("b", "x"), false),
            ("*", account("a", "y"), true),
            ("*", account("b", "y"), false),
        ] {
            check(&schema(subject(wanted), everything()), &user, pods, expected);
        }
        let user = UserInfo::new("jane", [] as [&str; 0]);
        let of = |field: &str, value: Value| {
            let mut rule = everything();
            rule[field] = value;
            schema(everybody(), rule)
        };
        let log = "/api/v1/namespaces/a/pods/p/log";
        let only_pods = of("resources", serde_json::json!(["pods"]));
        check(&only_pods, &user, pods, true);
        check(&only_pods, &user, log, false);
        let only_logs = of("resources", serde_json::json!(["pods/log"]));
        check(&only_logs, &user, log, true);
        check(&only_logs, &user, pods, false);
        check(&only_logs, &user, "/api/v1/namespaces/a/pods/p/status", false);
        let not_of_cluster = of("clusterScope", Value::Bool(false));
        check(&not_of_cluster, &user, "/api/v1/nodes", false);
        check(&not_of_cluster, &user, pods, true);
        let of_b = of("namespaces", serde_json::json!(["b"]));
        check(&of_b, &user, pods, false);
        check(&of_b, &user, "/api/v1/nodes", true);
        check(&of("verbs", serde_json::json!(["create"])), &user, pods, false);
        check(&of("apiGroups", serde_json::json!(["apps"])), &user, pods, false);
    }
}
