//! The group `authentication.k8s.io`: TokenRequests, which are answered and never stored.

use crate::errors::Errors;
use crate::kind::{BASE, Kind};
use crate::node::Node;
use crate::walk;

pub static TOKEN_REQUEST: Kind = Kind {
    group: "authentication.k8s.io",
    kind: "TokenRequest",
    default: |_, object| {
        if let Some(spec) = walk::object(object, "spec") {
            walk::pointer(spec, "expirationSeconds", 3600);
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let seconds = root.field("spec.expirationSeconds");
        if seconds.int().is_some_and(|n| n < 600) {
            errors.invalid(&seconds, "may not specify a duration less than 10 minutes");
        }
        if seconds.int().is_some_and(|n| n > 1 << 32) {
            errors.invalid(&seconds, "may not specify a duration larger than 2^32 seconds");
        }
        errors.into_vec()
    },
    ..BASE
};
