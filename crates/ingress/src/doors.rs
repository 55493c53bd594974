//! Keeps a door open at every port that something is served at: until then the ports are left to others, such as pods in
//! the host's network.
//!
//! At the end of the process requests are finished, and nobody is refused: connections that are open are asked to end
//! while others are still accepted, and when the doors close, `skiff_sockets` has a copy of each socket, so that whoever
//! comes then waits for the next process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::connections::{ConnectionLimits, Connections};
use crate::forward::Proxy;
use crate::gateway::listeners::Ports;
use crate::listen::{self, Door, Ending, Ingresses, Tasks};
use crate::run::IngressConfig;
use crate::workers::Workers;

/// How often a port that another program has is tried again.
const BIND_AGAIN: Duration = Duration::from_secs(5);
/// When the process ends, connections that are open may take this long.
const DRAIN: Duration = Duration::from_secs(5);
/// And those that came meanwhile. Both together are less than the process has for its end.
const DRAIN_LATE: Duration = Duration::from_secs(3);

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
    pub workers: Arc<Workers>,
    pub connections: Arc<Connections>,
    pub tasks: Tasks,
}

impl Doors {
    pub fn new(
        config: IngressConfig,
        proxy: Arc<Proxy>,
        tls: TlsAcceptor,
        failures: Failures,
        noted: Arc<dyn Fn() + Send + Sync>,
        workers: Arc<Workers>,
    ) -> Doors {
        Doors {
            config,
            proxy,
            tls,
            failures,
            noted,
            workers,
            connections: Connections::new(ConnectionLimits::default()),
            tasks: Tasks::default(),
        }
    }

    /// Keeps the wanted ports open until `stop`, and waits for what is under way then.
    pub async fn keep(self, mut wanted: watch::Receiver<BTreeSet<u16>>, stop: &CancellationToken) {
        let mut open: HashMap<u16, (Ending, JoinHandle<()>)> = HashMap::new();
        loop {
            let ports = wanted.borrow_and_update().clone();
            let closing: Vec<u16> = open
                .keys()
                .filter(|port| !ports.contains(port))
                .copied()
                .collect();
            for port in closing {
                let Some((ending, door)) = open.remove(&port) else {
                    continue;
                };
                ending.drain.cancel();
                ending.close.cancel();
                // The port is free when the door has ended; its connections may take longer.
                let _ = door.await;
                tracing::info!(port, "nothing is served at the port any more: it is given back");
                self.say(port, None);
            }
            self.config.sockets.retain(&ports);
            for port in ports {
                open.entry(port).or_insert_with(|| {
                    let ending = Ending::default();
                    let (doors, until) = (self.clone(), ending.clone());
                    let door = skiff_supervise::kept("ingress door", ending.close.clone(), move || {
                        doors.clone().door(port, until.clone())
                    });
                    (ending, tokio::spawn(door))
                });
            }
            tokio::select! {
                changed = wanted.changed() => if changed.is_err() { break },
                () = stop.cancelled() => break,
            }
        }
        for (ending, _) in open.values() {
            ending.drain.cancel();
        }
        let (Tasks { early, late }, tunnels) = (&self.tasks, &self.proxy.tunnels);
        early.close();
        tunnels.close();
        let drained = async { tokio::join!(early.wait(), tunnels.wait()) };
        let drained = tokio::time::timeout(DRAIN, drained).await.is_ok();
        for (ending, door) in open.into_values() {
            ending.close.cancel();
            let _ = door.await;
        }
        late.close();
        if tokio::time::timeout(DRAIN_LATE, late.wait()).await.is_err() || !drained {
            tracing::info!(
                open = self.connections.len(),
                "some connections did not end in time"
            );
        }
    }

    async fn door(self, port: u16, ending: Ending) {
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
            let listener = self.config.sockets.listener(port, || listen::bind(port));
            let error = match listener.and_then(TcpListener::from_std) {
                Ok(listener) => break listener,
                Err(error) => error,
            };
            if !std::mem::replace(&mut failed, true) {
                tracing::warn!(port, %error, "cannot listen; trying again");
            }
            self.say(port, Some(format!("cannot listen on port {port}: {error}")));
            tokio::select! {
                () = tokio::time::sleep(BIND_AGAIN) => {}
                () = ending.close.cancelled() => return,
            }
        };
        self.say(port, None);
        tracing::info!(port, "listening");
        let door = Door {
            proxy: self.proxy,
            workers: self.workers,
            connections: self.connections,
            listener,
            port: ports.logical(port),
            ingress,
            tasks: self.tasks,
        };
        door.serve(ending).await;
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
