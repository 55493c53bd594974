//! What Ingresses are told: in their status where they are reached, which is at every node that runs the proxy, and in
//! events what of them is not acted on.
//!
//! Every instance keeps a Lease. The living ones are where Ingresses are reached, and the first of them by name writes;
//! should two think they are the first, they write the same.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::Ingress;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use skiff_client::{Client, ErrorExt, EventRecorder, Informer, InformerFactory, Key, reference};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::compile::Problem;
use crate::gateway::GROUP;
use crate::gateway::plan::{ObjectId, Report};
use crate::gateway::status::status as gateway_status;
use crate::run::{IngressConfig, node_addresses};

const NAMESPACE: &str = "kube-system";
const LABEL: &str = "skiff.io/component";
const COMPONENT: &str = "ingress";
const FIELD_MANAGER: &str = "skiff-ingress";
const RENEW: Duration = Duration::from_secs(10);
const LEASE_SECONDS: i32 = 40;
/// A problem that is gone so soon was an object that was on its way.
const SETTLED: Duration = Duration::from_secs(2);
/// Objects change without a change of the table; and writes fail.
const LOOK: Duration = Duration::from_secs(1);

/// The Ingresses of the current table, with what of each is not acted on.
#[derive(Clone, Default)]
pub struct Served {
    pub ingresses: Vec<(Arc<Ingress>, Vec<Problem>)>,
    /// What the objects of Gateway API are told.
    pub gateways: Vec<Report>,
}

pub async fn run(
    config: &IngressConfig,
    client: Client,
    nodes: Informer<Node>,
    factory: InformerFactory,
    mut served: watch::Receiver<Served>,
    stop: &CancellationToken,
) {
    let leases = factory.namespaced::<Lease>(NAMESPACE, Some(&format!("{LABEL}={COMPONENT}")));
    let api: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    let own = format!("ingress-{}", config.instance);
    let mut reporter = Reporter {
        events: EventRecorder::new(client.clone(), FIELD_MANAGER, &config.node_name),
        client,
        problems: HashMap::new(),
    };
    let mut renewed: Option<Instant> = None;
    while !stop.is_cancelled() {
        if renewed.is_none_or(|at| at.elapsed() >= RENEW) {
            match renew(&api, &own, &config.node_name).await {
                Ok(()) => renewed = Some(Instant::now()),
                Err(error) => tracing::warn!(%error, "cannot renew the lease of the ingress proxy"),
            }
        }
        let alive = living(&leases.list(), Timestamp::now());
        if alive.keys().min().is_some_and(|first| *first == own) {
            let holders: BTreeSet<&str> = alive.values().map(String::as_str).collect();
            let addresses = addresses(&holders, &nodes, config);
            let ingresses = served.borrow_and_update().clone();
            reporter.report(&ingresses, &addresses).await;
        }
        tokio::select! {
            () = stop.cancelled() => {}
            // Many changes in a row are one.
            changed = served.changed() => match changed {
                Ok(()) => tokio::time::sleep(Duration::from_millis(100)).await,
                Err(_) => return,
            },
            () = tokio::time::sleep(LOOK) => {}
        }
    }
    // The others take this address out at once.
    let parameters = DeleteParams::default();
    let _ = tokio::time::timeout(Duration::from_secs(1), api.delete(&own, &parameters)).await;
    // The doors end the component, when their requests are answered.
    std::future::pending::<()>().await;
}

async fn renew(api: &Api<Lease>, name: &str, node: &str) -> Result<(), kube::Error> {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name, "labels": {LABEL: COMPONENT}},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now},
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(name, &parameters, &Patch::Apply(lease)).await.map(drop)
}

/// The nodes of the instances that live, by the names of their leases.
fn living(leases: &[Arc<Lease>], now: Timestamp) -> HashMap<String, String> {
    let lives = |lease: &Arc<Lease>| {
        let spec = lease.spec.as_ref()?;
        let age = now.duration_since(spec.renew_time.as_ref()?.0).as_secs();
        let name = lease.metadata.name.clone()?;
        (age < i64::from(LEASE_SECONDS)).then_some((name, spec.holder_identity.clone()?))
    };
    leases.iter().filter_map(lives).collect()
}

/// The external addresses of the nodes, or of a node without those its internal ones.
fn addresses(holders: &BTreeSet<&str>, nodes: &Informer<Node>, config: &IngressConfig) -> Vec<IpAddr> {
    let mut found = BTreeSet::new();
    for holder in holders {
        match nodes.get("", holder) {
            Some(node) => {
                let of_type = |wanted: &str| -> Vec<IpAddr> {
                    let all = node_addresses(&node);
                    all.filter(|(kind, _)| *kind == wanted)
                        .map(|(_, address)| address)
                        .collect()
                };
                let external = of_type("ExternalIP");
                found.extend(if external.is_empty() {
                    of_type("InternalIP")
                } else {
                    external
                });
            }
            None if **holder == config.node_name => {
                found.insert(config.address);
            }
            None => {}
        }
    }
    found.into_iter().collect()
}

struct Reporter {
    client: Client,
    events: EventRecorder,
    /// Since when each problem is there, and whether its event was written.
    problems: HashMap<(Key, Problem), (Instant, bool)>,
}

impl Reporter {
    async fn report(&mut self, served: &Served, addresses: &[IpAddr]) {
        let now = Instant::now();
        let mut current = HashMap::new();
        for (ingress, problems) in &served.ingresses {
            for problem in problems {
                let key = (Key::of(&**ingress), problem.clone());
                let (since, told) = self.problems.get(&key).copied().unwrap_or((now, false));
                if !told && now.duration_since(since) >= SETTLED {
                    let message = problem.message.clone();
                    self.events
                        .event(&reference(&**ingress), "Warning", problem.reason, message);
                    current.insert(key, (since, true));
                } else {
                    current.insert(key, (since, told));
                }
            }
        }
        self.problems = current;
        for (ingress, _) in &served.ingresses {
            if let Err(error) = self.write(ingress, addresses).await {
                let name = Key::of(&**ingress);
                tracing::warn!(%error, ingress = %name, "cannot write the status of an Ingress");
            }
        }
        for report in &served.gateways {
            if let Err(error) = self.tell(report, addresses).await {
                let ObjectId { resource, key } = &report.id;
                tracing::warn!(%error, resource, object = %key, "cannot write the status");
            }
        }
    }

    /// Writes the status of an object of Gateway API, if it is another one. Whoever changed the object meanwhile is
    /// not overwritten: the next table knows the change.
    async fn tell(&self, report: &Report, addresses: &[IpAddr]) -> Result<(), kube::Error> {
        let Report {
            id,
            told,
            meta,
            status: old,
        } = report;
        let none = Value::Null;
        let old = old.as_ref().unwrap_or(&none);
        let status = gateway_status(told, old, meta.generation, addresses, Timestamp::now());
        if status == *old {
            return Ok(());
        }
        let ObjectId { resource, key } = id;
        let namespace = match key.namespace.is_empty() {
            true => String::new(),
            false => format!("namespaces/{}/", key.namespace),
        };
        let path = format!("/apis/{GROUP}/v1/{namespace}{resource}/{}/status", key.name);
        let patch = json!({"metadata": {"resourceVersion": meta.resource_version}, "status": status});
        let request = http::Request::patch(path)
            .header(http::header::CONTENT_TYPE, "application/merge-patch+json")
            .body(patch.to_string().into_bytes());
        let Ok(request) = request else { return Ok(()) };
        match self.client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
            written => written.map(drop),
        }
    }

    async fn write(&self, ingress: &Ingress, addresses: &[IpAddr]) -> Result<(), kube::Error> {
        if shown(ingress) == addresses {
            return Ok(());
        }
        let (Some(namespace), Some(name)) = (&ingress.metadata.namespace, &ingress.metadata.name) else {
            return Ok(());
        };
        let list: Vec<_> = addresses.iter().map(|address| json!({"ip": address})).collect();
        let patch = json!({"status": {"loadBalancer": {"ingress": list}}});
        let api: Api<Ingress> = Api::namespaced(self.client.clone(), namespace);
        let written = api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        match written {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

fn shown(ingress: &Ingress) -> Vec<IpAddr> {
    let status = ingress
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    let entries = status
        .and_then(|balancer| balancer.ingress.as_ref())
        .into_iter()
        .flatten();
    entries
        .filter_map(|entry| entry.ip.as_deref()?.parse().ok())
        .collect()
}
