//! When the change happened that a write of endpoints follows: clients measure by it how long traffic takes to follow.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use parking_lot::Mutex;
use skiff_client::Key;

use super::pod::EndpointPod;

/// What was seen of Services and their pods at the last look.
#[derive(Default)]
pub(crate) struct TriggerTimes {
    services: Mutex<HashMap<Key, Seen>>,
}

#[derive(Default)]
struct Seen {
    service: Option<Timestamp>,
    pods: HashMap<String, Timestamp>,
}

impl TriggerTimes {
    /// The oldest change since the last look; of a Service that is new, its creation.
    pub(crate) fn observe(
        &self,
        key: &Key,
        service: &Service,
        pods: &[Arc<EndpointPod>],
    ) -> Option<Timestamp> {
        let created = service.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let mut now = Seen {
            service: created,
            pods: HashMap::new(),
        };
        for pod in pods {
            if let Some(changed) = pod.ready_changed {
                now.pods.insert(pod.name.clone(), changed);
            }
        }
        let mut services = self.services.lock();
        let Some(before) = services.get(key) else {
            services.insert(key.clone(), now);
            return created;
        };
        let changed_pods = now
            .pods
            .iter()
            .filter(|(name, time)| before.pods.get(*name).is_none_or(|before| *time > before));
        let changed_pods = changed_pods.map(|(_, time)| *time);
        let changed_service = now
            .service
            .filter(|time| before.service.is_none_or(|before| *time > before));
        let oldest = changed_pods.chain(changed_service).min();
        services.insert(key.clone(), now);
        oldest
    }

    pub(crate) fn forget(&self, key: &Key) {
        self.services.lock().remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_oldest_change_since_the_last_look() {
        let times = TriggerTimes::default();
        let key = Key::new("d", "s");
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let service: Service =
            serde_json::from_value(json!({"metadata": {"creationTimestamp": at(1)}})).unwrap();
        let check = |pods: &[(&str, i64)], expected: Option<i64>| {
            let pods: Vec<Arc<EndpointPod>> = pods
                .iter()
                .map(|(name, second)| {
                    let pod = json!({"metadata": {"name": name}, "status": {"conditions": [
                        {"type": "Ready", "status": "True", "lastTransitionTime": at(*second)}]}});
                    Arc::new(EndpointPod::of(&serde_json::from_value(pod).unwrap()))
                })
                .collect();
            assert_eq!(times.observe(&key, &service, &pods), expected.map(at), "{pods:?}");
        };
        check(&[("a", 5)], Some(1));
        check(&[("a", 5)], None);
        check(&[("a", 9), ("b", 7)], Some(7));
        check(&[("b", 7)], None);
        times.forget(&key);
        check(&[("b", 7)], Some(1));
    }
}
