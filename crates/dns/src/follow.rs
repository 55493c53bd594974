//! Keeps the configuration up to date: the Corefile of the ConfigMap `kube-system/coredns`, and the node's resolv.conf.
//!
//! A Corefile that is refused changes nothing: the last good one stays, and an Event on the ConfigMap says why.

use crate::corefile::{self, Config, Problem};
use crate::metrics::Metrics;
use crate::respond::{Active, Responder};
use crate::zone::Records;
use hickory_proto::rr::Name;
use k8s_openapi::api::core::v1::ConfigMap;
use skiff_client::{EventRecorder, Informer, InformerFactory, reference};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};

const NAMESPACE: &str = "kube-system";
const NAME: &str = "coredns";
const KEY: &str = "Corefile";
/// How often resolv.conf is looked at.
const LOOK: Duration = Duration::from_secs(5);
/// After how many looks a resolver that looped is tried again.
const LOOKS_OF_A_LOOP: u32 = 12;
/// How long the start waits for the ConfigMap. It may be that this machine is not allowed to read it.
const FIRST_READ: Duration = Duration::from_secs(3);
/// A resolv.conf is small; what is larger is none.
const MAX_RESOLV_CONF: u64 = 64 * 1024;

/// What a configuration depends on besides its Corefile.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) domain: String,
    pub(crate) resolv_conf: PathBuf,
    pub(crate) own: Vec<IpAddr>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Settings {
    async fn read_resolv_conf(&self) -> String {
        use tokio::io::AsyncReadExt;
        let mut text = String::new();
        if let Ok(file) = tokio::fs::File::open(&self.resolv_conf).await {
            let _ = file.take(MAX_RESOLV_CONF).read_to_string(&mut text).await;
        }
        text
    }

    /// The configuration of a cluster whose ConfigMap has none.
    pub(crate) fn default_config(&self) -> Result<Config, Problem> {
        corefile::parse(&corefile::default_corefile(&self.domain), &BTreeMap::new())
    }

    /// What is served until the ConfigMap has been read.
    pub(crate) async fn first(&self) -> Result<Active, String> {
        let config = self.default_config().map_err(|problem| problem.to_string())?;
        Active::new(config, &self.read_resolv_conf().await, &self.own, &self.metrics)
    }
}

type Data = BTreeMap<String, String>;

pub(crate) struct Follower<R> {
    responder: Arc<Responder<R>>,
    settings: Settings,
    config_map: Informer<ConfigMap>,
    news: Arc<Notify>,
    recorder: EventRecorder,
    /// What was last looked at, good or not; `None` for no Corefile at all.
    seen: Option<Data>,
    resolv_conf: String,
}

impl<R: Records + Send + Sync + 'static> Follower<R> {
    pub(crate) fn new(
        factory: &InformerFactory,
        responder: Arc<Responder<R>>,
        settings: Settings,
        recorder: EventRecorder,
    ) -> Self {
        let config_map = factory.named::<ConfigMap>(NAMESPACE, NAME);
        let news = Arc::new(Notify::new());
        let tell = news.clone();
        config_map.subscribe(move |_| tell.notify_one());
        Follower {
            responder,
            settings,
            config_map,
            news,
            recorder,
            seen: None,
            resolv_conf: String::new(),
        }
    }

    /// Reads everything for the first time.
    pub(crate) async fn start(&mut self) {
        let _ = timeout(FIRST_READ, self.config_map.synced()).await;
        self.resolv_conf = self.settings.read_resolv_conf().await;
        self.load();
        self.look_for_loops();
    }

    /// Follows changes until it is dropped.
    pub(crate) async fn run(&mut self) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut count = 0u32;
        loop {
            let changed = tokio::select! {
                () = self.news.notified() => self.load(),
                _ = looks.tick() => {
                    count = count.wrapping_add(1);
                    let has_loops = self.responder.active().forwards().any(|forward| forward.has_loops());
                    self.refresh().await || (has_loops && count.is_multiple_of(LOOKS_OF_A_LOOP))
                }
            };
            if changed {
                self.look_for_loops();
            }
        }
    }

    /// Puts the Corefile to work if it is another one and a good one; whether it was.
    fn load(&mut self) -> bool {
        let object = self.config_map.get(NAMESPACE, NAME);
        let data = object.as_ref().and_then(|object| object.data.clone());
        let data = data.filter(|data| data.contains_key(KEY));
        if data == self.seen {
            return false;
        }
        self.seen.clone_from(&data);
        let config = match &data {
            Some(data) => corefile::parse(&data[KEY], data),
            None => self.settings.default_config(),
        };
        let made = config.map_err(|problem| problem.to_string()).and_then(|config| {
            let notes = config.notes.clone();
            let settings = &self.settings;
            let active = Active::new(config, &self.resolv_conf, &settings.own, &settings.metrics)?;
            Ok((active, notes))
        });
        self.settings.metrics.loaded(made.is_ok());
        match made {
            Ok((active, notes)) => {
                for note in notes.iter().filter(|_| data.is_some()) {
                    tracing::info!("Corefile: {note}");
                }
                let blocks = active.blocks.len();
                self.responder.activate(active);
                tracing::info!(blocks, from_config_map = data.is_some(), "the Corefile is in use");
                true
            }
            Err(why) => {
                tracing::error!("the Corefile is refused, the last good one stays in use: {why}");
                if let Some(object) = object {
                    let message = format!("The last good Corefile stays in use: {why}");
                    self.recorder
                        .event(&reference(&*object), "Warning", "CorefileRefused", message);
                }
                false
            }
        }
    }

    /// Reads resolv.conf again; whether resolvers have changed.
    async fn refresh(&mut self) -> bool {
        let text = self.settings.read_resolv_conf().await;
        if text == self.resolv_conf {
            return false;
        }
        self.resolv_conf = text;
        let mut changed = false;
        for forward in self.responder.active().forwards() {
            match forward.refresh(&self.resolv_conf) {
                Ok(true) => {
                    tracing::info!(resolvers = ?forward.addresses(), "resolv.conf has changed");
                    changed = true;
                }
                Ok(false) => {}
                Err(why) => tracing::error!("resolv.conf: {why}"),
            }
        }
        changed
    }

    fn look_for_loops(&self) {
        let responder = self.responder.clone();
        // Ends with the answers, or their time.
        tokio::spawn(async move {
            let active = responder.active();
            for block in active.blocks.iter().filter(|block| block.config.find_loops) {
                let zone = block.config.zones.first().cloned().unwrap_or_else(Name::root);
                for forward in &block.forwards {
                    responder.loops.look(forward, &zone).await;
                }
            }
        });
    }
}
