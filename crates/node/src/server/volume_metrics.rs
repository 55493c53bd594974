//! `kubelet_volume_stats_*` of `/metrics`: how full the volumes of claims are, as the last look at them found.

use std::collections::BTreeMap;

use super::page::{Page, Sample, float};
use crate::kubelet::Kubelet;
use crate::pods;
use crate::volumes::FsUsage;

type Field = fn(&FsUsage) -> Option<u64>;

/// The names of the families behind their prefix, their values, and what they are.
const FAMILIES: [(&str, Field, &str); 6] = [
    (
        "available_bytes",
        |usage| usage.available,
        "[ALPHA] Number of available bytes in the volume",
    ),
    (
        "capacity_bytes",
        |usage| usage.capacity,
        "[ALPHA] Capacity in bytes of the volume",
    ),
    (
        "inodes",
        |usage| usage.inodes,
        "[ALPHA] Maximum number of inodes in the volume",
    ),
    (
        "inodes_free",
        |usage| usage.inodes_free,
        "[ALPHA] Number of free inodes in the volume",
    ),
    (
        "inodes_used",
        |usage| usage.inodes_used,
        "[ALPHA] Number of used inodes in the volume",
    ),
    (
        "used_bytes",
        |usage| usage.used,
        "[ALPHA] Number of used bytes in the volume",
    ),
];

pub fn text(kubelet: &Kubelet) -> String {
    // Pods that share a claim share its volume.
    let mut claims: BTreeMap<String, FsUsage> = BTreeMap::new();
    for state in kubelet.states() {
        let pod = state.pod();
        for volume in kubelet
            .disk_stats
            .of(&state.uid)
            .iter()
            .flat_map(|disk| &disk.volumes)
        {
            if let Some(claim) = &volume.claim {
                claims.insert(labels(pods::namespace(&pod), claim), volume.usage);
            }
        }
    }
    format(&claims)
}

/// Names of the API: nothing in them needs to be escaped.
fn labels(namespace: &str, claim: &str) -> String {
    format!("{{namespace=\"{namespace}\",persistentvolumeclaim=\"{claim}\"}}")
}

fn format(claims: &BTreeMap<String, FsUsage>) -> String {
    let mut page = Page::default();
    for (name, field, help) in FAMILIES {
        let samples: Vec<Sample> = claims
            .iter()
            .filter_map(|(labels, volume)| Some((labels.clone(), float(field(volume)?), None)))
            .collect();
        page.family(&format!("kubelet_volume_stats_{name}"), "gauge", help, samples);
    }
    page.into_text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim() {
        let usage = FsUsage {
            capacity: Some(100),
            used: Some(40),
            ..FsUsage::default()
        };
        let text = format(&BTreeMap::from([(labels("ns", "data"), usage)]));
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "kubelet_volume_stats_capacity_bytes{namespace=\"ns\",persistentvolumeclaim=\"data\"} 100",
                "kubelet_volume_stats_used_bytes{namespace=\"ns\",persistentvolumeclaim=\"data\"} 40",
            ]
        );
    }
}
