//! Images for containers: present or pulled, by the container's policy, with back-off after failures.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Container, ObjectReference, Pod, Secret};
use parking_lot::Mutex;
use skiff_client::EventRecorder;
use skiff_cri::v1;
use tokio::sync::Semaphore;

use crate::backoff::Backoff;
use crate::credential_providers::CredentialProviders;
use crate::credentials::Keyring;
use crate::durations::go_duration;
use crate::image_name;
use crate::marks;
use crate::pods;
use crate::pull_rate::{self, PullLimiter, PullRate};
use crate::pull_records::{PullRecords, VerificationPolicy, credential_hash};
use crate::runtime::Runtime;

const INITIAL_BACKOFF: Duration = Duration::from_secs(10);
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// What a runtime gets to end a pull that was cancelled.
const CANCELLATION_TIME: Duration = Duration::from_secs(2);

/// Why a container cannot have its image; the reason is what its status waits with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageError {
    pub reason: &'static str,
    pub message: String,
    /// When a retry makes sense, for back-off.
    pub retry_after: Option<Duration>,
}

/// The image a container runs, with the user it names.
#[derive(Debug, Clone)]
pub struct ImageInfo {
    pub id: String,
    pub uid: Option<i64>,
    pub username: String,
}

impl ImageInfo {
    fn from_cri(image: v1::Image) -> Self {
        // An image that names no user runs as root.
        let uid = image
            .uid
            .map(|u| u.value)
            .or(image.username.is_empty().then_some(0));
        ImageInfo {
            id: image.id,
            uid,
            username: image.username,
        }
    }
}

/// An image that is mounted as a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageVolume {
    pub id: String,
    /// As the pod names it.
    pub reference: String,
}

/// An image, for whom, and how it may be had.
struct Wanted<'a> {
    /// What events are about.
    reference: &'a ObjectReference,
    /// Of the container or the volume.
    name: &'a str,
    image: &'a str,
    policy: Option<&'a str>,
}

pub struct Images {
    runtime: Runtime,
    recorder: EventRecorder,
    slots: Semaphore,
    limiter: PullLimiter,
    backoff: Mutex<Backoff>,
    pub records: Arc<PullRecords>,
    providers: CredentialProviders,
    policy: VerificationPolicy,
    /// The last failure of a pod's image, told again while it backs off.
    last_errors: Mutex<HashMap<String, String>>,
}

impl Images {
    pub fn new(
        runtime: Runtime,
        recorder: EventRecorder,
        parallel: usize,
        records: PullRecords,
        (providers, policy): (CredentialProviders, VerificationPolicy),
    ) -> Self {
        Images {
            records: Arc::new(records),
            providers,
            policy,
            runtime,
            recorder,
            slots: Semaphore::new(parallel.max(1)),
            limiter: PullLimiter::new(PullRate::default()),
            backoff: Mutex::new(Backoff::new(INITIAL_BACKOFF, MAX_BACKOFF)),
            last_errors: Mutex::default(),
        }
    }

    pub fn with_rate(self, rate: PullRate) -> Self {
        Images {
            limiter: PullLimiter::new(rate),
            ..self
        }
    }

    pub fn forget(&self, pod_uid: &str) {
        let prefix = format!("{pod_uid}_");
        self.backoff.lock().forget(&prefix);
        self.last_errors.lock().retain(|key, _| !key.starts_with(&prefix));
    }

    /// Sees to it that the container's image is here. `secrets` are the pod's pull secrets.
    pub async fn ensure(
        &self,
        pod: &Pod,
        container: &Container,
        secrets: &[Arc<Secret>],
        sandbox_config: &v1::PodSandboxConfig,
    ) -> Result<ImageInfo, ImageError> {
        let wanted = Wanted {
            reference: &pods::container_reference(pod, &container.name),
            name: &container.name,
            image: container.image.as_deref().unwrap_or_default(),
            policy: container.image_pull_policy.as_deref(),
        };
        self.ensure_wanted(pod, &wanted, secrets, sandbox_config).await
    }

    /// Sees to it that the images of volumes are here, whether or not a container mounts them.
    pub async fn ensure_volumes(
        &self,
        pod: &Pod,
        secrets: &[Arc<Secret>],
        sandbox_config: &v1::PodSandboxConfig,
    ) -> HashMap<String, Result<ImageVolume, ImageError>> {
        let mut results = HashMap::new();
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        for volume in volumes {
            let Some(source) = &volume.image else { continue };
            let wanted = Wanted {
                reference: &pods::reference(pod),
                name: &volume.name,
                image: source.reference.as_deref().unwrap_or_default(),
                policy: source.pull_policy.as_deref(),
            };
            let ensured = self.ensure_wanted(pod, &wanted, secrets, sandbox_config).await;
            let found = ensured.map(|info| ImageVolume {
                id: info.id,
                reference: wanted.image.to_owned(),
            });
            results.insert(volume.name.clone(), found);
        }
        results
    }

    async fn ensure_wanted(
        &self,
        pod: &Pod,
        wanted: &Wanted<'_>,
        secrets: &[Arc<Secret>],
        sandbox_config: &v1::PodSandboxConfig,
    ) -> Result<ImageInfo, ImageError> {
        let requested = wanted.image;
        let reference = wanted.reference.clone();
        let fail = |reason: &'static str, message: String| ImageError {
            reason,
            message,
            retry_after: None,
        };
        let image = image_name::with_default_tag(requested).map_err(|error| {
            let message = format!("Failed to apply default image tag {requested:?}: {error}");
            self.recorder
                .event(&reference, "Warning", "InspectFailed", message.clone());
            fail("InvalidImageName", message)
        })?;
        let policy = wanted.policy.unwrap_or(if image.ends_with(":latest") {
            "Always"
        } else {
            "IfNotPresent"
        });
        if policy != "Always" {
            // One that the pod may not have is told from one that is not there by nobody.
            let found = self.inspect(&image).await;
            match found.map(|found| found.filter(|info| self.may_use(&image, info, secrets))) {
                Ok(Some(info)) => {
                    let message = format!(
                        "Container image {requested:?} already present on machine and can be accessed by the pod"
                    );
                    self.recorder.event(&reference, "Normal", "Pulled", message);
                    return Ok(info);
                }
                Ok(None) if policy == "Never" => {
                    let message =
                        format!("Container image {requested:?} is not present with pull policy of Never");
                    self.recorder
                        .event(&reference, "Warning", "ErrImageNeverPull", message.clone());
                    return Err(fail("ErrImageNeverPull", message));
                }
                Ok(None) => {}
                Err(status) => {
                    let message = format!("Failed to inspect image {image:?}: {}", describe(&status));
                    self.recorder
                        .event(&reference, "Warning", "InspectFailed", message.clone());
                    return Err(fail("ImageInspectError", message));
                }
            }
        }
        let pulled = self
            .pull(pod, &reference, requested, &image, secrets, sandbox_config)
            .await;
        if let Err(error) = &pulled
            && let Some(delay) = error.retry_after
        {
            marks::next_try(wanted.name, delay);
        }
        pulled
    }

    async fn inspect(&self, image: &str) -> Result<Option<ImageInfo>, skiff_cri::Status> {
        let found = self.runtime.image_status(image).await?;
        Ok(found.filter(|i| !i.id.is_empty()).map(ImageInfo::from_cri))
    }

    /// Whether a pod with these pull secrets may have the image that is on the node.
    fn may_use(&self, image: &str, info: &ImageInfo, secrets: &[Arc<Secret>]) -> bool {
        let repository = image_name::parse(image).map(|n| n.repository).unwrap_or_default();
        let keyring = Keyring::from_secrets(secrets.iter().map(Arc::as_ref)).unwrap_or_default();
        let credentials = keyring.lookup(&repository);
        let hashes = credentials
            .iter()
            .map(|one| credential_hash(&one.username, &one.password));
        self.policy
            .allows(&self.records, (image, &repository, &info.id), &hashes.collect())
    }

    async fn pull(
        &self,
        pod: &Pod,
        reference: &ObjectReference,
        requested: &str,
        image: &str,
        secrets: &[Arc<Secret>],
        sandbox_config: &v1::PodSandboxConfig,
    ) -> Result<ImageInfo, ImageError> {
        let key = format!("{}_{requested}", pods::uid(pod));
        if let Some(remaining) = self.backoff.lock().remaining_since_update(&key, Instant::now()) {
            let mut message = format!("Back-off pulling image {requested:?}");
            self.recorder
                .event(reference, "Normal", "BackOff", message.clone());
            if let Some(previous) = self.last_errors.lock().get(&key) {
                message = format!("{message}: {previous}");
            }
            return Err(ImageError {
                reason: "ImagePullBackOff",
                message,
                retry_after: Some(remaining),
            });
        }
        if let Some(wait) = self.backoff.lock().waited_since_update(&key, Instant::now()) {
            marks::waited("back-off before pulling again", wait);
        }
        self.recorder.event(
            reference,
            "Normal",
            "Pulling",
            format!("Pulling image {requested:?}"),
        );
        let asked_at = Instant::now();
        let pulled = async {
            let _slot = self
                .slots
                .acquire()
                .await
                .map_err(|_| skiff_cri::Status::cancelled("the node is shutting down"))?;
            let started_at = Instant::now();
            let keyring = Keyring::from_secrets(secrets.iter().map(Arc::as_ref)).map_err(|e| {
                skiff_cri::Status::invalid_argument(format!("a pull secret cannot be read: {e}"))
            })?;
            let repository = image_name::parse(image).map(|n| n.repository).unwrap_or_default();
            let credentials = keyring.lookup(&repository);
            // Those of the machine are for all its pods, and are tried after the pod's own.
            let of_machine = self.providers.lookup(&repository).await;
            let noted = |error: std::io::Error| {
                skiff_cri::Status::internal(format!("cannot note who may use the image: {error}"))
            };
            let before = self.runtime.image_status(image).await?.map(|status| status.id);
            self.records.begin(image).map_err(noted)?;
            let note = PullNote {
                records: self.records.clone(),
                runtime: self.runtime.clone(),
                image: image.to_owned(),
                repository: repository.clone(),
                before,
                is_settled: false,
            };
            let pulled = async {
                let used = self
                    .pull_with_any(image, credentials, of_machine, sandbox_config)
                    .await?;
                let status = self.runtime.image_status(image).await?;
                let status = status.ok_or_else(|| {
                    skiff_cri::Status::not_found(format!("image {image:?} is gone right after its pull"))
                })?;
                Ok::<_, skiff_cri::Status>((status, used))
            };
            let pulled = pulled.await;
            let came = pulled
                .as_ref()
                .ok()
                .map(|(status, used)| (status.id.as_str(), used.as_deref()));
            note.settle(came).map_err(noted)?;
            let (status, _) = pulled?;
            Ok::<_, skiff_cri::Status>((status, started_at.elapsed()))
        };
        match pulled.await {
            Ok((status, pull_time)) => {
                let message = format!(
                    "Successfully pulled image {requested:?} in {} ({} including waiting). Image size: {} bytes.",
                    go_duration(truncate_to_millis(pull_time)),
                    go_duration(truncate_to_millis(asked_at.elapsed())),
                    status.size
                );
                self.recorder.event(reference, "Normal", "Pulled", message);
                self.last_errors.lock().remove(&key);
                Ok(ImageInfo::from_cri(status))
            }
            Err(status) => {
                let why = describe(&status);
                self.recorder.event(
                    reference,
                    "Warning",
                    "Failed",
                    format!("Failed to pull image {requested:?}: {why}"),
                );
                let retry_after = {
                    let now = Instant::now();
                    let mut backoff = self.backoff.lock();
                    backoff.collect(now);
                    backoff.next(&key, now, now);
                    backoff.get(&key)
                };
                let (reason, message) = classify(requested, &why);
                self.last_errors
                    .lock()
                    .insert(key, format!("{reason}: {message}"));
                Err(ImageError {
                    reason,
                    message,
                    retry_after: Some(retry_after),
                })
            }
        }
    }

    /// Tries each credential that fits, and without one if there is none; the hash of the one that did it, if it is the
    /// pod's own. The last failure is told.
    async fn pull_with_any(
        &self,
        image: &str,
        credentials: Vec<v1::AuthConfig>,
        of_machine: Vec<v1::AuthConfig>,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> Result<Option<String>, skiff_cri::Status> {
        // One image is one pull, however many credentials are tried.
        if !self.limiter.accepts(Instant::now()) {
            return Err(skiff_cri::Status::resource_exhausted(pull_rate::EXCEEDED));
        }
        let pull = |auth| self.runtime.pull_image(image, auth, Some(sandbox_config.clone()));
        if credentials.is_empty() && of_machine.is_empty() {
            return pull(None).await.map(|_| None);
        }
        let mut last = skiff_cri::Status::unknown("no credentials were tried");
        let own = credentials.into_iter().map(|auth| (auth, true));
        for (auth, is_own) in own.chain(of_machine.into_iter().map(|auth| (auth, false))) {
            let hash = is_own.then(|| credential_hash(&auth.username, &auth.password));
            match pull(Some(auth)).await {
                Ok(_) => return Ok(hash),
                Err(status) => last = status,
            }
        }
        Err(last)
    }
}

/// A pull that was noted. Dropped before it is settled it was cancelled, because its pod ended.
struct PullNote {
    records: Arc<PullRecords>,
    runtime: Runtime,
    image: String,
    repository: String,
    /// The id of the image of this name that was here when the pull began.
    before: Option<String>,
    is_settled: bool,
}

impl PullNote {
    /// The runtime answered: with the image that came and the hash of the credentials that it came with, or with a failure.
    fn settle(mut self, came: Option<(&str, Option<&str>)>) -> std::io::Result<()> {
        self.is_settled = true;
        self.records.end(&self.image, &self.repository, came)
    }
}

impl Drop for PullNote {
    fn drop(&mut self) {
        let Ok(handle) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if self.is_settled {
            return;
        }
        let (records, runtime) = (self.records.clone(), self.runtime.clone());
        let (image, repository) = (
            std::mem::take(&mut self.image),
            std::mem::take(&mut self.repository),
        );
        let before = self.before.take();
        handle.spawn(async move {
            tokio::time::sleep(CANCELLATION_TIME).await;
            // An image that came all the same was pulled with credentials that nobody noted: it stays closed.
            let ended = match runtime.image_status(&image).await {
                Ok(status) if status.as_ref().map(|status| &status.id) == before.as_ref() => {
                    records.end(&image, &repository, None)
                }
                _ => {
                    records.abandon(&image);
                    Ok(())
                }
            };
            if let Err(error) = ended {
                tracing::warn!(image, %error, "cannot take back the note of a pull");
            }
        });
    }
}

/// A gRPC error as Go prints it; users know it from events.
pub fn describe(status: &skiff_cri::Status) -> String {
    format!(
        "rpc error: code = {} desc = {}",
        go_code(status.code()),
        status.message()
    )
}

fn go_code(code: skiff_cri::Code) -> &'static str {
    use skiff_cri::Code;
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

/// Runtimes mark some failures by a prefix, which becomes the reason.
fn classify(image: &str, error: &str) -> (&'static str, String) {
    if let Some(rest) = error.strip_prefix("RegistryUnavailable") {
        return (
            "RegistryUnavailable",
            format!("image pull failed for {image} because the registry is unavailable{rest}"),
        );
    }
    if let Some(rest) = error.strip_prefix("SignatureValidationFailed") {
        return (
            "SignatureValidationFailed",
            format!("image pull failed for {image} because the signature validation failed{rest}"),
        );
    }
    ("ErrImagePull", error.to_owned())
}

fn truncate_to_millis(duration: Duration) -> Duration {
    Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}
