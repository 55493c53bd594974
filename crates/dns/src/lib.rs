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

    /// A question as it comes by a socket, to a server that knows nothing.
    pub fn question(bytes: &[u8]) -> Option<Vec<u8>> {
        use crate::respond::{Active, Client, Responder};
        use std::sync::{Arc, LazyLock};
        static RESPONDER: LazyLock<Option<Arc<Responder<crate::zone::Nothing>>>> = LazyLock::new(|| {
            let metrics = Arc::new(crate::Metrics::new(&skiff_prometheus::Registry::new()));
            let text = ". {\n kubernetes cluster.local\n rewrite name suffix .a .cluster.local answer auto\n template IN TXT b {\n answer \"{{ .Name }} 1 IN TXT {{ .Remote }}\"\n }\n loadbalance\n}";
            let config = corefile::parse(text, &BTreeMap::new()).ok()?;
            let active = Active::new(config, "", &[], &metrics).ok()?;
            Some(Arc::new(Responder::new(crate::zone::Nothing, active, metrics)))
        });
        let client = Client {
            peer: ([10, 0, 0, 1], 53).into(),
            local: None,
            over_tcp: false,
        };
        // Nothing in it waits.
        let answering = RESPONDER.clone()?.respond(bytes.to_vec(), client);
        futures::FutureExt::now_or_never(answering)?
    }

    /// What a client of its answer would get of a resolver's message: it answers the question that it came with.
    pub fn forwarded(answer: &[u8], question: &[u8]) -> Option<Vec<u8>> {
        let read = Forwarded::read(answer)?;
        let mut told = read.told(question, Some(7), 1, false)?;
        crate::wire::add_opt(&mut told, 1232, false);
        Some(told)
    }
}
