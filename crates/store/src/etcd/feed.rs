//! The one watch on etcd: everything below the prefix comes through it, in order, into the hub. One
//! stream for all has a use beyond thrift: what was seen of one resource is known of all, so a quiet
//! resource needs no progress messages to know that it is up to date.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::client::OpenWatch;
use super::key_prefix::KeyPrefix;
use super::progress;
use super::proto::{WatchCreateRequest, WatchRequest, WatchResponse, Watching};
use super::{Shared, now, prefix_end};
use crate::Event;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Feeds the hub until the store is gone.
pub async fn run(shared: Weak<Shared>) {
    let mut pause = FIRST_PAUSE;
    while let Some(alive) = shared.upgrade() {
        let ended = follow(&alive, &mut pause).await;
        alive.progress.closed();
        tracing::debug!(place = %alive.client.place, reason = %ended, "the watch on etcd ended");
        drop(alive);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Opens the stream after what is known, and follows it; why that ended.
async fn follow(shared: &Arc<Shared>, pause: &mut Duration) -> String {
    if let Err(error) = shared.current().await
        && shared.history.broken().is_none()
    {
        return error.to_string();
    }
    if let Some(why) = shared.history.broken() {
        return begin_again(shared, &why).await;
    }
    // Held for as long as the stream is wanted: dropping it ends the request side.
    let (requests, receiver) = mpsc::channel(1);
    let create = WatchCreateRequest {
        key: Bytes::copy_from_slice(shared.place.root().as_bytes()),
        range_end: prefix_end(shared.place.root()),
        start_revision: shared.place.outer_revision(shared.hub.revision() + 1),
        progress_notify: true,
        fragment: true,
    };
    let watching = Some(Watching::Create(create));
    if requests.try_send(WatchRequest { watching }).is_err() {
        return "the request could not be queued".to_owned();
    }
    let mut watch = match shared.client.watch(receiver).await {
        Ok(opened) => opened,
        Err(status) => return status.to_string(),
    };
    shared
        .progress
        .opened(&requests, progress::is_sound(&watch.version));
    let ended = publish_all(shared, &mut watch, pause).await;
    shared.client.turn_from(&watch.member);
    ended
}

/// Publishes what comes until the stream breaks; why it broke.
async fn publish_all(shared: &Arc<Shared>, watch: &mut OpenWatch, pause: &mut Duration) -> String {
    // The parts of one answer that etcd cut up.
    let mut parts: Vec<Event> = Vec::new();
    loop {
        let message = tokio::select! {
            message = watch.messages.message() => message,
            () = watch.member.lost() => return "the member does not answer".to_owned(),
            () = shared.history.until_broken() => return "etcd was replaced".to_owned(),
        };
        let response = match message {
            Ok(Some(response)) => response,
            Ok(None) => return "the stream ended".to_owned(),
            Err(status) => return status.to_string(),
        };
        watch.member.heard();
        if response.compact_revision > 0 {
            return start_over(shared, response.compact_revision).await;
        }
        if response.canceled {
            return response.cancel_reason;
        }
        if response.created {
            *pause = FIRST_PAUSE;
            continue;
        }
        publish(shared, response, &mut parts);
    }
}

fn publish(shared: &Shared, response: WatchResponse, parts: &mut Vec<Event>) {
    let WatchResponse {
        header,
        fragment,
        events,
        ..
    } = response;
    let quiet = events.is_empty() && parts.is_empty();
    parts.extend(events.into_iter().filter_map(|one| event(&shared.place, one)));
    if fragment {
        return;
    }
    let revision = match parts.last() {
        // The header's revision may be ahead of what this watch has been sent.
        Some(last) => last.revision,
        // Only an answer without events is a promise that there are none up to its revision.
        None if quiet => header.map_or(0, |header| shared.place.inner_revision(header.revision)),
        None => return,
    };
    shared.history.shown(shared.place.outer_revision(revision));
    shared.hub.publish(std::mem::take(parts), revision, now());
    if let Some(excess) = shared.hub.excess(&shared.limits, now()) {
        shared.hub.forget(excess);
    }
}

fn event(place: &KeyPrefix, event: super::proto::Event) -> Option<Event> {
    let kv = event.kv?;
    let key = place.inner(std::str::from_utf8(&kv.key).ok()?);
    let deleted = event.kind == 1;
    Some(Event {
        key,
        revision: place.inner_revision(kv.mod_revision),
        create_revision: match deleted {
            true => 0,
            false => place.inner_revision(kv.create_revision),
        },
        value: (!deleted).then(|| detach(kv.value)),
    })
}

/// A value of its own: one cut from an answer would keep the whole answer in memory.
pub fn detach(value: Bytes) -> Bytes {
    Bytes::copy_from_slice(&value)
}

/// Under the same address there is another etcd, or a former state of it: everyone must list again.
async fn begin_again(shared: &Shared, why: &str) -> String {
    let place = &shared.client.place;
    // It may even be somebody else's by now.
    let header = match shared.place.claim(&shared.client).await {
        Ok(header) => header,
        Err(error) => {
            tracing::error!(%place, why, %error, "etcd was replaced, and what is there now cannot be used");
            return error.to_string();
        }
    };
    let revision = shared.place.inner_revision(header.revision);
    tracing::error!(%place, why, revision, "etcd was replaced or restored: starting over with what is there now");
    shared.compacted.store(0, Ordering::Relaxed);
    // First the hub: who is told by it must not find the old revision.
    shared.hub.restart(revision);
    shared.history.begin(header);
    format!("starting over at {revision}")
}

/// What happened since the last event seen is gone: everyone must list again.
async fn start_over(shared: &Shared, compacted: i64) -> String {
    match shared.current().await {
        Ok(revision) => {
            shared.hub.reset(revision);
            format!("history up to {compacted} was compacted; starting over at {revision}")
        }
        Err(error) => error.to_string(),
    }
}
