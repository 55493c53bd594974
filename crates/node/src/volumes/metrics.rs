//! How long volumes take, under upstream's names: operations on volumes, and calls of storage drivers.

use std::sync::Arc;
use std::time::Duration;

use skiff_prometheus::{Family, Histogram, Registry};

/// Drivers choose their names.
const MAX_SERIES: usize = 500;
const BUCKETS: [f64; 13] = [
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0,
];

pub(super) struct VolumeMetrics {
    operations: Arc<Family<Histogram>>,
    calls: Arc<Family<Histogram>>,
}

impl VolumeMetrics {
    pub fn new(registry: &Registry) -> Arc<Self> {
        Arc::new(VolumeMetrics {
            operations: registry.histograms(
                "storage_operation_duration_seconds",
                "How long operations on volumes took, by the type of the volume, the operation and its end.",
                &["volume_plugin", "operation_name", "status", "migrated"],
                MAX_SERIES,
                &BUCKETS,
            ),
            calls: registry.histograms(
                "csi_operations_seconds",
                "How long calls of storage drivers took, by driver, call and the code of the answer.",
                &["driver_name", "method_name", "grpc_status_code", "migrated"],
                MAX_SERIES,
                &BUCKETS,
            ),
        })
    }

    /// `plugin` is as in `kubernetes.io~<plugin>`; volumes of storage drivers have their driver, too.
    pub fn operation(&self, plugin: &str, driver: Option<&str>, name: &str, succeeded: bool, took: Duration) {
        let plugin = match driver {
            Some(driver) => format!("kubernetes.io/{plugin}:{driver}"),
            None => format!("kubernetes.io/{plugin}"),
        };
        let status = if succeeded { "success" } else { "fail-unknown" };
        self.operations
            .with(&[&plugin, name, status, "false"])
            .observe_duration(took);
    }

    pub fn call(&self, driver: &str, method: &str, code: &str, took: Duration) {
        let method = format!("/csi.v1.Node/{method}");
        self.calls
            .with(&[driver, &method, code, "false"])
            .observe_duration(took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_upstreams() {
        let registry = Registry::new();
        let metrics = VolumeMetrics::new(&registry);
        let took = Duration::from_millis(200);
        metrics.operation("iscsi", None, "volume_mount", true, took);
        metrics.operation("csi", Some("d.example"), "volume_unmount", false, took);
        metrics.call("d.example", "NodeStageVolume", "Unavailable", took);
        let text = registry.text();
        for line in [
            r#"storage_operation_duration_seconds_bucket{volume_plugin="kubernetes.io/iscsi",operation_name="volume_mount",status="success",migrated="false",le="0.25"} 1"#,
            r#"storage_operation_duration_seconds_count{volume_plugin="kubernetes.io/csi:d.example",operation_name="volume_unmount",status="fail-unknown",migrated="false"} 1"#,
            r#"csi_operations_seconds_count{driver_name="d.example",method_name="/csi.v1.Node/NodeStageVolume",grpc_status_code="Unavailable",migrated="false"} 1"#,
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in {text}");
        }
    }
}
