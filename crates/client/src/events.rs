//! The event recorder: core/v1 Events as upstream's recorder writes them. A repeated event raises the
//! count of the first one, many similar ones are combined, and an object that talks too much is muted.
//!
//! Recording never blocks and never fails its caller: the queue is bounded, and what does not fit is lost. Events of
//! different objects are written at once, those of one object in their order. Messages may hold what a container or a
//! registry said: they are cut, and only their digests are remembered.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::ErrorExt;

const QUEUE: usize = 1000;
const MAX_REMEMBERED: usize = 4096;
/// A longer message is cut.
const MAX_MESSAGE: usize = 16 * 1024;
/// More than this many messages of one reason within the interval are combined into one event.
const SIMILAR: usize = 10;
const SIMILAR_INTERVAL: i64 = 600;
/// An object may send this many at once, and one more each `SPAM_REFILL` seconds.
const SPAM_BURST: f64 = 25.0;
const SPAM_REFILL: f64 = 300.0;
const TRIES: u32 = 5;
/// Writes at a time. The store commits in groups: writes that wait together cost little more than one.
const WRITES_AT_ONCE: usize = 32;
/// Writes that wait for an earlier one of the same object, of all objects together.
const WAITING_WRITES: usize = 64;

/// The reference that an event about `object` carries.
pub fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    let meta = object.meta();
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        field_path: None,
    }
}

struct Occurrence {
    object: ObjectReference,
    type_: String,
    reason: String,
    message: String,
    at: Timestamp,
}

#[derive(Clone)]
pub struct EventRecorder {
    queue: mpsc::Sender<Occurrence>,
}

impl EventRecorder {
    /// Starts the task that writes the events of `component` on `host`; it ends with the last recorder.
    pub fn new(client: Client, component: &str, host: &str) -> Self {
        let (queue, occurrences) = mpsc::channel(QUEUE);
        let source = EventSource {
            component: Some(component.to_owned()),
            host: (!host.is_empty()).then(|| host.to_owned()),
        };
        let occurrences = Arc::new(tokio::sync::Mutex::new(occurrences));
        tokio::spawn(skiff_supervise::finished("events", move || {
            write_events(client.clone(), source.clone(), occurrences.clone())
        }));
        EventRecorder { queue }
    }

    /// `type_` is `Normal` or `Warning`.
    pub fn event(&self, object: &ObjectReference, type_: &str, reason: &str, mut message: String) {
        cut(&mut message);
        let occurrence = Occurrence {
            object: object.clone(),
            type_: type_.to_owned(),
            reason: reason.to_owned(),
            message,
            at: Timestamp::now(),
        };
        if self.queue.try_send(occurrence).is_err() {
            tracing::debug!(reason, "event lost: the recorder's queue is full");
        }
    }
}

/// What to do with one occurrence.
#[derive(Debug, PartialEq)]
enum Write {
    Nothing,
    Create(Box<Event>),
    Update {
        namespace: String,
        name: String,
        count: i32,
        event: Box<Event>,
    },
}

struct Written {
    name: String,
    count: i32,
    first: Timestamp,
    last: Timestamp,
}

struct Similar {
    messages: Vec<Digest>,
    last: Timestamp,
}

/// What an event is remembered by.
type Digest = u128;

/// Two hashes with keys that nobody outside knows.
fn digest(text: &str, keys: &[RandomState; 2]) -> Digest {
    let [high, low] = keys.each_ref().map(|key| u128::from(key.hash_one(text)));
    high << 64 | low
}

fn cut(message: &mut String) {
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        // Most of a long message may be room for one that never came.
        message.shrink_to_fit();
    }
}

struct Bucket {
    tokens: f64,
    at: Timestamp,
}

/// Decides, without writing anything, what becomes of each occurrence.
#[derive(Default)]
struct Correlator {
    keys: [RandomState; 2],
    written: HashMap<Digest, Written>,
    similar: HashMap<Digest, Similar>,
    buckets: HashMap<Digest, Bucket>,
}

impl Correlator {
    /// With the object that it is about: writes of one object must keep their order.
    fn plan(&mut self, source: &EventSource, occurrence: &Occurrence) -> (Digest, Write) {
        let object = &occurrence.object;
        let object_key = format!(
            "{:?}/{:?}/{:?}/{:?}/{:?}",
            object.kind, object.namespace, object.name, object.uid, object.api_version
        );
        // COMPAT: what is muted is counted all the same, so the next event that passes tells the true number.
        let write = self.count(source, occurrence, &object_key);
        let object = digest(&object_key, &self.keys);
        if self.admit(object, occurrence.at) {
            (object, write)
        } else {
            (object, Write::Nothing)
        }
    }

    fn count(&mut self, source: &EventSource, occurrence: &Occurrence, object_key: &str) -> Write {
        let object = &occurrence.object;
        let group = format!("{object_key}/{}/{}", occurrence.type_, occurrence.reason);
        let combined = self.is_one_of_many(digest(&group, &self.keys), occurrence);
        let (key, message) = if combined {
            (
                group,
                format!("(combined from similar events): {}", occurrence.message),
            )
        } else {
            (
                format!("{group}/{:?}/{}", object.field_path, occurrence.message),
                occurrence.message.clone(),
            )
        };
        let key = digest(&key, &self.keys);
        let namespace = object
            .namespace
            .clone()
            .filter(|ns| !ns.is_empty())
            .unwrap_or_else(|| "default".to_owned());
        let mut event = new_event(source, occurrence, namespace.clone(), message);
        if let Some(written) = self.written.get_mut(&key) {
            written.count += 1;
            written.last = occurrence.at;
            event.metadata.name = Some(written.name.clone());
            event.first_timestamp = Some(Time(written.first));
            event.count = Some(written.count);
            let (name, count) = (written.name.clone(), written.count);
            return Write::Update {
                namespace,
                name,
                count,
                event: Box::new(event),
            };
        }
        if self.written.len() >= MAX_REMEMBERED {
            drop_older_half(&mut self.written, |written| written.last);
        }
        let name = event.metadata.name.clone().unwrap_or_default();
        let (first, last) = (occurrence.at, occurrence.at);
        self.written.insert(
            key,
            Written {
                name,
                count: 1,
                first,
                last,
            },
        );
        Write::Create(Box::new(event))
    }

    fn admit(&mut self, object_key: Digest, at: Timestamp) -> bool {
        if self.buckets.len() >= MAX_REMEMBERED {
            drop_older_half(&mut self.buckets, |bucket| bucket.at);
        }
        let bucket = self.buckets.entry(object_key).or_insert(Bucket {
            tokens: SPAM_BURST,
            at,
        });
        let passed = at.duration_since(bucket.at).as_secs_f64().max(0.0);
        bucket.tokens = (bucket.tokens + passed / SPAM_REFILL).min(SPAM_BURST);
        bucket.at = at;
        if bucket.tokens < 1.0 {
            return false;
        }
        bucket.tokens -= 1.0;
        true
    }

    fn is_one_of_many(&mut self, group: Digest, occurrence: &Occurrence) -> bool {
        if self.similar.len() >= MAX_REMEMBERED {
            drop_older_half(&mut self.similar, |similar| similar.last);
        }
        let similar = self.similar.entry(group).or_insert(Similar {
            messages: Vec::new(),
            last: occurrence.at,
        });
        if occurrence.at.duration_since(similar.last).as_secs() > SIMILAR_INTERVAL {
            similar.messages.clear();
        }
        similar.last = occurrence.at;
        let message = digest(&occurrence.message, &self.keys);
        if !similar.messages.contains(&message) {
            if similar.messages.len() >= SIMILAR {
                similar.messages.remove(0);
                similar.messages.push(message);
                return true;
            }
            similar.messages.push(message);
        }
        similar.messages.len() >= SIMILAR
    }
}

fn drop_older_half<V>(map: &mut HashMap<Digest, V>, at: impl Fn(&V) -> Timestamp) {
    let mut times: Vec<Timestamp> = map.values().map(&at).collect();
    times.sort_unstable();
    let middle = times[times.len() / 2];
    map.retain(|_, value| at(value) > middle);
}

fn new_event(source: &EventSource, occurrence: &Occurrence, namespace: String, message: String) -> Event {
    let object_name = occurrence.object.name.clone().unwrap_or_default();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{object_name}.{:x}", occurrence.at.as_nanosecond())),
            namespace: Some(namespace),
            ..Default::default()
        },
        involved_object: occurrence.object.clone(),
        reason: Some(occurrence.reason.clone()),
        message: Some(message),
        type_: Some(occurrence.type_.clone()),
        first_timestamp: Some(Time(occurrence.at)),
        last_timestamp: Some(Time(occurrence.at)),
        count: Some(1),
        source: Some(source.clone()),
        reporting_component: source.component.clone(),
        reporting_instance: source.host.clone(),
        ..Default::default()
    }
}

async fn write_events(
    client: Client,
    source: EventSource,
    occurrences: Arc<tokio::sync::Mutex<mpsc::Receiver<Occurrence>>>,
) {
    let mut occurrences = occurrences.lock().await;
    let mut correlator = Correlator::default();
    let mut writes = Writes::default();
    loop {
        tokio::select! {
            Some(written) = writes.running.join_next() => writes.ended(&client, written),
            occurrence = occurrences.recv(), if writes.has_room() => {
                let Some(occurrence) = occurrence else { break };
                match correlator.plan(&source, &occurrence) {
                    (_, Write::Nothing) => {}
                    (object, write) => writes.add(&client, object, write),
                }
            }
        }
    }
    while let Some(written) = writes.running.join_next().await {
        writes.ended(&client, written);
    }
}

/// The writes under way, at most one of an object.
#[derive(Default)]
struct Writes {
    running: JoinSet<Digest>,
    /// By object that is being written of: what comes next.
    next: HashMap<Digest, VecDeque<Write>>,
    waiting: usize,
}

impl Writes {
    fn has_room(&self) -> bool {
        self.running.len() < WRITES_AT_ONCE && self.waiting < WAITING_WRITES
    }

    fn add(&mut self, client: &Client, object: Digest, write: Write) {
        match self.next.entry(object) {
            Entry::Occupied(mut busy) => {
                busy.get_mut().push_back(write);
                self.waiting += 1;
            }
            Entry::Vacant(free) => {
                free.insert(VecDeque::new());
                self.start(client, object, write);
            }
        }
    }

    fn start(&mut self, client: &Client, object: Digest, write: Write) {
        let client = client.clone();
        self.running.spawn(async move {
            // One bad event must not hold up the others of its object.
            let written = AssertUnwindSafe(persevere(&client, &write)).catch_unwind().await;
            if let Err(panic) = written {
                skiff_supervise::failed("events", skiff_supervise::panic_text(&*panic));
            }
            object
        });
    }

    fn ended(&mut self, client: &Client, object: Result<Digest, tokio::task::JoinError>) {
        // Nobody aborts these, and panics are caught inside.
        let Ok(object) = object else { return };
        let Entry::Occupied(mut busy) = self.next.entry(object) else {
            return;
        };
        match busy.get_mut().pop_front() {
            Some(write) => {
                self.waiting -= 1;
                self.start(client, object, write);
            }
            None => {
                busy.remove();
            }
        }
    }
}

/// Writes, and tries again a little later each time while the server may do better.
async fn persevere(client: &Client, write: &Write) {
    for attempt in 1..=TRIES {
        match perform(client, write).await {
            Ok(()) => return,
            // The server has decided: a namespace that ends takes no new events.
            Err(kube::Error::Api(status)) if status.code != 429 && status.code < 500 => {
                tracing::debug!(%status, "event refused");
                return;
            }
            Err(error) if attempt == TRIES => tracing::debug!(%error, "event lost"),
            Err(_) => {
                let pause = Duration::from_millis(100 << attempt);
                tokio::time::sleep(pause.mul_f64(rand::random_range(1.0..1.5))).await;
            }
        }
    }
}

async fn perform(client: &Client, write: &Write) -> Result<(), kube::Error> {
    match write {
        Write::Nothing => Ok(()),
        Write::Create(event) => create(client, event).await,
        Write::Update {
            namespace,
            name,
            count,
            event,
        } => {
            let api: Api<Event> = Api::namespaced(client.clone(), namespace);
            let patch =
                json!({"count": count, "lastTimestamp": event.last_timestamp, "message": event.message});
            match api
                .patch(name, &PatchParams::default(), &Patch::Strategic(patch))
                .await
            {
                Ok(_) => Ok(()),
                // Events expire; the next occurrence of one that is gone is a new one.
                Err(error) if error.is_not_found() => create(client, event).await,
                Err(error) => Err(error),
            }
        }
    }
}

async fn create(client: &Client, event: &Event) -> Result<(), kube::Error> {
    let api: Api<Event> = Api::namespaced(
        client.clone(),
        event.metadata.namespace.as_deref().unwrap_or("default"),
    );
    match api.create(&PostParams::default(), event).await {
        Err(error) if error.is_already_exists() => Ok(()),
        other => other.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{self, Reply};

    fn occurrence(message: &str, second: i64) -> Occurrence {
        Occurrence {
            object: ObjectReference {
                kind: Some("Pod".into()),
                name: Some("web".into()),
                namespace: Some("default".into()),
                ..Default::default()
            },
            type_: "Normal".into(),
            reason: "Test".into(),
            message: message.into(),
            at: Timestamp::from_second(1_000_000 + second).unwrap(),
        }
    }

    #[test]
    fn repeats_are_counted_and_a_flood_is_combined_then_muted() {
        let mut correlator = Correlator::default();
        let source = EventSource::default();
        let (_, Write::Create(first)) = correlator.plan(&source, &occurrence("same", 0)) else {
            panic!()
        };
        let name = first.metadata.name.clone().unwrap();
        assert_eq!(name, format!("web.{:x}", 1_000_000i128 * 1_000_000_000));
        match correlator.plan(&source, &occurrence("same", 5)).1 {
            Write::Update {
                name: again,
                count: 2,
                event,
                ..
            } => {
                assert_eq!(again, name);
                assert_eq!(event.first_timestamp, first.first_timestamp);
            }
            other => panic!("{other:?}"),
        }
        let mut outcomes = Vec::new();
        for number in 0..30 {
            outcomes.push(
                match correlator.plan(&source, &occurrence(&format!("m{number}"), 6)).1 {
                    Write::Create(event) if event.message.as_deref().unwrap().starts_with("(combined") => 'C',
                    Write::Create(_) => 'c',
                    Write::Update { event, .. }
                        if event.message.as_deref().unwrap().starts_with("(combined") =>
                    {
                        'U'
                    }
                    Write::Update { .. } => 'u',
                    Write::Nothing => '-',
                },
            );
        }
        let text: String = outcomes.iter().collect();
        assert_eq!(text, "ccccccccCUUUUUUUUUUUUUU-------");
        // Later one more may pass, and it tells of those that were muted.
        match correlator.plan(&source, &occurrence("m30", 600)).1 {
            Write::Update { count, .. } => assert_eq!(count, 23),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn an_expired_event_is_written_anew() {
        let (client, seen) = fake::client(|request| match request.method.as_str() {
            "PATCH" => fake::status(404, "NotFound"),
            _ => Reply::Json(201, request.body.clone()),
        });
        let recorder = EventRecorder::new(client, "test", "");
        let object = occurrence("", 0).object;
        recorder.event(&object, "Warning", "Bad", "it broke".into());
        recorder.event(&object, "Warning", "Bad", "it broke".into());
        recorder.event(&object, "Warning", "Worse", "ß".repeat(1 << 20));
        while seen.lock().len() < 4 {
            tokio::task::yield_now().await;
        }
        let seen = seen.lock();
        let methods: Vec<&str> = seen.iter().map(|request| request.method.as_str()).collect();
        assert_eq!(methods, vec!["POST", "PATCH", "POST", "POST"]);
        assert_eq!(seen[0].path, "/api/v1/namespaces/default/events");
        assert_eq!(seen[1].body["count"], 2);
        assert_eq!(seen[2].body["count"], 2);
        assert_eq!(seen[0].body["reportingComponent"], "test");
        let long = seen[3].body["message"].as_str().unwrap_or_default();
        assert_eq!(long.len(), MAX_MESSAGE, "a long message is cut");
    }

    fn about(name: &str) -> ObjectReference {
        ObjectReference {
            name: Some(name.into()),
            ..occurrence("", 0).object
        }
    }

    fn messages(seen: &[fake::Seen], name: &str) -> Vec<String> {
        let of_object = seen
            .iter()
            .filter(|request| request.body["involvedObject"]["name"] == name);
        of_object
            .map(|request| request.body["message"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    #[tokio::test]
    async fn objects_do_not_wait_for_each_other_and_one_keeps_its_order() {
        let (release, held) = mpsc::unbounded_channel();
        let held = parking_lot::Mutex::new(Some(held));
        let (client, seen) = fake::client(move |request| {
            let slow = request.body["involvedObject"]["name"] == "slow";
            match slow.then(|| held.lock().take()).flatten() {
                Some(held) => Reply::Stream(held),
                None => Reply::Json(201, request.body.clone()),
            }
        });
        let recorder = EventRecorder::new(client, "test", "");
        for message in ["first", "second", "third"] {
            recorder.event(&about("slow"), "Normal", "Test", message.into());
        }
        for number in 0..100 {
            recorder.event(&about(&format!("o{number}")), "Normal", "Test", "quick".into());
        }
        while seen.lock().len() < 101 {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            messages(&seen.lock(), "slow"),
            ["first"],
            "the others wait for it"
        );
        release.send("{}".to_owned()).unwrap();
        drop(release);
        while seen.lock().len() < 103 {
            tokio::task::yield_now().await;
        }
        assert_eq!(messages(&seen.lock(), "slow"), ["first", "second", "third"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_answer_gets_so_many_writes_and_no_more() {
        let kept = parking_lot::Mutex::new(Vec::new());
        let (client, seen) = fake::client(move |_| {
            let (never, held) = mpsc::unbounded_channel();
            kept.lock().push(never);
            Reply::Stream(held)
        });
        let recorder = EventRecorder::new(client, "test", "");
        for number in 0..2 * WRITES_AT_ONCE {
            recorder.event(&about(&format!("o{number}")), "Normal", "Test", "m".into());
        }
        // The clock stands still until nothing else is to do.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(seen.lock().len(), WRITES_AT_ONCE);
    }

    #[test]
    fn what_waits_for_one_object_is_bounded() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _guard = runtime.enter();
        let (client, _) = fake::client(|_| fake::status(500, "InternalError"));
        let mut writes = Writes::default();
        let mut taken = 0;
        while writes.has_room() && taken < 10 * WAITING_WRITES {
            writes.add(&client, 1, Write::Nothing);
            taken += 1;
        }
        assert_eq!(taken, WAITING_WRITES + 1);
    }
}
