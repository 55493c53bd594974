//! The calls of a driver's Node service: time limits, what it is capable of, and errors as upstream tells them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use skiff_csi::v1::node_service_capability::{Rpc, Type, rpc};
use skiff_csi::v1::volume_capability::access_mode::Mode;
use skiff_csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use skiff_csi::v1::{self, NodeGetCapabilitiesRequest, NodeGetInfoRequest, VolumeCapability};
use skiff_csi::{Channel, Code, NodeClient, Status};

use crate::volumes::metrics::VolumeMetrics;

const TIMEOUT: Duration = Duration::from_secs(120);

/// A call that failed.
#[derive(Debug)]
pub struct CallError {
    pub code: Code,
    pub message: String,
}

impl CallError {
    /// Whether the driver is done with it for sure; if not, it may still be at it.
    pub fn is_final(&self) -> bool {
        !matches!(
            self.code,
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Unavailable
                | Code::ResourceExhausted
                | Code::Aborted
        )
    }
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let code = code_name(self.code);
        write!(f, "rpc error: code = {code} desc = {}", self.message)
    }
}

/// As Go writes it.
fn code_name(code: Code) -> String {
    match code {
        Code::Ok => "OK".to_owned(),
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}

/// What the Node service can do beside publishing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Capabilities {
    pub stage: bool,
    pub stats: bool,
    pub expand: bool,
    pub single_node_multi_writer: bool,
    pub mount_group: bool,
}

/// What a volume shall be for the pod.
#[derive(Clone, Debug, Default)]
pub struct Access {
    pub block: bool,
    pub fs_type: String,
    pub options: Vec<String>,
    /// `ReadWriteOnce` and so on.
    pub mode: String,
    /// For drivers that give the volume to a group themselves.
    pub group: Option<i64>,
}

impl Access {
    pub fn capability(&self, capabilities: Capabilities) -> VolumeCapability {
        let mode = match (self.mode.as_str(), capabilities.single_node_multi_writer) {
            ("ReadWriteOnce", true) => Mode::SingleNodeMultiWriter,
            ("ReadWriteOncePod", true) => Mode::SingleNodeSingleWriter,
            ("ReadWriteOnce" | "ReadWriteOncePod", false) => Mode::SingleNodeWriter,
            ("ReadOnlyMany", _) => Mode::MultiNodeReaderOnly,
            ("ReadWriteMany", _) => Mode::MultiNodeMultiWriter,
            _ => Mode::Unknown,
        };
        let access_type = if self.block {
            AccessType::Block(BlockVolume {})
        } else {
            let group = self.group.filter(|_| capabilities.mount_group);
            AccessType::Mount(MountVolume {
                fs_type: self.fs_type.clone(),
                mount_flags: self.options.clone(),
                volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
            })
        };
        VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(access_type),
        }
    }
}

/// A driver that has registered.
#[derive(Clone)]
pub struct Driver {
    channel: Channel,
    pub endpoint: PathBuf,
    name: String,
    metrics: Option<Arc<VolumeMetrics>>,
}

macro_rules! call {
    ($self:expr, $method:ident, $name:literal, $request:expr) => {{
        let mut client = NodeClient::new($self.channel.clone());
        let began = Instant::now();
        let answered = tokio::time::timeout(TIMEOUT, client.$method($request)).await;
        let answer = match answered {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(failed(&status)),
            Err(_) => Err(CallError {
                code: Code::DeadlineExceeded,
                message: "context deadline exceeded".to_owned(),
            }),
        };
        let code = answer.as_ref().err().map_or(Code::Ok, |error| error.code);
        $self.count($name, &code_name(code), began);
        answer
    }};
}

fn failed(status: &Status) -> CallError {
    // A driver may say as much as it likes; users and events get the beginning.
    CallError {
        code: status.code(),
        message: status.message().chars().take(1024).collect(),
    }
}

impl Driver {
    pub fn new(endpoint: &Path, name: &str, metrics: Option<Arc<VolumeMetrics>>) -> Self {
        Driver {
            channel: skiff_csi::channel(endpoint),
            endpoint: endpoint.to_path_buf(),
            name: name.to_owned(),
            metrics,
        }
    }

    fn count(&self, method: &str, code: &str, began: Instant) {
        if let Some(metrics) = &self.metrics {
            metrics.call(&self.name, method, code, began.elapsed());
        }
    }

    pub async fn info(&self) -> Result<v1::NodeGetInfoResponse, CallError> {
        call!(self, node_get_info, "NodeGetInfo", NodeGetInfoRequest {})
    }

    pub async fn capabilities(&self) -> Result<Capabilities, CallError> {
        let answer: v1::NodeGetCapabilitiesResponse = call!(
            self,
            node_get_capabilities,
            "NodeGetCapabilities",
            NodeGetCapabilitiesRequest {}
        )?;
        let mut found = Capabilities::default();
        for capability in answer.capabilities {
            let Some(Type::Rpc(Rpc { r#type })) = capability.r#type else {
                continue;
            };
            match rpc::Type::try_from(r#type) {
                Ok(rpc::Type::StageUnstageVolume) => found.stage = true,
                Ok(rpc::Type::GetVolumeStats) => found.stats = true,
                Ok(rpc::Type::ExpandVolume) => found.expand = true,
                Ok(rpc::Type::SingleNodeMultiWriter) => found.single_node_multi_writer = true,
                Ok(rpc::Type::VolumeMountGroup) => found.mount_group = true,
                _ => {}
            }
        }
        Ok(found)
    }

    pub async fn stage(&self, request: v1::NodeStageVolumeRequest) -> Result<(), CallError> {
        call!(self, node_stage_volume, "NodeStageVolume", request).map(|_| ())
    }

    pub async fn unstage(&self, volume_id: &str, staging: &Path) -> Result<(), CallError> {
        let request = v1::NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(staging),
        };
        call!(self, node_unstage_volume, "NodeUnstageVolume", request).map(|_| ())
    }

    pub async fn publish(&self, request: v1::NodePublishVolumeRequest) -> Result<(), CallError> {
        call!(self, node_publish_volume, "NodePublishVolume", request).map(|_| ())
    }

    pub async fn unpublish(&self, volume_id: &str, target: &Path) -> Result<(), CallError> {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: text(target),
        };
        call!(self, node_unpublish_volume, "NodeUnpublishVolume", request).map(|_| ())
    }

    pub async fn expand(&self, request: v1::NodeExpandVolumeRequest) -> Result<(), CallError> {
        call!(self, node_expand_volume, "NodeExpandVolume", request).map(|_| ())
    }

    pub async fn stats(&self, volume_id: &str, path: &Path) -> Result<Vec<v1::VolumeUsage>, CallError> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: volume_id.to_owned(),
            volume_path: text(path),
            staging_target_path: String::new(),
        };
        let answer: v1::NodeGetVolumeStatsResponse =
            call!(self, node_get_volume_stats, "NodeGetVolumeStats", request)?;
        Ok(answer.usage)
    }
}

pub fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Attributes and secrets as the protocol has them.
pub fn map(from: impl IntoIterator<Item = (String, String)>) -> HashMap<String, String> {
    from.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_read_as_upstreams() {
        let error = failed(&Status::internal("no room"));
        assert_eq!(error.to_string(), "rpc error: code = Internal desc = no room");
        assert!(error.is_final());
        assert!(!failed(&Status::unavailable("x")).is_final());
        let cancelled = failed(&Status::cancelled("x"));
        assert_eq!(cancelled.to_string(), "rpc error: code = Canceled desc = x");
    }

    #[test]
    fn access_modes() {
        let check = |mode: &str, multi_writer: bool, expected: Mode| {
            let capabilities = Capabilities {
                single_node_multi_writer: multi_writer,
                ..Default::default()
            };
            let access = Access {
                mode: mode.to_owned(),
                group: Some(5),
                ..Default::default()
            };
            let made = access.capability(capabilities);
            assert_eq!(made.access_mode.unwrap().mode(), expected);
            // The driver cannot do it: the kubelet does.
            let Some(AccessType::Mount(mount)) = made.access_type else {
                panic!("not a mount")
            };
            assert_eq!(mount.volume_mount_group, "");
        };
        check("ReadWriteOnce", false, Mode::SingleNodeWriter);
        check("ReadWriteOnce", true, Mode::SingleNodeMultiWriter);
        check("ReadWriteOncePod", false, Mode::SingleNodeWriter);
        check("ReadWriteOncePod", true, Mode::SingleNodeSingleWriter);
        check("ReadOnlyMany", true, Mode::MultiNodeReaderOnly);
        check("ReadWriteMany", true, Mode::MultiNodeMultiWriter);
    }
}
