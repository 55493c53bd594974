//! Every field of a pod and of its containers, from the schema, and who acts on it or refuses it. A field that is new
//! in the schema fails the test until it has a line here; a line that no longer tells the truth fails it too, because
//! the file that is named must hold the words that are named.

use std::collections::BTreeMap;
use std::path::Path;

const SCHEMA: &str = include_str!("../../api/data/types.txt");

/// What becomes of a field.
enum Fate {
    /// Acted on in this file of the workspace's `crates`, at these words.
    Acts(&'static str, &'static str),
    /// Refused there, at these words, with a reason that the user sees.
    Refused(&'static str, &'static str),
}

use Fate::{Acts, Refused};

/// Where what `iscsi` volumes say is checked, and where what disks say is read.
const NAMES: &str = "node/src/volumes/disks/iscsi/names.rs";
const TYPES: &str = "node/src/volumes/disks/types.rs";
/// Where the sources of projected volumes are, and who asks for certificates.
const PROJECTED: &str = "node/src/volumes/projected.rs";
const CERTIFICATES: &str = "node/src/pod_certificates/mod.rs";

/// The types of volumes. What has no type in `volumes/volume_type.rs` is refused by its name.
fn volume() -> Vec<(&'static str, Fate)> {
    let acts = [
        ("name", "node/src/volumes/mod.rs", "volume.name"),
        ("hostPath", "node/src/volumes/host_path.rs", "volume.host_path"),
        ("emptyDir", "node/src/volumes/empty_dir.rs", "volume.empty_dir"),
        ("secret", "node/src/volumes/secret.rs", "volume.secret"),
        ("nfs", "node/src/volumes/nfs.rs", "volume.nfs"),
        ("iscsi", TYPES, "volume.iscsi"),
        (
            "persistentVolumeClaim",
            "node/src/volumes/claims.rs",
            "volume.persistent_volume_claim",
        ),
        (
            "downwardAPI",
            "node/src/volumes/downward_api.rs",
            "volume.downward_api",
        ),
        ("fc", TYPES, "volume.fc"),
        ("configMap", "node/src/volumes/config_map.rs", "volume.config_map"),
        ("projected", "node/src/volumes/projected.rs", "volume.projected"),
        ("csi", "node/src/volumes/csi/mount.rs", "volume.csi"),
        ("ephemeral", "node/src/volumes/claims.rs", "volume.ephemeral"),
        ("image", "node/src/volumes/image.rs", "volume.image"),
    ];
    let refused = [
        "gcePersistentDisk",
        "awsElasticBlockStore",
        "gitRepo",
        "glusterfs",
        "rbd",
        "flexVolume",
        "cinder",
        "cephfs",
        "flocker",
        "azureFile",
        "vsphereVolume",
        "quobyte",
        "azureDisk",
        "photonPersistentDisk",
        "portworxVolume",
        "scaleIO",
        "storageos",
    ];
    let words = "volumes are not supported by this node";
    let acts = acts.map(|(field, file, words)| (field, Acts(file, words)));
    let refused = refused.map(|field| (field, Refused("node/src/volumes/mod.rs", words)));
    acts.into_iter().chain(refused).collect()
}

fn fates() -> BTreeMap<&'static str, Vec<(&'static str, Fate)>> {
    let container = || {
        vec![
            ("name", Acts("node/src/container_config.rs", "container.name")),
            ("image", Acts("node/src/images.rs", "container.image")),
            (
                "command",
                Acts("node/src/container_config.rs", "container.command"),
            ),
            ("args", Acts("node/src/container_config.rs", "container.args")),
            (
                "workingDir",
                Acts("node/src/container_config.rs", "container.working_dir"),
            ),
            ("ports", Acts("node/src/sandbox_config.rs", "c.ports.iter()")),
            ("envFrom", Acts("node/src/env.rs", "container.env_from")),
            ("env", Acts("node/src/env.rs", "container.env.iter()")),
            (
                "resources",
                Acts("node/src/container_config.rs", "container.resources"),
            ),
            (
                "resizePolicy",
                Acts("node/src/resize/update.rs", "container.resize_policy"),
            ),
            (
                "restartPolicy",
                Acts("node/src/plan.rs", "container.restart_policy"),
            ),
            (
                "restartPolicyRules",
                Acts("node/src/restart_all.rs", "container.restart_policy_rules"),
            ),
            (
                "volumeMounts",
                Acts("node/src/mounts.rs", "container.volume_mounts"),
            ),
            (
                "volumeDevices",
                Acts("node/src/mounts.rs", "container.volume_devices"),
            ),
            ("livenessProbe", Acts("node/src/probes/mod.rs", "liveness_probe")),
            (
                "readinessProbe",
                Acts("node/src/probes/mod.rs", "readiness_probe"),
            ),
            ("startupProbe", Acts("node/src/probes/mod.rs", "startup_probe")),
            ("lifecycle", Acts("node/src/kill.rs", "l.pre_stop")),
            (
                "terminationMessagePath",
                Acts("node/src/mounts.rs", "termination_message_path"),
            ),
            (
                "terminationMessagePolicy",
                Acts("node/src/termination.rs", "TERMINATION_MESSAGE_POLICY"),
            ),
            (
                "imagePullPolicy",
                Acts("node/src/images.rs", "container.image_pull_policy"),
            ),
            (
                "securityContext",
                Acts("node/src/security.rs", "container.security_context"),
            ),
            ("stdin", Acts("node/src/container_config.rs", "container.stdin ")),
            (
                "stdinOnce",
                Acts("node/src/container_config.rs", "container.stdin_once"),
            ),
            ("tty", Acts("node/src/container_config.rs", "container.tty")),
        ]
    };
    let mut ephemeral = container();
    ephemeral.push((
        "targetContainerName",
        Acts("node/src/sync.rs", "target_container_name"),
    ));
    BTreeMap::from([
        (
            "PodSpec",
            vec![
                ("volumes", Acts("node/src/volumes/mod.rs", "spec.volumes")),
                ("initContainers", Acts("node/src/plan.rs", "spec.init_containers")),
                ("containers", Acts("node/src/plan.rs", "spec.containers")),
                (
                    "ephemeralContainers",
                    Acts("node/src/plan.rs", "spec.ephemeral_containers"),
                ),
                ("restartPolicy", Acts("node/src/plan.rs", "spec.restart_policy")),
                (
                    "terminationGracePeriodSeconds",
                    Acts("node/src/pods.rs", "termination_grace_period_seconds"),
                ),
                (
                    "activeDeadlineSeconds",
                    Acts("node/src/pod_worker.rs", "active_deadline_seconds"),
                ),
                ("dnsPolicy", Acts("node/src/dns.rs", "dns_policy")),
                ("nodeSelector", Acts("pods/src/affinity.rs", "node_selector")),
                (
                    "serviceAccountName",
                    Acts("node/src/volumes/tokens.rs", "service_account_name"),
                ),
                ("serviceAccount", Acts("api/src/core/pod.rs", "serviceAccount")),
                (
                    "automountServiceAccountToken",
                    Acts(
                        "admission/src/plugins/service_account.rs",
                        "automountServiceAccountToken",
                    ),
                ),
                ("nodeName", Acts("node/src/kubelet.rs", "spec.nodeName=")),
                ("hostNetwork", Acts("node/src/security.rs", "host_network")),
                ("hostPID", Acts("node/src/security.rs", "host_pid")),
                ("hostIPC", Acts("node/src/security.rs", "host_ipc")),
                (
                    "shareProcessNamespace",
                    Acts("node/src/security.rs", "share_process_namespace"),
                ),
                (
                    "securityContext",
                    Acts("node/src/security.rs", "security_context"),
                ),
                ("imagePullSecrets", Acts("node/src/sync.rs", "image_pull_secrets")),
                ("hostname", Acts("node/src/hosts.rs", "s.hostname.as_deref()")),
                ("subdomain", Acts("node/src/hosts.rs", "s.subdomain.as_deref()")),
                ("affinity", Acts("pods/src/affinity.rs", "affinity")),
                ("schedulerName", Acts("scheduler/src/run.rs", "scheduler_name")),
                ("tolerations", Acts("node/src/admission.rs", "spec.tolerations")),
                ("hostAliases", Acts("node/src/mounts.rs", "host_aliases")),
                (
                    "priorityClassName",
                    Acts("admission/src/plugins/priority.rs", "priorityClassName"),
                ),
                ("priority", Acts("node/src/preemption.rs", "spec.priority")),
                ("dnsConfig", Acts("node/src/dns.rs", "dns_config")),
                (
                    "readinessGates",
                    Acts("node/src/status/conditions.rs", "readiness_gates"),
                ),
                (
                    "runtimeClassName",
                    Acts("node/src/kubelet.rs", "runtime_class_name"),
                ),
                (
                    "enableServiceLinks",
                    Acts("node/src/start.rs", "enable_service_links"),
                ),
                (
                    "preemptionPolicy",
                    Acts("scheduler/src/pod.rs", "preemption_policy"),
                ),
                ("overhead", Acts("node/src/sandbox_config.rs", "spec.overhead")),
                (
                    "topologySpreadConstraints",
                    Acts("scheduler/src/pod.rs", "topology_spread_constraints"),
                ),
                (
                    "setHostnameAsFQDN",
                    Acts("node/src/hosts.rs", "set_hostname_as_fqdn"),
                ),
                ("os", Refused("node/src/admission.rs", "PodOSNotSupported")),
                ("hostUsers", Acts("node/src/user_namespaces.rs", "host_users")),
                (
                    "schedulingGates",
                    Acts("scheduler/src/pod.rs", "scheduling_gates"),
                ),
                (
                    "resourceClaims",
                    Acts("node/src/dra/mod.rs", "spec.resource_claims"),
                ),
                ("resources", Acts("node/src/resize/record.rs", "spec.resources")),
                ("hostnameOverride", Acts("node/src/hosts.rs", "hostname_override")),
                // Alpha: dropped unless PodGroups are served.
                (
                    "schedulingGroup",
                    Acts("scheduler/src/pod.rs", "scheduling_group"),
                ),
            ],
        ),
        ("Container", container()),
        ("EphemeralContainer", ephemeral),
        (
            "Lifecycle",
            vec![
                ("postStart", Acts("node/src/start.rs", "l.post_start")),
                ("preStop", Acts("node/src/kill.rs", "l.pre_stop")),
                (
                    "stopSignal",
                    Acts("node/src/container_config.rs", "l.stop_signal"),
                ),
            ],
        ),
        (
            "EnvVarSource",
            vec![
                ("fieldRef", Acts("node/src/env.rs", "from.field_ref")),
                (
                    "resourceFieldRef",
                    Acts("node/src/env.rs", "from.resource_field_ref"),
                ),
                (
                    "configMapKeyRef",
                    Acts("node/src/env.rs", "from.config_map_key_ref"),
                ),
                ("secretKeyRef", Acts("node/src/env.rs", "from.secret_key_ref")),
                ("fileKeyRef", Acts("node/src/env.rs", "from.file_key_ref")),
            ],
        ),
        (
            "VolumeMount",
            vec![
                ("name", Acts("node/src/mounts.rs", "mount.name")),
                ("readOnly", Acts("node/src/mounts.rs", "mount.read_only")),
                (
                    "recursiveReadOnly",
                    Acts("node/src/mounts.rs", "mount.recursive_read_only"),
                ),
                ("mountPath", Acts("node/src/mounts.rs", "mount.mount_path")),
                ("subPath", Acts("node/src/volumes/sub_path.rs", "mount.sub_path")),
                (
                    "mountPropagation",
                    Acts("node/src/mounts.rs", "mount.mount_propagation"),
                ),
                (
                    "subPathExpr",
                    Acts("node/src/volumes/sub_path.rs", "mount.sub_path_expr"),
                ),
            ],
        ),
        ("Volume", volume()),
        (
            "VolumeProjection",
            [
                ("secret", "part.secret"),
                ("downwardAPI", "part.downward_api"),
                ("configMap", "part.config_map"),
                ("serviceAccountToken", "part.service_account_token"),
                ("clusterTrustBundle", "part.cluster_trust_bundle"),
                ("podCertificate", "part.pod_certificate"),
            ]
            .map(|(field, words)| (field, Acts(PROJECTED, words)))
            .into(),
        ),
        (
            "PodCertificateProjection",
            [
                ("signerName", CERTIFICATES, "source.signer_name"),
                ("keyType", CERTIFICATES, "source.key_type"),
                (
                    "maxExpirationSeconds",
                    CERTIFICATES,
                    "source.max_expiration_seconds",
                ),
                ("userAnnotations", CERTIFICATES, "source.user_annotations"),
                (
                    "credentialBundlePath",
                    PROJECTED,
                    "certificate.credential_bundle_path",
                ),
                ("keyPath", PROJECTED, "certificate.key_path"),
                (
                    "certificateChainPath",
                    PROJECTED,
                    "certificate.certificate_chain_path",
                ),
            ]
            .map(|(field, file, words)| (field, Acts(file, words)))
            .into(),
        ),
        (
            "ISCSIVolumeSource",
            [
                ("targetPortal", NAMES, "source.target_portal"),
                ("iqn", NAMES, "source.iqn"),
                ("lun", NAMES, "source.lun"),
                ("iscsiInterface", NAMES, "source.iscsi_interface"),
                ("fsType", TYPES, "source.fs_type"),
                ("readOnly", TYPES, "source.read_only"),
                ("portals", NAMES, "source.portals"),
                ("chapAuthDiscovery", TYPES, "source.chap_auth_discovery"),
                ("chapAuthSession", TYPES, "source.chap_auth_session"),
                ("secretRef", TYPES, "source.secret_ref"),
                ("initiatorName", NAMES, "source.initiator_name"),
            ]
            .map(|(field, file, words)| (field, Acts(file, words)))
            .into(),
        ),
        (
            "FCVolumeSource",
            [
                ("targetWWNs", "source.target_wwns"),
                ("lun", "source.lun"),
                ("fsType", "source.fs_type"),
                ("readOnly", "source.read_only"),
                ("wwids", "source.wwids"),
            ]
            .map(|(field, words)| (field, Acts(TYPES, words)))
            .into(),
        ),
        (
            "ContainerRestartRule",
            vec![
                ("action", Acts("node/src/plan.rs", "rule.action")),
                ("exitCodes", Acts("node/src/restart_all.rs", "rule.exit_codes")),
            ],
        ),
    ])
}

/// The fields of a type of `core/v1`, in the schema's order.
fn fields(name: &str) -> Vec<&'static str> {
    let mut lines = SCHEMA.lines();
    let start = format!("T {name}");
    let package = "P core/v1 ";
    assert!(
        lines.any(|line| line.starts_with(package)),
        "the schema has no core/v1"
    );
    assert!(lines.any(|line| line == start), "the schema has no {name}");
    lines
        .take_while(|line| line.starts_with(' '))
        .filter_map(|line| line.split_whitespace().next())
        .collect()
}

#[test]
fn every_field_is_acted_on_or_refused() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut wrong = Vec::new();
    for (kind, fates) in fates() {
        let known = fields(kind);
        for field in &known {
            if !fates.iter().any(|(name, _)| name == field) {
                wrong.push(format!("{kind}.{field}: who acts on it, or refuses it?"));
            }
        }
        for (field, fate) in &fates {
            if !known.contains(field) {
                wrong.push(format!("{kind}.{field} is not in the schema"));
            }
            let (Acts(file, words) | Refused(file, words)) = fate;
            match std::fs::read_to_string(crates.join(file)) {
                Ok(text) if text.contains(words) => {}
                Ok(_) => wrong.push(format!("{kind}.{field}: {file} does not hold {words:?}")),
                Err(error) => wrong.push(format!("{kind}.{field}: {file}: {error}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
