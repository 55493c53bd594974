//! The front door: HTTPS and in-process requests, from authentication to the answer. State is the
//! registry's; the server itself keeps nothing that would be missed after a restart.
//! Read `chain.rs` first: it is the way of a request. Kinds are named only in `hooks`,
//! `subresources`, `crd`, `aggregation`, `dynamic` and `flow`.

mod aggregation;
mod audit;
mod body;
mod chain;
mod compress;
mod connections;
mod content;
mod cork;
mod crd;
mod debug_pages;
mod decode;
mod discovery;
mod dynamic;
mod flow;
mod gate;
mod health;
mod held;
mod hooks;
mod http1;
mod list_body;
mod listen;
mod metrics;
mod negotiate;
mod openapi;
mod paths;
mod protobuf;
mod proxy;
mod query;
mod request_info;
mod resource_paths;
mod respond;
mod server;
mod service;
mod status_page;
mod streams;
mod subresources;
mod table;
mod trace_report;
mod verbs;
mod version;
mod warnings;
mod webhook_client;
mod webhook_target;

pub use audit::{
    AuditConfig, AuditError, LogOptions, Mode as AuditMode, Policy as AuditPolicy,
    WebhookOptions as AuditWebhookOptions,
};
pub use body::{Answer, Body, BoxError};
pub use connections::Limits;
pub use health::HealthCheck;
pub use proxy::LocalApi;
pub use request_info::RequestInfo;
pub use server::{Authentication, ClientCertificates, Server, ServerConfig, ServiceAccountKey, StartError};
pub use service::InProcess;
pub use subresources::KubeletClient;
pub use version::Version;
