//! A driver's volume as a block device: staged once, published to a place of its own for each pod, which a link in the pod's
//! directory notes. The link comes first, so that nothing that was published is forgotten.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use skiff_csi::{Code, v1};

use super::client::{map, text};
use super::data::{Data, Layout, Stage};
use super::mount::Source;
use super::request::credentials;
use super::{Csi, log};
use crate::volumes::claims::FOR_ONE_POD;
use crate::volumes::disks::{Host, hold};
use crate::volumes::volume_type::{Ready, Wanted, remove_link};
use crate::volumes::{SetUpError, Volumes, blocking, is_mount_point, link_device};

impl Csi {
    pub(super) async fn map_device(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
    ) -> Result<Ready, SetUpError> {
        self.specs.synced().await;
        let Source::Persistent(claimed, csi) = source else {
            return Err(wanted.set_up_error("a block volume needs a claim"));
        };
        let (key, uid, name) = (source.key(wanted), wanted.uid(), claimed.name.clone());
        let set_up = |message: String| SetUpError::step("MapVolume.SetUpDevice", &name, message);
        let link = host.device_link(uid, "csi", &name);
        let target = self.layout.device_publish(&name, uid);
        let ready = Ready {
            read_only: claimed.read_only,
            ..Ready::at(link.clone())
        };
        let published = (uid.to_owned(), name.clone());
        if self.held.lock().published.contains(&published) {
            return Ok(ready);
        }
        self.add_user(&key, uid);
        {
            let _turn = self.turn(&key).await;
            if claimed.for_one_pod && self.other_users(&key, uid) {
                self.remove_user(&key, uid);
                return Err(wanted.set_up_error(FOR_ONE_POD));
            }
            let (driver, capabilities) = self.ask(wanted, &key).await?;
            let context = self.attached(&key, &name).await?;
            let data = Data {
                spec_vol_id: name.clone(),
                volume_handle: key.handle.clone(),
                driver_name: key.driver.clone(),
                node_name: self.node_name.clone(),
                attachment_id: key.attachment(&self.node_name),
                volume_lifecycle_mode: String::new(),
            };
            let (layout, place, noted) = (self.layout.clone(), target.clone(), link.clone());
            let volume = name.clone();
            blocking(move || {
                let data_folder = layout.device_data(&volume);
                std::fs::create_dir_all(&data_folder)?;
                data.save(&data_folder)?;
                std::fs::create_dir_all(layout.device_staging(&volume))?;
                place.parent().map_or(Ok(()), std::fs::create_dir_all)?;
                link_device(&place, &noted)
            })
            .await
            .map_err(|error: std::io::Error| set_up(error.to_string()))?;
            self.change(|held| {
                held.stages.insert(key.clone(), Stage::Block(name.clone()));
            });
            let capability = source.access(wanted.pod).capability(capabilities);
            if capabilities.stage && !self.held.lock().staged_now.contains(&key) {
                let secrets = match &csi.node_stage_secret_ref {
                    Some(reference) => credentials(host, reference).await.map_err(set_up)?,
                    None => HashMap::new(),
                };
                let request = v1::NodeStageVolumeRequest {
                    volume_id: key.handle.clone(),
                    publish_context: context.clone(),
                    staging_target_path: text(&self.layout.device_staging(&name)),
                    volume_capability: Some(capability.clone()),
                    secrets,
                    volume_context: map(source.attributes()),
                };
                driver.stage(request).await.map_err(|e| set_up(e.to_string()))?;
                self.change(|held| {
                    held.staged_now.insert(key.clone());
                });
            }
            let (attributes, secrets) = self.attributes(host, wanted, source).await.map_err(set_up)?;
            let request = v1::NodePublishVolumeRequest {
                volume_id: key.handle.clone(),
                publish_context: context,
                staging_target_path: text(&self.layout.device_staging(&name)),
                target_path: text(&target),
                volume_capability: Some(capability),
                readonly: claimed.read_only,
                secrets,
                volume_context: attributes,
            };
            let step = |message| SetUpError::step("MapVolume.MapPodDevice", &name, message);
            driver.publish(request).await.map_err(|e| step(e.to_string()))?;
            if is_device(&target).await {
                let step = |message| SetUpError::step("MapVolume.AttachFileDevice", &name, message);
                hold::take(host.disks.host(), &target, true).await.map_err(step)?;
            }
            self.change(|held| {
                held.published.insert(published);
            });
        }
        self.expand_if_needed(host, wanted, source).await?;
        Ok(ready)
    }

    pub(super) async fn unmap_device(&self, host: &Volumes, uid: &str, link: &Path) -> Result<(), String> {
        let name = link
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let data = Data::load(&self.layout.device_data(name)).map_err(|error| error.to_string())?;
        let Some(data) = data else {
            return remove_link(link).map_err(|error| error.to_string());
        };
        let key = data.key();
        {
            let _turn = self.turn(&key).await;
            let failed = |error: String| log(format!("blockMapper.unpublishVolumeForBlock failed: {error}"));
            let driver = self.driver(&key.driver).map_err(failed)?;
            let target = self.layout.device_publish(name, uid);
            // It has the file open, which the driver is to unmount.
            hold::let_go(host.disks.host(), &target).await.map_err(failed)?;
            match driver.unpublish(&key.handle, &target).await {
                Err(error) if error.code == Code::NotFound => {
                    let place = target.clone();
                    let removed = blocking(move || remove_unmounted(&place)).await;
                    removed.map_err(|_| failed(error.to_string()))?;
                }
                unpublished => unpublished.map_err(|error| failed(error.to_string()))?,
            }
            remove_link(link).map_err(|error| failed(error.to_string()))?;
            self.remove_user(&key, uid);
        }
        self.unstage_if_unused(&key).await;
        Ok(())
    }
}

/// Lets go of the devices of all pods. Their places are still mounted: by them it is found what holds which.
pub(in crate::volumes) async fn let_go_of_all(root: &Path, host: &Host) -> Result<(), String> {
    let layout = Layout {
        root: root.to_path_buf(),
    };
    hold::let_go_below(host, &layout.device_publish("", "")).await
}

/// A driver of tests may publish something else.
async fn is_device(place: &Path) -> bool {
    let place = place.to_path_buf();
    blocking(move || {
        let metadata = std::fs::metadata(place);
        metadata.is_ok_and(|metadata| FileTypeExt::is_block_device(&metadata.file_type()))
    })
    .await
}

/// Removes the place of a device that its driver does not know any more.
fn remove_unmounted(place: &Path) -> std::io::Result<()> {
    if is_mount_point(place)? {
        return Err(std::io::Error::other("still mounted"));
    }
    match std::fs::remove_file(place) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What is left of a block volume that no pod has. Empty folders, and our own notes.
pub(super) fn remove_global(layout: &Layout, name: &str) -> Result<(), String> {
    let gone = |path: &Path, result: std::io::Result<()>| match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("failed to remove [{}]: {error}", path.display()))
        }
        _ => Ok(()),
    };
    let publish = layout.device_publish(name, "");
    gone(&publish, std::fs::remove_dir(&publish))?;
    let staging = layout.device_staging(name);
    gone(&staging, skiff_fs::remove_tree(&staging))?;
    let folder = layout.device_folder(name);
    gone(&folder, skiff_fs::remove_tree(&folder))
}
