//! The end of a definition: its objects are deleted, and when the last is gone the finalizer goes too.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use skiff_meta::{Status, field};
use skiff_registry::{
    Context, DeleteOptions, ListOptions, Open, ReadAt, Resource, WatchFrom, WatchOptions, Write, WriteScope,
    is_not_found, object,
};

use super::CLEANUP_FINALIZER;
use super::controller::{read, write};
use super::names;
use crate::server::Inner;

/// How long nothing may happen before the objects are looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Removes the objects of a definition, then its finalizer. Tries for as long as the server runs.
pub async fn run(
    inner: Arc<Inner>,
    definitions: Arc<Resource>,
    name: String,
    uid: String,
    stored: Option<Arc<Resource>>,
) {
    loop {
        let outcome = tokio::select! {
            outcome = attempt(&inner, &definitions, &name, &uid, stored.as_deref()) => outcome,
            () = inner.shutdown.cancelled() => return,
        };
        match outcome {
            Ok(()) => return,
            Err(status) if is_not_found(&status) => return,
            Err(status) => {
                tracing::warn!(%status, name, "cannot remove a definition's objects yet");
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

async fn attempt(
    inner: &Arc<Inner>,
    definitions: &Resource,
    name: &str,
    uid: &str,
    stored: Option<&Resource>,
) -> Result<(), Status> {
    let now = || skiff_meta::time::format_seconds(inner.registry.now());
    let terminating = |reason: &'static str, message: String| {
        let (now, status) = (
            now(),
            if reason == "InstanceDeletionCompleted" {
                "False"
            } else {
                "True"
            },
        );
        move |mut definition: Value| {
            names::set(&mut definition, "Terminating", status, reason, &message, &now);
            definition
        }
    };
    if let Some(stored) = stored {
        let mut mark = terminating(
            "InstanceDeletionInProgress",
            "CustomResource deletion is in progress".to_owned(),
        );
        write(inner, definitions, name, uid, &mut mark).await?;
        if let Err(status) = empty(inner, stored).await {
            let message = format!("could not list instances: {}", status.message);
            let mut mark = terminating("InstanceDeletionFailed", message);
            write(inner, definitions, name, uid, &mut mark).await?;
            return Err(status);
        }
    }
    if read(inner, definitions, name).await?.is_none() {
        return Ok(());
    }
    let done = terminating("InstanceDeletionCompleted", "removed all instances".to_owned());
    let finish = |definition: Value| {
        let mut definition = done(definition);
        let mut finalizers = object::finalizers(&definition);
        finalizers.retain(|finalizer| finalizer != CLEANUP_FINALIZER);
        object::set(&mut definition, "finalizers", finalizers);
        definition
    };
    // By the registry, as upstream's finalizer works on the storage: a definition that no longer passes the rules of
    // today must be able to go.
    let part = WriteScope::Other {
        prepare: |_: &mut Value, _: &Value| {},
        validate: |_: &Value, _: &Value| Vec::<field::Error>::new(),
    };
    let mut transform = |current: Option<&Value>| {
        let current = current
            .filter(|current| object::uid(current) == uid)
            .ok_or_else(|| Status::not_found(&definitions.group_resource, name))?;
        Ok(finish(current.clone()))
    };
    let context = Context::default();
    let registry = &inner.registry;
    registry
        .update(
            &Write {
                context: &context,
                resource: definitions,
                namespace: "",
                gate: &Open,
            },
            name,
            part,
            false,
            &mut transform,
        )
        .await
        .map(drop)
}

/// Deletes all objects of a resource and waits until none is left.
async fn empty(inner: &Inner, resource: &Resource) -> Result<(), Status> {
    let context = Context::default();
    loop {
        let listed = inner
            .registry
            .list(
                resource,
                ListOptions {
                    at: ReadAt::Latest,
                    ..ListOptions::default()
                },
            )
            .await?;
        if listed.items.is_empty() {
            return Ok(());
        }
        for entry in listed.items.iter().filter(|entry| !entry.head.deleting) {
            let (namespace, name) = (&*entry.head.namespace, &*entry.head.name);
            let options = DeleteOptions::default();
            let deleted = inner
                .registry
                .delete(&context, resource, namespace, name, &options, &Open)
                .await;
            if let Err(status) = deleted
                && !is_not_found(&status)
            {
                return Err(status);
            }
        }
        // What is held by finalizers goes when they do.
        let options = WatchOptions {
            from: WatchFrom::After(listed.revision),
            ..WatchOptions::default()
        };
        if let Ok(mut watcher) = inner.registry.watch(resource, options).await {
            let _ = tokio::time::timeout(LOOK_AGAIN, watcher.next()).await;
        }
    }
}
