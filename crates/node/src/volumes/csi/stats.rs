//! How full the volumes of drivers are, as their drivers say, for `/stats/summary` and `/metrics`.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use skiff_csi::v1::VolumeUsage as CsiUsage;
use skiff_csi::v1::volume_usage::Unit;

use super::Csi;
use super::data::{Data, Key};
use crate::disk_stats::VolumeUsage;
use crate::pods;
use crate::volumes::{FsUsage, Volumes, blocking, claims};

/// A driver that does not answer must not keep the numbers of the others away.
const PATIENCE: Duration = Duration::from_secs(2);

impl Volumes {
    /// One entry for each volume of the pod whose driver tells.
    pub async fn driver_stats(&self, pod: &Pod) -> Vec<VolumeUsage> {
        let Some(csi) = &self.csi else {
            return Vec::new();
        };
        let uid = pods::uid(pod);
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let asked = volumes.filter_map(|volume| {
            let claim = claims::reference(pod, volume).map(|reference| reference.claim().to_owned());
            let on_disk = match (&claim, &volume.csi) {
                (Some(_), _) => self.claimed.lock().name_of(uid, &volume.name)?,
                (None, Some(_)) => volume.name.clone(),
                (None, None) => return None,
            };
            let directory = self.volume_dir(uid, "csi", &on_disk);
            let (link, device) = (
                self.device_link(uid, "csi", &on_disk),
                csi.layout.device_data(&on_disk),
            );
            Some(async move {
                let found = blocking(move || match Data::load(&directory)? {
                    Some(data) => Ok(Some((data, directory.join("mount")))),
                    None if link.is_symlink() => Ok(Data::load(&device)?.map(|data| (data, link))),
                    None => Ok::<_, std::io::Error>(None),
                });
                let (data, path) = found.await.ok()??;
                let key = data.key();
                let usage = tokio::time::timeout(PATIENCE, csi.usage(&key, &path));
                let usage = usage.await.ok()??;
                Some(VolumeUsage {
                    name: volume.name.clone(),
                    claim,
                    usage: fs_usage(&usage),
                })
            })
        });
        let asked: Vec<_> = asked.collect();
        let told = futures::future::join_all(asked).await;
        told.into_iter().flatten().collect()
    }
}

impl Csi {
    async fn usage(&self, key: &Key, path: &Path) -> Option<Vec<CsiUsage>> {
        let driver = self.driver(&key.driver).ok()?;
        if !driver.capabilities().await.ok()?.stats {
            return None;
        }
        driver.stats(&key.handle, path).await.ok()
    }
}

fn fs_usage(told: &[CsiUsage]) -> FsUsage {
    let mut usage = FsUsage {
        time: crate::server::now_nanos(),
        ..FsUsage::default()
    };
    for one in told {
        let [available, total, used] =
            [one.available, one.total, one.used].map(|amount| Some(u64::try_from(amount).unwrap_or(0)));
        match one.unit() {
            Unit::Bytes => (usage.available, usage.capacity, usage.used) = (available, total, used),
            Unit::Inodes => (usage.inodes_free, usage.inodes, usage.inodes_used) = (available, total, used),
            Unit::Unknown => {}
        }
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_says() {
        let usage = |unit: Unit, available, total, used| CsiUsage {
            available,
            total,
            used,
            unit: unit.into(),
        };
        let shown = fs_usage(&[
            usage(Unit::Bytes, 60, 100, 40),
            usage(Unit::Inodes, 7, 10, 3),
            usage(Unit::Unknown, 1, 1, 1),
        ]);
        let expected = FsUsage {
            time: shown.time,
            available: Some(60),
            capacity: Some(100),
            used: Some(40),
            inodes_free: Some(7),
            inodes: Some(10),
            inodes_used: Some(3),
        };
        assert_eq!(shown, expected);
    }
}
