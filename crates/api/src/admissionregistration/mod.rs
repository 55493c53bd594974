//! The group `admissionregistration.k8s.io`: webhooks and policies of admission.

pub mod binding;
pub mod matching;
pub mod policy;
mod url;
pub mod webhook;

pub use binding::{MUTATING_ADMISSION_POLICY_BINDING, VALIDATING_ADMISSION_POLICY_BINDING};
pub use policy::{MUTATING_ADMISSION_POLICY, VALIDATING_ADMISSION_POLICY};
pub use webhook::{MUTATING_WEBHOOK_CONFIGURATION, VALIDATING_WEBHOOK_CONFIGURATION};

const GROUP: &str = "admissionregistration.k8s.io";
