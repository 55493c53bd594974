//! Keeps a door open at every port that something is served at: until then the ports are left to others, such as pods in
//! the host's network. At the end, requests that are on their way may finish.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::connections::{ConnectionLimits, Connections};
use crate::forward::Proxy;
use crate::gateway::listeners::Ports;
use crate::listen::{self, Door, Ingresses};
use crate::run::IngressConfig;

/// How often a port that another program has is tried again.
const BIND_AGAIN: Duration = Duration::from_secs(5);
/// What is under way when the process ends may take this long.
const DRAIN: Duration = Duration::from_secs(5);

/// Ports that cannot be opened, and why.
#[derive(Clone, Default)]
pub struct Failures(Arc<Mutex<BTreeMap<u16, String>>>);

impl Failures {
    pub fn all(&self) -> BTreeMap<u16, String> {
        self.0.lock().clone()
    }

    /// Whether something changed.
    fn set(&self, port: u16, why: Option<String>) -> bool {
        let mut all = self.0.lock();
        match why {
            Some(why) => all.insert(port, why.clone()) != Some(why),
            None => all.remove(&port).is_some(),
        }
    }
}

/// What all doors share.
#[derive(Clone)]
pub struct Doors {
    pub config: IngressConfig,
    pub proxy: Arc<Proxy>,
    pub tls: TlsAcceptor,
    pub failures: Failures,
    /// Called when a port failed, or does no longer.
    pub noted: Arc<dyn Fn() + Send + Sync>,
    pub connections: Arc<Connections>,
    pub tasks: TaskTracker,
}

impl Doors {
    pub fn new(
        config: IngressConfig,
        proxy: Arc<Proxy>,
        tls: TlsAcceptor,
        failures: Failures,
        noted: Arc<dyn Fn() + Send + Sync>,
    ) -> Doors {
        Doors {
            config,
            proxy,
            tls,
            failures,
            noted,
            connections: Connections::new(ConnectionLimits::default()),
            tasks: TaskTracker::new(),
        }
    }

    /// Keeps the wanted ports open until `stop`, and waits for what is under way then.
    pub async fn keep(self, mut wanted: watch::Receiver<BTreeSet<u16>>, stop: &CancellationToken) {
        let mut open: HashMap<u16, (CancellationToken, JoinHandle<()>)> = HashMap::new();
        loop {
            let ports = wanted.borrow_and_update().clone();
            let closing: Vec<u16> = open
                .keys()
                .filter(|port| !ports.contains(port))
                .copied()
                .collect();
            for port in closing {
                let Some((closed, door)) = open.remove(&port) else {
                    continue;
                };
                closed.cancel();
                // The port is free when the door has ended; its connections may take longer.
                let _ = door.await;
                tracing::info!(port, "nothing is served at the port any more: it is given back");
                self.say(port, None);
            }
            for port in ports {
                open.entry(port).or_insert_with(|| {
                    let closed = stop.child_token();
                    let (doors, until) = (self.clone(), closed.clone());
                    let door = skiff_supervise::kept("ingress door", closed.clone(), move || {
                        doors.clone().door(port, until.clone())
                    });
                    (closed, tokio::spawn(door))
                });
            }
            tokio::select! {
                changed = wanted.changed() => if changed.is_err() { break },
                () = stop.cancelled() => break,
            }
        }
        for (closed, door) in open.into_values() {
            closed.cancel();
            let _ = door.await;
        }
        self.tasks.close();
        self.proxy.tunnels.close();
        let drained = async { tokio::join!(self.tasks.wait(), self.proxy.tunnels.wait()) };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            tracing::info!(
                open = self.connections.len(),
                "some connections did not end in time"
            );
        }
    }

    async fn door(self, port: u16, closed: CancellationToken) {
        let ingress = match Some(port) {
            port if port == self.config.http_port => Ingresses::Http,
            port if port == self.config.https_port => Ingresses::Https(self.tls.clone()),
            _ => Ingresses::None,
        };
        let ports = Ports {
            http: self.config.http_port,
            https: self.config.https_port,
            ..Ports::default()
        };
        let mut failed = false;
        let listener = loop {
            let error = match listen::bind(port) {
                Ok(listener) => break listener,
                Err(error) => error,
            };
            if !std::mem::replace(&mut failed, true) {
                tracing::warn!(port, %error, "cannot listen; trying again");
            }
            self.say(port, Some(format!("cannot listen on port {port}: {error}")));
            tokio::select! {
                () = tokio::time::sleep(BIND_AGAIN) => {}
                () = closed.cancelled() => return,
            }
        };
        self.say(port, None);
        tracing::info!(port, "listening");
        let door = Door {
            proxy: self.proxy,
            connections: self.connections,
            listener,
            port: ports.logical(port),
            ingress,
            tasks: self.tasks,
        };
        door.serve(closed).await;
    }

    fn say(&self, port: u16, why: Option<String>) {
        let changed = self.failures.set(port, why);
        let all: Vec<String> = self.failures.all().into_values().collect();
        (self.config.report)(&all.join("; "));
        if changed {
            (self.noted)();
        }
    }
}
