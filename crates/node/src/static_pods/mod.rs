//! Static pods: pods of manifests on this machine or behind a URL, which run whether or not there is an API server.
//! The API shows each as a mirror pod ([`mirror`]), which is an image of it and changes nothing here.

mod manifest;
mod mirror;
mod source;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::kubelet::Kubelet;
use crate::pods;
use source::{Files, Report, Url};

/// Upstream's annotations of pods that a kubelet reads from elsewhere than the API.
pub mod annotations {
    /// `file`, `http` or `api`.
    pub const SOURCE: &str = "kubernetes.io/config.source";
    pub const HASH: &str = "kubernetes.io/config.hash";
    pub const SEEN: &str = "kubernetes.io/config.seen";
    pub const MIRROR: &str = "kubernetes.io/config.mirror";
}

/// Where static pods come from.
#[derive(Clone, Debug)]
pub struct StaticPodConfig {
    /// A folder of manifests, or one manifest.
    pub path: Option<PathBuf>,
    pub url: Option<String>,
    /// Sent to the URL.
    pub url_headers: HeaderMap,
    /// How often files are read that were not seen to change.
    pub file_check_frequency: Duration,
    pub http_check_frequency: Duration,
}

impl Default for StaticPodConfig {
    fn default() -> Self {
        StaticPodConfig {
            path: None,
            url: None,
            url_headers: HeaderMap::new(),
            file_check_frequency: Duration::from_secs(20),
            http_check_frequency: Duration::from_secs(20),
        }
    }
}

const FILE: &str = "file";
const HTTP: &str = "http";

/// The pods that the sources want.
pub(crate) struct StaticPods {
    /// By source; a source that has not been read yet is missing. A leaf lock.
    wanted: Mutex<HashMap<&'static str, Vec<Pod>>>,
    /// The sources that have not been read yet.
    unread: watch::Sender<Vec<&'static str>>,
    /// Something changed about static pods or their mirrors.
    pub(crate) changed: Notify,
}

impl StaticPods {
    pub(crate) fn new(config: &StaticPodConfig) -> Self {
        let mut unread = Vec::new();
        unread.extend(config.path.is_some().then_some(FILE));
        unread.extend(config.url.is_some().then_some(HTTP));
        StaticPods {
            wanted: Mutex::default(),
            unread: watch::Sender::new(unread),
            changed: Notify::new(),
        }
    }

    /// Waits until each source was read once: before that nobody can say which pods are missing.
    pub(crate) async fn read(&self) {
        let _ = self.unread.subscribe().wait_for(Vec::is_empty).await;
    }

    fn are_read(&self) -> bool {
        self.unread.borrow().is_empty()
    }

    fn set(&self, source: &'static str, pods: Vec<Pod>) {
        let news = {
            let mut wanted = self.wanted.lock();
            let known = wanted.get(source);
            let news = known != Some(&pods);
            if news {
                wanted.insert(source, pods);
            }
            news
        };
        self.unread.send_if_modified(|unread| {
            let before = unread.len();
            unread.retain(|one| *one != source);
            before != unread.len()
        });
        if news {
            self.changed.notify_one();
        }
    }

    /// What shall run; of two pods of one name the first.
    fn wanted(&self) -> Vec<Pod> {
        let wanted = self.wanted.lock();
        let mut all: Vec<Pod> = Vec::new();
        for pod in [FILE, HTTP]
            .iter()
            .filter_map(|source| wanted.get(source))
            .flatten()
        {
            if !all
                .iter()
                .any(|other| same_name(other, pod) || pods::uid(other) == pods::uid(pod))
            {
                all.push(pod.clone());
            }
        }
        all
    }
}

fn same_name(a: &Pod, b: &Pod) -> bool {
    pods::name(a) == pods::name(b) && pods::namespace(a) == pods::namespace(b)
}

impl Kubelet {
    /// Starts what reads the manifests.
    pub(crate) fn start_static_pods(self: &Arc<Self>, tasks: &mut JoinSet<()>) {
        let config = self.config.static_pods.clone();
        let report = |source: &'static str| -> Report {
            let kubelet = self.clone();
            Box::new(move |pods| kubelet.static_pods.set(source, pods))
        };
        let node_name = self.config.node_name.clone();
        if let Some(path) = config.path {
            let files = Files {
                path,
                node_name: node_name.clone(),
                period: config.file_check_frequency,
            };
            tasks.spawn(files.run(report(FILE), self.shutdown.clone()));
        }
        if let Some(url) = config.url {
            let url = Url {
                url,
                headers: config.url_headers,
                node_name,
                period: config.http_check_frequency,
            };
            tasks.spawn(url.run(report(HTTP), self.shutdown.clone()));
        }
        // Also without a source: mirrors that an earlier life left must go.
        tasks.spawn(self.clone().run_static_pods());
    }

    async fn run_static_pods(self: Arc<Self>) {
        loop {
            self.reconcile_static_pods();
            let pause = self.reconcile_mirrors().await;
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.static_pods.changed.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Starts and ends pods until they are those that the sources want.
    fn reconcile_static_pods(self: &Arc<Self>) {
        let wanted = self.static_pods.wanted();
        let running: Vec<_> = self
            .states()
            .into_iter()
            .filter(|state| state.is_static())
            .collect();
        for state in &running {
            let stays = wanted.iter().any(|pod| pods::uid(pod) == state.uid);
            if !stays && !state.is_gone() {
                state.set_gone(state.pod());
            }
        }
        for pod in wanted {
            let known = running.iter().find(|state| state.uid == pods::uid(&pod));
            if let Some(state) = known {
                // One that is ending starts again when it has ended.
                if !state.is_gone() && !is_same(&state.pod(), &pod) {
                    self.pod_applied(&Arc::new(with_seen(pod, Some(&state.pod()))));
                }
                continue;
            }
            // Two pods of one name would be in each other's way: the earlier one ends first.
            if !running.iter().any(|state| same_name(&state.pod(), &pod)) {
                self.pod_applied(&Arc::new(with_seen(pod, None)));
            }
        }
    }
}

/// The same manifest: one that says its uid may change without a new one.
fn is_same(running: &Pod, wanted: &Pod) -> bool {
    let strip = |pod: &Pod| {
        let mut pod = pod.clone();
        pod.metadata
            .annotations
            .get_or_insert_default()
            .remove(annotations::SEEN);
        pod.status = None;
        pod
    };
    strip(running) == strip(wanted)
}

fn with_seen(mut pod: Pod, before: Option<&Pod>) -> Pod {
    let before = before.and_then(|pod| pod.metadata.annotations.as_ref()?.get(annotations::SEEN).cloned());
    let seen = before.unwrap_or_else(|| Timestamp::now().to_string());
    let all = pod.metadata.annotations.get_or_insert_default();
    all.insert(annotations::SEEN.to_owned(), seen);
    pod
}

/// Whether the pod is of a manifest. What a client of the API writes does not count: see [`from_api`].
pub fn is_static(pod: &Pod) -> bool {
    let source = pod
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(annotations::SOURCE));
    source.is_some_and(|source| source != "api")
}

pub fn is_mirror(pod: &Pod) -> bool {
    let annotations = pod.metadata.annotations.as_ref();
    annotations.is_some_and(|all| all.contains_key(annotations::MIRROR))
}

/// A pod of the API cannot say that it is another's.
pub fn from_api(pod: &Arc<Pod>) -> Arc<Pod> {
    if !is_static(pod) {
        return pod.clone();
    }
    let mut pod = (**pod).clone();
    let all = pod.metadata.annotations.get_or_insert_default();
    all.insert(annotations::SOURCE.to_owned(), "api".to_owned());
    Arc::new(pod)
}
