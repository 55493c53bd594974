//! The clients of registers: what each does next, and what an answer of the API server says about it.

use super::{
    Answer, CLIENTS, Call, Event, Operation, PATIENCE, REQUEST_TIMEOUT, Recorded, Services, Shared, watch,
};
use crate::Random;
use anyhow::{Context, Result, bail};
use http::{Method, Request};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a register serves, and how many do at once.
const REGISTER_TIME: Duration = Duration::from_secs(8);
const AT_ONCE: u64 = 4;
/// Node ports are few.
const MAX_SERVICES: usize = 300;
pub(super) const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LABEL: &str = "registers";
const SERVICES: &str = "/api/v1/namespaces/default/services";

pub(super) struct Clients {
    shared: Arc<Shared>,
    seed: u64,
}

/// What an API server answered, if it did.
struct Reply {
    code: Option<u16>,
    object: Value,
}

/// A register as a client saw it last: its value and version.
type Known = Option<(u64, String)>;

impl Clients {
    pub(super) fn new(shared: Arc<Shared>, seed: u64) -> Clients {
        Clients { shared, seed }
    }

    pub(super) async fn run(self) -> Result<Recorded> {
        let shared = &self.shared;
        let version = self.first_version().await?;
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let watchers: Vec<_> = (0..shared.servers.len())
                    .map(|first| tokio::task::spawn_local(watch::run(shared.clone(), first, version)))
                    .collect();
                let clients: Vec<_> = (0..CLIENTS)
                    .map(|number| {
                        let random = Random(self.seed.wrapping_mul(31).wrapping_add(number as u64));
                        tokio::task::spawn_local(work(shared.clone(), number, random))
                    })
                    .collect();
                let services = tokio::task::spawn_local(make_services(shared.clone(), Random(self.seed)));
                let mut operations = BTreeMap::<String, Vec<Operation>>::new();
                for client in clients {
                    for (name, operation) in client.await?? {
                        operations.entry(name).or_default().push(operation);
                    }
                }
                let acknowledged = services.await??;
                self.read_all(&mut operations).await?;
                self.make_last().await?;
                let mut watches = Vec::new();
                for watcher in watchers {
                    watches.push(watcher.await??);
                }
                let services = format!("{SERVICES}?{}", shared.selector());
                let found = self.ask_until(Method::GET, &services, None, &[200]).await?;
                let found = found["items"].as_array().cloned().unwrap_or_default();
                self.ask_until(Method::DELETE, &services, None, &[200]).await?;
                let services = Services { acknowledged, found };
                Ok(Recorded {
                    operations,
                    watches,
                    services,
                })
            })
            .await
    }

    async fn first_version(&self) -> Result<u64> {
        let list = self.ask_until(Method::GET, MAPS, None, &[200]).await?;
        version(&list).with_context(|| format!("a list without a version: {list}"))
    }

    /// Every server shows every register as it is at the end.
    async fn read_all(&self, operations: &mut BTreeMap<String, Vec<Operation>>) -> Result<()> {
        for (name, history) in operations {
            for (number, server) in self.shared.servers.iter().enumerate() {
                let began = Instant::now();
                loop {
                    let read = call(&self.shared, server, CLIENTS + number, name, Call::Read, &None).await?;
                    if read.answer != Answer::Unknown {
                        history.push(read);
                        break;
                    }
                    if began.elapsed() > PATIENCE {
                        bail!("the server {number} does not show {name} at the end");
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
        Ok(())
    }

    async fn make_last(&self) -> Result<()> {
        let last = self.shared.register(&self.shared.last(), 0, None);
        // The second answer is that of a repetition.
        self.ask_until(Method::POST, MAPS, Some(last), &[201, 409])
            .await
            .map(drop)
    }

    /// Asks all servers in turn until one gives one of these answers.
    async fn ask_until(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        codes: &[u16],
    ) -> Result<Value> {
        let (began, mut at) = (Instant::now(), 0);
        loop {
            let server = &self.shared.servers[at % self.shared.servers.len()];
            let reply = ask(server, method.clone(), path, body.clone()).await;
            if reply.code.is_some_and(|code| codes.contains(&code)) {
                return Ok(reply.object);
            }
            if began.elapsed() > PATIENCE {
                bail!("{method} {path}: {:?} {}", reply.code, reply.object);
            }
            at += 1;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn ask(client: &kube::Client, method: Method, path: &str, body: Option<Value>) -> Reply {
    let nothing = Reply {
        code: None,
        object: Value::Null,
    };
    let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Body::from(body));
    let Ok(request) = request else {
        return nothing;
    };
    let asking = async {
        let response = client.send(request).await.ok()?;
        let code = response.status().as_u16();
        let bytes = response.into_body().collect().await.ok()?.to_bytes();
        let object = serde_json::from_slice(&bytes).ok()?;
        let code = Some(code);
        Some(Reply { code, object })
    };
    match tokio::time::timeout(REQUEST_TIMEOUT, asking).await {
        Ok(Some(reply)) => reply,
        _ => nothing,
    }
}

impl Shared {
    /// The name of the object that is made when all clients have ended.
    pub(super) fn last(&self) -> String {
        format!("last-{}", self.id)
    }

    pub(super) fn selector(&self) -> String {
        format!("labelSelector={LABEL}%3D{}", self.id)
    }

    fn register(&self, name: &str, value: u64, version: Option<&str>) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"value": value.to_string()},
            "metadata": {"name": name, "labels": {LABEL: self.id}, "resourceVersion": version}})
    }
}

pub(super) fn version(object: &Value) -> Option<u64> {
    object["metadata"]["resourceVersion"].as_str()?.parse().ok()
}

pub(super) fn value(object: &Value) -> Option<u64> {
    object["data"]["value"].as_str()?.parse().ok()
}

pub(super) fn event(kind: &str, object: &Value) -> Option<Event> {
    Some(Event {
        kind: kind.to_owned(),
        name: object["metadata"]["name"].as_str()?.to_owned(),
        value: value(object)?,
        version: version(object)?,
    })
}

/// One call, and what its answer says.
async fn call(
    shared: &Shared,
    server: &kube::Client,
    client: usize,
    name: &str,
    call: Call,
    known: &Known,
) -> Result<Operation> {
    let path = format!("{MAPS}/{name}");
    let version_before = known.as_ref().map(|(_, version)| version.as_str());
    let invoked = shared.began.elapsed();
    let reply = match call {
        Call::Read => ask(server, Method::GET, &path, None).await,
        Call::Create { value } => {
            ask(
                server,
                Method::POST,
                MAPS,
                Some(shared.register(name, value, None)),
            )
            .await
        }
        Call::Swap { value, .. } => {
            let object = shared.register(name, value, version_before);
            ask(server, Method::PUT, &path, Some(object)).await
        }
        Call::Delete { .. } => {
            let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"resourceVersion": version_before}});
            ask(server, Method::DELETE, &path, Some(options)).await
        }
    };
    let returned = shared.began.elapsed();
    let answer = match (call, reply.code) {
        (Call::Read, Some(200)) => Answer::Found(value(&reply.object)),
        (Call::Read, Some(404)) => Answer::Found(None),
        (Call::Create { .. }, Some(201)) | (Call::Swap { .. } | Call::Delete { .. }, Some(200)) => {
            Answer::Done
        }
        (Call::Create { .. }, Some(409)) | (Call::Swap { .. } | Call::Delete { .. }, Some(404 | 409)) => {
            Answer::Refused
        }
        // Sent too early, too often, or to a server in need: it may have been carried out or not.
        (_, None | Some(408 | 429 | 500..)) => Answer::Unknown,
        (_, Some(code)) => bail!("{call:?} of {name}: {code} {}", reply.object),
    };
    if answer == Answer::Done {
        shared.count_write();
    }
    let version = match (call, answer) {
        (Call::Delete { .. }, _) => None,
        (_, Answer::Done | Answer::Found(Some(_))) => version(&reply.object),
        _ => None,
    };
    Ok(Operation {
        client,
        call,
        answer,
        version,
        invoked,
        returned,
    })
}

/// Reads and writes the registers of the moment until the load is to end.
async fn work(shared: Arc<Shared>, number: usize, mut random: Random) -> Result<Vec<(String, Operation)>> {
    let (mut recorded, mut known) = (Vec::new(), HashMap::<String, Known>::new());
    let mut period = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        let now = shared.began.elapsed().as_secs() / REGISTER_TIME.as_secs();
        if now != period {
            period = now;
            known.clear();
        }
        let name = format!("register-{}-{period}-{}", shared.id, random.below(AT_ONCE));
        // Another server each time: what one acknowledged, all others must know.
        let server = &shared.servers[random.below(shared.servers.len() as u64) as usize];
        let before = known.get(&name);
        let fresh = || shared.next_value.fetch_add(1, Ordering::Relaxed);
        let next = match (before, random.below(10)) {
            (None, _) | (_, 0..4) => Call::Read,
            (Some(None), _) => Call::Create { value: fresh() },
            (Some(Some((expected, _))), 4..9) => Call::Swap {
                expected: *expected,
                value: fresh(),
            },
            (Some(Some((expected, _))), _) => Call::Delete { expected: *expected },
        };
        let before = before.cloned().unwrap_or_default();
        let done = call(&shared, server, number, &name, next, &before).await?;
        let written = match next {
            Call::Create { value } | Call::Swap { value, .. } => Some(value),
            Call::Delete { .. } | Call::Read => None,
        };
        let found = match done.answer {
            Answer::Found(found) => Some(found),
            Answer::Done => Some(written),
            // The next call is a read.
            Answer::Refused | Answer::Unknown => None,
        };
        match (found, done.version) {
            (Some(Some(value)), Some(version)) => {
                known.insert(name.clone(), Some((value, version.to_string())));
            }
            (Some(None), _) => {
                known.insert(name.clone(), None);
            }
            // Now and then one goes on with what it knew.
            _ if random.one_in(3) => {}
            _ => {
                known.remove(&name);
            }
        }
        recorded.push((name, done));
        tokio::time::sleep(random.millis(5, 25)).await;
    }
    Ok(recorded)
}

/// Makes Services of fixed names, each once; the names of those that were acknowledged.
async fn make_services(shared: Arc<Shared>, mut random: Random) -> Result<Vec<String>> {
    let mut acknowledged = Vec::new();
    for number in 0..MAX_SERVICES {
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("service-{}-{number}", shared.id);
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": {LABEL: shared.id}},
            "spec": {"type": "NodePort", "ports": [{"port": 80}]}});
        let server = &shared.servers[random.below(shared.servers.len() as u64) as usize];
        let reply = ask(server, Method::POST, SERVICES, Some(service)).await;
        match reply.code {
            Some(201) => acknowledged.push(name),
            None | Some(408 | 429 | 500..) => {}
            Some(code) => bail!("a service: {code} {}", reply.object),
        }
        tokio::time::sleep(random.millis(50, 150)).await;
    }
    Ok(acknowledged)
}
