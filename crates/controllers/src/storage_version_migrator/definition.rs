//! What a migration says of itself in the CustomResourceDefinition of its resource: that it runs, and at its end that
//! objects of other versions than the stored one are no longer there.

use base64::Engine;
use base64::prelude::BASE64_STANDARD as STANDARD;
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionCondition,
};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skiff_client::{Client, ErrorExt};

use crate::Error;

/// COMPAT: upstream's name of who owns these fields.
const FIELD_MANAGER: &str = "migration-runner-controller";
const CONDITION: &str = "StorageMigrating";

/// Says that the migration `name` runs.
pub(super) async fn begin(
    client: &Client,
    group: &str,
    resource: &str,
    name: &str,
    now: Timestamp,
) -> Result<(), Error> {
    let Some(definition) = find(client, group, resource).await? else {
        return Ok(());
    };
    let message = format!("Migration {name} is running");
    let condition = condition(&definition, "True", "MigrationRunning", &message, now);
    let stored = stored_versions(&definition);
    apply(
        client,
        &definition,
        json!({"conditions": [condition], "storedVersions": stored}),
    )
    .await
}

/// Says that the migration has ended. If the definition is the one it began with, only the stored version is left.
pub(super) async fn finish(
    client: &Client,
    group: &str,
    resource: &str,
    succeeded: bool,
    now: Timestamp,
) -> Result<(), Error> {
    let Some(definition) = find(client, group, resource).await? else {
        return Ok(());
    };
    let found = condition_of(&definition);
    // Said already, by an attempt whose other write failed: the generation noted then is not the one it began with.
    if found.is_some_and(|condition| condition.status == "False") {
        return Ok(());
    }
    let unchanged = found.is_some_and(|found| found.observed_generation == definition.metadata.generation);
    let (reason, message) = match (succeeded, unchanged) {
        (true, true) => (
            "MigrationSucceeded",
            "The migration has succeeded and the stored versions have been updated",
        ),
        (true, false) => (
            "MigrationSucceeded",
            "The migration has succeeded but the stored versions have not been updated due to a generation mismatch",
        ),
        (false, _) => ("MigrationFailed", "The migration has failed"),
    };
    // A failed migration leaves objects of other versions.
    let stored = match succeeded && unchanged {
        true => {
            let versions = definition.spec.versions.iter().filter(|version| version.storage);
            versions.map(|version| version.name.as_str()).collect()
        }
        false => stored_versions(&definition),
    };
    let condition = condition(&definition, "False", reason, message, now);
    apply(
        client,
        &definition,
        json!({"conditions": [condition], "storedVersions": stored}),
    )
    .await
}

/// As they are. Every apply names them: who has applied a field once and then leaves it out removes it.
fn stored_versions(definition: &CustomResourceDefinition) -> Vec<&str> {
    let stored = definition
        .status
        .iter()
        .filter_map(|status| status.stored_versions.as_ref());
    stored.flatten().map(String::as_str).collect()
}

fn condition_of(definition: &CustomResourceDefinition) -> Option<&CustomResourceDefinitionCondition> {
    let conditions = definition.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == CONDITION)
}

/// What discovery shows of the resource once the server stores it in the version that its definition names now. `None`:
/// it has no definition.
pub(super) async fn storage_version_hash(
    client: &Client,
    group: &str,
    resource: &str,
) -> Result<Option<String>, Error> {
    let Some(definition) = find(client, group, resource).await? else {
        return Ok(None);
    };
    let spec = &definition.spec;
    let stored = spec.versions.iter().find(|version| version.storage);
    // COMPAT: upstream's hash, which clients compare too.
    Ok(stored.map(|stored| {
        let digest = Sha256::digest(format!("{group}/{}/{}", stored.name, spec.names.kind));
        STANDARD.encode(&digest[..8])
    }))
}

async fn find(
    client: &Client,
    group: &str,
    resource: &str,
) -> Result<Option<CustomResourceDefinition>, kube::Error> {
    if group.is_empty() {
        return Ok(None);
    }
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    match api.get(&format!("{resource}.{group}")).await {
        Ok(definition) => Ok(Some(definition)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn condition(
    definition: &CustomResourceDefinition,
    status: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Value {
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now);
    json!({"type": CONDITION, "status": status, "lastTransitionTime": now, "reason": reason, "message": message,
        "observedGeneration": definition.metadata.generation})
}

/// Fails, and is tried again, if the definition has changed since it was read.
async fn apply(client: &Client, definition: &CustomResourceDefinition, status: Value) -> Result<(), Error> {
    let name = definition.metadata.name.as_deref().unwrap_or_default();
    let body = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "resourceVersion": definition.metadata.resource_version}, "status": status});
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_status(name, &params, &Patch::Apply(body)).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error.into()),
    }
}
