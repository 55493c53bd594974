//! The list and watch behind an informer, for as long as the informer lives.
//!
//! A watch that breaks is resumed from the last version seen; only a version that is too old (410), or a
//! watch that the server refuses, makes a new list. An object that cannot be decoded is logged and left out: one bad object must not blind a
//! component to all others.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures::StreamExt;
use http::Request;
use http_body_util::BodyExt;
use kube::client::Body;
use kube::core::Status;
use kube::core::params::{ListParams, WatchParams};
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::Shared;
use crate::Key;
use crate::writes::Target;

const PAGE: u32 = 500;
const METADATA_LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
const METADATA_WATCH: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
/// The server refuses objects far smaller than this; a longer line is not a watch event.
const MAX_EVENT: usize = 64 << 20;
/// Short at first, so that a component that starts before its role exists catches up at once.
const FIRST_BACKOFF: Duration = Duration::from_millis(20);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// A watch that lived this long did its job.
const GOOD_WATCH: Duration = Duration::from_secs(10);
/// How much longer than asked for a watch may last. The server ends it in time; a server that is gone without
/// a word does not.
const OVERDUE: Duration = Duration::from_secs(30);

/// What to list and watch.
pub(super) struct Source {
    url: String,
    label_selector: Option<String>,
    field_selector: Option<String>,
    metadata_only: bool,
    partial: bool,
}

impl Source {
    pub(super) fn new(url: String, label_selector: Option<&str>, field_selector: Option<&str>) -> Self {
        Source {
            url,
            label_selector: label_selector.map(str::to_owned),
            field_selector: field_selector.map(str::to_owned),
            metadata_only: false,
            partial: false,
        }
    }

    /// What is decoded is all that is kept.
    pub(super) fn partial(mut self) -> Self {
        self.partial = true;
        self
    }

    pub(super) fn is_partial(&self) -> bool {
        self.partial
    }

    pub(super) fn metadata_only(mut self) -> Self {
        self.metadata_only = true;
        self
    }

    pub(super) fn is_metadata_only(&self) -> bool {
        self.metadata_only
    }

    /// Resource and group.
    pub(super) fn resource(&self) -> String {
        Target::parse(&self.url).map_or_else(String::new, |target| target.resource)
    }

    /// Resource and group of a source without selectors.
    pub(super) fn complete_resource(&self) -> Option<String> {
        let selected = self.label_selector.is_some() || self.field_selector.is_some();
        let target = Target::parse(&self.url).filter(|_| !selected)?;
        // One namespace of a kind is a selection too.
        target.is_cluster_wide().then_some(target.resource)
    }

    pub(super) fn identity(&self) -> String {
        format!(
            "{} {:?} {:?} {} {}",
            self.url, self.label_selector, self.field_selector, self.metadata_only, self.partial
        )
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Api(Box<Status>),
    #[error("{0}")]
    Client(#[from] kube::Error),
    #[error("building the request: {0}")]
    Request(#[from] kube::core::request::Error),
    #[error("the answer is not what was asked for: {0}")]
    Decode(#[from] serde_json::Error),
    #[error("a watch event of more than {MAX_EVENT} bytes")]
    TooLong,
    #[error("the watch did not end in its time")]
    Overdue,
}

impl Error {
    fn is_expired(&self) -> bool {
        matches!(self, Error::Api(status) if status.code == 410)
    }

    /// True if asking the same again would get the same answer.
    fn is_refusal(&self) -> bool {
        matches!(self, Error::Api(status) if (400..500).contains(&status.code) && status.code != 429)
    }
}

#[derive(Deserialize)]
struct RawList<'a> {
    #[serde(default)]
    metadata: RawListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct RawListMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    continue_token: String,
}

#[derive(Deserialize)]
struct RawEvent<'a> {
    #[serde(rename = "type")]
    event_type: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct VersionOnly {
    metadata: VersionMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VersionMeta {
    resource_version: String,
}

/// Splits a byte stream into lines without looking twice at a byte.
#[derive(Default)]
struct Lines {
    /// A chunk that was one line. A watch in this process sends each event so, and then the line is the memory that
    /// the server's cache holds anyway; lines put together here are memory of their own.
    whole: Option<Bytes>,
    buffer: BytesMut,
    searched: usize,
}

impl Lines {
    fn push(&mut self, chunk: Bytes) {
        if let Some(before) = self.whole.take() {
            self.buffer.extend_from_slice(&before);
            self.buffer.extend_from_slice(b"\n");
        }
        if self.buffer.is_empty()
            && chunk.iter().position(|byte| *byte == b'\n') == chunk.len().checked_sub(1)
        {
            self.whole = (!chunk.is_empty()).then(|| chunk.slice(..chunk.len() - 1));
        } else {
            self.buffer.extend_from_slice(&chunk);
        }
    }

    fn next(&mut self) -> Option<Bytes> {
        if let Some(line) = self.whole.take() {
            return Some(line);
        }
        match self.buffer[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n')
        {
            Some(offset) => {
                let end = self.searched + offset;
                let line = Bytes::copy_from_slice(&self.buffer[..end]);
                self.buffer.advance(end + 1);
                self.searched = 0;
                Some(line)
            }
            None => {
                self.searched = self.buffer.len();
                None
            }
        }
    }
}

pub(super) struct Reflector<K> {
    client: Client,
    source: Source,
    shared: Arc<Shared<K>>,
}

impl<K: Resource + DeserializeOwned + Send + Sync + 'static> Reflector<K> {
    pub(super) fn new(client: Client, source: Source, shared: Arc<Shared<K>>) -> Self {
        Reflector {
            client,
            source,
            shared,
        }
    }

    /// Runs until dropped.
    pub(super) async fn run(&self) {
        let mut backoff = FIRST_BACKOFF;
        // Any version will do for the first list; after an expired one only the newest will.
        let mut list_at = "0";
        loop {
            match self.list(list_at).await {
                Ok(version) => {
                    let started = Instant::now();
                    self.watch_from(version).await;
                    list_at = "";
                    // A list whose version is too old at once must not be asked for again and again.
                    if started.elapsed() > GOOD_WATCH {
                        backoff = FIRST_BACKOFF;
                    } else {
                        pause(&mut backoff).await;
                    }
                }
                Err(error) => {
                    if error.is_expired() {
                        list_at = "";
                    }
                    tracing::debug!(url = self.source.url, %error, "list failed");
                    pause(&mut backoff).await;
                }
            }
        }
    }

    /// Lists everything, page by page, puts it in the store and answers the list's version.
    async fn list(&self, at: &str) -> Result<String, Error> {
        let (mut objects, mut undecoded) = (Vec::new(), Vec::new());
        let mut continue_token: Option<String> = None;
        loop {
            let params = ListParams {
                label_selector: self.source.label_selector.clone(),
                field_selector: self.source.field_selector.clone(),
                // Version 0 means the server's cache, which answers whole.
                limit: (at != "0" || continue_token.is_some()).then_some(PAGE),
                resource_version: (continue_token.is_none() && !at.is_empty()).then(|| at.to_owned()),
                continue_token: continue_token.take(),
                ..Default::default()
            };
            let request = kube::core::Request::new(self.source.url.clone());
            let request = request.list(&params)?;
            let body = self.send(request, METADATA_LIST).await?;
            let bytes = body.collect().await?.to_bytes();
            let list: RawList<'_> = serde_json::from_slice(&bytes)?;
            for item in list.items.unwrap_or_default() {
                let listed = self.shared.listed(objects.len(), item.get().as_bytes());
                match self.readable(item, listed) {
                    Some(object) => objects.push(object),
                    None => undecoded.extend(
                        serde_json::from_str::<kube::core::PartialObjectMeta>(item.get())
                            .ok()
                            .map(|object| Key::of(&object)),
                    ),
                }
            }
            if list.metadata.continue_token.is_empty() {
                self.shared.replace(objects, &undecoded);
                self.shared.reached(&list.metadata.resource_version);
                return Ok(list.metadata.resource_version);
            }
            continue_token = Some(list.metadata.continue_token);
        }
    }

    /// Watches from `version`, again and again, until the server no longer knows that version.
    async fn watch_from(&self, mut version: String) {
        let mut backoff = FIRST_BACKOFF;
        loop {
            let started = Instant::now();
            let before = version.clone();
            match self.watch_once(&mut version).await {
                Ok(()) => {}
                Err(error) if error.is_refusal() => {
                    tracing::debug!(url = self.source.url, version, %error, "watch refused, listing again");
                    return;
                }
                Err(error) => tracing::debug!(url = self.source.url, version, %error, "watch broke"),
            }
            // A watch that did its job is renewed at once; one that broke early waits.
            if version != before || started.elapsed() > GOOD_WATCH {
                backoff = FIRST_BACKOFF;
            } else {
                pause(&mut backoff).await;
            }
        }
    }

    async fn watch_once(&self, version: &mut String) -> Result<(), Error> {
        // Not all watches of a process should end at the same moment.
        let seconds = rand::random_range(240..295);
        let limit = Duration::from_secs(seconds.into()) + OVERDUE;
        let watched = tokio::time::timeout(limit, self.watch_for(seconds, version)).await;
        watched.unwrap_or(Err(Error::Overdue))
    }

    async fn watch_for(&self, seconds: u32, version: &mut String) -> Result<(), Error> {
        let params = WatchParams {
            label_selector: self.source.label_selector.clone(),
            field_selector: self.source.field_selector.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: false,
        };
        let request = kube::core::Request::new(self.source.url.clone()).watch(&params, version)?;
        let mut body = self.send(request, METADATA_WATCH).await?.into_data_stream();
        let mut lines = Lines::default();
        while let Some(chunk) = body.next().await {
            lines.push(chunk?);
            while let Some(line) = lines.next() {
                if !line.is_empty() {
                    self.event(&line, version)?;
                }
            }
            if lines.buffer.len() > MAX_EVENT {
                return Err(Error::TooLong);
            }
        }
        Ok(())
    }

    fn event(&self, line: &Bytes, version: &mut String) -> Result<(), Error> {
        let event: RawEvent<'_> = serde_json::from_slice(line)?;
        match event.event_type {
            "ADDED" | "MODIFIED" | "DELETED" => {
                let raw = event.object.get().as_bytes();
                if let Some(object) = self.readable(event.object, self.shared.decode(raw)) {
                    let seen = object.meta().resource_version.clone();
                    if event.event_type == "DELETED" {
                        self.shared.delete(object);
                    } else {
                        self.shared.apply(object, line.slice_ref(raw));
                    }
                    *version = seen.unwrap_or_default();
                } else if let Ok(object) =
                    serde_json::from_str::<kube::core::PartialObjectMeta>(event.object.get())
                {
                    if event.event_type == "DELETED" {
                        self.shared.delete_unread(&Key::of(&object));
                    }
                    *version = object.metadata.resource_version.unwrap_or_default();
                }
            }
            "BOOKMARK" => {
                *version = serde_json::from_str::<VersionOnly>(event.object.get())?
                    .metadata
                    .resource_version;
            }
            "ERROR" => {
                let status: Status = serde_json::from_str(event.object.get())?;
                return Err(Error::Api(status.boxed()));
            }
            other => tracing::debug!(url = self.source.url, event = other, "unknown watch event"),
        }
        self.shared.reached(version);
        Ok(())
    }

    /// Says which object it is that cannot be decoded.
    fn readable<T>(&self, raw: &RawValue, decoded: serde_json::Result<T>) -> Option<T> {
        match decoded {
            Ok(object) => Some(object),
            Err(error) => {
                let named = serde_json::from_str::<kube::core::PartialObjectMeta>(raw.get()).ok();
                let name = named.and_then(|object| object.metadata.name).unwrap_or_default();
                tracing::warn!(url = self.source.url, name, %error, "object left out: it cannot be decoded");
                None
            }
        }
    }

    async fn send(&self, request: Request<Vec<u8>>, metadata_accept: &'static str) -> Result<Body, Error> {
        let mut request = request.map(Body::from);
        if self.source.metadata_only {
            let accept = http::HeaderValue::from_static(metadata_accept);
            request.headers_mut().insert(http::header::ACCEPT, accept);
        }
        let response = self.client.send(request).await?;
        let code = response.status();
        if code.is_success() {
            return Ok(response.into_body());
        }
        let bytes = response.into_body().collect().await?.to_bytes();
        let mut status = serde_json::from_slice::<Status>(&bytes).unwrap_or_else(|_not_a_status| {
            Status::failure(
                &String::from_utf8_lossy(&bytes),
                code.canonical_reason().unwrap_or_default(),
            )
        });
        status.code = code.as_u16();
        Err(Error::Api(status.boxed()))
    }
}

async fn pause(backoff: &mut Duration) {
    let jitter = rand::random_range(1.0..1.5);
    tokio::time::sleep(backoff.mul_f64(jitter)).await;
    *backoff = (*backoff * 2).min(MAX_BACKOFF);
}

#[cfg(test)]
mod tests {
    use super::Lines;
    use bytes::Bytes;

    #[test]
    fn lines_come_whole_from_any_split() {
        let text: &'static [u8] = b"one\n\ntwo two\nthr";
        for split in 0..text.len() {
            let mut lines = Lines::default();
            let mut got = Vec::new();
            for part in [&text[..split], &text[split..]] {
                lines.push(Bytes::from_static(part));
                while let Some(line) = lines.next() {
                    got.push(String::from_utf8(line.to_vec()).unwrap());
                }
            }
            assert_eq!(got, vec!["one", "", "two two"], "split at {split}");
        }
    }

    #[test]
    fn a_chunk_that_is_one_line_is_not_copied() {
        let chunk = Bytes::from_static(b"an event\n");
        let mut lines = Lines::default();
        lines.push(chunk.clone());
        let line = lines.next().unwrap();
        assert_eq!((&line[..], line.as_ptr()), (&b"an event"[..], chunk.as_ptr()));
        // Not so what comes in parts, or behind a part.
        for part in [&b"one"[..], b" line\n", b"more\n"] {
            lines.push(Bytes::from_static(part));
        }
        assert_eq!(lines.next().unwrap(), "one line");
        assert_eq!(lines.next().unwrap(), "more");
        assert!(lines.next().is_none());
        lines.push(chunk.clone());
        lines.push(chunk);
        assert_eq!(
            (lines.next().unwrap(), lines.next().unwrap()),
            ("an event".into(), "an event".into())
        );
    }
}
