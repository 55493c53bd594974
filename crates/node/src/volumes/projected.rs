//! `projected`: ConfigMaps, Secrets, fields of the pod, tokens, ClusterTrustBundles and certificates of the pod as files of one
//! volume.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{
    Pod, PodCertificateProjection, ProjectedVolumeSource, ServiceAccountTokenProjection, VolumeProjection,
};

use super::atomic_writer::{File, Payload};
use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, downward_api, fs_group, keyed};
use crate::trust_bundles;

pub(super) struct Projected;

#[async_trait]
impl VolumeType for Projected {
    fn name(&self) -> &'static str {
        "projected"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::Files)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volume.projected.is_some()
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let Some(source) = &wanted.volume.projected else {
            return Err(wanted.set_up_error("no projected"));
        };
        let payload = payload(host, wanted, source).await;
        let payload = payload.map_err(|error| wanted.set_up_error(error))?;
        host.write_files(wanted, self.name(), payload, true).await
    }
}

async fn payload(
    host: &Volumes,
    wanted: &Wanted<'_>,
    source: &ProjectedVolumeSource,
) -> Result<Payload, String> {
    let default_mode = source.default_mode.unwrap_or(0o644);
    let sources = source.sources.as_deref().unwrap_or_default();
    let parts = sources
        .iter()
        .enumerate()
        .map(|(index, part)| part_of(host, wanted, index, part, default_mode));
    let mut payload = Payload::new();
    let mut errors = Vec::new();
    for result in futures::future::join_all(parts).await {
        match result {
            Ok(files) => payload.extend(files),
            Err(error) => errors.push(error),
        }
    }
    match errors.as_slice() {
        [] => Ok(payload),
        [one] => Err(one.clone()),
        many => Err(format!("[{}]", many.join(", "))),
    }
}

async fn part_of(
    host: &Volumes,
    wanted: &Wanted<'_>,
    index: usize,
    part: &VolumeProjection,
    default_mode: i32,
) -> Result<Payload, String> {
    let namespace = wanted.namespace();
    if let Some(map) = &part.config_map {
        let optional = map.optional == Some(true);
        let object = host.objects.config_map(namespace, &map.name).await?;
        if object.is_none() && !optional {
            return Err(format!("configmap {:?} not found", map.name));
        }
        return keyed::config_map_payload(object.as_deref(), map.items.as_ref(), default_mode, optional);
    }
    if let Some(secret) = &part.secret {
        let optional = secret.optional == Some(true);
        let object = host.objects.secret(namespace, &secret.name).await?;
        if object.is_none() && !optional {
            return Err(format!("secret {:?} not found", secret.name));
        }
        return keyed::secret_payload(object.as_deref(), secret.items.as_ref(), default_mode, optional);
    }
    if let Some(downward) = &part.downward_api {
        let items = downward.items.as_deref().unwrap_or_default();
        return downward_api::payload(wanted.pod, items, default_mode, wanted.facts);
    }
    if let Some(token) = &part.service_account_token {
        return token_file(host, wanted.pod, token, default_mode).await;
    }
    if let Some(bundle) = &part.cluster_trust_bundle {
        let bundles = host.objects.trust_bundles().await?;
        let data = trust_bundles::anchors(bundle, &bundles.all)?;
        let (mode, owner) = mode_and_owner(wanted.pod, default_mode);
        return Ok(Payload::from([(bundle.path.clone(), File { data, mode, owner })]));
    }
    if let Some(certificate) = &part.pod_certificate {
        return certificate_files(host, wanted, index, certificate, default_mode);
    }
    // COMPAT: where the feature of a source is off, the API server drops it and keeps an empty one. Upstream's node passes over
    // that; here a pod does not start without what it asked for.
    Err("a source of the projected volume is empty: the API server drops clusterTrustBundle unless --runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true, and podCertificate unless --runtime-config=certificates.k8s.io/v1beta1/podcertificaterequests=true".to_owned())
}

/// Key and certificates, in one file or in two: all of them are of the same issue.
fn certificate_files(
    host: &Volumes,
    wanted: &Wanted<'_>,
    index: usize,
    certificate: &PodCertificateProjection,
    default_mode: i32,
) -> Result<Payload, String> {
    let Some(certificates) = &host.certificates else {
        return Err("podCertificate projections are not supported by this node".to_owned());
    };
    let issued = certificates.get(wanted.pod, &wanted.volume.name, index, certificate)?;
    let (mode, owner) = mode_and_owner(wanted.pod, default_mode);
    let bundle = [issued.key.as_slice(), issued.chain.as_slice()].concat();
    let files = [
        (&certificate.credential_bundle_path, bundle),
        (&certificate.key_path, issued.key),
        (&certificate.certificate_chain_path, issued.chain),
    ];
    let named = files
        .into_iter()
        .filter_map(|(path, data)| Some((path.clone().filter(|path| !path.is_empty())?, data)));
    Ok(named
        .map(|(path, data)| (path, File { data, mode, owner }))
        .collect())
}

async fn token_file(
    host: &Volumes,
    pod: &Pod,
    token: &ServiceAccountTokenProjection,
    default_mode: i32,
) -> Result<Payload, String> {
    let (mode, owner) = mode_and_owner(pod, default_mode);
    let made = host.tokens.get(host.objects.as_ref(), pod, token).await?;
    let data = made.token.into_bytes();
    Ok(Payload::from([(token.path.clone(), File { data, mode, owner })]))
}

/// Of a file that is for the pod's processes alone, where they are known.
fn mode_and_owner(pod: &Pod, default_mode: i32) -> (u32, Option<u32>) {
    let (group, _) = fs_group(pod);
    let owner = token_owner(pod);
    // A group makes it 0640 by the ownership rule; an owner needs no more than 0600.
    let mode = if group.is_some() || owner.is_some() {
        0o600
    } else {
        u32::try_from(default_mode).unwrap_or(0o644)
    };
    (mode, owner)
}

/// The one user all containers run as, if there is one: then the token can be theirs alone.
fn token_owner(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let pod_user = spec.security_context.as_ref().and_then(|c| c.run_as_user);
    let mut users = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .map(|c| {
            c.security_context
                .as_ref()
                .and_then(|s| s.run_as_user)
                .or(pod_user)
        });
    let first = users.next()??;
    if users.all(|user| user == Some(first)) {
        u32::try_from(first).ok()
    } else {
        None
    }
}
