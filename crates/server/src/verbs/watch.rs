//! Watch: frames that the cache encoded once for all, passed on as they come.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{HeaderValue, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{EventKind, ReadAt, Resource, WatchEvent, WatchFrom, WatchOptions, Watcher, encode};
use tokio::time::Instant;

use crate::body::{Answer, BoxError};
use crate::chain::Exchange;
use crate::negotiate::{Format, Transform};
use crate::protobuf;
use crate::query::ListOptions;
use crate::server::Inner;
use crate::table::{self, IncludeObject};
use crate::verbs::read;

/// Upstream's `--min-request-timeout`: a watch without a timeout lasts this long, and up to twice that.
const MIN_TIMEOUT: Duration = Duration::from_secs(1800);

pub async fn watch(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    resource: &Arc<Resource>,
) -> Result<Answer, Status> {
    let output = exchange.output(true)?;
    let options = read::list_options(exchange, resource, true)?;
    let scope = read::cache_list(
        exchange,
        &ListOptions {
            resource_version: String::new(),
            ..options.clone()
        },
    )?;
    let watch = WatchOptions {
        namespace: scope.namespace,
        labels: scope.labels,
        fields: scope.fields,
        from: from(&options)?,
        bookmarks: options.bookmarks,
        initial_events_end: options.send_initial_events == Some(true) && options.bookmarks,
    };
    let timeout = match options.timeout_seconds {
        Some(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => MIN_TIMEOUT.mul_f64(1.0 + rand::random_range(0.0..1.0)),
    };
    let shape = Shape {
        resource: resource.clone(),
        format: output.format,
        transform: output.transform,
        include: IncludeObject::read(&exchange.query)?,
        headed: false,
    };
    let first: Result<Watcher, Bytes> = match inner.registry.watch(resource, watch).await {
        Ok(watcher) => Ok(watcher),
        // COMPAT: a version that is too old is told in the stream, as upstream's cache does.
        Err(status) if status.code == 410 => Err(error_frame(output.format, &status)),
        Err(status) => return Err(status),
    };
    let body = match first {
        Ok(watcher) => {
            let deadline = Instant::now() + timeout;
            let running = Running {
                watcher,
                shape,
                deadline,
                inner: inner.clone(),
                ended: false,
            };
            inner.metrics.watchers.fetch_add(1, Ordering::Relaxed);
            let frames = stream::unfold(running, Running::step);
            StreamBody::new(frames).boxed_unsync()
        }
        Err(frame) => {
            StreamBody::new(stream::iter([Ok::<_, BoxError>(Frame::data(frame))]).boxed()).boxed_unsync()
        }
    };
    let mut response = Response::new(body);
    let content_type = HeaderValue::from_static(match output.format {
        Format::Protobuf => protobuf::STREAM_MEDIA_TYPE,
        _ => "application/json",
    });
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    Ok(response)
}

/// Where a watch starts.
fn from(options: &ListOptions) -> Result<WatchFrom, Status> {
    let version = options.resource_version.as_str();
    let number = || read::version_number(version).map_err(|message| Status::failure(500, "", message));
    Ok(match (options.send_initial_events, version) {
        (Some(true), "") => WatchFrom::State(ReadAt::Latest),
        (Some(true), "0") => WatchFrom::State(ReadAt::Any),
        (Some(true), _) => WatchFrom::State(ReadAt::NotOlderThan(number()?)),
        (Some(false), "" | "0") => WatchFrom::Now,
        (None, "") => WatchFrom::State(ReadAt::Latest),
        (None, "0") => WatchFrom::State(ReadAt::Any),
        (_, _) => WatchFrom::After(number()?),
    })
}

fn error_frame(format: Format, status: &Status) -> Bytes {
    if format == Format::Protobuf
        && let Ok(object) = protobuf::document(&status.to_value())
    {
        return protobuf::frame("ERROR", &object);
    }
    Bytes::from(format!(
        "{}\n",
        json!({"type": "ERROR", "object": status.to_value()})
    ))
}

/// An open watch.
struct Running {
    watcher: Watcher,
    shape: Shape,
    deadline: Instant,
    inner: Arc<Inner>,
    ended: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.inner.metrics.watchers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Running {
    async fn step(mut self) -> Option<(Result<Frame<Bytes>, BoxError>, Running)> {
        if self.ended {
            return None;
        }
        let event = tokio::select! {
            event = self.watcher.next() => event,
            () = tokio::time::sleep_until(self.deadline) => None,
            () = self.inner.shutdown.cancelled() => None,
        };
        let event = match event {
            Some(event) => event,
            None => {
                // The end; a last bookmark spares the client events that it need not see again.
                self.ended = true;
                self.watcher.final_bookmark()?
            }
        };
        let frame = match self.shape.frame(&event).await {
            Ok(frame) => frame,
            Err(status) => {
                self.ended = true;
                error_frame(self.shape.format, &status)
            }
        };
        Some((Ok(Frame::data(frame)), self))
    }
}

/// The form of the events' objects.
struct Shape {
    resource: Arc<Resource>,
    format: Format,
    transform: Transform,
    include: IncludeObject,
    /// Column definitions were sent: only the first table has them.
    headed: bool,
}

impl Shape {
    async fn frame(&mut self, event: &WatchEvent) -> Result<Bytes, Status> {
        if self.transform == Transform::None && self.resource.served_as_stored() {
            if self.format == Format::Protobuf {
                return event.protobuf(|| self.protobuf(event));
            }
            return Ok(event.json());
        }
        if self.format == Format::Protobuf && self.transform == Transform::None {
            return self.protobuf(event);
        }
        let object = match &event.entry {
            Some(entry) => {
                let mut value = encode::decode(&entry.bytes)?;
                self.resource.serve_one(&mut value).await?;
                self.object(value)
            }
            None => self.bookmark(event),
        };
        if self.format == Format::Protobuf {
            return Ok(protobuf::frame(
                event.kind.as_str(),
                &protobuf::document(&object)?,
            ));
        }
        Ok(Bytes::from(format!(
            "{}\n",
            json!({"type": event.kind.as_str(), "object": object})
        )))
    }

    /// The event in protobuf, with the object as it is served.
    fn protobuf(&mut self, event: &WatchEvent) -> Result<Bytes, Status> {
        let object = match &event.entry {
            Some(entry) => protobuf::cached(&self.resource, &entry.bytes)?,
            None => protobuf::document(&self.bookmark(event))?,
        };
        Ok(protobuf::frame(event.kind.as_str(), &object))
    }

    fn object(&mut self, mut value: Value) -> Value {
        match &self.transform {
            Transform::None => {
                self.resource.from_stored(&mut value);
                value
            }
            Transform::Table(version) => {
                let columns = if std::mem::replace(&mut self.headed, true) {
                    Value::Null
                } else {
                    table::columns(&self.resource)
                };
                let now = jiff::Timestamp::now().as_second();
                let metadata = json!({"resourceVersion": skiff_registry::object::resource_version(&value)});
                let row = table::row(&self.resource, &value, version, self.include, now);
                table::table(version, metadata, columns, vec![row])
            }
            Transform::PartialObjectMetadata(version) | Transform::PartialObjectMetadataList(version) => {
                table::partial(&value, &format!("meta.k8s.io/{version}"))
            }
        }
    }

    fn bookmark(&mut self, event: &WatchEvent) -> Value {
        debug_assert_eq!(event.kind, EventKind::Bookmark);
        let mut metadata = json!({"resourceVersion": event.revision.to_string()});
        if event.initial_events_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        match &self.transform {
            Transform::None => {
                json!({"kind": self.resource.kind, "apiVersion": self.resource.api_version, "metadata": metadata})
            }
            // COMPAT: upstream's bookmark in a table is a row like any other.
            Transform::Table(_) => self.object(json!({"metadata": metadata})),
            Transform::PartialObjectMetadata(version) | Transform::PartialObjectMetadataList(version) => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": format!("meta.k8s.io/{version}"), "metadata": metadata})
            }
        }
    }
}
