//! ServiceAccounts.

use crate::kind::{AGE, BASE, Kind, NAME};
use crate::node::at;
use crate::row;

const ENFORCE_MOUNTABLE: &str = "kubernetes.io/enforce-mountable-secrets";

pub static SERVICE_ACCOUNT: Kind = Kind {
    kind: "ServiceAccount",
    columns: &[NAME, AGE],
    row: row::name_and_age,
    warnings: |new, old| {
        let has = |object| {
            at(object, "metadata.annotations")
                .get(ENFORCE_MOUNTABLE)
                .is_some()
        };
        if !has(new) || old.is_some_and(has) {
            return Vec::new();
        }
        vec![format!(
            "metadata.annotations[{ENFORCE_MOUNTABLE}]: deprecated in v1.32+; prefer separate namespaces to isolate access to mounted secrets"
        )]
    },
    ..BASE
};
