//! Where cluster DNS listens on a node: the gateways of its pod networks, which the Node object says and may change.

use k8s_openapi::api::core::v1::Node;
use skiff_client::{Informer, InformerFactory};
use skiff_meta::net::Cidr;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const PORT: u16 = 53;

/// The gateways of a node's pod networks, which its Node says.
pub(crate) struct Gateways {
    node: Informer<Node>,
    news: Arc<Notify>,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Gateways {
    pub(crate) fn follow(factory: &InformerFactory, name: &str) -> Gateways {
        let node = factory.filtered::<Node>(None, Some(&format!("metadata.name={name}")));
        let news = Arc::new(Notify::new());
        let tell = news.clone();
        node.subscribe(move |_| tell.notify_one());
        Gateways {
            node,
            news,
            addresses: Vec::new(),
        }
    }

    fn current(&self) -> Vec<SocketAddr> {
        let nodes = self.node.list();
        let cidrs = nodes.iter().flat_map(|node| {
            let spec = node.spec.as_ref();
            spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default()
        });
        cidrs
            .filter_map(|cidr| Some(SocketAddr::new(cidr.parse::<Cidr>().ok()?.nth(1)?, PORT)))
            .collect()
    }

    /// Waits until the node has networks; `None` at shutdown.
    pub(crate) async fn known(mut self, shutdown: &CancellationToken) -> Option<Gateways> {
        loop {
            self.addresses = self.current();
            if !self.addresses.is_empty() {
                return Some(self);
            }
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = self.news.notified() => {}
            }
        }
    }

    /// Waits until the node has other networks, as one has that was deleted and registered again.
    pub(crate) async fn changed(gateways: Option<Gateways>) {
        let Some(gateways) = gateways else {
            return std::future::pending().await;
        };
        loop {
            gateways.news.notified().await;
            let now = gateways.current();
            if !now.is_empty() && now != gateways.addresses {
                return;
            }
        }
    }
}
