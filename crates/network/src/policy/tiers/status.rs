//! Tells what became of a policy of either tier: the condition `Accepted`, and an event where a rule is not in force as it
//! is written. The API leaves conditions to implementations. What a policy is told follows from the policy alone, so this
//! runs beside API servers and not on every node, and may run beside each of them.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skiff_client::{Client, ErrorExt, EventRecorder, InformerFactory, reference};
use tokio_util::sync::CancellationToken;

use super::TierObject;
use super::watch::{TierObjects, Watch};

/// Of all three kinds.
const CONDITION: &str = "Accepted";
const ACCEPTED: &str = "Accepted";
const UNSUPPORTED: &str = "UnsupportedRules";
const COMPONENT: &str = "skiff-policy";
const SETTLE: Duration = Duration::from_millis(20);
const MAX_RETRY: Duration = Duration::from_secs(10);
/// The longest message of a condition.
const MAX_MESSAGE: usize = 32768;

/// Runs until `stop`.
pub async fn run(client: Client, stop: CancellationToken) {
    let ended = stop.child_token();
    let _end = ended.clone().drop_guard();
    let factory = InformerFactory::new(client.clone(), ended.clone());
    let mut watch = Watch::new(client.clone(), &factory, &ended);
    let mut teller = Teller {
        events: EventRecorder::new(client.clone(), COMPONENT, ""),
        client,
        told: HashMap::new(),
    };
    let mut retry = Duration::ZERO;
    loop {
        if let Some(objects) = watch.objects() {
            teller.forget_others(&objects);
            let written = async {
                teller.tell(&objects.cluster).await?;
                teller.tell(&objects.admin).await?;
                teller.tell(&objects.baseline).await
            };
            match written.await {
                Ok(()) => retry = Duration::ZERO,
                Err(error) => {
                    retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                    tracing::warn!(%error, again_in = ?retry, "cannot write the status of a network policy");
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = watch.changed() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(retry), if !retry.is_zero() => {}
        }
    }
}

struct Teller {
    client: Client,
    events: EventRecorder,
    /// The problems that each object was last told, by its uid.
    told: HashMap<String, String>,
}

impl Teller {
    /// Forgets what objects that are gone were told.
    fn forget_others(&mut self, objects: &TierObjects) {
        let cluster = objects.cluster.iter().map(|object| object.meta());
        let admin = objects.admin.iter().map(|object| object.meta());
        let baseline = objects.baseline.iter().map(|object| object.meta());
        let metas = cluster.chain(admin).chain(baseline);
        let present: HashSet<&str> = metas.filter_map(|meta| meta.uid.as_deref()).collect();
        self.told.retain(|uid, _| present.contains(uid.as_str()));
    }

    async fn tell<K>(&mut self, objects: &[Arc<K>]) -> Result<(), kube::Error>
    where
        K: TierObject + Resource<Scope = ClusterResourceScope> + Clone + DeserializeOwned + Debug,
    {
        for object in objects {
            let problems = object.read().problems.join("; ");
            let meta = object.meta();
            let uid = meta.uid.clone().unwrap_or_default();
            if problems.is_empty() {
                self.told.remove(&uid);
            } else if self.told.get(&uid) != Some(&problems) {
                self.told.insert(uid, problems.clone());
                let object = reference(&**object);
                self.events
                    .event(&object, "Warning", UNSUPPORTED, problems.clone());
            }
            let old = object
                .status()
                .map_or(&Value::Null, |status| &status["conditions"]);
            let Some(conditions) = conditions(old, &problems, meta.generation, Timestamp::now()) else {
                continue;
            };
            // Not over what somebody else wrote meanwhile: conditions are a list.
            let patch = json!({"metadata": {"resourceVersion": meta.resource_version}, "status": {"conditions": conditions}});
            let api: Api<K> = Api::all(self.client.clone());
            let name = meta.name.as_deref().unwrap_or_default();
            let written = api
                .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
                .await;
            match written {
                // It is gone, its kind has no status, or its next version comes.
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                written => drop(written?),
            }
        }
        Ok(())
    }
}

/// The conditions as they shall be; `None` if they are.
fn conditions(old: &Value, problems: &str, generation: Option<i64>, now: Timestamp) -> Option<Value> {
    let (status, reason) = match problems.is_empty() {
        true => ("True", ACCEPTED),
        false => ("False", UNSUPPORTED),
    };
    let message: String = problems.chars().take(MAX_MESSAGE).collect();
    let old: &[Value] = old.as_array().map_or(&[], Vec::as_slice);
    let before = old.iter().find(|each| each["type"] == CONDITION);
    let since = before
        .filter(|before| before["status"] == status)
        .map(|before| before["lastTransitionTime"].clone());
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let ours = json!({
        "type": CONDITION, "status": status, "reason": reason, "message": message,
        "observedGeneration": generation.unwrap_or_default(),
        "lastTransitionTime": since.unwrap_or_else(|| now.into()),
    });
    if before == Some(&ours) {
        return None;
    }
    let others = old.iter().filter(|each| each["type"] != CONDITION);
    Some(others.cloned().chain([ours]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_time_and_others_stay() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let first = conditions(&Value::Null, "", Some(1), at(0)).unwrap();
        assert_eq!(first[0]["status"], "True");
        assert_eq!(conditions(&first, "", Some(1), at(60)), None);
        let mut with_other = first.as_array().unwrap().clone();
        with_other.insert(0, json!({"type": "Theirs", "status": "True"}));
        let second = conditions(&with_other.into(), "", Some(2), at(60)).unwrap();
        assert_eq!(second[0]["type"], "Theirs");
        assert_eq!(second[1]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        let third = conditions(&second, "egress[0]: why", Some(2), at(60)).unwrap();
        assert_eq!(
            (&third[1]["status"], &third[1]["lastTransitionTime"]),
            (&json!("False"), &json!("1970-01-01T00:01:00Z"))
        );
    }
}
