//! (being written)
pub struct Etcd;
