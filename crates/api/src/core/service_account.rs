//! ServiceAccounts.

use serde_json::{Value, json};

use crate::kind::{AGE, BASE, Kind, NAME};
use crate::node::{at, text};
use crate::{row, walk};

const ENFORCE_MOUNTABLE: &str = "kubernetes.io/enforce-mountable-secrets";

pub static SERVICE_ACCOUNT: Kind = Kind {
    kind: "ServiceAccount",
    prepare_create: clean_secrets,
    prepare_update: |new, _| clean_secrets(new),
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

/// Of a secret's reference only the name counts.
fn clean_secrets(object: &mut Value) {
    walk::each(object, "secrets[]", &mut |secret| {
        *secret = match text(secret, "name") {
            "" => json!({}),
            name => json!({ "name": name }),
        };
    });
}
