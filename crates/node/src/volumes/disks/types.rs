//! `iscsi` and `fc` volumes: from what a pod or a PersistentVolume says to the disk that it wants.

use std::collections::BTreeMap;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{FCVolumeSource, ISCSIPersistentVolumeSource, SecretReference};

use super::format::check_type;
use super::iscsi::Target;
use super::{Chap, FibreChannel, Request, Source};
use crate::volumes::usage::Measure;
use crate::volumes::volume_type::{Ready, VolumeType, Wanted};
use crate::volumes::{SetUpError, Volumes, fs_group};

pub(in crate::volumes) struct IscsiVolume;
pub(in crate::volumes) struct FibreChannelVolume;

impl Request {
    pub fn new(
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: Source,
        fs_type: Option<String>,
        read_only: bool,
    ) -> Result<Self, SetUpError> {
        let fs_type = fs_type.unwrap_or_default();
        check_type(&fs_type).map_err(|error| wanted.set_up_error(error))?;
        let (uid, name, plugin) = (wanted.uid(), wanted.name(), source.plugin());
        let block = wanted.claimed.is_some_and(|claimed| claimed.block);
        let (group, change_policy) = fs_group(wanted.pod);
        Ok(Request {
            uid: uid.to_owned(),
            name: name.to_owned(),
            chap: Chap::default(),
            block,
            fs_type,
            options: wanted
                .claimed
                .map(|claimed| claimed.options.clone())
                .unwrap_or_default(),
            read_only: read_only || wanted.claimed.is_some_and(|claimed| claimed.read_only),
            for_one_pod: wanted.claimed.is_some_and(|claimed| claimed.for_one_pod),
            group,
            change_policy,
            target: match block {
                true => host.device_link(uid, plugin, name),
                false => host.volume_dir(uid, plugin, name),
            },
            ready_file: host.ready_file(uid, plugin, name),
            source,
        })
    }
}

/// The two forms have the same fields, but for the secret's namespace.
fn iscsi_of(wanted: &Wanted<'_>) -> Option<ISCSIPersistentVolumeSource> {
    if let Some(claimed) = wanted.claimed {
        return claimed.spec()?.iscsi.clone();
    }
    let inline = wanted.volume.iscsi.clone()?;
    Some(ISCSIPersistentVolumeSource {
        chap_auth_discovery: inline.chap_auth_discovery,
        chap_auth_session: inline.chap_auth_session,
        fs_type: inline.fs_type,
        initiator_name: inline.initiator_name,
        iqn: inline.iqn,
        iscsi_interface: inline.iscsi_interface,
        lun: inline.lun,
        portals: inline.portals,
        read_only: inline.read_only,
        secret_ref: inline.secret_ref.map(|secret| SecretReference {
            name: Some(secret.name),
            namespace: None,
        }),
        target_portal: inline.target_portal,
    })
}

async fn chap_of(
    host: &Volumes,
    wanted: &Wanted<'_>,
    source: &ISCSIPersistentVolumeSource,
) -> Result<Chap, String> {
    let discovery = source.chap_auth_discovery == Some(true);
    let session = source.chap_auth_session == Some(true);
    if !discovery && !session {
        return Ok(Chap::default());
    }
    let reference = source.secret_ref.clone().unwrap_or_default();
    let name = reference.name.unwrap_or_default();
    let namespace = reference.namespace.filter(|namespace| !namespace.is_empty());
    let namespace = namespace.unwrap_or_else(|| wanted.namespace().to_owned());
    if name.is_empty() {
        return Err("iscsi: CHAP is asked for without a secret".to_owned());
    }
    let failed = |error: &str| format!("couldn't get secret {namespace}/{name} error: {error}");
    let secret = match host.objects.secret(&namespace, &name).await {
        Ok(Some(secret)) => secret,
        Ok(None) => return Err(failed(&format!("secrets {name:?} not found"))),
        Err(error) => return Err(failed(&error)),
    };
    let data = secret.data.iter().flatten();
    let data: BTreeMap<String, Vec<u8>> = data.map(|(key, value)| (key.clone(), value.0.clone())).collect();
    Chap::new(discovery, session, &data)
}

#[async_trait]
impl VolumeType for IscsiVolume {
    fn name(&self) -> &'static str {
        "iscsi"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::FileSystem)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        iscsi_of(wanted).is_some()
    }

    fn supports_mount_options(&self) -> bool {
        true
    }

    fn supports_block(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let source = iscsi_of(wanted).unwrap_or_default();
        let failed = |error: String| wanted.set_up_error(error);
        let target = Target::new(&source, wanted.name()).map_err(failed)?;
        let chap = chap_of(host, wanted, &source).await.map_err(failed)?;
        let read_only = source.read_only == Some(true);
        let request = Request::new(host, wanted, Source::Iscsi(target), source.fs_type, read_only)?;
        host.disks.set_up(Request { chap, ..request }).await
    }
}

fn fc_of(wanted: &Wanted<'_>) -> Option<FCVolumeSource> {
    match wanted.claimed {
        Some(claimed) => claimed.spec()?.fc.clone(),
        None => wanted.volume.fc.clone(),
    }
}

#[async_trait]
impl VolumeType for FibreChannelVolume {
    fn name(&self) -> &'static str {
        "fc"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::FileSystem)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        fc_of(wanted).is_some()
    }

    fn supports_mount_options(&self) -> bool {
        true
    }

    fn supports_block(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let source = fc_of(wanted).unwrap_or_default();
        let disk = FibreChannel::new(source.target_wwns.as_deref(), source.lun, source.wwids.as_deref());
        let disk = disk.map_err(|error| wanted.set_up_error(error))?;
        let read_only = source.read_only == Some(true);
        let request = Request::new(host, wanted, Source::Fc(disk), source.fs_type, read_only)?;
        host.disks.set_up(request).await
    }
}
