//! Custom resources. A CustomResourceDefinition that is accepted becomes resources of the registry, one a
//! served version, which then go through the same verbs as built-in kinds.
//!
//! ```text
//! controller  follows the definitions, settles their names, makes and unmakes their resources
//! definition  a definition, read: versions, schemas, columns, paths
//! custom      the rules of one version
//! strategy    the same, as the verbs ask for them
//! decode      bodies and patches: pruned, defaulted, checked for unknown fields
//! columns     tables by JSONPath      scale  the scale subresource
//! convert     other versions, by a webhook
//! ```

pub mod api_services;
mod columns;
mod controller;
mod convert;
mod custom;
mod decode;
mod definition;
mod facts;
mod names;
pub mod openapi;
mod retire;
mod scale;
pub mod select;
mod strategy;

pub use controller::start;
pub use custom::CustomVersion;

pub const GROUP: &str = "apiextensions.k8s.io";
pub const PLURAL: &str = "customresourcedefinitions";
/// Holds a definition until its objects are gone.
pub const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";
