//! Leader election on a coordination.k8s.io Lease: of several processes that want to lead, one does.
//!
//! A leader that cannot renew in time stops before another one may begin, so it compares only times of
//! its own clock: the holder's clock is never trusted.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::ErrorExt;
use crate::metrics::ComponentMetrics;

/// By how much a contender may wait longer, chosen by chance.
const JITTER: f64 = 0.2;

/// `identity` names the contender. One that stays the same over a restart takes its own lease back at
/// once instead of waiting for it to run out.
#[derive(Clone)]
pub struct LeaderElector {
    pub namespace: String,
    pub name: String,
    pub identity: String,
    pub lease_duration: Duration,
    pub renew_deadline: Duration,
    pub retry_period: Duration,
    /// Where it is shown whether this contender leads.
    pub metrics: Option<Arc<ComponentMetrics>>,
}

/// Why an election ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Shutdown,
    /// The lease could not be renewed in time, or `lead` returned by itself.
    Lost,
}

/// The lease as last seen, and when it last changed by our own clock.
#[derive(Default)]
struct Observed {
    lease: Option<Lease>,
    changed_at: Option<Instant>,
}

impl Observed {
    fn see(&mut self, lease: Lease) {
        let same = self.lease.as_ref().is_some_and(|old| old.spec == lease.spec);
        if !same {
            self.changed_at = Some(Instant::now());
        }
        self.lease = Some(lease);
    }
}

impl LeaderElector {
    /// Upstream's default times: 15 s, 10 s, 2 s.
    pub fn new(namespace: &str, name: &str, identity: &str) -> Self {
        LeaderElector {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity: identity.to_owned(),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
            metrics: None,
        }
    }

    pub fn measured(self, metrics: Arc<ComponentMetrics>) -> Self {
        LeaderElector {
            metrics: Some(metrics),
            ..self
        }
    }

    fn leads(&self, leads: bool) {
        if let Some(metrics) = &self.metrics {
            metrics.leads(&self.name, leads);
        }
    }

    /// Waits to lead, then runs `lead` with a token that is cancelled when leading ends, and gives the
    /// lease back on a clean end.
    pub async fn run<L, F>(self, client: Client, lead: L, shutdown: CancellationToken) -> Outcome
    where
        L: FnOnce(CancellationToken) -> F,
        F: Future<Output = ()>,
    {
        let api: Api<Lease> = Api::namespaced(client, &self.namespace);
        let mut observed = Observed::default();
        let mut retry = Duration::from_millis(50);
        self.leads(false);
        loop {
            let attempt = tokio::select! {
                _ = shutdown.cancelled() => return Outcome::Shutdown,
                attempt = self.try_acquire_or_renew(&api, &mut observed) => attempt,
            };
            match attempt {
                Ok(true) => break,
                // Someone else leads: ask as often as upstream does.
                Ok(false) => retry = self.retry_period,
                // The server is starting, perhaps: ask again soon, then less often.
                Err(error) => {
                    tracing::debug!(lease = self.name, %error, "cannot reach the lease");
                    retry = (retry * 2).min(self.retry_period);
                }
            }
            tokio::select! {
                _ = shutdown.cancelled() => return Outcome::Shutdown,
                // Contenders that started together do not go on asking together.
                _ = tokio::time::sleep(retry.mul_f64(rand::random_range(1.0..1.0 + JITTER))) => {}
            }
        }
        tracing::info!(lease = self.name, identity = self.identity, "leading");
        self.leads(true);
        let leading = shutdown.child_token();
        let outcome = {
            let work = lead(leading.clone());
            tokio::pin!(work);
            let ended = tokio::select! {
                _ = &mut work => None,
                _ = shutdown.cancelled() => Some(Outcome::Shutdown),
                _ = self.renew_until_lost(&api, &mut observed) => Some(Outcome::Lost),
            };
            leading.cancel();
            match ended {
                Some(outcome) => {
                    work.await;
                    outcome
                }
                None if shutdown.is_cancelled() => Outcome::Shutdown,
                None => Outcome::Lost,
            }
        };
        self.leads(false);
        self.release(&api, &observed).await;
        outcome
    }

    async fn renew_until_lost(&self, api: &Api<Lease>, observed: &mut Observed) {
        let mut renewed_at = Instant::now();
        loop {
            tokio::time::sleep(self.retry_period).await;
            // Others count from when they see the renewal, which is not before it was asked for.
            let asked_at = Instant::now();
            let left = self.renew_deadline.saturating_sub(renewed_at.elapsed());
            match tokio::time::timeout(left, self.try_acquire_or_renew(api, observed)).await {
                Ok(Ok(true)) => renewed_at = asked_at,
                Ok(Ok(false)) if !self.holds(observed) => return,
                // Somebody else wrote to the lease in that moment, and it is still ours.
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::debug!(lease = self.name, %error, "cannot renew the lease"),
                Err(_timeout) => {}
            }
            if renewed_at.elapsed() >= self.renew_deadline {
                tracing::warn!(
                    lease = self.name,
                    "lost the lease: it could not be renewed in time"
                );
                return;
            }
        }
    }

    /// True if the lease is ours now.
    async fn try_acquire_or_renew(
        &self,
        api: &Api<Lease>,
        observed: &mut Observed,
    ) -> Result<bool, kube::Error> {
        let Some(present) = api.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    ..Default::default()
                },
                spec: Some(self.taken(None)),
            };
            return match api.create(&PostParams::default(), &lease).await {
                Ok(created) => {
                    observed.see(created);
                    Ok(true)
                }
                Err(error) if error.is_already_exists() => Ok(false),
                Err(error) => Err(error),
            };
        };
        observed.see(present.clone());
        let spec = present.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() {
            let duration = spec
                .lease_duration_seconds
                .map_or(self.lease_duration, |s| Duration::from_secs(s.max(0) as u64));
            if observed.changed_at.is_some_and(|at| at.elapsed() < duration) {
                return Ok(false);
            }
        }
        let lease = Lease {
            spec: Some(self.taken(Some(spec))),
            ..present
        };
        match api.replace(&self.name, &PostParams::default(), &lease).await {
            Ok(updated) => {
                observed.see(updated);
                Ok(true)
            }
            Err(error) if error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn holds(&self, observed: &Observed) -> bool {
        let spec = observed.lease.as_ref().and_then(|lease| lease.spec.as_ref());
        spec.is_some_and(|spec| spec.holder_identity.as_ref() == Some(&self.identity))
    }

    /// The spec that says that we hold the lease, renewed now.
    fn taken(&self, before: Option<LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let mut spec = before.unwrap_or_default();
        if spec.holder_identity.as_deref() != Some(self.identity.as_str()) {
            // The first holder is no transition.
            let transitions = spec.lease_transitions.map_or(0, |count| count.saturating_add(1));
            spec.lease_transitions = Some(transitions);
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = Some(self.lease_duration.as_secs() as i32);
        spec.renew_time = Some(now);
        spec
    }

    /// Lets the next contender begin without waiting. A failure only costs that wait.
    async fn release(&self, api: &Api<Lease>, observed: &Observed) {
        if !self.holds(observed) {
            return;
        }
        let Some(mut lease) = observed.lease.clone() else {
            return;
        };
        let Some(spec) = &mut lease.spec else { return };
        // A lease that nobody holds names nobody; an empty name is not valid.
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        let params = PostParams::default();
        let write = api.replace(&self.name, &params, &lease);
        if let Ok(Err(error)) = tokio::time::timeout(Duration::from_secs(1), write).await {
            tracing::debug!(lease = self.name, %error, "cannot release the lease");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{self, Reply};
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use std::sync::Arc;

    type State<T> = Arc<Mutex<T>>;

    /// A server with one lease, which answers nothing but errors while `down`.
    fn lease_server(lease: Option<Value>) -> (Client, State<Option<Value>>, State<bool>) {
        let state = Arc::new(Mutex::new(lease));
        let down = Arc::new(Mutex::new(false));
        let (kept, broken) = (state.clone(), down.clone());
        let (client, _) = fake::client(move |request| {
            if *broken.lock() {
                return fake::status(503, "ServiceUnavailable");
            }
            let mut state = kept.lock();
            match (request.method.as_str(), state.clone()) {
                ("GET", Some(lease)) => Reply::Json(200, lease),
                ("GET", None) => fake::status(404, "NotFound"),
                _ => {
                    *state = Some(request.body.clone());
                    Reply::Json(200, request.body.clone())
                }
            }
        });
        (client, state, down)
    }

    fn holder(state: &Mutex<Option<Value>>) -> String {
        state.lock().as_ref().map_or(String::new(), |l| {
            l["spec"]["holderIdentity"].as_str().unwrap_or_default().into()
        })
    }

    #[tokio::test(start_paused = true)]
    async fn leads_at_once_on_a_free_lease_and_gives_it_back() {
        let (client, state, _) = lease_server(None);
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let kept = state.clone();
        let elector = LeaderElector::new("kube-system", "test", "me");
        let outcome = elector
            .run(
                client,
                |leading| async move {
                    assert_eq!(holder(&kept), "me");
                    stop.cancel();
                    leading.cancelled().await;
                },
                shutdown,
            )
            .await;
        assert_eq!(outcome, Outcome::Shutdown);
        assert_eq!(holder(&state), "");
    }

    #[tokio::test(start_paused = true)]
    async fn waits_for_a_silent_holder_to_run_out_then_stops_when_it_cannot_renew() {
        let lease = json!({"metadata": {"name": "test", "namespace": "kube-system"}, "spec": {
            "holderIdentity": "other", "leaseDurationSeconds": 15, "leaseTransitions": 3}});
        let (client, state, down) = lease_server(Some(lease));
        let start = Instant::now();
        let elector = LeaderElector::new("kube-system", "test", "me");
        let outcome = elector
            .run(
                client,
                |leading| async move {
                    assert!(start.elapsed() >= Duration::from_secs(15));
                    *down.lock() = true;
                    leading.cancelled().await;
                },
                CancellationToken::new(),
            )
            .await;
        assert_eq!(outcome, Outcome::Lost);
        assert_eq!(state.lock().as_ref().unwrap()["spec"]["leaseTransitions"], 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_over_the_lease_does_not_cost_it() {
        let lease = json!({"metadata": {"name": "test", "namespace": "kube-system"}, "spec": {
            "holderIdentity": "me", "leaseDurationSeconds": 15}});
        let writes = Arc::new(Mutex::new(0));
        let (counted, shutdown) = (writes.clone(), CancellationToken::new());
        let stop = shutdown.clone();
        let (client, _) = fake::client(move |request| {
            if request.method == "GET" {
                return Reply::Json(200, lease.clone());
            }
            let mut writes = counted.lock();
            *writes += 1;
            match *writes {
                2 => fake::status(409, "Conflict"),
                4 => {
                    stop.cancel();
                    Reply::Json(200, request.body.clone())
                }
                _ => Reply::Json(200, request.body.clone()),
            }
        });
        let elector = LeaderElector::new("kube-system", "test", "me");
        let outcome = elector
            .run(
                client,
                |leading| async move { leading.cancelled().await },
                shutdown,
            )
            .await;
        assert_eq!(outcome, Outcome::Shutdown);
    }
}
