//! The kinds of Gateway API, as far as they are acted on. Statuses stay JSON: most of what is in them is others'.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use serde::Deserialize;
use serde_json::Value;

use super::GROUP;

macro_rules! kind {
    ($name:ident, $spec:ty, $scope:ty, $group:expr, $version:literal, $kind:literal, $plural:literal) => {
        #[derive(Clone, Debug, Default, Deserialize)]
        pub struct $name {
            #[serde(default)]
            pub metadata: ObjectMeta,
            #[serde(default)]
            pub spec: $spec,
            // Grants have none.
            #[serde(default)]
            #[allow(dead_code)]
            pub status: Option<Value>,
        }

        impl kube::Resource for $name {
            type DynamicType = ();
            type Scope = $scope;

            fn kind(_: &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group(_: &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version(_: &()) -> Cow<'_, str> {
                $version.into()
            }

            fn plural(_: &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

kind!(
    GatewayClass,
    GatewayClassSpec,
    ClusterResourceScope,
    GROUP,
    "v1",
    "GatewayClass",
    "gatewayclasses"
);
kind!(
    Gateway,
    GatewaySpec,
    NamespaceResourceScope,
    GROUP,
    "v1",
    "Gateway",
    "gateways"
);
kind!(
    HttpRoute,
    HttpRouteSpec,
    NamespaceResourceScope,
    GROUP,
    "v1",
    "HTTPRoute",
    "httproutes"
);
kind!(
    GrpcRoute,
    GrpcRouteSpec,
    NamespaceResourceScope,
    GROUP,
    "v1",
    "GRPCRoute",
    "grpcroutes"
);
kind!(
    TlsRoute,
    TlsRouteSpec,
    NamespaceResourceScope,
    GROUP,
    "v1",
    "TLSRoute",
    "tlsroutes"
);
// Of all versions that users may have installed, this one is served by the most.
kind!(
    ReferenceGrant,
    ReferenceGrantSpec,
    NamespaceResourceScope,
    GROUP,
    "v1beta1",
    "ReferenceGrant",
    "referencegrants"
);

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewayClassSpec {
    pub controller_name: String,
    pub parameters_ref: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewaySpec {
    pub gateway_class_name: String,
    pub listeners: Vec<Listener>,
    pub addresses: Vec<GatewayAddress>,
    pub infrastructure: Option<Infrastructure>,
    pub tls: Option<GatewayTls>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Infrastructure {
    pub parameters_ref: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct GatewayTls {
    pub backend: Option<Value>,
    pub frontend: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GatewayAddress {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    pub value: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Listener {
    pub name: String,
    pub hostname: Option<String>,
    pub port: u16,
    pub protocol: String,
    pub tls: Option<ListenerTls>,
    pub allowed_routes: Option<AllowedRoutes>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListenerTls {
    pub mode: Option<String>,
    pub certificate_refs: Vec<ObjectRef>,
    pub options: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct AllowedRoutes {
    pub namespaces: Option<RouteNamespaces>,
    pub kinds: Vec<RouteKind>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteNamespaces {
    pub from: Option<String>,
    pub selector: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteKind {
    pub group: Option<String>,
    pub kind: String,
}

/// A Secret, or the Service of a backend.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ObjectRef {
    pub group: Option<String>,
    pub kind: Option<String>,
    pub name: String,
    pub namespace: Option<String>,
    pub port: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ParentRef {
    pub group: Option<String>,
    pub kind: Option<String>,
    pub namespace: Option<String>,
    pub name: String,
    pub section_name: Option<String>,
    pub port: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRouteSpec {
    /// As JSON, because statuses repeat them.
    pub parent_refs: Vec<Value>,
    pub hostnames: Vec<String>,
    pub rules: Vec<HttpRule>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRule {
    pub matches: Vec<HttpMatch>,
    pub filters: Vec<Filter>,
    pub backend_refs: Vec<BackendRef>,
    pub timeouts: Option<Timeouts>,
    pub retry: Option<RetrySpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpMatch {
    pub path: Option<ValueMatch>,
    pub headers: Vec<NamedMatch>,
    pub query_params: Vec<NamedMatch>,
    pub method: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ValueMatch {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    pub value: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NamedMatch {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    pub name: String,
    pub value: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeouts {
    pub request: Option<String>,
    pub backend_request: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RetrySpec {
    pub attempts: Option<u32>,
    pub backoff: Option<String>,
    pub codes: Vec<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct BackendRef {
    #[serde(flatten)]
    pub object: ObjectRef,
    pub weight: Option<u32>,
    pub filters: Vec<Filter>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Filter {
    #[serde(rename = "type")]
    pub type_: String,
    pub request_header_modifier: Option<HeaderModifier>,
    pub response_header_modifier: Option<HeaderModifier>,
    pub request_mirror: Option<MirrorSpec>,
    pub request_redirect: Option<RedirectSpec>,
    pub url_rewrite: Option<RewriteSpec>,
    pub cors: Option<CorsSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct HeaderModifier {
    pub set: Vec<Header>,
    pub add: Vec<Header>,
    pub remove: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Header {
    pub name: String,
    pub value: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MirrorSpec {
    pub backend_ref: ObjectRef,
    pub percent: Option<u32>,
    pub fraction: Option<Fraction>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Fraction {
    pub numerator: u32,
    pub denominator: Option<u32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RedirectSpec {
    pub scheme: Option<String>,
    pub hostname: Option<String>,
    pub path: Option<PathChange>,
    pub port: Option<u16>,
    pub status_code: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RewriteSpec {
    pub hostname: Option<String>,
    pub path: Option<PathChange>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PathChange {
    pub replace_full_path: Option<String>,
    pub replace_prefix_match: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CorsSpec {
    pub allow_origins: Vec<String>,
    pub allow_credentials: Option<bool>,
    pub allow_methods: Vec<String>,
    pub allow_headers: Vec<String>,
    pub expose_headers: Vec<String>,
    pub max_age: Option<u32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRouteSpec {
    pub parent_refs: Vec<Value>,
    pub hostnames: Vec<String>,
    pub rules: Vec<GrpcRule>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRule {
    pub matches: Vec<GrpcMatch>,
    pub filters: Vec<Filter>,
    pub backend_refs: Vec<BackendRef>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GrpcMatch {
    pub method: Option<GrpcMethod>,
    pub headers: Vec<NamedMatch>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GrpcMethod {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    pub service: Option<String>,
    pub method: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TlsRouteSpec {
    pub parent_refs: Vec<Value>,
    pub hostnames: Vec<String>,
    pub rules: Vec<TlsRule>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TlsRule {
    pub backend_refs: Vec<BackendRef>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ReferenceGrantSpec {
    pub from: Vec<GrantFrom>,
    pub to: Vec<GrantTo>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GrantFrom {
    pub group: String,
    pub kind: String,
    pub namespace: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GrantTo {
    pub group: String,
    pub kind: String,
    pub name: Option<String>,
}
