//! The Metrics API (`metrics.k8s.io`): what `kubectl top` and the horizontal pod autoscaler read. It scrapes the nodes'
//! `/metrics/resource` like metrics-server, keeps the last two readings, and answers from them.
//!
//! It is a client of the API like any other component, and reaches nodes by the network only. Requests come to it
//! through the API server, which has decided by then who may ask; if somebody installs metrics-server, their
//! APIService takes the requests there instead.

mod api;
mod documents;
mod points;
mod registration;
mod scrape;
mod table;
mod text;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use http_body_util::Full;
use skiff_client::{Client, InformerFactory};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use api::{Listers, State};
use registration::Registration;
use scrape::Scraper;

pub const GROUP: &str = "metrics.k8s.io";
pub const VERSION: &str = "v1beta1";
/// The component's own identity.
pub const NAMESPACE: &str = "kube-system";
pub const SERVICE_ACCOUNT: &str = "skiff-metrics";
/// On the APIService that is ours.
pub const COMPONENT_LABEL: &str = "skiff.dev/component";

/// metrics-server's `--metric-resolution` as its manifests set it.
const RESOLUTION: Duration = Duration::from_secs(15);
/// A node that was read once is read again after this, so that `kubectl top` works soon after a start.
const FIRST_WINDOW: Duration = Duration::from_secs(5);
/// How often, and how long after the start, the first node is looked for.
const FIRST_LOOK: Duration = Duration::from_secs(1);
const WARM_UP: Duration = Duration::from_secs(60);

/// The handler of the API, which outlives a restart of the component. Clones share it.
#[derive(Clone, Default)]
pub struct MetricsApi(Arc<State>);

impl MetricsApi {
    pub fn answer(&self, request: &Parts) -> Response<Full<Bytes>> {
        self.0.answer(request)
    }
}

#[derive(Clone)]
pub struct MetricsConfig {
    pub client: Client,
    /// The authority of the nodes' serving certificates; a renewed one is used from the next scrape on.
    pub ca: watch::Receiver<String>,
}

/// Scrapes until `shutdown`.
pub async fn run(config: MetricsConfig, api: MetricsApi, shutdown: CancellationToken) {
    let factory = InformerFactory::new(config.client.clone(), shutdown.clone());
    let listers = Arc::new(Listers {
        nodes: factory.informer(),
        pods: factory.informer(),
    });
    let ready = async {
        listers.nodes.synced().await;
        listers.pods.synced().await;
    };
    if shutdown.run_until_cancelled(ready).await.is_none() {
        return;
    }
    *api.0.listers.lock() = Some(listers.clone());
    let mut registration = Registration::new(config.client.clone());
    let scraper = Scraper::new(config.client, config.ca);
    let began = Instant::now();
    loop {
        let round = Instant::now();
        let work = async {
            registration.ensure().await;
            let batch = scraper.scrape(listers.nodes.list(), RESOLUTION).await;
            api.0.points.write().store(batch, RESOLUTION);
            let progress = api.0.points.read().progress();
            tokio::time::sleep_until(round + pause(progress, began.elapsed())).await;
        };
        if shutdown.run_until_cancelled(work).await.is_none() {
            return;
        }
    }
}

/// How long after the begin of a scrape the next one is due.
fn pause((found, once): (bool, bool), running: Duration) -> Duration {
    match (found, once) {
        (false, _) if running < WARM_UP => FIRST_LOOK,
        (true, true) => FIRST_WINDOW,
        _ => RESOLUTION,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_come_soon() {
        let soon = Duration::from_secs(3);
        assert_eq!(pause((false, false), soon), FIRST_LOOK);
        assert_eq!(pause((true, true), soon), FIRST_WINDOW);
        assert_eq!(pause((true, false), soon), RESOLUTION);
        assert_eq!(pause((false, false), WARM_UP), RESOLUTION);
    }
}
