//! Which controllers run: upstream's `--controllers`.

use crate::CONTROLLERS;

/// Upstream's controllers and their older names, and skiff's own.
const KNOWN: &[(&str, &str)] = &[
    ("bootstrap-signer-controller", "bootstrapsigner"),
    ("certificatesigningrequest-approving-controller", "csrapproving"),
    ("certificatesigningrequest-cleaner-controller", "csrcleaner"),
    ("certificatesigningrequest-signing-controller", "csrsigning"),
    ("cloud-node-lifecycle-controller", "cloud-node-lifecycle"),
    ("clusterrole-aggregation-controller", "clusterrole-aggregation"),
    ("cronjob-controller", "cronjob"),
    ("daemonset-controller", "daemonset"),
    ("deployment-controller", "deployment"),
    ("device-taint-eviction-controller", ""),
    ("disruption-controller", "disruption"),
    ("endpoints-controller", "endpoint"),
    ("endpointslice-controller", "endpointslice"),
    ("endpointslice-mirroring-controller", "endpointslicemirroring"),
    ("ephemeral-volume-controller", "ephemeral-volume"),
    ("garbage-collector-controller", "garbagecollector"),
    ("horizontal-pod-autoscaler-controller", "horizontalpodautoscaling"),
    ("job-controller", "job"),
    (
        "kube-apiserver-serving-clustertrustbundle-publisher-controller",
        "",
    ),
    ("kubelet-serving-approving-controller", ""),
    (
        "legacy-serviceaccount-token-cleaner-controller",
        "legacy-service-account-token-cleaner",
    ),
    ("namespace-controller", "namespace"),
    ("node-departure-controller", ""),
    ("node-ipam-controller", "nodeipam"),
    ("node-lifecycle-controller", "nodelifecycle"),
    ("node-route-controller", "route"),
    ("persistentvolume-attach-detach-controller", "attachdetach"),
    ("persistentvolume-binder-controller", "persistentvolume-binder"),
    (
        "persistentvolume-expander-controller",
        "persistentvolume-expander",
    ),
    ("persistentvolume-protection-controller", "pv-protection"),
    ("persistentvolumeclaim-protection-controller", "pvc-protection"),
    ("pod-garbage-collector-controller", "podgc"),
    ("podcertificaterequest-cleaner-controller", ""),
    ("podgroup-protection-controller", ""),
    ("replicaset-controller", "replicaset"),
    ("replicationcontroller-controller", "replicationcontroller"),
    ("resourceclaim-controller", "resource-claim-controller"),
    ("resourcepoolstatusrequest-controller", ""),
    ("resourcequota-controller", "resourcequota"),
    (
        "root-ca-certificate-publisher-controller",
        "root-ca-cert-publisher",
    ),
    ("selinux-warning-controller", ""),
    ("service-cidr-controller", ""),
    ("service-lb-controller", "service"),
    ("serviceaccount-controller", "serviceaccount"),
    ("serviceaccount-token-controller", "serviceaccount-token"),
    ("statefulset-controller", "statefulset"),
    ("storage-version-migrator-controller", "svm"),
    (
        "storageversion-garbage-collector-controller",
        "storage-version-gc",
    ),
    ("taint-eviction-controller", ""),
    ("token-cleaner-controller", "tokencleaner"),
    ("ttl-after-finished-controller", "ttl-after-finished"),
    ("ttl-controller", "ttl"),
    ("validatingadmissionpolicy-status-controller", ""),
    ("volumeattributesclass-protection-controller", ""),
];

/// Run only if they are named.
const OFF_BY_DEFAULT: &[&str] = &[
    "bootstrap-signer-controller",
    "selinux-warning-controller",
    "token-cleaner-controller",
];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectionError {
    #[error("{0:?} is not in the list of known controllers")]
    Unknown(String),
    #[error(
        "{0:?} cannot be enabled: upstream runs it only with a feature gate that is off by default or with a cloud provider, and skiff does not have it"
    )]
    NotBuilt(String),
}

/// A list in upstream's syntax: `*` is all that are on by default, `foo` adds one, `-foo` leaves one out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerSelection {
    /// Canonical names, with their sign.
    entries: Vec<String>,
}

impl Default for ControllerSelection {
    fn default() -> Self {
        ControllerSelection {
            entries: vec!["*".to_owned()],
        }
    }
}

impl ControllerSelection {
    pub fn parse<S: AsRef<str>>(list: &[S]) -> Result<ControllerSelection, SelectionError> {
        let is_built = |name: &str| CONTROLLERS.iter().any(|spec| spec.name == name);
        let mut entries = Vec::new();
        for entry in list {
            let entry = entry.as_ref();
            if entry == "*" {
                entries.push(entry.to_owned());
                continue;
            }
            let (sign, given) = entry.strip_prefix('-').map_or(("", entry), |given| ("-", given));
            let known = KNOWN
                .iter()
                .find(|(name, alias)| *name == given || (!alias.is_empty() && *alias == given));
            let name = known.map_or(given, |(name, _)| name);
            if known.is_none() && !is_built(name) {
                return Err(SelectionError::Unknown(given.to_owned()));
            }
            if sign.is_empty() && !is_built(name) {
                return Err(SelectionError::NotBuilt(name.to_owned()));
            }
            entries.push(format!("{sign}{name}"));
        }
        Ok(ControllerSelection { entries })
    }

    /// Whether an entry asks for the controller by its name.
    pub fn names(&self, name: &str) -> bool {
        self.enables(name) && self.entries.iter().any(|entry| entry == name)
    }

    /// The first entry that names the controller decides.
    pub fn enables(&self, name: &str) -> bool {
        let mut star = false;
        for entry in &self.entries {
            match entry.as_str() {
                "*" => star = true,
                entry if entry == name => return true,
                entry if entry.strip_prefix('-') == Some(name) => return false,
                _ => {}
            }
        }
        star && !OFF_BY_DEFAULT.contains(&name)
    }
}

/// What the flag's help lists: all controllers there are, and those that are off by default.
pub fn controller_names() -> (Vec<&'static str>, Vec<&'static str>) {
    let mut all: Vec<&str> = CONTROLLERS.iter().map(|spec| spec.name).collect();
    all.sort_unstable();
    let off = all
        .iter()
        .copied()
        .filter(|name| OFF_BY_DEFAULT.contains(name))
        .collect();
    (all, off)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_decides() {
        let check = |list: &[&str], name: &str, expected: bool| {
            let selection = ControllerSelection::parse(list).unwrap();
            assert_eq!(selection.enables(name), expected, "{list:?} {name}");
        };
        check(&["*"], "deployment-controller", true);
        check(&["*"], "token-cleaner-controller", false);
        check(&["*", "tokencleaner"], "token-cleaner-controller", true);
        check(&["*", "-deployment"], "deployment-controller", false);
        check(
            &["*", "-deployment", "deployment-controller"],
            "deployment-controller",
            false,
        );
        check(&["*", "-deployment"], "replicaset-controller", true);
        check(&["deployment"], "deployment-controller", true);
        check(&["deployment"], "replicaset-controller", false);
        check(&[], "deployment-controller", false);
        check(&["*", "-cloud-node-lifecycle"], "node-lifecycle-controller", true);
        assert!(ControllerSelection::default().enables("job-controller"));
    }

    #[test]
    fn names_that_are_refused() {
        let check = |name: &str, expected: &str| {
            assert_eq!(
                ControllerSelection::parse(&[name]).unwrap_err().to_string(),
                expected
            );
        };
        check("foo", "\"foo\" is not in the list of known controllers");
        check("-foo", "\"foo\" is not in the list of known controllers");
        let error = ControllerSelection::parse(&["storage-version-gc"]).unwrap_err();
        assert_eq!(
            error,
            SelectionError::NotBuilt("storageversion-garbage-collector-controller".into())
        );
    }

    #[test]
    fn aliases_are_of_one_controller() {
        let mut names: Vec<&str> = KNOWN.iter().flat_map(|(name, alias)| [*name, *alias]).collect();
        names.retain(|name| !name.is_empty());
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        let (built, _) = controller_names();
        let known = |name: &str| KNOWN.iter().any(|(one, _)| *one == name);
        assert!(OFF_BY_DEFAULT.iter().all(|name| known(name)));
        assert!(built.contains(&"disruption-controller"));
    }
}
