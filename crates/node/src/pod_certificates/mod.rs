//! The certificates of this node's pods. For each `podCertificate` source of a projected volume a key is made here, the signer
//! is asked by a PodCertificateRequest in the node's name, and key and certificates are handed to the volume. A certificate is
//! renewed when its signer says so. Keys are in memory and in the volume (a tmpfs) only: a node that starts anew asks for new ones.

mod keys;
mod state;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1beta1::{PodCertificateRequest, PodCertificateRequestSpec};
use k8s_openapi::api::core::v1::{Node, Pod, PodCertificateProjection, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use skiff_client::{Action, Controller, EventRecorder, Informer, InformerFactory, Reconcile, WorkQueue};
use skiff_meta::field::quote;
use skiff_prometheus::Registry;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::objects::error_message;
use crate::pods;
use crate::static_pods::is_static;
pub(crate) use state::Credentials;
use state::{Outcome, Pending, State};

/// How often certificates are looked at, whatever changes.
const PERIOD: Duration = Duration::from_secs(60);
/// Refreshes are spread over so much time.
const JITTER: Duration = Duration::from_secs(5 * 60);
/// A request that is gone is made again after this long: who deletes requests does not keep this node busy.
const LOST: Duration = Duration::from_secs(60);
/// How often the API server is asked whether it serves the API.
const UNSERVED_PAUSE: Duration = Duration::from_secs(30);

/// Keys are made one after the other: an RSA key takes a core for seconds.
static KEYS: Semaphore = Semaphore::const_new(1);

/// One source of one volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    pod_uid: String,
    volume: String,
    index: usize,
}

struct Record {
    pod: Arc<Pod>,
    source: Arc<PodCertificateProjection>,
    state: State,
    /// Why the last attempt to ask failed.
    trouble: Option<String>,
}

#[derive(Default)]
struct Shared {
    /// Bounded by the pods of the node: those of a pod go with it.
    records: HashMap<Source, Record>,
    /// Pods that get something else than before.
    woken: HashSet<String>,
    /// Why nobody can be asked.
    unserved: Option<String>,
}

pub(crate) struct PodCertificates {
    queue: Arc<WorkQueue<Source>>,
    /// A leaf lock: not held over a request.
    shared: Mutex<Shared>,
    wake: Notify,
    /// A pod has such a source.
    needed: Notify,
}

/// What asking takes.
pub(crate) struct Access {
    pub(crate) client: Client,
    pub(crate) informers: InformerFactory,
    pub(crate) node: Informer<Node>,
    pub(crate) node_name: String,
    pub(crate) recorder: EventRecorder,
}

impl PodCertificates {
    pub(crate) fn new() -> Arc<PodCertificates> {
        Arc::new(PodCertificates {
            queue: WorkQueue::new(),
            shared: Mutex::default(),
            wake: Notify::new(),
            needed: Notify::new(),
        })
    }

    /// Key and certificates of a source, if they were issued; the error is a sentence for the user. Who asks for the first time
    /// sets the request in motion.
    pub(crate) fn get(
        &self,
        pod: &Pod,
        volume: &str,
        index: usize,
        source: &PodCertificateProjection,
    ) -> Result<Credentials, String> {
        if is_static(pod) {
            return Err("static pods cannot have pod certificates".to_owned());
        }
        let key = Source {
            pod_uid: pods::uid(pod).to_owned(),
            volume: volume.to_owned(),
            index,
        };
        let mut shared = self.shared.lock();
        let Some(record) = shared.records.get(&key) else {
            let record = Record {
                pod: Arc::new(pod.clone()),
                source: Arc::new(source.clone()),
                state: State::Initial,
                trouble: None,
            };
            let answer = record.state.credentials();
            shared.records.insert(key.clone(), record);
            drop(shared);
            self.queue.add(key, None);
            self.needed.notify_one();
            return answer;
        };
        record.state.credentials().map_err(|why| {
            let trouble = record.trouble.as_ref().or(shared.unserved.as_ref());
            trouble.map_or(why.clone(), |trouble| format!("{why}: {trouble}"))
        })
    }

    /// Forgets what a pod had.
    pub(crate) fn forget(&self, pod_uid: &str) {
        self.shared.lock().records.retain(|key, _| key.pod_uid != pod_uid);
    }

    /// Waits until pods get something else than before. Returns their uids.
    pub(crate) async fn changed(&self) -> HashSet<String> {
        loop {
            let woken = std::mem::take(&mut self.shared.lock().woken);
            if !woken.is_empty() {
                return woken;
            }
            self.wake.notified().await;
        }
    }

    fn wake_pods(&self, pods: impl IntoIterator<Item = String>) {
        self.shared.lock().woken.extend(pods);
        self.wake.notify_one();
    }

    fn keys(&self) -> Vec<Source> {
        self.shared.lock().records.keys().cloned().collect()
    }

    fn of_pod(&self, pod_uid: &str) -> Vec<Source> {
        let shared = self.shared.lock();
        let of_pod = shared.records.keys().filter(|key| key.pod_uid == pod_uid);
        of_pod.cloned().collect()
    }

    /// Asks, waits and renews until `shutdown`. Nothing is watched before a pod of this node has such a source.
    pub(crate) async fn run(self: Arc<Self>, access: Access, shutdown: CancellationToken) {
        let selector = format!("spec.nodeName={}", access.node_name);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = async {
                self.needed.notified().await;
                self.until_served(&access.client, &selector).await;
            } => {}
        }
        let issuer = Arc::new(Issuer {
            requests: access.informers.filtered(None, Some(&selector)),
            certificates: self.clone(),
            access,
        });
        Controller::new("pod-certificates", self.queue.clone(), shutdown, issuer)
            .watches_own(
                |issuer| &issuer.requests,
                |issuer, change| issuer.certificates.of_pod(&change.object().spec.pod_uid),
            )
            .reads(|issuer| &issuer.access.node)
            .every(PERIOD, |issuer| issuer.certificates.keys())
            .run()
            .await;
    }

    /// Waits until the API server has the API, and tells the pods that wait for it.
    async fn until_served(&self, client: &Client, selector: &str) {
        let api: Api<PodCertificateRequest> = Api::all(client.clone());
        let some = ListParams::default().fields(selector).limit(1);
        loop {
            let why = match api.list(&some).await {
                Ok(_) => None,
                Err(kube::Error::Api(status)) if status.code == 404 => Some(
                    "the API server does not serve certificates.k8s.io/v1beta1 podcertificaterequests"
                        .to_owned(),
                ),
                Err(error) => Some(format!(
                    "while listing PodCertificateRequests: {}",
                    error_message(&error)
                )),
            };
            let is_served = why.is_none();
            self.shared.lock().unserved = why;
            self.wake_pods(self.keys().into_iter().map(|key| key.pod_uid));
            if is_served {
                return;
            }
            tokio::time::sleep(UNSERVED_PAUSE).await;
        }
    }

    /// Counts certificates by signer and state, as upstream's metric does.
    pub(crate) fn count(self: &Arc<Self>, registry: &Registry) {
        let weak = Arc::downgrade(self);
        registry.read_gauges(
            "kubelet_podcertificate_states",
            "Certificates of pods, by signer and state.",
            &["signer_name", "state"],
            move || {
                let Some(certificates) = weak.upgrade() else {
                    return Vec::new();
                };
                let now = Timestamp::now();
                let mut counts: HashMap<(String, &str), f64> = HashMap::new();
                for record in certificates.shared.lock().records.values() {
                    let labels = (record.source.signer_name.clone(), record.state.name(now));
                    *counts.entry(labels).or_default() += 1.0;
                }
                let row =
                    |((signer, state), count): ((String, &str), f64)| (vec![signer, state.to_owned()], count);
                counts.into_iter().map(row).collect()
            },
        );
    }
}

struct Issuer {
    certificates: Arc<PodCertificates>,
    access: Access,
    /// Those of this node.
    requests: Informer<PodCertificateRequest>,
}

/// What a look at a record leads to.
enum Step {
    Rest,
    Wait(Duration),
    Ask(Arc<Pod>, Arc<PodCertificateProjection>),
}

impl Reconcile for Issuer {
    type Key = Source;
    type Error = String;

    async fn reconcile(&self, key: Source) -> Result<Action, String> {
        let (pod, source) = match self.look(&key, Timestamp::now()) {
            Step::Rest => return Ok(Action::Done),
            Step::Wait(time) => return Ok(Action::RequeueAfter(time)),
            Step::Ask(pod, source) => (pod, source),
        };
        let asked = self.ask(&pod, &source).await;
        let mut shared = self.certificates.shared.lock();
        // The pod may have gone in the meantime; then the request goes with it.
        let Some(record) = shared.records.get_mut(&key) else {
            return Ok(Action::Done);
        };
        match asked {
            Ok(pending) => {
                record.trouble = None;
                record.state.asked(pending);
                Ok(Action::Done)
            }
            Err(why) => {
                let is_news = record.trouble.as_ref() != Some(&why);
                record.trouble = Some(why.clone());
                drop(shared);
                if is_news {
                    self.certificates.wake_pods([key.pod_uid]);
                }
                Err(why)
            }
        }
    }
}

impl Issuer {
    /// Takes in what became of a request, and says what is to be done.
    fn look(&self, key: &Source, now: Timestamp) -> Step {
        let awaited = {
            let shared = self.certificates.shared.lock();
            let Some(record) = shared.records.get(key) else {
                return Step::Rest;
            };
            let name = record.state.pending().map(|pending| pending.name.clone());
            name.map(|name| (pods::namespace(&record.pod).to_owned(), name))
        };
        // Not under the lock: the informer has one of its own, under which it asks for keys.
        let found = awaited.map(|(namespace, name)| (self.requests.get(&namespace, &name), namespace, name));
        let mut events: Vec<(&'static str, String)> = Vec::new();
        let mut is_changed = false;
        let mut wait = None;
        let mut shared = self.certificates.shared.lock();
        let Some(record) = shared.records.get_mut(key) else {
            return Step::Rest;
        };
        match found {
            None => {}
            Some((Some(request), namespace, name)) => {
                let outcome = state::outcome(&request);
                events.extend(refusal(&outcome, &namespace, &name));
                is_changed = record.state.settle(outcome, jitter());
            }
            // The runtime waits until the informer shows what was written, so someone deleted it.
            Some((None, namespace, name)) => {
                let since = record.state.pending().map_or(now, |pending| pending.since);
                let age = Duration::try_from(now.duration_since(since)).unwrap_or_default();
                match LOST.checked_sub(age).filter(|rest| !rest.is_zero()) {
                    Some(rest) => wait = Some(rest),
                    None => {
                        tracing::info!(namespace, name, "a PodCertificateRequest was deleted");
                        record.state.lost();
                    }
                }
            }
        }
        let warnings = record.state.warnings(now).into_iter();
        events.extend(warnings.map(|(reason, message)| (reason, message.to_owned())));
        let step = match wait {
            Some(rest) => Step::Wait(rest),
            None if record.state.is_due(now) => Step::Ask(record.pod.clone(), record.source.clone()),
            None => Step::Rest,
        };
        let reference = pods::reference(&record.pod);
        drop(shared);
        for (reason, message) in events {
            self.access.recorder.event(&reference, "Warning", reason, message);
        }
        if is_changed {
            self.certificates.wake_pods([key.pod_uid.clone()]);
        }
        step
    }

    /// Makes a key and asks the signer for a certificate of it.
    async fn ask(&self, pod: &Pod, source: &PodCertificateProjection) -> Result<Pending, String> {
        let Access {
            client,
            node,
            node_name,
            ..
        } = &self.access;
        let namespace = pods::namespace(pod);
        let account_name = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.clone())
            .unwrap_or_default();
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        let account = accounts.get(&account_name).await;
        let account =
            account.map_err(|error| format!("while fetching service account: {}", error_message(&error)))?;
        let node = node.get("", node_name);
        let node = node.ok_or_else(|| {
            format!("while getting node object from local cache: node {node_name:?} not found")
        })?;
        let key = new_key(source.key_type.clone()).await?;
        let request = PodCertificateRequest {
            metadata: ObjectMeta {
                namespace: Some(namespace.to_owned()),
                generate_name: Some("req-".to_owned()),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Pod".to_owned(),
                    name: pods::name(pod).to_owned(),
                    uid: pods::uid(pod).to_owned(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: PodCertificateRequestSpec {
                signer_name: source.signer_name.clone(),
                pod_name: pods::name(pod).to_owned(),
                pod_uid: pods::uid(pod).to_owned(),
                service_account_name: account_name,
                service_account_uid: account.metadata.uid.unwrap_or_default(),
                node_name: node_name.clone(),
                node_uid: node.metadata.uid.clone().unwrap_or_default(),
                max_expiration_seconds: source.max_expiration_seconds,
                stub_pkc_s10_request: ByteString(key.request),
                unverified_user_annotations: source.user_annotations.clone(),
                ..PodCertificateRequestSpec::default()
            },
            status: None,
        };
        let api: Api<PodCertificateRequest> = Api::namespaced(client.clone(), namespace);
        let made = api.create(&PostParams::default(), &request).await;
        let made =
            made.map_err(|error| format!("while creating PodCertificateRequest: {}", error_message(&error)))?;
        Ok(Pending {
            key: key.pem,
            name: made.metadata.name.unwrap_or_default(),
            since: Timestamp::now(),
        })
    }
}

/// Reason and message of the event about a refusal.
fn refusal(outcome: &Outcome, namespace: &str, name: &str) -> Option<(&'static str, String)> {
    let Outcome::Refused {
        is_denied,
        reason,
        message,
    } = outcome
    else {
        return None;
    };
    let (event, verb) = match is_denied {
        true => ("Denied", "was denied"),
        false => ("Failed", "failed"),
    };
    let message = format!(
        "PodCertificateRequest {namespace}/{name} {verb}, reason={}, message={}",
        quote(reason),
        quote(message)
    );
    Some((event, message))
}

async fn new_key(key_type: String) -> Result<keys::NewKey, String> {
    let _turn = KEYS.acquire().await.map_err(|error| error.to_string())?;
    let made = tokio::task::spawn_blocking(move || keys::generate(&key_type)).await;
    made.map_err(|error| error.to_string())?
        .map_err(|error| error.to_string())
}

fn jitter() -> SignedDuration {
    SignedDuration::from_secs_f64(JITTER.as_secs_f64() * rand::random::<f64>())
}
