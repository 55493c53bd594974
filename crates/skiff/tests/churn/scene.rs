//! What the workers of a churn share: the API, the word to stop, what is under way when skiff is killed, and whose
//! processes may be killed too.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::Value;
use skiff_client::ErrorExt;
use skiff_testkit::Cluster;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long something may take while skiff is killed again and again.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
/// How long something may take when nobody disturbs any more.
pub(crate) const QUIET_PATIENCE: Duration = Duration::from_secs(90);

/// What a kill may interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Activity {
    PodStart,
    ImagePull,
    Resize,
    GracePeriod,
    VolumeUpdate,
}

pub(crate) const ACTIVITIES: [Activity; 5] = [
    Activity::PodStart,
    Activity::ImagePull,
    Activity::Resize,
    Activity::GracePeriod,
    Activity::VolumeUpdate,
];

pub(crate) type Tally<K> = BTreeMap<K, usize>;

pub(crate) struct Scene {
    pub name: String,
    pub client: Client,
    /// Whether the machine has what `hostUsers: false` needs.
    pub has_user_namespaces: bool,
    stop: AtomicBool,
    /// The uids of pods whose shims and containers may be killed.
    fair_game: Mutex<BTreeSet<String>>,
    under_way: Mutex<Tally<Activity>>,
    interrupted: Mutex<Tally<Activity>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scene {
    pub fn new(name: &str, client: Client, has_user_namespaces: bool) -> Self {
        Scene {
            name: name.to_owned(),
            client,
            has_user_namespaces,
            stop: AtomicBool::new(false),
            fair_game: Mutex::default(),
            under_way: Mutex::default(),
            interrupted: Mutex::default(),
        }
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }

    /// Where the node keeps a pod's volume.
    pub fn volume(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        let pods = Cluster::data_dir(&self.name).join("kubelet/pods");
        pods.join(uid).join("volumes").join(plugin).join(name)
    }

    /// Whether workers are to come to an end.
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub fn set_over(&self, over: bool) {
        self.stop.store(over, Ordering::Relaxed);
    }

    pub fn allow_kills(&self, uid: String) {
        lock(&self.fair_game).insert(uid);
    }

    pub fn may_be_killed(&self, uid: &str) -> bool {
        lock(&self.fair_game).contains(uid)
    }

    /// Until the answer is dropped, this is under way.
    pub fn during(self: &Arc<Self>, activity: Activity) -> UnderWay {
        *lock(&self.under_way).entry(activity).or_insert(0) += 1;
        UnderWay(Arc::clone(self), activity)
    }

    pub fn is_under_way(&self, activity: Activity) -> bool {
        lock(&self.under_way)
            .get(&activity)
            .is_some_and(|number| *number > 0)
    }

    /// skiff has just been killed.
    pub fn note_kill(&self) {
        let mut interrupted = lock(&self.interrupted);
        for (activity, number) in lock(&self.under_way).iter() {
            if *number > 0 {
                *interrupted.entry(*activity).or_insert(0) += 1;
            }
        }
    }

    /// How many kills of skiff fell into what.
    pub fn interrupted(&self) -> Tally<Activity> {
        lock(&self.interrupted).clone()
    }

    /// Creates a pod, however often skiff is killed meanwhile; its uid.
    pub async fn create(&self, pod: Value) -> Result<String> {
        let pod: Pod = serde_json::from_value(pod)?;
        let (pods, name) = (self.pods(), pod.metadata.name.clone().context("a name")?);
        let made = insist(&name, || async {
            match pods.create(&PostParams::default(), &pod).await {
                // An attempt before this one, whose answer was lost.
                Err(error) if error.is_already_exists() => pods.get(&name).await,
                made => made,
            }
        })
        .await?;
        made.metadata.uid.context("a uid")
    }

    /// Deletes a pod, however often skiff is killed meanwhile; it may be there until its end.
    pub async fn delete(&self, name: &str, parameters: &DeleteParams) -> Result<()> {
        let pods = self.pods();
        insist(name, || async {
            match pods.delete(name, parameters).await {
                Err(error) if error.is_not_found() => Ok(()),
                answer => answer.map(drop),
            }
        })
        .await
    }

    /// Waits until a pod is as it should be: `None` is a pod that is gone.
    pub async fn wait(
        &self,
        name: &str,
        what: &str,
        is_it: impl Fn(Option<&Pod>) -> Result<bool>,
    ) -> Result<()> {
        let (began, pods) = (Instant::now(), self.pods());
        loop {
            let pod = insist(name, || pods.get_opt(name)).await?;
            if is_it(pod.as_ref()).with_context(|| format!("pod {name}"))? {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                let found = pod.as_ref().map_or("it is gone".into(), describe);
                bail!("pod {name} is not {what} after {PATIENCE:?}: {found}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub async fn wait_gone(&self, name: &str, uid: &str) -> Result<()> {
        self.wait(name, "gone", |pod| {
            Ok(pod.is_none_or(|pod| pod.metadata.uid.as_deref() != Some(uid)))
        })
        .await
    }
}

/// Something that is under way.
pub(crate) struct UnderWay(Arc<Scene>, Activity);

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(number) = lock(&self.0.under_way).get_mut(&self.1) {
            *number -= 1;
        }
    }
}

/// Asks until there is an answer: a server that was killed gives none, and one that starts may refuse.
pub(crate) async fn insist<T, F>(what: &str, ask: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = Result<T, kube::Error>>,
{
    let began = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(kube::Error::Api(status)) if matches!(status.code, 400..=422) => {
                bail!("{what}: {status:?}")
            }
            Err(error) if began.elapsed() > PATIENCE => return Err(error).with_context(|| what.to_owned()),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    ready.next().is_some_and(|condition| condition.status == "True")
}

/// Who runs in a pod since when, one line for each container; the same as long as nothing was restarted.
pub(crate) fn identity(pod: &Pod) -> Vec<String> {
    let Some(status) = &pod.status else {
        return Vec::new();
    };
    let mut lines = vec![format!("{:?} since {:?}", status.pod_ip, status.start_time)];
    let statuses = [&status.init_container_statuses, &status.container_statuses];
    for one in statuses.into_iter().flatten().flatten() {
        let state = one.state.as_ref();
        let running = state.and_then(|state| state.running.as_ref());
        let ended = state.and_then(|state| state.terminated.as_ref());
        lines.push(format!(
            "{} {:?} restarts {} running since {:?} ended {:?}",
            one.name,
            one.container_id,
            one.restart_count,
            running.map(|state| &state.started_at),
            ended.map(|state| (state.exit_code, &state.started_at, &state.finished_at)),
        ));
    }
    lines
}

/// Nothing of a pod that nobody harmed was restarted.
pub(crate) fn ensure_no_restart(pod: &Pod) -> Result<()> {
    let status = pod.status.as_ref();
    let lists = status.map(|status| [&status.init_container_statuses, &status.container_statuses]);
    let statuses = lists.into_iter().flatten().flatten().flatten();
    let again: Vec<_> = statuses.filter(|one| one.restart_count > 0).collect();
    anyhow::ensure!(again.is_empty(), "restarted: {again:?}");
    Ok(())
}

pub(crate) fn describe(pod: &Pod) -> String {
    let status = serde_json::to_string(&pod.status).unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    format!(
        "pod {name} {} {status}",
        pod.metadata.uid.as_deref().unwrap_or_default()
    )
}
