//! GangScheduling: a pod of a PodGroup waits until the group exists and, if that is a gang, until `minCount` of its pods
//! exist. That a gang is placed as a whole is for `pod_group` to see to, where a profile has this plugin at Permit.

use crate::events::ClusterEvent;
use crate::framework::{Plugin, Rejection, Scope, Verdict};
use crate::listers::Listers;
use crate::pod::PodInfo;
use std::sync::Arc;

pub(crate) const NAME: &str = "GangScheduling";

pub(crate) struct GangScheduling {
    pub(crate) listers: Arc<Listers>,
}

impl Plugin for GangScheduling {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            // A pod that has a node counts for the gang, too.
            ClusterEvent::PodAdded(added) | ClusterEvent::PodPlaced(added) => {
                pod.pod_group.is_some()
                    && pod.pod_group == added.pod_group
                    && pod.key.namespace == added.key.namespace
            }
            ClusterEvent::PodGroupAdded(added) => {
                pod.pod_group.as_deref() == Some(&added.name) && pod.key.namespace == added.namespace
            }
            _ => false,
        }
    }

    fn pre_enqueue(&self, pod: &PodInfo) -> Verdict {
        let Some(key) = pod.group_key() else {
            return Ok(());
        };
        let Some(group) = self.listers.pod_groups.get(&key.namespace, &key.name) else {
            // COMPAT: upstream's words.
            return Err(Rejection::unresolvable(format!(
                "waiting for pods's pod group {:?} to appear in scheduling queue",
                key.name
            )));
        };
        let members = self.listers.group_members.count(&key);
        match &group.spec.scheduling_policy.gang {
            Some(gang) if members < usize::try_from(gang.min_count).unwrap_or(0) => {
                Err(Rejection::unresolvable(
                    "waiting for minCount pods from a gang to appear in scheduling queue",
                ))
            }
            _ => Ok(()),
        }
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::pod;
    use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
    use serde_json::{Value, json};
    use skiff_client::Key;

    fn member(name: &str, group: &str) -> Arc<PodInfo> {
        pod(name, json!({"schedulingGroup": {"podGroupName": group}}))
    }

    fn group(policy: Value) -> Arc<PodGroup> {
        let group =
            json!({"metadata": {"name": "g", "namespace": "default"}, "spec": {"schedulingPolicy": policy}});
        Arc::new(serde_json::from_value(group).unwrap())
    }

    #[test]
    fn a_gang_is_held_back_until_it_is_there() {
        let listers = Arc::new(Listers::default());
        let plugin = GangScheduling {
            listers: Arc::clone(&listers),
        };
        let waits = |pod: &PodInfo| plugin.pre_enqueue(pod).err().map(|rejection| rejection.message());
        assert_eq!(waits(&pod("p", json!({}))), None);
        let one = member("a", "g");
        assert_eq!(
            waits(&one).unwrap(),
            "waiting for pods's pod group \"g\" to appear in scheduling queue"
        );
        let key = Key::new("default", "g");
        listers.pod_groups.set(key.clone(), group(json!({"basic": {}})));
        assert_eq!(waits(&one), None);
        listers
            .pod_groups
            .set(key.clone(), group(json!({"gang": {"minCount": 2}})));
        assert!(listers.group_members.add(&key, &one.uid));
        assert!(!listers.group_members.add(&key, &one.uid), "it is counted once");
        assert_eq!(
            waits(&one).unwrap(),
            "waiting for minCount pods from a gang to appear in scheduling queue"
        );
        listers.group_members.add(&key, &"b".into());
        assert_eq!(waits(&one), None);
        listers.group_members.remove(&key, "b");
        assert!(waits(&one).is_some());
    }

    #[test]
    fn pods_of_the_group_and_the_group_itself_are_chances() {
        let plugin = GangScheduling {
            listers: Arc::default(),
        };
        let hint = |event: ClusterEvent| plugin.hint(&member("a", "g"), &event);
        assert!(hint(ClusterEvent::PodAdded(member("b", "g"))));
        assert!(!hint(ClusterEvent::PodAdded(member("b", "h"))));
        assert!(hint(ClusterEvent::PodPlaced(member("b", "g"))));
        assert!(hint(ClusterEvent::PodGroupAdded(Key::new("default", "g"))));
        assert!(!hint(ClusterEvent::PodGroupAdded(Key::new("other", "g"))));
        let alone = pod("p", json!({}));
        assert!(!plugin.hint(&alone, &ClusterEvent::PodAdded(pod("q", json!({})))));
    }
}
