//! ServiceAccounts.

use crate::kind::{AGE, BASE, Kind, NAME};
use crate::row;

pub static SERVICE_ACCOUNT: Kind = Kind {
    kind: "ServiceAccount",
    columns: &[NAME, AGE],
    row: row::name_and_age,
    ..BASE
};
