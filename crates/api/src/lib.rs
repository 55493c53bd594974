//! The built-in kinds: the fact tables, and one file a kind with what is special to it (defaults,
//! validation, strategy, selectable fields, table columns), over `serde_json::Value`.
//! No I/O and no clock here.

pub mod admissionregistration;
pub mod apiextensions;
pub mod apiregistration;
pub mod apps;
pub mod authentication;
pub mod authorization;
pub mod autoscaling;
pub mod batch;
pub mod certificates;
pub mod coordination;
pub mod core;
pub mod discovery;
pub mod equality;
pub mod errors;
pub mod facts;
pub mod flowcontrol;
pub mod internal;
pub mod kind;
pub mod net;
pub mod networking;
pub mod node;
pub mod node_k8s_io;
pub mod object_meta;
pub mod policy;
pub mod rbac;
pub mod resource;
pub mod row;
pub mod scheduling;
pub mod storage;
pub mod storagemigration;
pub mod strategy;
mod unified;
pub mod walk;

/// What a column of a kind's Table says of itself.
pub use skiff_descriptions::column as column_description;

pub use kind::{Column, Graceful, Kind, kind};

/// Every kind that has rules of its own. Adding one is a file and a line here.
pub static KINDS: &[&Kind] = &[
    &core::component_status::COMPONENT_STATUS,
    &core::config::CONFIG_MAP,
    &core::endpoints::ENDPOINTS,
    &core::event::EVENT,
    &core::event::EVENTS_EVENT,
    &core::quota::LIMIT_RANGE,
    &core::namespace::NAMESPACE,
    &core::node::NODE,
    &core::persistent_volume::PERSISTENT_VOLUME,
    &core::claim::PERSISTENT_VOLUME_CLAIM,
    &core::pod::POD,
    &core::replication_controller::POD_TEMPLATE,
    &core::replication_controller::REPLICATION_CONTROLLER,
    &core::quota::RESOURCE_QUOTA,
    &core::config::SECRET,
    &core::service::SERVICE,
    &core::service_account::SERVICE_ACCOUNT,
    &apps::controller_revision::CONTROLLER_REVISION,
    &apps::daemon_set::DAEMON_SET,
    &apps::deployment::DEPLOYMENT,
    &apps::replica_set::REPLICA_SET,
    &apps::stateful_set::STATEFUL_SET,
    &admissionregistration::MUTATING_ADMISSION_POLICY,
    &admissionregistration::MUTATING_ADMISSION_POLICY_BINDING,
    &admissionregistration::MUTATING_WEBHOOK_CONFIGURATION,
    &admissionregistration::VALIDATING_ADMISSION_POLICY,
    &admissionregistration::VALIDATING_ADMISSION_POLICY_BINDING,
    &admissionregistration::VALIDATING_WEBHOOK_CONFIGURATION,
    &apiextensions::CUSTOM_RESOURCE_DEFINITION,
    &apiregistration::API_SERVICE,
    &authentication::TOKEN_REQUEST,
    &autoscaling::HORIZONTAL_POD_AUTOSCALER,
    &batch::cron_job::CRON_JOB,
    &batch::job::JOB,
    &certificates::CERTIFICATE_SIGNING_REQUEST,
    &certificates::CLUSTER_TRUST_BUNDLE,
    &certificates::POD_CERTIFICATE_REQUEST,
    &coordination::LEASE,
    &discovery::ENDPOINT_SLICE,
    &flowcontrol::FLOW_SCHEMA,
    &flowcontrol::PRIORITY_LEVEL_CONFIGURATION,
    &networking::address::IP_ADDRESS,
    &networking::address::SERVICE_CIDR,
    &networking::ingress::INGRESS,
    &networking::ingress::INGRESS_CLASS,
    &networking::network_policy::NETWORK_POLICY,
    &node_k8s_io::RUNTIME_CLASS,
    &policy::POD_DISRUPTION_BUDGET,
    &rbac::CLUSTER_ROLE,
    &rbac::CLUSTER_ROLE_BINDING,
    &rbac::ROLE,
    &rbac::ROLE_BINDING,
    &resource::DEVICE_CLASS,
    &resource::RESOURCE_CLAIM,
    &resource::RESOURCE_CLAIM_TEMPLATE,
    &resource::RESOURCE_SLICE,
    &scheduling::PRIORITY_CLASS,
    &scheduling::POD_GROUP,
    &scheduling::WORKLOAD,
    &storage::CSI_DRIVER,
    &storage::CSI_NODE,
    &storage::CSI_STORAGE_CAPACITY,
    &storage::STORAGE_CLASS,
    &storage::VOLUME_ATTACHMENT,
    &storage::VOLUME_ATTRIBUTES_CLASS,
    &storagemigration::STORAGE_VERSION_MIGRATION,
];
