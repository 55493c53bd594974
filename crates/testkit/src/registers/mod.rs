//! Registers for tests of faults: ConfigMaps that many clients write and read at once over all API servers, by HTTPS, while
//! watchers record what they are told. Afterwards the history of each register must be linearizable, and every
//! watch complete and in order.
//!
//! A register serves for some seconds, then clients go on to new ones: the search for an order stays short.

mod check;
mod clients;
mod watch;

pub use check::{Answer, Call, Operation, Violation, check};

use crate::Machine;
use anyhow::{Context, Result, anyhow, ensure};
use clients::Clients;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use skiff_client::{Remote, ServerAddress};
use std::collections::{BTreeMap, HashSet};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use watch::Event;

/// Clients at work at once.
const CLIENTS: usize = 6;
/// How long clients wait for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);
/// What is asked at the end, when all faults are healed, is asked again for so long.
const PATIENCE: Duration = Duration::from_secs(90);

/// A running load.
pub struct Registers {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<Recorded>>>,
}

/// What clients and watchers share.
struct Shared {
    id: String,
    /// One client for each API server.
    servers: Vec<kube::Client>,
    began: Instant,
    stop: AtomicBool,
    acknowledged: AtomicUsize,
    next_value: AtomicU64,
    /// The longest time without an acknowledged write, and when the last one was.
    pause: Mutex<(Duration, Instant)>,
}

/// Everything that was seen.
struct Recorded {
    /// By the name of the register.
    operations: BTreeMap<String, Vec<Operation>>,
    watches: Vec<watch::Recorded>,
    services: Services,
}

/// The Services that a client made: each takes an address and a port from what all servers share.
#[derive(Default)]
struct Services {
    acknowledged: Vec<String>,
    /// All that exist at the end.
    found: Vec<Value>,
}

/// What a load that found nothing wrong did.
#[derive(Debug)]
pub struct Report {
    pub registers: usize,
    pub operations: usize,
    pub acknowledged: usize,
    pub refused: usize,
    pub unknown: usize,
    pub events: usize,
    /// How often watches were resumed, at the same or another server.
    pub resumed: usize,
    pub services: usize,
    /// The longest time in which no write of any client was acknowledged.
    pub longest_pause: Duration,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} operations on {} registers ({} writes acknowledged, {} refused, {} unknown), {} events, {} watches resumed, \
             {} services, longest pause {:.1} s",
            self.operations,
            self.registers,
            self.acknowledged,
            self.refused,
            self.unknown,
            self.events,
            self.resumed,
            self.services,
            self.longest_pause.as_secs_f64()
        )
    }
}

impl Registers {
    /// Starts clients on `machine`, with the identity that `tls` shows. `id` tells this load's objects from those of others.
    pub fn start(
        id: &str,
        machine: &Machine,
        servers: Vec<ServerAddress>,
        tls: &rustls::ClientConfig,
        seed: u64,
    ) -> Result<Registers> {
        let now = Instant::now();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        // Clients start tasks when they are made.
        let entered = runtime.enter();
        let servers = servers
            .into_iter()
            .map(|server| Remote::new(vec![server], tls.clone()).client("registers"));
        let shared = Arc::new(Shared {
            id: id.to_owned(),
            servers: servers.collect(),
            began: now,
            stop: AtomicBool::new(false),
            acknowledged: AtomicUsize::new(0),
            next_value: AtomicU64::new(1),
            pause: Mutex::new((Duration::ZERO, now)),
        });
        drop(entered);
        let (namespace, running) = (machine.network_namespace(), shared.clone());
        let thread = std::thread::spawn(move || -> Result<Recorded> {
            let namespace = std::fs::File::open(namespace)?;
            // Only this thread moves, and what it opens.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            runtime.block_on(Clients::new(running, seed).run())
        });
        let thread = Some(thread);
        Ok(Registers { shared, thread })
    }

    /// Writes that were acknowledged until now.
    pub fn acknowledged(&self) -> usize {
        self.shared.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until `count` more writes were acknowledged.
    pub fn go_on(&self, count: usize) -> Result<()> {
        let goal = self.acknowledged() + count;
        crate::eventually("writes go on", PATIENCE, || {
            let now = self.acknowledged();
            ensure!(now >= goal, "{now} writes, {goal} expected");
            let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            ensure!(!ended, "the clients have ended");
            Ok(())
        })
    }

    /// Ends the load when all faults are healed, and checks all that was recorded.
    pub fn finish(mut self) -> Result<Report> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it runs")?;
        let recorded = thread.join().map_err(|_| anyhow!("the clients panicked"))??;
        for (name, history) in &recorded.operations {
            check(history).with_context(|| format!("the register {name}"))?;
        }
        watch::check_all(&recorded.watches, &recorded.operations)?;
        recorded.services.check()?;
        let all = || recorded.operations.values().flatten();
        let writes = |answer: Answer| {
            let found = all().filter(|one| one.call != Call::Read && one.answer == answer);
            found.count()
        };
        let pause = self.shared.pause.lock().map(|pause| pause.0);
        Ok(Report {
            registers: recorded.operations.len(),
            operations: all().count(),
            acknowledged: writes(Answer::Done),
            refused: writes(Answer::Refused),
            unknown: writes(Answer::Unknown),
            events: recorded.watches.iter().map(|watch| watch.events.len()).sum(),
            resumed: recorded.watches.iter().map(|watch| watch.resumed).sum(),
            services: recorded.services.acknowledged.len(),
            longest_pause: pause.unwrap_or_default(),
        })
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && let Ok(Err(error)) = thread.join()
        {
            eprintln!("the registers' clients: {error:#}");
        }
    }
}

impl Shared {
    fn count_write(&self) {
        self.acknowledged.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut pause) = self.pause.lock() {
            pause.0 = pause.0.max(pause.1.elapsed());
            pause.1 = Instant::now();
        }
    }
}

impl Services {
    fn check(&self) -> Result<()> {
        let text = |service: &Value, pointer: &str| {
            let found = service.pointer(pointer).filter(|found| !found.is_null());
            let name = &service["metadata"]["name"];
            found
                .map(ToString::to_string)
                .with_context(|| format!("the service {name} has no {pointer}"))
        };
        let mut names = HashSet::new();
        for service in &self.found {
            names.insert(service["metadata"]["name"].as_str().unwrap_or_default());
        }
        let lost: Vec<_> = self
            .acknowledged
            .iter()
            .filter(|name| !names.contains(name.as_str()))
            .collect();
        ensure!(
            lost.is_empty(),
            "services were acknowledged and are lost: {lost:?}"
        );
        for pointer in ["/spec/clusterIP", "/spec/ports/0/nodePort"] {
            let mut taken = HashSet::new();
            for service in &self.found {
                let value = text(service, pointer)?;
                ensure!(
                    taken.insert(value.clone()),
                    "{pointer} {value} was given out twice"
                );
            }
        }
        Ok(())
    }
}
