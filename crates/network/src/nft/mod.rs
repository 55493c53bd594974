//! What all parts of the network that have nftables tables share: connections whose changes are known to be skiff's own
//! and the notice of changes that are not (`watch`), and the comparison of a table with what it should be (`standing`).

mod standing;
mod watch;

pub(crate) use standing::{Elements, Look, Standing, element_of, elements_of};
pub(crate) use watch::{OwnConnection, Touched, Watch};
