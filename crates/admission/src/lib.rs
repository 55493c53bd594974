//! Admission: the ordered chain of plugins between authorization and the store. Plugins read other
//! objects through [`Lister`] only, and write nothing but the charge to a quota: a write is the registry's business.

mod attributes;
mod chain;
mod configuration;
pub mod plugins;
mod pod_security;

pub use attributes::{Access, AdmissionRecorder, Attributes, Operation, Reinvocation, User};
pub use chain::{Chain, Lister, Plugin};
pub use configuration::{Choice, pod_security as pod_security_configuration};
pub use pod_security::{Configuration as PodSecurityConfiguration, check_names as pod_security_checks};
