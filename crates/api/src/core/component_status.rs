//! ComponentStatus: never stored, and on its way out.

use crate::kind::{BASE, Kind};

pub static COMPONENT_STATUS: Kind = Kind {
    kind: "ComponentStatus",
    deprecation: Some("v1 ComponentStatus is deprecated in v1.19+"),
    ..BASE
};
