//! The group `resource.k8s.io`: devices, and claims to them.

pub mod claim;
mod claim_status;
pub mod slice;

pub use claim::{DEVICE_CLASS, RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE};
pub use slice::RESOURCE_SLICE;

const GROUP: &str = "resource.k8s.io";
