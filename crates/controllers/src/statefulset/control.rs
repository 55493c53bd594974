//! The writes of a StatefulSet's plan: its pods and their claims, with an event for each.

use std::sync::Arc;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use skiff_client::{ErrorExt, reference, stage};

use super::StatefulSets;
use super::claims;
use super::plan::{Plan, Step};
use super::set::{Set, name_of, ordinal_of};
use crate::{Error, error_message, replicas};

const CONFLICT_RETRIES: usize = 4;

/// The words of events: upstream quotes the API's message.
fn text(error: &Error) -> String {
    match error {
        Error::Api(error) => error_message(error),
        Error::Other(message) => message.clone(),
    }
}

/// One error out of several, as upstream joins them.
fn joined(mut errors: Vec<Error>) -> Result<(), Error> {
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => {
            let texts: Vec<String> = errors.iter().map(text).collect();
            Err(Error::Other(format!("[{}]", texts.join(", "))))
        }
    }
}

impl StatefulSets {
    /// Ends at the first failure; in parallel, at the first batch with one.
    pub(super) async fn carry_out(&self, set: &Set<'_>, plan: &mut Plan) -> Result<(), Error> {
        for items in std::mem::take(&mut plan.stages) {
            if !plan.parallel {
                for item in items {
                    self.item(set, item).await?;
                }
                continue;
            }
            let sizes = replicas::batches(items.len());
            let mut items = items.into_iter();
            for size in sizes {
                let batch = items.by_ref().take(size);
                let outcomes = join_all(batch.map(|item| self.item(set, item))).await;
                joined(outcomes.into_iter().filter_map(Result::err).collect())?;
            }
        }
        for pod in std::mem::take(&mut plan.outdated) {
            self.delete(set, &pod).await?;
            let current = &mut plan.status.current_replicas;
            *current = current.map(|count| count - 1).filter(|count| *count > 0);
        }
        Ok(())
    }

    /// The steps of one pod.
    async fn item(&self, set: &Set<'_>, steps: Vec<Step>) -> Result<(), Error> {
        for step in steps {
            match step {
                Step::Create(pod) => stage("create pod", self.create(set, &pod)).await?,
                Step::Delete(pod) => stage("delete pod", self.delete(set, &pod)).await?,
                Step::Claims(pod) => {
                    self.create_claims(set, &pod).await?;
                    if let Err(error) = self.own_claims(set, &pod).await {
                        self.record(set, "Update", &pod, Err(&error));
                        return Err(error);
                    }
                }
                Step::Repair(pod) => self.repair(set, &pod).await?,
                Step::Owners(pod) => self.own_claims(set, &pod).await?,
            }
        }
        Ok(())
    }

    fn event(&self, set: &Set<'_>, type_: &str, reason: &str, message: String) {
        let about = reference(set.object);
        self.context.events.event(&about, type_, reason, message);
    }

    fn record(&self, set: &Set<'_>, verb: &str, pod: &Pod, outcome: Result<(), &Error>) {
        let (pod, name) = (name_of(pod), set.name());
        match outcome {
            Ok(()) => self.event(
                set,
                "Normal",
                &format!("Successful{verb}"),
                format!("{verb} Pod {pod} in StatefulSet {name} successful"),
            ),
            Err(error) => self.event(
                set,
                "Warning",
                &format!("Failed{verb}"),
                format!(
                    "{verb} Pod {pod} in StatefulSet {name} failed error: {}",
                    text(error)
                ),
            ),
        }
    }

    fn pods_api(&self, set: &Set<'_>) -> Api<Pod> {
        Api::namespaced(self.context.client.clone(), set.namespace())
    }

    fn claims_api(&self, set: &Set<'_>) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.context.client.clone(), set.namespace())
    }

    async fn create(&self, set: &Set<'_>, pod: &Pod) -> Result<(), Error> {
        if let Err(error) = self.create_claims(set, pod).await {
            self.record(set, "Create", pod, Err(&error));
            return Err(error);
        }
        let created = self.pods_api(set).create(&PostParams::default(), pod).await;
        let created = match created {
            // A pod that the set does not control has the name: not worth an event at each retry.
            Err(error) if error.is_already_exists() => return Err(error.into()),
            created => created.map(|_| ()).map_err(Error::from),
        };
        if let Err(error) = self.own_claims(set, pod).await {
            self.record(set, "Update", pod, Err(&error));
            return Err(error);
        }
        self.record(set, "Create", pod, created.as_ref().map(|_| ()));
        created
    }

    async fn delete(&self, set: &Set<'_>, pod: &Pod) -> Result<(), Error> {
        let deleted = self
            .pods_api(set)
            .delete(name_of(pod), &DeleteParams::default())
            .await;
        match deleted {
            Err(error) if !error.is_not_found() => {
                let error = Error::from(error);
                self.record(set, "Delete", pod, Err(&error));
                Err(error)
            }
            _ => {
                self.record(set, "Delete", pod, Ok(()));
                Ok(())
            }
        }
    }

    /// Creates those claims of the pod that are missing.
    async fn create_claims(&self, set: &Set<'_>, pod: &Pod) -> Result<(), Error> {
        let Some(ordinal) = ordinal_of(pod) else {
            return Ok(());
        };
        let api = self.claims_api(set);
        let mut errors = Vec::new();
        for claim in set.claims(ordinal) {
            let name = claim.metadata.name.clone().unwrap_or_default();
            if let Some(present) = self.claims.get(set.namespace(), &name) {
                if present.metadata.deletion_timestamp.is_some() {
                    errors.push(Error::Other(format!("pvc {name} is being deleted")));
                }
                continue;
            }
            let (pod, set_name) = (name_of(pod), set.name());
            match api.create(&PostParams::default(), &claim).await {
                Ok(_) => self.event(
                    set,
                    "Normal",
                    "SuccessfulCreate",
                    format!("Create Claim {name} Pod {pod} in StatefulSet {set_name} success"),
                ),
                Err(error) => {
                    let message = error_message(&error);
                    if !error.is_already_exists() {
                        self.event(
                            set,
                            "Warning",
                            "FailedCreate",
                            format!(
                                "Create Claim {name} for Pod {pod} in StatefulSet {set_name} failed error: {message}"
                            ),
                        );
                    }
                    errors.push(Error::Other(format!("failed to create PVC {name}: {message}")));
                }
            }
        }
        joined(errors)
    }

    /// Gives the pod's claims the owners that the retention policy asks for. Claims that the copy does not show
    /// yet get theirs next time.
    async fn own_claims(&self, set: &Set<'_>, pod: &Pod) -> Result<(), Error> {
        let Some(ordinal) = ordinal_of(pod) else {
            return Ok(());
        };
        let api = self.claims_api(set);
        for template in set.claim_templates() {
            let name = set.claim_name(template, ordinal);
            let Some(claim) = self.claims.get(set.namespace(), &name) else {
                continue;
            };
            if claims::has_other_controller(&claim, set, pod) {
                // COMPAT: the misspelling is upstream's.
                let message = format!(
                    "PersistentVolumeClaim {name} has a conflicting OwnerReference that acts as a manging controller, the retention policy is ignored for this claim"
                );
                self.event(set, "Warning", "ConflictingController", message);
            }
            let Some(owners) = claims::new_owners(&claim, set, pod) else {
                continue;
            };
            let mut updated = PersistentVolumeClaim::clone(&claim);
            updated.metadata.owner_references = Some(owners);
            let failed = |why: String| {
                Error::Other(format!(
                    "could not update claim {name} for delete policy ownerRefs: {why}"
                ))
            };
            let replaced = api.replace(&name, &PostParams::default(), &updated).await;
            let replaced = replaced.map_err(|error| failed(error_message(&error)))?;
            if claims::new_owners(&replaced, set, pod).is_some() {
                // Only with back-off is it tried again.
                return Err(failed("admission changes them back".into()));
            }
        }
        Ok(())
    }

    /// Puts back what makes the pod the set's member: its labels, its volumes, the owners of its claims.
    async fn repair(&self, set: &Set<'_>, pod: &Arc<Pod>) -> Result<(), Error> {
        let outcome = self.try_repair(set, pod).await;
        self.record(set, "Update", pod, outcome.as_ref().map(|_| ()));
        outcome
    }

    async fn try_repair(&self, set: &Set<'_>, pod: &Arc<Pod>) -> Result<(), Error> {
        let Some(ordinal) = ordinal_of(pod) else {
            return Ok(());
        };
        let api = self.pods_api(set);
        let mut pod = Pod::clone(pod);
        let mut retries = CONFLICT_RETRIES;
        loop {
            let mut changed = false;
            if !set.has_identity(&pod) {
                set.put_identity(&mut pod, ordinal);
                changed = true;
            }
            if !set.has_storage(&pod) {
                set.put_storage(&mut pod, ordinal);
                self.create_claims(set, &pod).await?;
                changed = true;
            }
            self.own_claims(set, &pod).await?;
            if !changed {
                return Ok(());
            }
            let name = set.pod_name(ordinal);
            match api.replace(&name, &PostParams::default(), &pod).await {
                Err(error) if error.is_conflict() && retries > 0 => {
                    retries -= 1;
                    pod = api.get(&name).await?;
                }
                Err(error) => return Err(error.into()),
                // Only with back-off is it tried again.
                Ok(replaced) if !set.has_identity(&replaced) => {
                    return Err(Error::Other(
                        "admission removes the label of the pod's name".into(),
                    ));
                }
                Ok(_) => return Ok(()),
            }
        }
    }
}
