//! How full the volumes of drivers are, as their drivers say, for `/stats/summary`.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use skiff_csi::v1::VolumeUsage;
use skiff_csi::v1::volume_usage::Unit;

use super::Csi;
use super::data::{Data, Key};
use crate::pods;
use crate::volumes::{Volumes, blocking, claims};

/// Who asks for the summary waits for all of it.
const PATIENCE: Duration = Duration::from_secs(2);

impl Volumes {
    /// One entry for each volume of the pod whose driver tells.
    pub async fn driver_stats(&self, pod: &Pod) -> Vec<Value> {
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
            let namespace = pods::namespace(pod);
            Some(async move {
                let place = directory.clone();
                let data = blocking(move || Data::load(&place)).await.ok()??;
                let (key, mount) = (data.key(), directory.join("mount"));
                let usage = tokio::time::timeout(PATIENCE, csi.usage(&key, &mount));
                let usage = usage.await.ok()??;
                let mut shown = entry(&usage);
                shown["name"] = json!(volume.name);
                if let Some(claim) = claim {
                    shown["pvcRef"] = json!({"name": claim, "namespace": namespace});
                }
                Some(shown)
            })
        });
        let asked: Vec<_> = asked.collect();
        let told = futures::future::join_all(asked).await;
        told.into_iter().flatten().collect()
    }
}

impl Csi {
    async fn usage(&self, key: &Key, path: &Path) -> Option<Vec<VolumeUsage>> {
        let driver = self.driver(&key.driver).ok()?;
        if !driver.capabilities().await.ok()?.stats {
            return None;
        }
        driver.stats(&key.handle, path).await.ok()
    }
}

fn entry(usage: &[VolumeUsage]) -> Value {
    let now = k8s_openapi::jiff::Timestamp::now();
    let mut shown = json!({"time": skiff_meta::time::format_seconds(now)});
    for one in usage {
        let names = match one.unit() {
            Unit::Bytes => ["availableBytes", "capacityBytes", "usedBytes"],
            Unit::Inodes => ["inodesFree", "inodes", "inodesUsed"],
            Unit::Unknown => continue,
        };
        for (name, amount) in names.into_iter().zip([one.available, one.total, one.used]) {
            shown[name] = json!(u64::try_from(amount).unwrap_or(0));
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_says() {
        let usage = |unit: Unit, available, total, used| VolumeUsage {
            available,
            total,
            used,
            unit: unit.into(),
        };
        let mut shown = entry(&[
            usage(Unit::Bytes, 60, 100, 40),
            usage(Unit::Inodes, 7, 10, 3),
            usage(Unit::Unknown, 1, 1, 1),
        ]);
        shown.as_object_mut().unwrap().remove("time");
        let expected = json!({"availableBytes": 60, "capacityBytes": 100, "usedBytes": 40, "inodesFree": 7, "inodes": 10, "inodesUsed": 3});
        assert_eq!(shown, expected);
    }
}
