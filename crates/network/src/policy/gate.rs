//! The socket where the CNI plugin asks for a pod's policies to be in force: it attaches a pod once it has the answer,
//! so that no packet of a pod comes before its policies.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use parking_lot::Mutex;
use skiff_client::{Client, Key};
use skiff_cni::PolicyRequest;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::compile::Compiler;
use super::{Error, PolicyConfig};

/// A request is one line.
const MAX_REQUEST: u64 = 64 << 10;
/// How long a request may take to come: who connects is root, but may be stopped in the middle.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the pod may take to show in the informer before the API server is asked for it.
const INFORMER_PATIENCE: Duration = Duration::from_secs(2);
/// The plugin waits a little longer, so that it hears why.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The state that the loop and the gate share.
pub(super) struct Shared {
    /// A leaf lock.
    pub(super) compiler: Mutex<Compiler>,
    pub(super) changed: Notify,
    /// Counts what was told to the compiler.
    pub(super) told: watch::Sender<u64>,
    /// What the kernel has of it.
    pub(super) in_force: watch::Sender<u64>,
}

impl Shared {
    pub(super) fn new(node: &str) -> Shared {
        Shared {
            compiler: Mutex::new(Compiler::new(node)),
            changed: Notify::new(),
            told: watch::Sender::new(0),
            in_force: watch::Sender::new(0),
        }
    }

    /// Tells the compiler something. Returns the count after it, if it changes anything.
    pub(super) fn tell(&self, tell: impl FnOnce(&mut Compiler) -> bool) -> Option<u64> {
        let mut compiler = self.compiler.lock();
        if !tell(&mut compiler) {
            return None;
        }
        // Under the lock: who compiles next has seen all up to this count.
        self.told.send_modify(|count| *count += 1);
        let count = *self.told.borrow();
        drop(compiler);
        self.changed.notify_one();
        Some(count)
    }
}

/// Opens the socket, in the place of one that a former run left.
pub(super) fn listen(config: &PolicyConfig) -> Result<UnixListener, Error> {
    let failed = |source| Error::Socket {
        path: config.socket.clone(),
        source,
    };
    match std::fs::remove_file(&config.socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    if let Some(dir) = config.socket.parent() {
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    let listener = UnixListener::bind(&config.socket).map_err(failed)?;
    let only_root = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&config.socket, only_root).map_err(failed)?;
    Ok(listener)
}

/// Answers until it is dropped.
pub(super) async fn serve(listener: UnixListener, shared: Arc<Shared>, client: Client) {
    let mut answers = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    answers.spawn(answer(stream, shared.clone(), client.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a CNI plugin's request");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = answers.join_next() => {}
        }
    }
}

async fn answer(stream: UnixStream, shared: Arc<Shared>, client: Client) {
    let (input, mut output) = stream.into_split();
    let mut line = String::new();
    let mut input = BufReader::new(input.take(MAX_REQUEST));
    match timeout(REQUEST_TIMEOUT, input.read_line(&mut line)).await {
        Ok(Ok(1..)) => {}
        _ => return,
    }
    let text = match serde_json::from_str::<PolicyRequest>(&line) {
        Ok(request) => match admit(&request, &shared, &client).await {
            Ok(()) => skiff_cni::POLICY_IN_FORCE.to_owned(),
            Err(why) => why,
        },
        Err(error) => format!("the request cannot be read: {error}"),
    };
    // A plugin that is gone asks again, or its pod is gone too.
    let _ = output.write_all(format!("{text}\n").as_bytes()).await;
}

/// Returns when the policies of the pod are in force under its addresses.
async fn admit(request: &PolicyRequest, shared: &Shared, client: &Client) -> Result<(), String> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let key = Key::new(&request.namespace, &request.name);
    if !is_known(&key, request, shared, client, deadline).await? {
        // Not a pod of this cluster, or one that is deleted already: nothing is open under its addresses, and it may
        // well do without.
        tracing::warn!(pod = %key, "a sandbox of a pod that the API server does not have gets no traffic");
        return Ok(());
    }
    // A pod that was deleted meanwhile stays closed.
    let told = shared.tell(|compiler| compiler.attach(&key, &request.uid, request.addresses.clone()));
    let mut in_force = shared.in_force.subscribe();
    let reached = in_force.wait_for(|count| Some(*count) >= told);
    match timeout_at(deadline, reached).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err("the network policies cannot be brought into the kernel; skiff's log says why".to_owned()),
    }
}

async fn is_known(
    key: &Key,
    request: &PolicyRequest,
    shared: &Shared,
    client: &Client,
    deadline: Instant,
) -> Result<bool, String> {
    let shown = async {
        let mut told = shared.told.subscribe();
        while !shared.compiler.lock().knows(key, &request.uid) {
            // The sender is in `shared`, so this ends only by the pod.
            let _ = told.changed().await;
        }
    };
    tokio::pin!(shown);
    if timeout(INFORMER_PATIENCE, &mut shown).await.is_ok() {
        return Ok(true);
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), &key.namespace);
    match timeout_at(deadline, pods.get_opt(&key.name)).await {
        Ok(Ok(found)) => {
            if found.is_none_or(|pod| pod.metadata.uid.as_deref() != Some(&request.uid)) {
                return Ok(false);
            }
        }
        Ok(Err(error)) => return Err(format!("cannot ask the API server for pod {key}: {error}")),
        Err(_) => return Err(format!("the API server does not answer a request for pod {key}")),
    }
    match timeout_at(deadline, shown).await {
        Ok(()) => Ok(true),
        Err(_) => Err(format!(
            "the network policies' copy of pods and namespaces does not show pod {key}"
        )),
    }
}
