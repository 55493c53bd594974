//! The built-in kinds: the fact tables, and one file a kind with what is special to it (defaults,
//! validation, strategy, selectable fields, table columns), over `serde_json::Value`.
//! No I/O and no clock here.

pub mod apps;
pub mod core;
pub mod errors;
pub mod facts;
pub mod kind;
pub mod net;
pub mod node;
pub mod object_meta;
pub mod row;
pub mod strategy;
pub mod walk;

pub use kind::{Column, Graceful, Kind, kind};

/// Every kind that has rules of its own. Adding one is a file and a line here.
pub static KINDS: &[&Kind] = &[
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
];
