//! The declared types of what admission expressions read.

use std::sync::Arc;

use crate::decl::DeclType;
use crate::types::Type;

pub(super) fn object(name: &str, fields: &[(&str, DeclType)]) -> DeclType {
    let fields = fields
        .iter()
        .map(|(name, kind)| ((*name).to_owned(), Arc::new(kind.clone())))
        .collect();
    DeclType {
        fields: Some(fields),
        ..DeclType::simple(Type::Struct(name.into()), 2, 0)
    }
}

fn scalar(kind: Type) -> DeclType {
    DeclType::simple(kind, 1, 0)
}

fn string() -> DeclType {
    scalar(Type::String)
}

fn list(element: DeclType) -> DeclType {
    DeclType {
        element: Some(Arc::new(element.clone())),
        ..DeclType::simple(Type::list(element.cel), 2, 0)
    }
}

fn map(value: DeclType) -> DeclType {
    DeclType {
        key: Some(Arc::new(string())),
        element: Some(Arc::new(value.clone())),
        ..DeclType::simple(Type::map(Type::String, value.cel), 2, 0)
    }
}

/// A type of the authorization library.
pub(super) fn authorizer(name: &str) -> Type {
    Type::Struct(format!("kubernetes.authorization.{name}").into())
}

/// `request`: the admission request without its objects.
pub(super) fn request() -> Arc<DeclType> {
    let kind = object(
        "kubernetes.GroupVersionKind",
        &[("group", string()), ("version", string()), ("kind", string())],
    );
    let resource = object(
        "kubernetes.GroupVersionResource",
        &[("group", string()), ("version", string()), ("resource", string())],
    );
    let user = object(
        "kubernetes.UserInfo",
        &[
            ("username", string()),
            ("uid", string()),
            ("groups", list(string())),
            ("extra", map(list(string()))),
        ],
    );
    Arc::new(object(
        "kubernetes.AdmissionRequest",
        &[
            ("kind", kind.clone()),
            ("resource", resource.clone()),
            ("subResource", string()),
            ("requestKind", kind),
            ("requestResource", resource),
            ("requestSubResource", string()),
            ("name", string()),
            ("namespace", string()),
            ("operation", string()),
            ("userInfo", user),
            ("dryRun", scalar(Type::Bool)),
            ("options", scalar(Type::Dyn)),
        ],
    ))
}

/// `namespaceObject`: the namespace of the request.
pub(super) fn namespace() -> Arc<DeclType> {
    let time = || scalar(Type::Timestamp);
    let condition = object(
        "kubernetes.NamespaceCondition",
        &[
            ("status", string()),
            ("type", string()),
            ("lastTransitionTime", time()),
            ("message", string()),
            ("reason", string()),
        ],
    );
    let metadata = object(
        "kubernetes.NamespaceMetadata",
        &[
            ("name", string()),
            ("generateName", string()),
            ("namespace", string()),
            ("labels", map(string())),
            ("annotations", map(string())),
            ("UID", string()),
            ("creationTimestamp", time()),
            ("deletionGracePeriodSeconds", scalar(Type::Int)),
            ("deletionTimestamp", time()),
            ("generation", scalar(Type::Int)),
            ("resourceVersion", string()),
            ("finalizers", list(string())),
        ],
    );
    let spec = object("kubernetes.NamespaceSpec", &[("finalizers", list(string()))]);
    let status = object(
        "kubernetes.NamespaceStatus",
        &[("conditions", list(condition)), ("phase", string())],
    );
    Arc::new(object(
        "kubernetes.Namespace",
        &[("metadata", metadata), ("spec", spec), ("status", status)],
    ))
}
