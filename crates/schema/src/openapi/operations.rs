//! The operations of the API: which paths there are, what may be done there, with which parameters.

use super::definitions::meta;
use super::{Resource, Subresource};
use crate::types::{Scalar, Schema, Shape, TypeId};

pub(super) struct Path {
    pub path: String,
    pub operations: Vec<Operation>,
}

#[derive(Debug, Clone)]
pub(super) struct Operation {
    pub method: &'static str,
    pub id: String,
    pub tag: String,
    /// `x-kubernetes-action`; empty where there is no kind.
    pub action: &'static str,
    pub gvk: Option<(String, String, String)>,
    /// The kind of the resource that the path names, also where `gvk` is that of a subresource.
    pub object: String,
    pub subresource: String,
    /// Whether the resource of a list can be watched.
    pub watchable: bool,
    pub parameters: Vec<Parameter>,
    pub body: Option<Body>,
    /// The type of the answer; `None` is plain text.
    pub answer: Option<String>,
    pub codes: &'static [u16],
    pub media: Media,
}

#[derive(Debug, Clone)]
pub(super) struct Body {
    pub type_name: String,
    pub required: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parameter {
    pub name: String,
    pub location: &'static str,
    pub type_name: &'static str,
}

/// Which media types an operation speaks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Media {
    Object,
    Watchable,
    Connect,
    Log,
    Discovery,
    JsonOnly,
    OpenIdConfiguration,
    OpenIdKeys,
}

impl Path {
    pub fn references(&self) -> Vec<String> {
        let of = |operation: &Operation| {
            operation
                .answer
                .clone()
                .into_iter()
                .chain(operation.body.as_ref().map(|body| body.type_name.clone()))
        };
        self.operations.iter().flat_map(of).collect()
    }
}

const LIST: &[(&str, &str)] = &[
    ("allowWatchBookmarks", "boolean"),
    ("continue", "string"),
    ("fieldSelector", "string"),
    ("labelSelector", "string"),
    ("limit", "integer"),
    ("resourceVersion", "string"),
    ("resourceVersionMatch", "string"),
    ("sendInitialEvents", "boolean"),
    ("shardSelector", "string"),
    ("timeoutSeconds", "integer"),
    ("watch", "boolean"),
];
const WRITE: &[(&str, &str)] = &[
    ("dryRun", "string"),
    ("fieldManager", "string"),
    ("fieldValidation", "string"),
];
const PATCH: &[(&str, &str)] = &[
    ("dryRun", "string"),
    ("fieldManager", "string"),
    ("fieldValidation", "string"),
    ("force", "boolean"),
];
const DELETE: &[(&str, &str)] = &[
    ("dryRun", "string"),
    ("gracePeriodSeconds", "integer"),
    ("ignoreStoreReadErrorWithClusterBreakingPotential", "boolean"),
    ("orphanDependents", "boolean"),
    ("propagationPolicy", "string"),
];
const DELETE_COLLECTION: &[(&str, &str)] = &[
    ("continue", "string"),
    ("dryRun", "string"),
    ("fieldSelector", "string"),
    ("gracePeriodSeconds", "integer"),
    ("ignoreStoreReadErrorWithClusterBreakingPotential", "boolean"),
    ("labelSelector", "string"),
    ("limit", "integer"),
    ("orphanDependents", "boolean"),
    ("propagationPolicy", "string"),
    ("resourceVersion", "string"),
    ("resourceVersionMatch", "string"),
    ("sendInitialEvents", "boolean"),
    ("shardSelector", "string"),
    ("timeoutSeconds", "integer"),
];

pub(super) fn root(group: &str, version: &str) -> String {
    if group.is_empty() {
        format!("/api/{version}")
    } else {
        format!("/apis/{group}/{version}")
    }
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_uppercase().chain(chars).collect())
        .unwrap_or_default()
}

/// `rbac.authorization.k8s.io` is `RbacAuthorization` in operation ids.
fn camel_group(group: &str) -> String {
    if group.is_empty() {
        return "Core".to_string();
    }
    group
        .trim_end_matches(".k8s.io")
        .split('.')
        .map(capital)
        .collect()
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_lowercase().chain(chars).collect())
        .unwrap_or_default()
}

fn query(list: &[(&str, &'static str)]) -> Vec<Parameter> {
    list.iter()
        .map(|(name, type_name)| Parameter {
            name: name.to_string(),
            location: "query",
            type_name,
        })
        .collect()
}

struct Maker<'a> {
    schema: &'a Schema,
    paths: Vec<Path>,
}

/// All paths, sorted.
pub(super) fn paths(schema: &Schema, resources: &[Resource<'_>]) -> Vec<Path> {
    let mut maker = Maker {
        schema,
        paths: Vec::new(),
    };
    maker.discovery(resources);
    for resource in resources {
        maker.resource(resource);
        for subresource in &resource.subresources {
            maker.subresource(resource, subresource);
        }
    }
    maker.paths.sort_by(|a, b| a.path.cmp(&b.path));
    maker.paths
}

impl Maker<'_> {
    fn push(&mut self, path: String, operations: Vec<Operation>) {
        if !operations.is_empty() {
            self.paths.push(Path { path, operations });
        }
    }

    fn name(&self, id: TypeId) -> String {
        self.schema.get(id).name.to_string()
    }

    fn discovery(&mut self, resources: &[Resource<'_>]) {
        let get = |id: String, tag: &str, answer: &str, media| Operation {
            method: "get",
            id,
            tag: tag.to_string(),
            action: "",
            gvk: None,
            object: String::new(),
            subresource: String::new(),
            watchable: false,
            parameters: Vec::new(),
            body: None,
            answer: Some(answer.to_string()),
            codes: &[200],
            media,
        };
        let versions = meta("APIVersions");
        self.push(
            "/api/".into(),
            vec![get(
                "getCoreAPIVersions".into(),
                "core",
                &versions,
                Media::Discovery,
            )],
        );
        let groups = meta("APIGroupList");
        self.push(
            "/apis/".into(),
            vec![get("getAPIVersions".into(), "apis", &groups, Media::Discovery)],
        );
        for (path, id, tag, media) in [
            (
                "/.well-known/openid-configuration/",
                "getServiceAccountIssuerOpenIDConfiguration",
                "WellKnown",
                Media::OpenIdConfiguration,
            ),
            (
                "/openid/v1/jwks/",
                "getServiceAccountIssuerOpenIDKeyset",
                "openid",
                Media::OpenIdKeys,
            ),
        ] {
            let mut operation = get(id.into(), tag, "", media);
            operation.answer = None;
            self.push(path.into(), vec![operation]);
        }
        let info = "io.k8s.apimachinery.pkg.version.Info";
        self.push(
            "/version/".into(),
            vec![get("getCodeVersion".into(), "version", info, Media::JsonOnly)],
        );
        let mut seen: Vec<(&str, &str)> = Vec::new();
        for resource in resources {
            let tag = lower_first(&camel_group(resource.group));
            if !resource.group.is_empty() && !seen.iter().any(|(group, _)| *group == resource.group) {
                let id = format!("get{}APIGroup", camel_group(resource.group));
                let operation = get(id, &tag, &meta("APIGroup"), Media::Discovery);
                self.push(format!("/apis/{}/", resource.group), vec![operation]);
            }
            if !seen.contains(&(resource.group, resource.version)) {
                seen.push((resource.group, resource.version));
                let id = format!(
                    "get{}{}APIResources",
                    camel_group(resource.group),
                    capital(resource.version)
                );
                let tag = format!("{tag}_{}", resource.version);
                let operation = get(id, &tag, &meta("APIResourceList"), Media::Object);
                self.push(
                    format!("{}/", root(resource.group, resource.version)),
                    vec![operation],
                );
            }
        }
    }

    /// An operation on a kind, with the parameters that its path implies.
    fn operation(
        &self,
        resource: &Resource<'_>,
        path: &str,
        method: &'static str,
        action: &'static str,
    ) -> Operation {
        let mut parameters = Vec::new();
        for name in ["name", "namespace", "path"] {
            if path.contains(&format!("{{{name}}}")) {
                parameters.push(Parameter {
                    name: name.to_string(),
                    location: "path",
                    type_name: "string",
                });
            }
        }
        if action != "connect" {
            parameters.extend(query(&[("pretty", "string")]));
        }
        Operation {
            method,
            id: String::new(),
            tag: format!(
                "{}_{}",
                lower_first(&camel_group(resource.group)),
                resource.version
            ),
            action,
            gvk: Some((
                resource.group.into(),
                resource.version.into(),
                resource.kind.into(),
            )),
            object: resource.kind.into(),
            subresource: String::new(),
            watchable: resource.verbs.contains(&"watch"),
            parameters,
            body: None,
            answer: None,
            codes: &[200],
            media: Media::Object,
        }
    }

    fn resource(&mut self, resource: &Resource<'_>) {
        let root = root(resource.group, resource.version);
        let prefix = format!("{}{}", camel_group(resource.group), capital(resource.version));
        let scope = if resource.namespaced { "Namespaced" } else { "" };
        let namespace = if resource.namespaced {
            "/namespaces/{namespace}"
        } else {
            ""
        };
        let (kind, plural) = (resource.kind, resource.plural);
        let can = |verb: &str| resource.verbs.contains(&verb);
        let own = self.name(resource.type_id);
        let list = resource.list_type_id.map(|id| self.name(id));
        let delete_body = Body {
            type_name: meta("DeleteOptions"),
            required: false,
        };
        let body = || {
            Some(Body {
                type_name: own.clone(),
                required: true,
            })
        };

        let collection = format!("{root}{namespace}/{plural}");
        let mut operations = Vec::new();
        if can("list") {
            let mut op = self.operation(resource, &collection, "get", "list");
            op.id = format!("list{prefix}{scope}{kind}");
            op.parameters.extend(query(LIST));
            op.answer = list.clone();
            op.media = Media::Watchable;
            operations.push(op);
        }
        if can("create") {
            let mut op = self.operation(resource, &collection, "post", "post");
            op.id = format!("create{prefix}{scope}{kind}");
            op.parameters.extend(query(WRITE));
            op.body = body();
            op.answer = Some(own.clone());
            op.codes = &[200, 201, 202];
            operations.push(op);
        }
        if can("deletecollection") {
            let mut op = self.operation(resource, &collection, "delete", "deletecollection");
            op.id = format!("delete{prefix}Collection{scope}{kind}");
            op.parameters.extend(query(DELETE_COLLECTION));
            op.body = Some(delete_body.clone());
            op.answer = Some(meta("Status"));
            operations.push(op);
        }
        self.push(collection.clone(), operations);

        let single = format!("{collection}/{{name}}");
        let mut operations = Vec::new();
        if can("get") {
            let mut op = self.operation(resource, &single, "get", "get");
            op.id = format!("read{prefix}{scope}{kind}");
            op.answer = Some(own.clone());
            operations.push(op);
        }
        if can("update") {
            let mut op = self.operation(resource, &single, "put", "put");
            op.id = format!("replace{prefix}{scope}{kind}");
            op.parameters.extend(query(WRITE));
            op.body = body();
            op.answer = Some(own.clone());
            op.codes = &[200, 201];
            operations.push(op);
        }
        if can("patch") {
            let mut op = self.operation(resource, &single, "patch", "patch");
            op.id = format!("patch{prefix}{scope}{kind}");
            op.parameters.extend(query(PATCH));
            op.body = Some(Body {
                type_name: meta("Patch"),
                required: true,
            });
            op.answer = Some(own.clone());
            op.codes = &[200, 201];
            operations.push(op);
        }
        if can("delete") {
            let mut op = self.operation(resource, &single, "delete", "delete");
            op.id = format!("delete{prefix}{scope}{kind}");
            op.parameters.extend(query(DELETE));
            op.body = Some(delete_body);
            op.answer = Some(if resource.returns_deleted_object {
                own.clone()
            } else {
                meta("Status")
            });
            op.codes = &[200, 202];
            operations.push(op);
        }
        self.push(single.clone(), operations);

        if resource.namespaced && can("list") {
            let all = format!("{root}/{plural}");
            let mut op = self.operation(resource, &all, "get", "list");
            op.id = format!("list{prefix}{kind}ForAllNamespaces");
            op.parameters.extend(query(LIST));
            op.answer = list;
            op.media = Media::Watchable;
            self.push(all, vec![op]);
        }
        if can("watch") {
            let mut watch = |path: String, id: String, action: &'static str| {
                let mut op = self.operation(resource, &path, "get", action);
                op.id = id;
                op.parameters.extend(query(LIST));
                op.answer = Some(meta("WatchEvent"));
                op.media = Media::Watchable;
                self.push(path, vec![op]);
            };
            let many = format!("{root}/watch{namespace}/{plural}");
            watch(
                format!("{many}/{{name}}"),
                format!("watch{prefix}{scope}{kind}"),
                "watch",
            );
            watch(many, format!("watch{prefix}{scope}{kind}List"), "watchlist");
            if resource.namespaced {
                let id = format!("watch{prefix}{kind}ListForAllNamespaces");
                watch(format!("{root}/watch/{plural}"), id, "watchlist");
            }
        }
    }

    fn subresource(&mut self, resource: &Resource<'_>, sub: &Subresource<'_>) {
        let root = root(resource.group, resource.version);
        let prefix = format!("{}{}", camel_group(resource.group), capital(resource.version));
        let scope = if resource.namespaced { "Namespaced" } else { "" };
        let namespace = if resource.namespaced {
            "/namespaces/{namespace}"
        } else {
            ""
        };
        let path = format!("{root}{namespace}/{}/{{name}}/{}", resource.plural, sub.name);
        let own = self.name(sub.type_id);
        let title = match sub.name {
            "ephemeralcontainers" => "Ephemeralcontainers".to_string(),
            "portforward" => "Portforward".to_string(),
            other => capital(other),
        };
        let kind = format!("{}{title}", resource.kind);
        let gvk = Some((
            sub.group.to_string(),
            sub.version.to_string(),
            sub.kind.to_string(),
        ));
        if sub.kind.ends_with("Options") {
            return self.connect(resource, sub, &path, &prefix, scope, &kind);
        }
        let mut operations = Vec::new();
        for verb in sub.verbs {
            let (method, action, word) = match *verb {
                "get" => ("get", "get", "read"),
                "update" => ("put", "put", "replace"),
                "patch" => ("patch", "patch", "patch"),
                "create" => ("post", "post", "create"),
                _ => continue,
            };
            let mut op = self.operation(resource, &path, method, action);
            op.id = format!("{word}{prefix}{scope}{kind}");
            op.gvk.clone_from(&gvk);
            op.subresource = sub.name.to_string();
            op.answer = Some(own.clone());
            match *verb {
                "get" if sub.name == "log" => {
                    op.answer = None;
                    op.media = Media::Log;
                    op.parameters.extend(self.options_of("PodLogOptions"));
                }
                "get" => {}
                "patch" => {
                    op.parameters.extend(query(PATCH));
                    op.body = Some(Body {
                        type_name: meta("Patch"),
                        required: true,
                    });
                    op.codes = &[200, 201];
                }
                verb => {
                    op.parameters.extend(query(WRITE));
                    op.body = Some(Body {
                        type_name: own.clone(),
                        required: true,
                    });
                    op.codes = if verb == "create" {
                        &[200, 201, 202]
                    } else {
                        &[200, 201]
                    };
                }
            }
            operations.push(op);
        }
        self.push(path, operations);
    }

    /// Streams and proxies: every method that the verbs allow, and the fields of the options as query.
    fn connect(
        &mut self,
        resource: &Resource<'_>,
        sub: &Subresource<'_>,
        path: &str,
        prefix: &str,
        scope: &str,
        kind: &str,
    ) {
        let methods: &[&'static str] = if sub.name == "proxy" {
            &["get", "post", "put", "patch", "delete", "head", "options"]
        } else {
            &["get", "post"]
        };
        let mut both = vec![(path.to_string(), "")];
        if sub.name == "proxy" {
            both.push((format!("{path}/{{path}}"), "WithPath"));
        }
        for (path, ending) in both {
            let mut operations = Vec::new();
            for method in methods {
                let mut op = self.operation(resource, &path, method, "connect");
                op.id = format!("connect{prefix}{}{scope}{kind}{ending}", capital(method));
                op.gvk = Some((sub.group.into(), sub.version.into(), sub.kind.into()));
                op.subresource = sub.name.to_string();
                op.media = Media::Connect;
                op.parameters.extend(self.options_of(sub.kind));
                operations.push(op);
            }
            self.push(path, operations);
        }
    }

    fn options_of(&self, kind: &str) -> Vec<Parameter> {
        let Some(id) = self.schema.by_gvk("", "v1", kind) else {
            return Vec::new();
        };
        let fields = self.schema.get(id).fields.iter();
        fields
            .filter(|field| !matches!(&*field.name, "kind" | "apiVersion" | "sinceTime"))
            .map(|field| Parameter {
                name: field.name.to_string(),
                location: "query",
                type_name: match &field.shape {
                    Shape::Scalar(Scalar::Bool, _) => "boolean",
                    Shape::Scalar(Scalar::Int32 | Scalar::Int64 | Scalar::Int, _) => "integer",
                    Shape::List(list) if matches!(list.of, Shape::Scalar(Scalar::Int32, _)) => "integer",
                    _ => "string",
                },
            })
            .collect()
    }
}
