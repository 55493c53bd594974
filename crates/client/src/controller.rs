//! The reconcile runtime: a controller declares which informers wake it and how their changes map to its keys,
//! and reconciles one key at a time. Everything else is here: the queue, back-off, the number of workers,
//! causes, panics, and the answer to copies that lag.
//!
//! **Stale copies.** An informer may lag behind the server. A reconcile that acted on a copy without its own
//! last writes would make them twice. Therefore a key is held after its reconcile until every informer of the
//! controller that follows a written resource has passed the revision of that write. Reconciles in between are
//! not lost: the key stays queued and runs as soon as it is released.
//!
//! **Writers that never rest.** A key that writes in every reconcile is slowed down (see `pace`), and one that wrote and
//! failed keeps its back-off though the events of its own writes would wake it.
//!
//! A reconcile gets a key, never an event. It must not spawn tasks that write: only writes of its own task are
//! waited for.

use std::fmt::{Debug, Display};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use kube::Resource;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::informer::{Change, Informer};
use crate::pace::Pace;
use crate::queue::{Taken, WorkQueue};
use crate::workers::{Action, Worked, work};
use crate::writes::Write;
use crate::{Key, cause_of};

/// A watch that breaks may take a while to come back; after this long a copy is trusted again.
const MAX_HOLD: Duration = Duration::from_secs(30);

/// A key that wrote and failed waits at most this long, whatever happens. After that, events wake it before its back-off
/// is over, as they wake one that failed without a write.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// What a controller does with one key: observe its informers, plan, write.
///
/// An `Err` brings the key back with exponential back-off.
pub trait Reconcile: Send + Sync + 'static {
    type Key: Clone + Debug + Eq + Hash + Send + Sync + 'static;
    type Error: Display + Send + 'static;

    fn reconcile(&self, key: Self::Key) -> impl Future<Output = Result<Action, Self::Error>> + Send;
}

/// An informer without its type.
pub(crate) trait Follow: Send + Sync {
    fn synced(&self) -> BoxFuture<'_, ()>;
    /// True if the copy shows the write, or never will because it is not about this kind.
    fn shows(&self, write: &Write) -> bool;
    /// Changes whenever the copy does.
    fn progress(&self) -> watch::Receiver<u64>;
}

/// A declaration; [`Controller::run`] makes it work.
pub struct Controller<R: Reconcile> {
    name: String,
    queue: Arc<WorkQueue<R::Key>>,
    shutdown: CancellationToken,
    reconciler: Arc<R>,
    workers: usize,
    informers: Vec<Box<dyn Follow>>,
    ticks: Vec<Tick<R>>,
    /// Work starts when all of these have ended.
    ready: Vec<BoxFuture<'static, ()>>,
}

/// Keys that are due at each period, whatever changes.
struct Tick<R: Reconcile> {
    period: Duration,
    keys: fn(&R) -> Vec<R::Key>,
}

impl<R: Reconcile> Controller<R> {
    pub fn new(
        name: impl Into<String>,
        queue: Arc<WorkQueue<R::Key>>,
        shutdown: CancellationToken,
        reconciler: Arc<R>,
    ) -> Self {
        Controller {
            name: name.into(),
            queue,
            shutdown,
            reconciler,
            workers: 1,
            informers: Vec::new(),
            ticks: Vec::new(),
            ready: Vec::new(),
        }
    }

    /// How many keys are reconciled at a time; one unless said otherwise.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Reconciles the keys that `keys` answers for each change of an object.
    pub fn watches<K, I>(
        self,
        informer: impl Fn(&R) -> &Informer<K>,
        keys: impl Fn(&R, &Change<K>) -> I + Send + Sync + 'static,
    ) -> Self
    where
        K: Resource<DynamicType = ()> + Send + Sync + 'static,
        I: IntoIterator<Item = R::Key>,
    {
        self.woken_by(informer, keys, true)
    }

    /// As [`Controller::watches`], for objects that the controller makes itself: a change of one is looked at, but is
    /// not the cause of what is written next.
    pub fn watches_own<K, I>(
        self,
        informer: impl Fn(&R) -> &Informer<K>,
        keys: impl Fn(&R, &Change<K>) -> I + Send + Sync + 'static,
    ) -> Self
    where
        K: Resource<DynamicType = ()> + Send + Sync + 'static,
        I: IntoIterator<Item = R::Key>,
    {
        self.woken_by(informer, keys, false)
    }

    fn woken_by<K, I>(
        mut self,
        informer: impl Fn(&R) -> &Informer<K>,
        keys: impl Fn(&R, &Change<K>) -> I + Send + Sync + 'static,
        is_cause: bool,
    ) -> Self
    where
        K: Resource<DynamicType = ()> + Send + Sync + 'static,
        I: IntoIterator<Item = R::Key>,
    {
        let informer = informer(&self.reconciler).clone();
        let (queue, reconciler) = (self.queue.clone(), self.reconciler.clone());
        informer.subscribe(move |change| {
            let mut woken = keys(&reconciler, change).into_iter().peekable();
            if woken.peek().is_some() {
                let cause = is_cause.then(|| cause_of(&**change.object()));
                woken.for_each(|key| queue.add(key, cause.clone()));
            }
        });
        self.informers.push(Box::new(informer));
        self
    }

    /// Waits for the first list of an informer and for the writes that it must show, but is not woken by it.
    pub fn reads<K>(mut self, informer: impl Fn(&R) -> &Informer<K>) -> Self
    where
        K: Resource + Send + Sync + 'static,
    {
        let informer = informer(&self.reconciler).clone();
        self.informers.push(Box::new(informer));
        self
    }

    /// Reconciles what `keys` answers once per `period`.
    pub fn every(mut self, period: Duration, keys: fn(&R) -> Vec<R::Key>) -> Self {
        self.ticks.push(Tick { period, keys });
        self
    }

    /// Work does not start before `ready` has ended, whatever is queued.
    pub fn starts_after(mut self, ready: impl Future<Output = ()> + Send + 'static) -> Self {
        self.ready.push(Box::pin(ready));
        self
    }

    /// Works until the shutdown, then lets the reconciles in progress end.
    pub async fn run(self) {
        let informers: Arc<[Box<dyn Follow>]> = self.informers.into();
        let synced = join_all(informers.iter().map(|informer| informer.synced()));
        tokio::select! {
            _ = async { (synced.await, join_all(self.ready).await) } => {}
            () = self.shutdown.cancelled() => return,
        }
        let mut tasks = JoinSet::new();
        let pace: Arc<Pace<R::Key>> = Arc::default();
        for _ in 0..self.workers {
            let pace = pace.clone();
            let (name, queue, shutdown) = (self.name.clone(), self.queue.clone(), self.shutdown.clone());
            let (informers, reconciler) = (informers.clone(), self.reconciler.clone());
            tasks.spawn(async move {
                loop {
                    let taken = tokio::select! {
                        biased;
                        () = shutdown.cancelled() => return,
                        taken = queue.next() => taken,
                    };
                    let Some(taken) = taken else { return };
                    let worked = work(&name, &queue, &taken, |key| reconciler.reconcile(key)).await;
                    let Worked { written, retry_after } = worked;
                    let pause = match written.is_empty() {
                        true => Duration::ZERO,
                        // The events of what it wrote before it failed would bring it back at once.
                        false => pace
                            .wrote(&name, &taken.item)
                            .max(retry_after.unwrap_or_default().min(MAX_PAUSE)),
                    };
                    hold(&name, taken, written, pause, &informers, &shutdown);
                }
            });
        }
        for tick in self.ticks {
            let (queue, shutdown) = (self.queue.clone(), self.shutdown.clone());
            let reconciler = self.reconciler.clone();
            tasks.spawn(async move {
                loop {
                    (tick.keys)(&reconciler)
                        .into_iter()
                        .for_each(|key| queue.add(key, None));
                    tokio::select! {
                        () = shutdown.cancelled() => return,
                        () = tokio::time::sleep(tick.period) => {}
                    }
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            // A panic outside of a reconcile: whoever runs the controller starts it again.
            if let Err(error) = ended
                && let Ok(panic) = error.try_into_panic()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl<R: Reconcile<Key = Key>> Controller<R> {
    /// Reconciles every object of the kind that this controller is about, by its own name.
    pub fn owns<K>(self, informer: impl Fn(&R) -> &Informer<K>) -> Self
    where
        K: Resource<DynamicType = ()> + Send + Sync + 'static,
    {
        self.watches(informer, |_, change| [Key::of(&**change.object())])
    }
}

/// Releases the key when the informers show what its reconcile wrote, and not before `pause` is over.
fn hold<T: Clone + Debug + Eq + Hash + Send + Sync + 'static>(
    name: &str,
    taken: Taken<T>,
    written: Vec<Write>,
    pause: Duration,
    informers: &Arc<[Box<dyn Follow>]>,
    shutdown: &CancellationToken,
) {
    let shown = move |informer: &dyn Follow| written.iter().all(|write| informer.shows(write));
    if pause.is_zero() && informers.iter().all(|informer| shown(&**informer)) {
        return;
    }
    let (informers, shutdown, name) = (informers.clone(), shutdown.clone(), name.to_owned());
    tokio::spawn(async move {
        let caught_up = async {
            for informer in &*informers {
                let mut progress = informer.progress();
                while !shown(&**informer) {
                    if progress.changed().await.is_err() {
                        break;
                    }
                }
            }
        };
        let caught_up = async {
            if tokio::time::timeout(MAX_HOLD, caught_up).await.is_err() {
                tracing::warn!(controller = name, item = ?taken.item, "an informer does not show the last write");
            }
        };
        tokio::select! {
            _ = async { tokio::join!(caught_up, tokio::time::sleep(pause)) } => {}
            () = shutdown.cancelled() => {}
        }
        drop(taken);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InformerFactory;
    use crate::fake::{self, Reply};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use kube::api::PostParams;
    use parking_lot::Mutex;
    use serde_json::json;
    use tokio::sync::mpsc;

    /// Creates a ConfigMap while its copy shows none.
    struct CreateOnce {
        client: kube::Client,
        maps: Informer<ConfigMap>,
        seen: Mutex<Vec<usize>>,
    }

    impl Reconcile for CreateOnce {
        type Key = Key;
        type Error = kube::Error;

        async fn reconcile(&self, _key: Key) -> Result<Action, kube::Error> {
            let present = self.maps.len();
            self.seen.lock().push(present);
            if present == 0 {
                let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), "d");
                api.create(&PostParams::default(), &ConfigMap::default()).await?;
            }
            Ok(Action::Done)
        }
    }

    async fn until(what: impl Fn() -> bool) {
        while !what() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Writes at each look, and each write is an event that wakes it.
    struct Restless {
        client: kube::Client,
        maps: Informer<ConfigMap>,
    }

    impl Reconcile for Restless {
        type Key = Key;
        type Error = kube::Error;

        async fn reconcile(&self, _key: Key) -> Result<Action, kube::Error> {
            let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), "d");
            api.create(&PostParams::default(), &ConfigMap::default()).await?;
            Ok(Action::Done)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_wakes_itself_by_its_writes_is_slowed_down() {
        let (events, stream) = mpsc::unbounded_channel();
        let (stream, version) = (Mutex::new(Some(stream)), Mutex::new(1));
        let (client, requests) = fake::client(move |request| match request.method.as_str() {
            "POST" => {
                *version.lock() += 1;
                let made = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "a",
                    "namespace": "d", "uid": "u", "resourceVersion": version.lock().to_string()}});
                let event = json!({"type": "MODIFIED", "object": made});
                events.send(format!("{event}\n")).unwrap();
                Reply::Json(201, made)
            }
            _ if request.query.contains("watch=") => match stream.lock().take() {
                Some(stream) => Reply::Stream(stream),
                None => fake::status(500, "InternalError"),
            },
            _ => Reply::Json(200, json!({"metadata": {"resourceVersion": "1"}, "items": []})),
        });
        let stop = CancellationToken::new();
        let factory = InformerFactory::new(client.clone(), stop.clone());
        let maps = factory.informer();
        let reconciler = Arc::new(Restless { client, maps });
        let queue: Arc<WorkQueue> = WorkQueue::new();
        let controller =
            Controller::new("test", queue.clone(), stop.clone(), reconciler).owns(|r: &Restless| &r.maps);
        let running = tokio::spawn(controller.run());
        queue.add(Key::new("d", "a"), None);
        tokio::time::sleep(Duration::from_secs(20)).await;
        let writes = requests
            .lock()
            .iter()
            .filter(|seen| seen.method == "POST")
            .count();
        assert!((250..320).contains(&writes), "{writes} writes in 20 seconds");
        stop.cancel();
        running.await.unwrap();
    }

    #[tokio::test]
    async fn a_key_is_held_until_the_copy_shows_its_writes() {
        let (events, stream) = mpsc::unbounded_channel();
        let stream = Mutex::new(Some(stream));
        let made = json!({"kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"name": "a", "namespace": "d", "uid": "u", "resourceVersion": "5"}});
        let created = made.clone();
        let (client, requests) = fake::client(move |request| match request.method.as_str() {
            "POST" => Reply::Json(201, created.clone()),
            _ if request.query.contains("watch=") => match stream.lock().take() {
                Some(stream) => Reply::Stream(stream),
                None => fake::status(500, "InternalError"),
            },
            _ => Reply::Json(200, json!({"metadata": {"resourceVersion": "1"}, "items": []})),
        });
        let stop = CancellationToken::new();
        let factory = InformerFactory::new(client.clone(), stop.clone());
        let reconciler = Arc::new(CreateOnce {
            client,
            maps: factory.informer(),
            seen: Mutex::default(),
        });
        let queue: Arc<WorkQueue> = WorkQueue::new();
        let controller = Controller::new("test", queue.clone(), stop.clone(), reconciler.clone())
            .workers(2)
            .owns(|r: &CreateOnce| &r.maps);
        let running = tokio::spawn(controller.run());
        queue.add(Key::new("d", "a"), None);
        until(|| reconciler.seen.lock().len() == 1).await;
        // Woken again, but its own write is not in the copy yet: nothing may happen.
        queue.add(Key::new("d", "a"), None);
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(*reconciler.seen.lock(), [0]);
        // Another key is not held up by it.
        events
            .send(format!("{}\n", json!({"type": "ADDED", "object": made})))
            .unwrap();
        until(|| reconciler.seen.lock().len() >= 2).await;
        assert!(reconciler.seen.lock()[1..].iter().all(|present| *present == 1));
        let posts = requests
            .lock()
            .iter()
            .filter(|seen| seen.method == "POST")
            .count();
        assert_eq!(posts, 1);
        stop.cancel();
        running.await.unwrap();
    }
}
