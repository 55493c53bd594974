//! The group `storage.k8s.io`.

pub mod csi;
pub mod storage_class;
pub mod volume_attachment;

pub use csi::{CSI_DRIVER, CSI_NODE, CSI_STORAGE_CAPACITY};
pub use storage_class::{STORAGE_CLASS, VOLUME_ATTRIBUTES_CLASS};
pub use volume_attachment::VOLUME_ATTACHMENT;

const GROUP: &str = "storage.k8s.io";
