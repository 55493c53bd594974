//! The expansion controller. No type of volume is expanded inside of the cluster any more: CSI drivers have their own
//! resizers, so what is left to do is to say who is waited for.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Api;
use skiff_client::{Action, Change, Informer, Key, Reconcile, reference};

use super::{claim_phase, claim_ref, requested_storage, storage, volume_name};
use crate::{Context, Error};

struct Expander {
    context: Context,
    claims: Informer<PersistentVolumeClaim>,
}

pub(crate) async fn run(context: Context) {
    let expander = Arc::new(Expander {
        claims: context.informers.informer(),
        context: context.clone(),
    });
    context
        .controller("volume_expand", expander)
        .workers(10)
        .watches(|expander| &expander.claims, |_, change| woken(change))
        .run()
        .await;
}

fn woken(change: &Change<PersistentVolumeClaim>) -> Option<Key> {
    let Change::Applied { old, new } = change else {
        return None;
    };
    let given =
        |claim: &PersistentVolumeClaim| storage(claim.status.as_ref().and_then(|s| s.capacity.as_ref()));
    let grew = old
        .as_ref()
        .is_none_or(|old| requested_storage(new) > requested_storage(old) || given(new) > given(old));
    (grew && claim_phase(new) == "Bound" && wants_more(new)).then(|| Key::of(&**new))
}

/// Whether the claim asks for more than it has.
fn wants_more(claim: &PersistentVolumeClaim) -> bool {
    let given = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
    requested_storage(claim) > storage(given)
}

impl Reconcile for Expander {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(claim) = self.claims.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        if !wants_more(&claim) {
            return Ok(Action::Done);
        }
        let volumes: Api<PersistentVolume> = Api::all(self.context.client.clone());
        let volume = volumes.get(volume_name(&claim)).await?;
        let holder = claim_ref(&volume).and_then(|holder| holder.uid.as_ref());
        if holder != claim.metadata.uid.as_ref() {
            return Err(Error::Other(format!(
                "persistent Volume is not bound to PVC being updated : {key}"
            )));
        }
        self.context.events.event(
            &reference(&*claim),
            "Normal",
            "ExternalExpanding",
            "waiting for an external controller to expand this PVC".to_owned(),
        );
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn claims_that_ask_for_more() {
        let claim = |phase: &str, wanted: &str, given: &str| -> Arc<PersistentVolumeClaim> {
            let claim = json!({"metadata": {"name": "c", "namespace": "ns"}, "spec": {"resources": {"requests": {"storage": wanted}}},
                "status": {"phase": phase, "capacity": {"storage": given}}});
            Arc::new(serde_json::from_value(claim).unwrap())
        };
        let check =
            |old: Option<Arc<PersistentVolumeClaim>>, new: Arc<PersistentVolumeClaim>, expected: bool| {
                assert_eq!(
                    woken(&Change::Applied {
                        old: old.map(Into::into),
                        new
                    })
                    .is_some(),
                    expected
                );
            };
        let settled = claim("Bound", "1Gi", "1Gi");
        check(None, settled.clone(), false);
        check(Some(settled.clone()), claim("Bound", "2Gi", "1Gi"), true);
        check(None, claim("Bound", "2Gi", "1Gi"), true);
        check(None, claim("Pending", "2Gi", "1Gi"), false);
        let waiting = claim("Bound", "2Gi", "1Gi");
        check(Some(waiting.clone()), waiting, false);
        check(
            Some(claim("Bound", "2Gi", "1Gi")),
            claim("Bound", "2Gi", "2Gi"),
            false,
        );
    }
}
