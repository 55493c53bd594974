//! Writing the objects of a resource again: an apply of nothing, each. The API server notices that the stored form is not
//! the current one, and stores the object anew; an object in the current form stays as it is.

use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use skiff_client::{Client, ErrorExt};

use super::plan::is_later;
use crate::discovery::Served;
use crate::{Error, error_message};

const PAGE: u32 = 500;
/// How many objects are written at a time: the store commits together what waits for it.
const CONCURRENT_WRITES: usize = 8;
/// COMPAT: no namespace can have this name, so that lists of it are empty and cheap.
const NO_NAMESPACE: &str = "@fake:svm_ns!";

pub(super) enum Outcome {
    Written,
    /// The server refuses an object, and would again.
    Refused(String),
}

/// An object that may have to be written.
struct Found {
    namespace: Option<String>,
    name: String,
    uid: String,
    version: String,
}

/// The newest resourceVersion of a resource.
pub(super) async fn newest_version(client: &Client, served: &Served) -> Result<String, Error> {
    let api: Api<DynamicObject> = match served.namespaced {
        true => Api::namespaced_with(client.clone(), NO_NAMESPACE, &served.resource),
        false => Api::all_with(client.clone(), &served.resource),
    };
    let list = api.list_metadata(&ListParams::default().limit(1)).await?;
    Ok(list.metadata.resource_version.unwrap_or_default())
}

/// Writes all objects that are not later than `up_to`. An error is one that passes.
pub(super) async fn write_all(client: &Client, served: &Served, up_to: &str) -> Result<Outcome, Error> {
    let found = match list(client, served, up_to).await? {
        Ok(found) => found,
        Err(why) => return Ok(Outcome::Refused(why)),
    };
    let writes = stream::iter(found).map(|found| write(client, served, found));
    let refused = writes
        .buffer_unordered(CONCURRENT_WRITES)
        .try_filter_map(|refused| std::future::ready(Ok(refused)));
    // The first refusal ends the migration.
    match std::pin::pin!(refused).try_next().await? {
        Some(why) => Ok(Outcome::Refused(why)),
        None => Ok(Outcome::Written),
    }
}

/// Lists before the first write, because a list in pages does not outlive a compaction of the store.
async fn list(client: &Client, served: &Served, up_to: &str) -> Result<Result<Vec<Found>, String>, Error> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &served.resource);
    let mut params = ListParams::default().limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = api.list_metadata(&params).await?;
        for object in page.items {
            let version = object.resource_version().unwrap_or_default();
            match is_later(&version, up_to) {
                Some(true) => continue,
                Some(false) => {}
                None => return Ok(Err(format!("resource version is not well formed: {version}"))),
            }
            found.push(Found {
                namespace: object.namespace(),
                name: object.name_any(),
                uid: object.uid().unwrap_or_default(),
                version,
            });
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(Ok(found)),
        }
    }
}

/// The refusal, if there is one. An object that has changed meanwhile has the current form, and one that is gone needs
/// none: uid and resourceVersion make a conflict of both.
async fn write(client: &Client, served: &Served, found: Found) -> Result<Option<String>, Error> {
    let api: Api<DynamicObject> = match &found.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &served.resource),
        None => Api::all_with(client.clone(), &served.resource),
    };
    let nothing = json!({"apiVersion": served.resource.api_version, "kind": served.resource.kind,
        "metadata": {"uid": found.uid, "resourceVersion": found.version}});
    let params = PatchParams::apply(super::NAME);
    match api
        .patch_metadata(&found.name, &params, &Patch::Apply(nothing))
        .await
    {
        Ok(_) => Ok(None),
        Err(error) if error.is_conflict() || is_gone(&error, &found.name) => Ok(None),
        Err(error) if is_passing(&error) => Err(error.into()),
        Err(error) => Ok(Some(error_message(&error))),
    }
}

/// Whether it is the object, or its namespace, that is not there, and not the resource.
fn is_gone(error: &kube::Error, name: &str) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let about = status
        .details
        .as_ref()
        .map(|details| (details.name.as_str(), details.kind.as_str()));
    status.is_not_found() && about.is_some_and(|(of, kind)| of == name || kind == "namespaces")
}

/// Whether the same write may succeed later.
fn is_passing(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 429 | 500 | 503 | 504),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(status: serde_json::Value) -> kube::Error {
        kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
    }

    #[test]
    fn errors_are_told_apart() {
        let not_found = |kind: &str, name: &str| {
            error(json!({"status": "Failure", "code": 404, "reason": "NotFound",
                "details": {"kind": kind, "name": name}}))
        };
        assert!(is_gone(&not_found("secrets", "a"), "a"));
        assert!(is_gone(&not_found("namespaces", "n"), "a"));
        assert!(!is_gone(&not_found("", ""), "a"));
        for (code, expected) in [
            (429, true),
            (500, true),
            (503, true),
            (504, true),
            (403, false),
            (422, false),
        ] {
            assert_eq!(
                is_passing(&error(json!({"status": "Failure", "code": code}))),
                expected,
                "{code}"
            );
        }
    }
}
