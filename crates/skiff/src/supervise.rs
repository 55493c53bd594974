//! Keeps components running: one that ends or panics is logged and started again, with a growing pause. Their
//! states, and those of the tasks inside of them that failed (`skiff_supervise`), are published in files that
//! `skiff status` reads.

use futures::FutureExt;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A component that ran this long failed for another reason than the last time.
const GOOD_RUN: Duration = Duration::from_secs(60);
/// However often tasks fail, their file is not written more often.
const PUBLISH_EVERY: Duration = Duration::from_millis(500);

/// What a component is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComponentState {
    pub state: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub message: String,
}

/// The tasks of one name that failed at least once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskState {
    pub running: usize,
    /// Those that wait for their next start.
    pub waiting: usize,
    pub failures: u64,
    pub last_failure: String,
}

/// Where they are published, beside the components.
pub const TASKS_FILE: &str = "tasks.json";

pub struct Supervisor {
    pub shutdown: CancellationToken,
    tasks: TaskTracker,
    /// A leaf lock; the file is written under it so that the newest state wins.
    states: Mutex<BTreeMap<String, ComponentState>>,
    file: PathBuf,
}

impl Supervisor {
    pub fn new(file: PathBuf, shutdown: CancellationToken) -> Arc<Self> {
        let supervisor = Arc::new(Self {
            shutdown,
            tasks: TaskTracker::new(),
            states: Mutex::default(),
            file,
        });
        let tasks_file = supervisor.file.with_file_name(TASKS_FILE);
        // That of an earlier process.
        let _ = std::fs::remove_file(&tasks_file);
        skiff_supervise::keep("task-states", &supervisor.shutdown, move || {
            publish_tasks(tasks_file.clone())
        });
        supervisor
    }

    pub fn set(&self, component: &str, state: &str, message: &str) {
        let mut states = self.states.lock();
        let new = ComponentState {
            state: state.to_owned(),
            message: message.to_owned(),
        };
        states.insert(component.to_owned(), new);
        if let Err(error) = publish(&self.file, &*states) {
            tracing::warn!(%error, "cannot publish the state of {component}");
        }
    }

    /// Whether the component was started and is not at its end.
    pub fn is_running(&self, component: &str) -> bool {
        let states = self.states.lock();
        states
            .get(component)
            .is_some_and(|state| state.state != "stopped")
    }

    /// Why the component waits to be started again, if it does.
    pub fn failure(&self, component: &str) -> Option<String> {
        let states = self.states.lock();
        let state = states.get(component)?;
        (state.state == "restarting").then(|| state.message.clone())
    }

    /// Runs what `start` makes until the shutdown, again and again if it ends before.
    pub fn run<F>(
        self: &Arc<Self>,
        component: &'static str,
        mut start: impl FnMut(CancellationToken) -> F + Send + 'static,
    ) where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let supervisor = Arc::clone(self);
        supervisor.set(component, "running", "");
        self.tasks.spawn(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                let began = Instant::now();
                let stop = supervisor.shutdown.child_token();
                // What the component spawned ends with it.
                let _end_its_tasks = stop.clone().drop_guard();
                let result = AssertUnwindSafe(start(stop)).catch_unwind().await;
                if supervisor.shutdown.is_cancelled() {
                    break;
                }
                let why = match result {
                    Ok(Ok(())) => "ended".to_owned(),
                    Ok(Err(why)) => why,
                    Err(panic) => format!("panicked: {}", skiff_supervise::panic_text(&*panic)),
                };
                if began.elapsed() >= GOOD_RUN {
                    pause = FIRST_PAUSE;
                }
                skiff_supervise::failed(component, &why);
                tracing::error!(
                    component,
                    why,
                    pause_ms = pause.as_millis(),
                    "component ended, starting it again"
                );
                supervisor.set(component, "restarting", &why);
                tokio::select! {
                    () = supervisor.shutdown.cancelled() => break,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                supervisor.set(component, "running", "");
            }
            supervisor.set(component, "stopped", "");
        });
    }

    /// Ends everything and waits, but not for ever.
    pub async fn stop(&self, patience: Duration) {
        self.shutdown.cancel();
        self.tasks.close();
        if tokio::time::timeout(patience, self.tasks.wait()).await.is_err() {
            tracing::warn!("some components did not end in time");
        }
    }
}

fn publish(file: &Path, value: &impl Serialize) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(value).map_err(std::io::Error::other)?;
    skiff_fs::write_atomically(file, &bytes, 0o600)
}

/// Writes the states of the tasks that failed, whenever they change.
async fn publish_tasks(file: PathBuf) {
    let mut changes = skiff_supervise::changes();
    loop {
        let failed = skiff_supervise::tasks().into_iter();
        let failed: BTreeMap<&str, TaskState> = failed
            .filter(|(_, tasks)| tasks.failures > 0)
            .map(|(name, tasks)| {
                let state = TaskState {
                    running: tasks.running,
                    waiting: tasks.waiting,
                    failures: tasks.failures,
                    last_failure: tasks.last_failure,
                };
                (name, state)
            })
            .collect();
        if !failed.is_empty()
            && let Err(error) = publish(&file, &failed)
        {
            tracing::warn!(%error, "cannot publish the states of the tasks");
        }
        // The sender lives as long as the process.
        let _ = changes.changed().await;
        tokio::time::sleep(PUBLISH_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn a_component_that_panics_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let supervisor = Supervisor::new(dir.path().join("components.json"), CancellationToken::new());
        let starts = Arc::new(AtomicU32::new(0));
        let (counter, (alive, mut lives)) = (Arc::clone(&starts), tokio::sync::mpsc::channel(1));
        supervisor.run("x", move |stop| {
            let (n, alive) = (counter.fetch_add(1, Ordering::SeqCst), alive.clone());
            async move {
                assert!(n > 0, "the first start fails");
                let _ = alive.send(()).await;
                stop.cancelled().await;
                Ok(())
            }
        });
        lives.recv().await.unwrap();
        assert_eq!(starts.load(Ordering::SeqCst), 2);
        supervisor.stop(Duration::from_secs(5)).await;
        let text = std::fs::read_to_string(dir.path().join("components.json")).unwrap();
        assert!(text.contains("stopped"), "{text}");
    }

    #[tokio::test]
    async fn tasks_that_failed_are_published() {
        let dir = tempfile::tempdir().unwrap();
        let supervisor = Supervisor::new(dir.path().join("components.json"), CancellationToken::new());
        skiff_supervise::keep("published", &supervisor.shutdown, std::future::pending);
        let file = dir.path().join(TASKS_FILE);
        let state = async {
            loop {
                skiff_supervise::panic_in("published");
                tokio::time::sleep(Duration::from_millis(20)).await;
                let text = std::fs::read_to_string(&file).unwrap_or_default();
                let states: BTreeMap<String, TaskState> = serde_json::from_str(&text).unwrap_or_default();
                if let Some(state) = states.get("published") {
                    return state.clone();
                }
            }
        };
        let state = tokio::time::timeout(Duration::from_secs(60), state)
            .await
            .unwrap();
        assert_eq!(state.last_failure, "panicked: a test said so");
        supervisor.stop(Duration::from_secs(5)).await;
    }
}
