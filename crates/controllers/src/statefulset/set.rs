//! A StatefulSet's spec with its defaults, and the identity of its pods: names, ordinals, labels and volumes.
//! No I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{RollingUpdateStatefulSetStrategy, StatefulSet, StatefulSetSpec};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume,
};

use crate::history::REVISION_LABEL;
use crate::ownership::controller_reference;
use crate::replicas;

const POD_NAME_LABEL: &str = "statefulset.kubernetes.io/pod-name";
const POD_INDEX_LABEL: &str = "apps.kubernetes.io/pod-index";

/// The set that a pod of this name belongs to, and the pod's ordinal if it is a number that an ordinal can be.
pub(super) fn parse_name(pod: &str) -> Option<(&str, Option<i32>)> {
    let (parent, digits) = pod.rsplit_once('-')?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| (parent, digits.parse().ok()))
}

pub(super) fn name_of(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub(super) fn ordinal_of(pod: &Pod) -> Option<i64> {
    parse_name(name_of(pod))?.1.map(i64::from)
}

pub(super) fn revision_of(pod: &Pod) -> &str {
    let labels = pod.metadata.labels.as_ref();
    labels
        .and_then(|labels| labels.get(REVISION_LABEL))
        .map_or("", String::as_str)
}

/// A StatefulSet that has a spec.
#[derive(Clone, Copy)]
pub(super) struct Set<'a> {
    pub(super) object: &'a StatefulSet,
    pub(super) spec: &'a StatefulSetSpec,
}

impl<'a> Set<'a> {
    pub(super) fn new(object: &'a StatefulSet) -> Option<Self> {
        let spec = object.spec.as_ref()?;
        Some(Set { object, spec })
    }

    pub(super) fn name(&self) -> &'a str {
        self.object.metadata.name.as_deref().unwrap_or_default()
    }

    pub(super) fn namespace(&self) -> &'a str {
        self.object.metadata.namespace.as_deref().unwrap_or_default()
    }

    pub(super) fn uid(&self) -> &'a str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    pub(super) fn replicas(&self) -> i32 {
        self.spec.replicas.unwrap_or(1)
    }

    pub(super) fn min_ready_seconds(&self) -> i32 {
        self.spec.min_ready_seconds.unwrap_or(0)
    }

    /// The ordinals of the pods that the set wants.
    pub(super) fn ordinals(&self) -> std::ops::Range<i64> {
        let start = self.spec.ordinals.as_ref().and_then(|ordinals| ordinals.start);
        let start = i64::from(start.unwrap_or(0));
        start..start + i64::from(self.replicas().max(0))
    }

    pub(super) fn wants(&self, pod: &Pod) -> bool {
        ordinal_of(pod).is_some_and(|ordinal| self.ordinals().contains(&ordinal))
    }

    pub(super) fn is_parallel(&self) -> bool {
        self.spec.pod_management_policy.as_deref() == Some("Parallel")
    }

    pub(super) fn is_rolling(&self) -> bool {
        let strategy = self.spec.update_strategy.as_ref();
        strategy
            .and_then(|strategy| strategy.type_.as_deref())
            .unwrap_or("RollingUpdate")
            == "RollingUpdate"
    }

    pub(super) fn rolling(&self) -> Option<&'a RollingUpdateStatefulSetStrategy> {
        self.spec.update_strategy.as_ref()?.rolling_update.as_ref()
    }

    /// The first ordinal that a rolling update reaches.
    pub(super) fn partition(&self) -> i64 {
        let partition = self.rolling().and_then(|rolling| rolling.partition);
        self.ordinals().start + i64::from(partition.unwrap_or(0).max(0))
    }

    pub(super) fn claim_templates(&self) -> &'a [PersistentVolumeClaim] {
        self.spec.volume_claim_templates.as_deref().unwrap_or_default()
    }

    /// True if claims go with the set.
    pub(super) fn deletes_claims_when_deleted(&self) -> bool {
        let policy = self.spec.persistent_volume_claim_retention_policy.as_ref();
        policy.and_then(|policy| policy.when_deleted.as_deref()) == Some("Delete")
    }

    /// True if claims go with the pods that a smaller set has no more.
    pub(super) fn deletes_claims_when_scaled(&self) -> bool {
        let policy = self.spec.persistent_volume_claim_retention_policy.as_ref();
        policy.and_then(|policy| policy.when_scaled.as_deref()) == Some("Delete")
    }

    pub(super) fn pod_name(&self, ordinal: i64) -> String {
        format!("{}-{ordinal}", self.name())
    }

    pub(super) fn claim_name(&self, template: &PersistentVolumeClaim, ordinal: i64) -> String {
        let template = template.metadata.name.as_deref().unwrap_or_default();
        format!("{template}-{}-{ordinal}", self.name())
    }

    /// The claims of the pod with this ordinal.
    pub(super) fn claims(&self, ordinal: i64) -> Vec<PersistentVolumeClaim> {
        let templates = self.claim_templates().iter();
        templates
            .map(|template| {
                let mut claim = template.clone();
                claim.metadata.name = Some(self.claim_name(template, ordinal));
                claim.metadata.namespace = Some(self.namespace().to_owned());
                if let Some(selected) = &self.spec.selector.match_labels {
                    let labels = claim.metadata.labels.get_or_insert_default();
                    labels.extend(selected.clone());
                }
                claim
            })
            .collect()
    }

    /// The pod of this ordinal, made from a template of this revision.
    pub(super) fn new_pod(&self, template: &PodTemplateSpec, revision: &str, ordinal: i64) -> Pod {
        let owner = controller_reference(self.object);
        let mut pod = replicas::new_pod(template, &owner, self.namespace());
        self.put_identity(&mut pod, ordinal);
        let labels = pod.metadata.labels.get_or_insert_default();
        labels.insert(REVISION_LABEL.into(), revision.to_owned());
        // A live pod cannot change these.
        let spec = pod.spec.get_or_insert_default();
        spec.hostname = Some(self.pod_name(ordinal));
        spec.subdomain = self.spec.service_name.clone().filter(|name| !name.is_empty());
        self.put_storage(&mut pod, ordinal);
        pod
    }

    pub(super) fn has_identity(&self, pod: &Pod) -> bool {
        let label = pod
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(POD_NAME_LABEL));
        ordinal_of(pod).is_some_and(|ordinal| self.pod_name(ordinal) == name_of(pod))
            && label.is_some_and(|label| label == name_of(pod))
    }

    pub(super) fn put_identity(&self, pod: &mut Pod, ordinal: i64) {
        let name = self.pod_name(ordinal);
        let labels: &mut BTreeMap<String, String> = pod.metadata.labels.get_or_insert_default();
        labels.insert(POD_NAME_LABEL.into(), name.clone());
        labels.insert(POD_INDEX_LABEL.into(), ordinal.to_string());
        pod.metadata.name = Some(name);
    }

    pub(super) fn has_storage(&self, pod: &Pod) -> bool {
        let Some(ordinal) = ordinal_of(pod) else {
            return false;
        };
        let volumes = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        self.claim_templates().iter().all(|template| {
            let wanted = self.claim_name(template, ordinal);
            let volume = volumes().find(|volume| Some(&volume.name) == template.metadata.name.as_ref());
            let claim = volume.and_then(|volume| volume.persistent_volume_claim.as_ref());
            claim.is_some_and(|claim| claim.claim_name == wanted)
        })
    }

    /// Puts the claims in place of the pod's own volumes of their names.
    pub(super) fn put_storage(&self, pod: &mut Pod, ordinal: i64) {
        let mut volumes: Vec<Volume> = self
            .claim_templates()
            .iter()
            .map(|template| Volume {
                name: template.metadata.name.clone().unwrap_or_default(),
                persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                    claim_name: self.claim_name(template, ordinal),
                    read_only: None,
                }),
                ..Default::default()
            })
            .collect();
        let spec = pod.spec.get_or_insert_default();
        let claimed = volumes.len();
        for volume in spec.volumes.take().unwrap_or_default() {
            if volumes[..claimed].iter().all(|claim| claim.name != volume.name) {
                volumes.push(volume);
            }
        }
        spec.volumes = (!volumes.is_empty()).then_some(volumes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn names() {
        let check = |pod: &str, expected: Option<(&str, Option<i32>)>| assert_eq!(parse_name(pod), expected);
        check("web-0", Some(("web", Some(0))));
        check("a-1-23", Some(("a-1", Some(23))));
        check("web-99999999999", Some(("web", None)));
        check("web", None);
        check("web-", None);
        check("web-0a", None);
        check("-7", Some(("", Some(7))));
    }

    fn set(spec: Value) -> StatefulSet {
        let mut whole = json!({"metadata": {"name": "web", "namespace": "d", "uid": "u"}, "spec": {
            "selector": {"matchLabels": {"app": "web"}}, "serviceName": "svc",
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [],
                "volumes": [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]}}}});
        let fields = whole["spec"].as_object_mut().unwrap();
        fields.extend(spec.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn a_pod_has_its_identity_and_its_claims() {
        let object = set(json!({"volumeClaimTemplates": [
            {"metadata": {"name": "data", "labels": {"x": "y"}}, "spec": {}}]}));
        let set = Set::new(&object).unwrap();
        let pod = json!(set.new_pod(&set.spec.template, "web-abc", 3));
        assert_eq!(pod["metadata"]["name"], "web-3");
        assert_eq!(
            pod["metadata"]["labels"],
            json!({"app": "web", "statefulset.kubernetes.io/pod-name": "web-3",
                "apps.kubernetes.io/pod-index": "3", "controller-revision-hash": "web-abc"})
        );
        assert_eq!(
            (&pod["spec"]["hostname"], &pod["spec"]["subdomain"]),
            (&json!("web-3"), &json!("svc"))
        );
        assert_eq!(
            pod["spec"]["volumes"],
            json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data-web-3"}},
                {"name": "tmp", "emptyDir": {}}])
        );
        let claim = json!(set.claims(3)[0]);
        assert_eq!(claim["metadata"]["name"], "data-web-3");
        assert_eq!(claim["metadata"]["labels"], json!({"x": "y", "app": "web"}));
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert!(set.has_identity(&pod) && set.has_storage(&pod));
        let mut other = pod.clone();
        other.metadata.labels = None;
        assert!(!set.has_identity(&other));
        other.spec.as_mut().unwrap().volumes = None;
        assert!(!set.has_storage(&other));
    }

    #[test]
    fn ordinals_start_where_the_spec_says() {
        let check = |spec: Value, ordinals: std::ops::Range<i64>, partition: i64| {
            let object = set(spec.clone());
            let set = Set::new(&object).unwrap();
            assert_eq!((set.ordinals(), set.partition()), (ordinals, partition), "{spec}");
        };
        check(json!({}), 0..1, 0);
        check(json!({"replicas": 0}), 0..0, 0);
        check(json!({"replicas": 3, "ordinals": {"start": 5}}), 5..8, 5);
        let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 2}});
        check(
            json!({"replicas": 3, "ordinals": {"start": 5}, "updateStrategy": rolling}),
            5..8,
            7,
        );
        check(
            json!({"replicas": i32::MAX, "ordinals": {"start": i32::MAX}}),
            2147483647..4294967294,
            2147483647,
        );
    }
}
