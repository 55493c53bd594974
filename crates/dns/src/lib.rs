//! Cluster DNS: names of services, their endpoints and pods, by the Kubernetes DNS specification 1.1.0, and the common
//! plugins of CoreDNS by the Corefile of the ConfigMap `kube-system/coredns`. Everything else is forwarded to resolvers.
//!
//! Answers about the cluster are made from informers at the moment of the question, so there is nothing to go stale; those
//! of resolvers are cached. It writes nothing to the API but Events on that ConfigMap.

mod cache;
mod clients;
mod cluster;
mod corefile;
mod follow;
mod forward;
mod gateways;
mod metrics;
mod names;
mod plugins;
mod respond;
mod server;
mod wire;
mod zone;

pub use corefile::default_corefile;
pub use metrics::Metrics;
pub use server::{DnsConfig, Error, Listen, run};

/// What the fuzz targets call.
#[doc(hidden)]
pub mod fuzz {
    use crate::corefile;
    use crate::wire::Forwarded;
    use std::collections::BTreeMap;

    /// Reads a Corefile; the message of its refusal.
    pub fn corefile(text: &str) -> Result<usize, String> {
        let files = BTreeMap::from([("list".to_owned(), "192.0.2.1 a.example.org".to_owned())]);
        let read = corefile::parse(text, &files);
        read.map(|config| config.blocks.len())
            .map_err(|problem| problem.to_string())
    }

    /// What a client of its answer would get of a resolver's message: it answers the question that it came with.
    pub fn forwarded(answer: &[u8], question: &[u8]) -> Option<Vec<u8>> {
        let read = Forwarded::read(answer)?;
        let mut told = read.told(question, Some(7), 1, false)?;
        crate::wire::add_opt(&mut told, 1232, false);
        Some(told)
    }
}
