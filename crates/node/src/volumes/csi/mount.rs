//! A driver's volume as a filesystem: attached, staged, published for the pod, given to its group; and the way back.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, CSIVolumeSource, Pod, SecretReference};
use skiff_csi::{Code, v1};

use super::client::{Access, Capabilities, Driver, map, text};
use super::data::{Data, Key, Stage, hash};
use super::request::{credentials, fetching};
use super::{Csi, GLOBAL_MOUNT, log, remove_mount_dir};
use crate::volumes::claims::FOR_ONE_POD;
use crate::volumes::volume_type::{Persistent, Ready, VolumeType, Wanted, unmount_and_remove};
use crate::volumes::{SetUpError, Volumes, blocking, fs_group, is_mount_point, ownership};

pub(in crate::volumes) struct CsiVolume;

/// The two forms in which a volume of a driver comes.
pub(super) enum Source<'a> {
    Persistent(&'a Persistent, &'a CSIPersistentVolumeSource),
    Inline(&'a CSIVolumeSource),
}

pub(super) fn source_of<'a>(wanted: &Wanted<'a>) -> Option<Source<'a>> {
    match wanted.claimed {
        Some(claimed) => {
            let csi = claimed.spec()?.csi.as_ref()?;
            Some(Source::Persistent(claimed, csi))
        }
        None => wanted.volume.csi.as_ref().map(Source::Inline),
    }
}

impl Source<'_> {
    pub fn key(&self, wanted: &Wanted<'_>) -> Key {
        match self {
            Source::Persistent(_, csi) => Key {
                driver: csi.driver.clone(),
                handle: csi.volume_handle.clone(),
            },
            Source::Inline(csi) => Key {
                driver: csi.driver.clone(),
                handle: format!("csi-{}", hash(&[wanted.uid(), &wanted.volume.name])),
            },
        }
    }

    pub fn access(&self, pod: &Pod) -> Access {
        let (group, _) = fs_group(pod);
        match self {
            Source::Persistent(claimed, csi) => {
                let modes = claimed.spec().and_then(|spec| spec.access_modes.as_deref());
                let first = modes.and_then(|modes| modes.first()).cloned();
                Access {
                    block: claimed.block,
                    fs_type: csi.fs_type.clone().unwrap_or_default(),
                    options: claimed.options.clone(),
                    mode: first.unwrap_or_else(|| "ReadWriteOnce".to_owned()),
                    group,
                }
            }
            Source::Inline(csi) => Access {
                fs_type: csi.fs_type.clone().unwrap_or_default(),
                mode: "ReadWriteOnce".to_owned(),
                group,
                ..Default::default()
            },
        }
    }

    fn read_only(&self) -> bool {
        match self {
            Source::Persistent(claimed, _) => claimed.read_only,
            Source::Inline(csi) => csi.read_only == Some(true),
        }
    }

    fn lifecycle(&self) -> &'static str {
        match self {
            Source::Persistent(..) => "Persistent",
            Source::Inline(_) => "Ephemeral",
        }
    }

    pub fn attributes(&self) -> BTreeMap<String, String> {
        let attributes = match self {
            Source::Persistent(_, csi) => csi.volume_attributes.clone(),
            Source::Inline(csi) => csi.volume_attributes.clone(),
        };
        attributes.unwrap_or_default()
    }

    pub fn publish_secret(&self, namespace: &str) -> Option<SecretReference> {
        match self {
            Source::Persistent(_, csi) => csi.node_publish_secret_ref.clone(),
            Source::Inline(csi) => csi
                .node_publish_secret_ref
                .as_ref()
                .map(|secret| SecretReference {
                    name: Some(secret.name.clone()),
                    namespace: Some(namespace.to_owned()),
                }),
        }
    }
}

#[async_trait]
impl VolumeType for CsiVolume {
    fn name(&self) -> &'static str {
        "csi"
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        source_of(wanted).is_some()
    }

    fn supports_mount_options(&self) -> bool {
        true
    }

    fn supports_block(&self) -> bool {
        true
    }

    fn updates(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let (Some(csi), Some(source)) = (&host.csi, source_of(wanted)) else {
            return Err(wanted.set_up_error("this node has no CSI drivers"));
        };
        match source {
            Source::Persistent(claimed, _) if claimed.block => csi.map_device(host, wanted, &source).await,
            _ => csi.mount(host, wanted, &source).await,
        }
    }

    async fn update(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<(), SetUpError> {
        let (Some(csi), Some(source)) = (&host.csi, source_of(wanted)) else {
            return Ok(());
        };
        let key = source.key(wanted);
        if csi.republishes(&key.driver) && wanted.claimed.is_some_and(|claimed| !claimed.block) {
            csi.mount(host, wanted, &source).await?;
        }
        csi.expand_if_needed(host, wanted, &source).await
    }

    async fn tear_down(&self, host: &Volumes, uid: &str, directory: &Path) -> Result<(), String> {
        let data = Data::load(directory).map_err(|error| error.to_string())?;
        let (Some(csi), Some(data)) = (&host.csi, data) else {
            // Nothing was published by us: what is there is an empty directory, or somebody else's mount.
            return unmount_and_remove(directory.to_path_buf()).await;
        };
        let (key, mount) = (data.key(), directory.join("mount"));
        {
            let _turn = csi.turn(&key).await;
            let failed = |error: String| log(format!("Unmounter.TearDownAt failed: {error}"));
            let driver = csi.driver(&key.driver).map_err(failed)?;
            match driver.unpublish(&key.handle, &mount).await {
                // The driver has deleted it, and its answer did not reach an earlier life of the node. If something is still
                // mounted, the removal below says so.
                Err(error) if error.code == Code::NotFound => {}
                unpublished => unpublished.map_err(|error| failed(error.to_string()))?,
            }
            let directory = directory.to_path_buf();
            blocking(move || remove_mount_dir(&mount, &directory))
                .await
                .map_err(failed)?;
            csi.remove_user(&key, uid);
        }
        csi.unstage_if_unused(&key).await;
        Ok(())
    }

    async fn tear_down_device(&self, host: &Volumes, uid: &str, link: &Path) -> Result<(), String> {
        match &host.csi {
            Some(csi) => csi.unmap_device(host, uid, link).await,
            None => Err(log("there are no drivers")),
        }
    }
}

impl Csi {
    fn republishes(&self, driver: &str) -> bool {
        self.spec(driver).and_then(|spec| spec.requires_republish) == Some(true)
    }

    async fn mount(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
    ) -> Result<Ready, SetUpError> {
        // Without it a driver would be used otherwise than its CSIDriver says.
        self.specs.synced().await;
        let (key, uid) = (source.key(wanted), wanted.uid());
        let directory = host.volume_dir(uid, "csi", wanted.name());
        let mount = directory.join("mount");
        let ready_file = host.ready_file(uid, "csi", wanted.name());
        let ready = Ready {
            read_only: source.read_only(),
            ..Ready::at(mount.clone())
        };
        let name = (uid.to_owned(), wanted.name().to_owned());
        let published = self.held.lock().published.contains(&name)
            || found_again(&directory, &ready_file, &key)
                .await
                .map_err(|error| wanted.set_up_error(error))?;
        if published && !self.republishes(&key.driver) {
            self.add_published(&key, name);
            return Ok(ready);
        }
        self.check_lifecycle(&key.driver, source.lifecycle())
            .map_err(|error| wanted.set_up_error(error))?;
        self.add_user(&key, uid);
        let turn = self.turn(&key).await;
        if let Source::Persistent(claimed, _) = source
            && claimed.for_one_pod
            && self.other_users(&key, uid)
        {
            self.remove_user(&key, uid);
            return Err(wanted.set_up_error(FOR_ONE_POD));
        }
        let (driver, capabilities) = self.ask(wanted, &key).await?;
        let context = match source {
            Source::Persistent(claimed, csi) => {
                let context = self.attached(&key, &claimed.name).await?;
                if capabilities.stage {
                    let access = source.access(wanted.pod);
                    self.stage(
                        host,
                        &key,
                        csi,
                        &driver,
                        access.capability(capabilities),
                        &context,
                    )
                    .await
                    .map_err(|error| SetUpError::step("MountVolume.MountDevice", &claimed.name, error))?;
                }
                context
            }
            Source::Inline(_) => HashMap::new(),
        };
        let published_now = self
            .publish(host, wanted, source, &driver, capabilities, context, !published)
            .await;
        published_now.map_err(|error| wanted.set_up_error(error))?;
        if !published {
            self.give_to_group(wanted, source, capabilities, &mount)
                .await
                .map_err(|error| wanted.set_up_error(error))?;
            blocking(move || {
                ready_file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
                std::fs::write(&ready_file, b"")
            })
            .await
            .map_err(|error| wanted.set_up_error(error))?;
        }
        self.add_published(&key, name);
        drop(turn);
        self.expand_if_needed(host, wanted, source).await?;
        Ok(ready)
    }

    fn add_published(&self, key: &Key, name: (String, String)) {
        self.change(|held| {
            held.users.entry(key.clone()).or_default().insert(name.0.clone());
            held.published.insert(name);
        });
    }

    /// The driver and what it can do.
    pub(super) async fn ask(
        &self,
        wanted: &Wanted<'_>,
        key: &Key,
    ) -> Result<(Driver, Capabilities), SetUpError> {
        let driver = self.driver(&key.driver).map_err(|error| match wanted.claimed {
            Some(claimed) => SetUpError::step(
                "MountVolume.MountDevice",
                &claimed.name,
                log(format!(
                    "attacher.MountDevice failed to create newCsiDriverClient: {error}"
                )),
            ),
            None => wanted.set_up_error(log(format!("mounter.SetUpAt failed to get CSI client: {error}"))),
        })?;
        let capabilities = driver.capabilities().await;
        let capabilities = capabilities.map_err(|error| wanted.set_up_error(error))?;
        Ok((driver, capabilities))
    }

    /// Has the driver prepare the volume on this node, once for all pods. In the volume's turn.
    async fn stage(
        &self,
        host: &Volumes,
        key: &Key,
        source: &CSIPersistentVolumeSource,
        driver: &Driver,
        capability: v1::VolumeCapability,
        context: &HashMap<String, String>,
    ) -> Result<(), String> {
        if self.held.lock().staged_now.contains(key) {
            return Ok(());
        }
        let secrets = match &source.node_stage_secret_ref {
            Some(reference) => credentials(host, reference)
                .await
                .map_err(|error| fetching("NodeStageSecretRef", reference, &error))?,
            None => HashMap::new(),
        };
        let directory = self.layout.global(key);
        let staging = directory.join(GLOBAL_MOUNT);
        let data = Data {
            volume_handle: key.handle.clone(),
            driver_name: key.driver.clone(),
            ..Default::default()
        };
        let (place, target) = (directory.clone(), staging.clone());
        blocking(move || {
            std::fs::create_dir_all(&target)?;
            data.save(&place)
        })
        .await
        .map_err(|error| log(format!("attacher.MountDevice failed to create dir: {error}")))?;
        self.change(|held| {
            held.stages
                .insert(key.clone(), Stage::Filesystem(directory.clone()));
        });
        let request = v1::NodeStageVolumeRequest {
            volume_id: key.handle.clone(),
            publish_context: context.clone(),
            staging_target_path: text(&staging),
            volume_capability: Some(capability),
            secrets,
            volume_context: map(source.volume_attributes.clone().unwrap_or_default()),
        };
        if let Err(error) = driver.stage(request).await {
            // What other pods of an earlier life have is mounted, and stays.
            if error.is_final()
                && blocking(move || remove_mount_dir(&staging, &directory))
                    .await
                    .is_ok()
            {
                self.change(|held| {
                    held.stages.remove(key);
                });
            }
            return Err(error.to_string());
        }
        self.change(|held| {
            held.staged_now.insert(key.clone());
        });
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "all of it is in the request")]
    async fn publish(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
        driver: &Driver,
        capabilities: Capabilities,
        context: HashMap<String, String>,
        first: bool,
    ) -> Result<(), String> {
        let key = source.key(wanted);
        let directory = host.volume_dir(wanted.uid(), "csi", wanted.name());
        let mount = directory.join("mount");
        let (attributes, secrets) = self.attributes(host, wanted, source).await?;
        let data = Data {
            spec_vol_id: wanted.name().to_owned(),
            volume_handle: key.handle.clone(),
            driver_name: key.driver.clone(),
            node_name: self.node_name.clone(),
            attachment_id: key.attachment(&self.node_name),
            volume_lifecycle_mode: source.lifecycle().to_owned(),
        };
        let place = directory.clone();
        blocking(move || {
            std::fs::create_dir_all(&place)?;
            data.save(&place)
        })
        .await
        .map_err(|error| {
            log(format!(
                "mounter.SetUpAt failed to save volume info data: {error}"
            ))
        })?;
        let staged = capabilities.stage && matches!(source, Source::Persistent(..));
        let staging = staged.then(|| text(&self.layout.global(&key).join(GLOBAL_MOUNT)));
        let request = v1::NodePublishVolumeRequest {
            volume_id: key.handle.clone(),
            publish_context: context,
            staging_target_path: staging.unwrap_or_default(),
            target_path: text(&mount),
            volume_capability: Some(source.access(wanted.pod).capability(capabilities)),
            readonly: source.read_only(),
            secrets,
            volume_context: attributes,
        };
        let Err(error) = driver.publish(request).await else {
            return Ok(());
        };
        // A pod that sees the volume keeps seeing it.
        if error.is_final() && first {
            let _ = blocking(move || remove_mount_dir(&mount, &directory)).await;
        }
        Err(error.to_string())
    }

    async fn give_to_group(
        &self,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
        capabilities: Capabilities,
        mount: &Path,
    ) -> Result<(), String> {
        let (group, change_policy) = fs_group(wanted.pod);
        let Some(group) = group.filter(|_| !capabilities.mount_group) else {
            return Ok(());
        };
        let driver = source.key(wanted).driver;
        let policy = match self.spec(&driver) {
            None => "ReadWriteOnceWithFSType".to_owned(),
            Some(spec) => spec.fs_group_policy.unwrap_or_default(),
        };
        let modes = match source {
            Source::Persistent(claimed, _) => {
                let spec = claimed.spec();
                spec.and_then(|spec| spec.access_modes.clone())
                    .unwrap_or_default()
            }
            Source::Inline(_) => vec!["ReadWriteOnce".to_owned()],
        };
        let fs_type = source.access(wanted.pod).fs_type;
        if !changes_group(&policy, &fs_type, &modes, source.read_only()) {
            return Ok(());
        }
        let mount: PathBuf = mount.to_path_buf();
        let applied =
            blocking(move || ownership::apply(&mount, Some(group), change_policy.as_deref(), false));
        let applied = applied.await;
        applied.map_err(|error| {
            format!(
                "applyFSGroup failed for vol {}: {error}",
                source.key(wanted).handle
            )
        })
    }
}

/// Whether the kubelet gives the volume to the pod's group.
fn changes_group(policy: &str, fs_type: &str, modes: &[String], read_only: bool) -> bool {
    match policy {
        "None" => false,
        _ if read_only => false,
        "File" => true,
        _ => {
            let once = |mode: &String| mode == "ReadWriteOnce" || mode == "ReadWriteOncePod";
            !fs_type.is_empty() && modes.iter().any(once)
        }
    }
}

/// Whether an earlier life of the node mounted the volume to the end.
async fn found_again(directory: &Path, ready: &Path, key: &Key) -> Result<bool, String> {
    let (directory, ready, key) = (directory.to_path_buf(), ready.to_path_buf(), key.clone());
    blocking(move || {
        let data = Data::load(&directory)?;
        let ours = data.is_some_and(|data| data.key() == key);
        Ok(ours && ready.exists() && is_mount_point(&directory.join("mount"))?)
    })
    .await
    .map_err(|error: std::io::Error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups() {
        let modes = |mode: &str| vec![mode.to_owned()];
        assert!(changes_group("File", "", &modes("ReadWriteMany"), false));
        assert!(!changes_group("File", "", &modes("ReadWriteMany"), true));
        assert!(!changes_group("None", "ext4", &modes("ReadWriteOnce"), false));
        let default = "ReadWriteOnceWithFSType";
        assert!(changes_group(default, "ext4", &modes("ReadWriteOncePod"), false));
        assert!(!changes_group(default, "", &modes("ReadWriteOnce"), false));
        assert!(!changes_group(default, "ext4", &modes("ReadWriteMany"), false));
    }
}
