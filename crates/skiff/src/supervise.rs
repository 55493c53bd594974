//! Keeps components running: one that ends or panics is logged and started again, with a growing pause. Their
//! states are published in a file that `skiff status` reads.

use futures::FutureExt;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What a component is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComponentState {
    pub state: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub message: String,
}

pub struct Supervisor {
    pub shutdown: CancellationToken,
    tasks: TaskTracker,
    /// A leaf lock; the file is written under it so that the newest state wins.
    states: Mutex<BTreeMap<String, ComponentState>>,
    file: PathBuf,
}

impl Supervisor {
    pub fn new(file: PathBuf, shutdown: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            shutdown,
            tasks: TaskTracker::new(),
            states: Mutex::default(),
            file,
        })
    }

    pub fn set(&self, component: &str, state: &str, message: &str) {
        let mut states = self.states.lock();
        let new = ComponentState {
            state: state.to_owned(),
            message: message.to_owned(),
        };
        states.insert(component.to_owned(), new);
        let beside = self.file.with_extension("new");
        let written = serde_json::to_vec(&*states)
            .map_err(std::io::Error::other)
            .and_then(|bytes| std::fs::write(&beside, bytes))
            .and_then(|()| std::fs::rename(&beside, &self.file));
        if let Err(error) = written {
            tracing::warn!(%error, "cannot publish the state of {component}");
        }
    }

    /// Runs what `start` makes until the shutdown, again and again if it ends before.
    pub fn run<F>(
        self: &Arc<Self>,
        component: &str,
        mut start: impl FnMut(CancellationToken) -> F + Send + 'static,
    ) where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let (supervisor, component) = (Arc::clone(self), component.to_owned());
        supervisor.set(&component, "running", "");
        self.tasks.spawn(async move {
            let mut pause = FIRST_PAUSE;
            loop {
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
                    Err(panic) => format!("panicked: {}", panic_text(&panic)),
                };
                tracing::error!(
                    component,
                    why,
                    pause_ms = pause.as_millis(),
                    "component ended, starting it again"
                );
                supervisor.set(&component, "restarting", &why);
                tokio::select! {
                    () = supervisor.shutdown.cancelled() => break,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                supervisor.set(&component, "running", "");
            }
            supervisor.set(&component, "stopped", "");
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

fn panic_text(panic: &Box<dyn std::any::Any + Send>) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("unknown")
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
}
