//! Follows a resource through the cache for as long as the server runs: every object that is there, then every
//! change. What falls out of the cache's history is found by comparing with the present state, deletions included.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use skiff_registry::{
    Entry, EventKind, ListResult, ReadAt, Registry, Resource, WatchFrom, WatchOptions, Watcher,
};
use tokio_util::sync::CancellationToken;

use crate::server::Inner;

/// One change, or one object of the state at the start.
pub struct Event {
    pub kind: EventKind,
    pub entry: Arc<Entry>,
}

pub struct Follower {
    registry: Arc<Registry>,
    resource: Arc<Resource>,
    shutdown: CancellationToken,
    watcher: Option<Watcher>,
    /// The last version that was seen; none: start with the state. Seeing an object twice does no harm.
    seen: Option<i64>,
    /// What is there, by key, as its reader knows it.
    known: HashMap<Arc<str>, Arc<Entry>>,
    /// While the state is read: what was known before and has not been seen again.
    missing: Option<HashMap<Arc<str>, Arc<Entry>>>,
    /// What turned out to be gone.
    gone: Vec<Arc<Entry>>,
}

/// Hands every event to `handle`, for as long as the server runs. An event whose handling panics is passed over, the
/// others are not; and whatever else fails, following goes on with the whole state, so that no deletion is missed.
pub fn follow(
    shutdown: &CancellationToken,
    name: &'static str,
    follower: Follower,
    handle: impl FnMut(Event) + Send + 'static,
) {
    let state = Arc::new(tokio::sync::Mutex::new((follower, handle)));
    let mut starts = 0;
    skiff_supervise::keep(name, shutdown, move || {
        let state = state.clone();
        starts += 1;
        let again = starts > 1;
        async move {
            let (follower, handle) = &mut *state.lock().await;
            if again {
                follower.start_over();
            }
            while let Some(event) = follower.next().await {
                let key = event.entry.key.clone();
                let handled = std::panic::catch_unwind(AssertUnwindSafe(|| handle(event)));
                if let Err(panic) = handled {
                    let why = skiff_supervise::panic_text(&*panic);
                    tracing::error!(task = name, %key, panic = why, "an object was skipped: its handler panicked");
                    skiff_supervise::failed(name, &format!("{key}: panicked: {why}"));
                }
            }
        }
    });
}

impl Follower {
    pub fn new(inner: &Inner, resource: Arc<Resource>) -> Follower {
        Follower::over(inner.registry.clone(), resource, inner.shutdown.clone())
    }

    /// Follows from where a list ended.
    pub fn after(inner: &Inner, resource: Arc<Resource>, listed: &ListResult) -> Follower {
        let mut follower = Follower::new(inner, resource);
        follower.seen = Some(listed.revision);
        let known = listed
            .items
            .iter()
            .map(|entry| (entry.key.clone(), entry.clone()));
        follower.known = known.collect();
        follower
    }

    fn over(registry: Arc<Registry>, resource: Arc<Resource>, shutdown: CancellationToken) -> Follower {
        Follower {
            registry,
            resource,
            shutdown,
            watcher: None,
            seen: None,
            known: HashMap::new(),
            missing: None,
            gone: Vec::new(),
        }
    }

    /// Reads the whole state again.
    fn start_over(&mut self) {
        (self.watcher, self.seen) = (None, None);
    }

    /// The next event; `None` when the server ends.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(entry) = self.gone.pop() {
                let kind = EventKind::Deleted;
                return Some(Event { kind, entry });
            }
            let Some(watcher) = &mut self.watcher else {
                self.open().await?;
                continue;
            };
            let event = tokio::select! {
                event = watcher.next() => event,
                () = self.shutdown.cancelled() => return None,
            };
            let Some(event) = event else {
                self.watcher = None;
                continue;
            };
            let Some(entry) = &event.entry else {
                // The state has been read: what of the known was not in it is gone.
                if event.initial_events_end {
                    for (key, entry) in self.missing.take().into_iter().flatten() {
                        // One that cannot be read now is not gone.
                        if self.registry.is_unreadable(&self.resource, &key) {
                            self.known.insert(key, entry);
                        } else {
                            self.gone.push(entry);
                        }
                    }
                }
                self.pass(event.revision);
                continue;
            };
            if let Some(missing) = &mut self.missing {
                missing.remove(&entry.key);
            }
            if event.kind == EventKind::Deleted {
                self.known.remove(&entry.key);
            } else {
                self.known.insert(entry.key.clone(), entry.clone());
            }
            self.pass(event.revision);
            return Some(Event {
                kind: event.kind,
                entry: entry.clone(),
            });
        }
    }

    /// Objects of the state come in the order of their keys: none of their versions says how far it was read.
    fn pass(&mut self, revision: i64) {
        if self.missing.is_none() {
            self.seen = Some(revision);
        }
    }

    async fn open(&mut self) -> Option<()> {
        let from = match self.seen.take() {
            Some(revision) => WatchFrom::After(revision),
            None => {
                // Reading the state may have been broken off before: what was missing then still is.
                let mut missing = self.missing.take().unwrap_or_default();
                missing.extend(std::mem::take(&mut self.known));
                self.missing = Some(missing);
                WatchFrom::State(ReadAt::Latest)
            }
        };
        let options = WatchOptions {
            from,
            initial_events_end: true,
            skip_unreadable: true,
            ..WatchOptions::default()
        };
        match self.registry.watch(&self.resource, options).await {
            Ok(watcher) => self.watcher = Some(watcher),
            Err(status) => {
                tracing::warn!(%status, resource = self.resource.plural, "cannot follow a resource");
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(100)) => {}
                    () = self.shutdown.cancelled() => return None,
                }
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use skiff_registry::{Context, DeleteOptions, Open, RegistryConfig, Write};

    struct World {
        registry: Arc<Registry>,
        resource: Arc<Resource>,
        _folder: tempfile::TempDir,
    }

    impl World {
        async fn start() -> World {
            let folder = tempfile::tempdir().expect("a folder");
            let store = skiff_store::Embedded::open(folder.path().join("store")).expect("a store");
            let config = RegistryConfig {
                store: Arc::new(store),
                service_cidrs: vec![skiff_registry::Cidr::parse("10.0.0.0/24").expect("a range")],
                node_ports: 30000..=30100,
                runtime_config: Default::default(),
            };
            let registry = Registry::start(config).await.expect("a registry");
            let resource = registry
                .resources
                .get("scheduling.k8s.io", "v1", "priorityclasses");
            let resource = resource.expect("a resource").clone();
            World {
                registry,
                resource,
                _folder: folder,
            }
        }

        async fn create(&self, name: &str) {
            let object = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1});
            let context = Context::default();
            let made = self
                .registry
                .create(
                    &Write {
                        context: &context,
                        resource: &self.resource,
                        namespace: "",
                        gate: &Open,
                    },
                    object,
                )
                .await;
            made.expect("creates");
        }

        async fn delete(&self, name: &str) {
            let (context, options) = (Context::default(), DeleteOptions::default());
            let gone = self
                .registry
                .delete(&context, &self.resource, "", name, &options, &Open)
                .await;
            gone.expect("deletes");
        }
    }

    async fn brief(follower: &mut Follower) -> String {
        let event = follower.next().await.expect("an event");
        format!("{:?} {}", event.kind, event.entry.head.name)
    }

    #[tokio::test]
    async fn deletions_that_history_lost_are_found() {
        let world = World::start().await;
        let shutdown = CancellationToken::new();
        let mut follower = Follower::over(world.registry.clone(), world.resource.clone(), shutdown.clone());
        for name in ["a", "b", "c"] {
            world.create(name).await;
            assert_eq!(brief(&mut follower).await, format!("Added {name}"));
        }
        // The watch ends, and where it ended is older than what the cache remembers.
        follower.watcher = None;
        follower.seen = Some(1);
        world.delete("a").await;
        world.delete("c").await;
        world.create("d").await;
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(brief(&mut follower).await);
        }
        seen.sort();
        assert_eq!(seen, ["Added b", "Added d", "Deleted a", "Deleted c"]);
        world.delete("b").await;
        assert_eq!(brief(&mut follower).await, "Deleted b");
        shutdown.cancel();
        assert!(follower.next().await.is_none());
    }

    #[tokio::test]
    async fn a_state_that_was_read_in_part_is_read_again() {
        let world = World::start().await;
        let shutdown = CancellationToken::new();
        let mut follower = Follower::over(world.registry.clone(), world.resource.clone(), shutdown);
        for name in ["a", "b"] {
            world.create(name).await;
            assert_eq!(brief(&mut follower).await, format!("Added {name}"));
        }
        (follower.watcher, follower.seen) = (None, None);
        assert_eq!(brief(&mut follower).await, "Added a");
        // Broken off here, before `b`.
        follower.watcher = None;
        world.delete("a").await;
        world.delete("b").await;
        let mut seen = vec![brief(&mut follower).await, brief(&mut follower).await];
        seen.sort();
        assert_eq!(seen, ["Deleted a", "Deleted b"]);
    }

    #[tokio::test]
    async fn an_event_that_panics_is_passed_over_and_a_new_start_misses_nothing() {
        let world = World::start().await;
        let shutdown = CancellationToken::new();
        let follower = Follower::over(world.registry.clone(), world.resource.clone(), shutdown.clone());
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        follow(&shutdown, "test-follow", follower, move |event| {
            assert_ne!(&*event.entry.head.name, "bad");
            let _ = tell.send(format!("{:?} {}", event.kind, event.entry.head.name));
        });
        for name in ["a", "bad", "b"] {
            world.create(name).await;
        }
        assert_eq!(told.recv().await.as_deref(), Some("Added a"));
        assert_eq!(told.recv().await.as_deref(), Some("Added b"));
        let failures = || skiff_supervise::tasks()["test-follow"].failures;
        assert_eq!(failures(), 1);
        skiff_supervise::panic_in("test-follow");
        while failures() < 2 {
            tokio::task::yield_now().await;
        }
        // While nobody follows.
        world.delete("a").await;
        let mut seen = vec![told.recv().await, told.recv().await];
        seen.sort();
        assert_eq!(seen, [Some("Added b".to_owned()), Some("Deleted a".to_owned())]);
        shutdown.cancel();
    }
}
