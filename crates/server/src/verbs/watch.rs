//! Watch: frames that the cache encoded once for all, passed on as they come.

use std::hash::{Hash, Hasher};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{EventKind, ReadAt, Resource, WatchEvent, WatchFrom, WatchOptions, Watcher, encode};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::body::{self, Answer, BoxError};
use crate::chain::Exchange;
use crate::connections::Deadline;
use crate::crd::select::Select;
use crate::metrics::{Counted, RequestLabels};
use crate::negotiate::{Format, Transform};
use crate::protobuf;
use crate::proxy::ClientAddress;
use crate::query::ListOptions;
use crate::server::Inner;
use crate::table::{self, IncludeObject};
use crate::verbs::open_watches::OpenWatch;
use crate::verbs::read;

/// Upstream's `--min-request-timeout`: a watch without a timeout lasts this long, and up to twice that.
const MIN_TIMEOUT: Duration = Duration::from_secs(1800);

/// Longer than any watch; a time that far from now can still be counted.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

pub async fn watch(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    resource: &Arc<Resource>,
) -> Result<Answer, Status> {
    let output = exchange.output(true)?;
    let options = read::list_options(exchange, resource, true)?;
    let mut scope = read::cache_list(
        exchange,
        &ListOptions {
            resource_version: String::new(),
            ..options.clone()
        },
    )?;
    let timeout = match options.timeout_seconds {
        None | Some(0) => MIN_TIMEOUT.mul_f64(1.0 + rand::random_range(0.0..1.0)),
        Some(seconds) => Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(LONGEST),
    };
    let deadline = Instant::now() + timeout;
    if let Some(answered) = exchange.parts.extensions.get::<Arc<Deadline>>() {
        answered.start_long(deadline);
    }
    let select = Select::split(resource, &mut scope.fields);
    let client = exchange.parts.extensions.get::<ClientAddress>();
    // Components in this process are not counted: theirs are few.
    let open = match client {
        None => None,
        Some(_) => match inner.watches.open(&exchange.user.name) {
            None => {
                let why = "too many watches are open, please try again later";
                return Err(Status::too_many_requests(why, 1));
            }
            open => open,
        },
    };
    let watch = WatchOptions {
        namespace: scope.namespace,
        labels: scope.labels,
        fields: scope.fields,
        from: from(&options)?,
        bookmarks: options.bookmarks,
        deadline: Some(deadline),
        initial_events_end: options.send_initial_events == Some(true) && options.bookmarks,
        reader: client.map_or(0, |ClientAddress(address)| address.port().into()),
        skip_unreadable: false,
    };
    let include = match output.transform {
        Transform::Table(_) => IncludeObject::read(&exchange.query)?,
        _ => IncludeObject::Metadata,
    };
    let shape = Shape {
        select: select.map(Arc::new),
        ..Shape::new(resource, output.format, output.transform, include)
    };
    let first: Result<Watcher, Bytes> = match inner.registry.watch(resource, watch).await {
        Ok(watcher) => Ok(watcher),
        // COMPAT: a version that is too old, or not yet there, is told in the stream, as upstream's
        // cache does.
        Err(status) if matches!(status.code, 410 | 504) => Err(error_frame(output.format, &status)),
        Err(status) => return Err(status),
    };
    let body = match first {
        Ok(watcher) => {
            let counted = inner.metrics.long_running(&RequestLabels::of(exchange));
            Running::new(inner, watcher, shape, deadline, (counted, open)).boxed_unsync()
        }
        Err(frame) => body::full(frame),
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
    json_line("ERROR", &status.to_value())
}

/// The line of an event, with its parts in upstream's order.
fn json_line(kind: &str, object: &Value) -> Bytes {
    let mut line = format!("{{\"type\":\"{kind}\",\"object\":").into_bytes();
    line.extend(skiff_schema::declared_order(skiff_api::facts::schema(), object));
    line.extend_from_slice(b"}\n");
    line.into()
}

/// An open watch: the body of its answer. What it waits for besides events is set up once, not with
/// every event.
struct Running {
    watcher: Watcher,
    shape: Shape,
    deadline: Pin<Box<Sleep>>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    over: Arc<Over>,
    /// Whom `over` wakes.
    reader: Option<Waker>,
    /// The frame that is being made.
    making: Option<Making>,
    ended: bool,
    _counted: (Counted, Option<OpenWatch>),
}

impl Running {
    fn new(
        inner: &Arc<Inner>,
        watcher: Watcher,
        shape: Shape,
        deadline: Instant,
        counted: (Counted, Option<OpenWatch>),
    ) -> Running {
        Running {
            watcher,
            shape,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            stop: Box::pin(inner.shutdown.clone().cancelled_owned()),
            over: Arc::new(Over {
                rung: AtomicBool::new(true),
                reader: Mutex::default(),
            }),
            reader: None,
            making: None,
            ended: deadline <= Instant::now(),
            _counted: counted,
        }
    }
}

impl Body for Running {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        loop {
            if let Some(making) = &mut this.making {
                let made = ready!(making.as_mut().poll(context));
                this.making = None;
                match made {
                    Ok(Some(frame)) => return Poll::Ready(Some(Ok(Frame::data(frame)))),
                    Ok(None) => {}
                    Err(status) => {
                        this.ended = true;
                        let frame = error_frame(this.shape.format, &status);
                        return Poll::Ready(Some(Ok(Frame::data(frame))));
                    }
                }
            }
            let event = match this.watcher.poll_next(context) {
                Poll::Ready(event) => event,
                Poll::Pending => {
                    ready!(this.poll_over(context));
                    None
                }
            };
            // COMPAT: an event is no list, and upstream ends a watch that wants one at the first event.
            let unfit = matches!(this.shape.transform, Transform::PartialObjectMetadataList(_));
            let Some(event) = event.filter(|_| !unfit) else {
                this.ended = true;
                return Poll::Ready(None);
            };
            match this.shape.frame(&event) {
                Made::Now(frame) => return Poll::Ready(Some(Ok(Frame::data(frame)))),
                Made::Soon(making) => this.making = Some(making),
            }
        }
    }
}

impl Running {
    /// Ready when time is up, or the server ends. Both are looked at only when they have rung, not after every event.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let known = self.reader.as_ref();
        if known.is_some_and(|known| known.will_wake(context.waker()))
            && !self.over.rung.load(Ordering::Acquire)
        {
            return Poll::Pending;
        }
        *self.over.reader.lock() = Some(context.waker().clone());
        self.reader = Some(context.waker().clone());
        if !self.over.rung.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let waker = Waker::from(self.over.clone());
        let context = &mut Context::from_waker(&waker);
        if self.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        self.stop.as_mut().poll(context)
    }
}

/// What the deadline and the end of the server wake: it remembers that they did.
struct Over {
    rung: AtomicBool,
    /// Stays when it was woken. Leaf lock.
    reader: Mutex<Option<Waker>>,
}

impl Wake for Over {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        let reader = self.reader.lock().clone();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// An event in the form that the watcher wants.
enum Made {
    Now(Bytes),
    /// It takes decoding, and perhaps somebody else's conversion.
    Soon(Making),
}

/// `None`: the watcher's selector does not want it.
type Making = Pin<Box<dyn Future<Output = Result<Option<Bytes>, Status>> + Send>>;

/// The form of the events' objects.
#[derive(Clone)]
struct Shape {
    resource: Arc<Resource>,
    format: Format,
    transform: Transform,
    include: IncludeObject,
    /// Column definitions were sent: only the first table has them.
    headed: bool,
    /// The number of this form among all.
    form: u64,
    /// What only the objects as they are served can tell.
    select: Option<Arc<Select>>,
}

impl Shape {
    fn new(resource: &Arc<Resource>, format: Format, transform: Transform, include: IncludeObject) -> Shape {
        let mut hasher = std::hash::DefaultHasher::new();
        (
            &resource.api_version,
            format!("{format:?} {transform:?} {include:?}"),
        )
            .hash(&mut hasher);
        Shape {
            resource: resource.clone(),
            format,
            transform,
            include,
            headed: false,
            form: hasher.finish(),
            select: None,
        }
    }
}

impl Shape {
    fn frame(&mut self, event: &Arc<WatchEvent>) -> Made {
        if let Some(select) = self.select.clone() {
            let (shape, event) = (self.clone(), event.clone());
            self.headed = true;
            return Made::Soon(Box::pin(async move {
                if event.entry.is_none() {
                    return shape.encode(&event).await.map(Some);
                }
                let found = select.event(&shape.resource, &event).await?;
                let frame = found.map(|(kind, value)| shape.line(kind, shape.object(value)));
                frame.transpose()
            }));
        }
        let as_stored = self.transform == Transform::None && self.resource.served_as_stored();
        if as_stored && self.format != Format::Protobuf && event.entry.is_some() {
            return Made::Now(event.json());
        }
        // Watchers of one form share what is made of an event, but for the one that gets the columns.
        let shape = self.clone();
        let shared = !matches!(self.transform, Transform::Table(_)) || self.headed;
        self.headed = true;
        if let Some(made) = event.form(self.form).filter(|_| shared) {
            return Made::Now(made);
        }
        if let Transform::PartialObjectMetadata(version) = &self.transform
            && let Some(entry) = &event.entry
            && self.format != Format::Protobuf
            && !self.resource.converts_elsewhere()
            && self.resource.served_annotation.is_none()
        {
            let opening = format!("{{\"type\":\"{}\",\"object\":", event.kind.as_str());
            let made = table::partial_bytes(&opening, entry.metadata(), version, "}\n");
            event.keep_form(self.form, &made);
            return Made::Now(made);
        }
        let event = event.clone();
        Made::Soon(Box::pin(async move {
            let made = shape.encode(&event).await?;
            if shared {
                event.keep_form(shape.form, &made);
            }
            Ok(Some(made))
        }))
    }

    async fn encode(&self, event: &WatchEvent) -> Result<Bytes, Status> {
        if self.format == Format::Protobuf && self.transform == Transform::None {
            return self.protobuf(event);
        }
        let object = match &event.entry {
            Some(entry) => {
                let mut value = encode::decode(&entry.bytes)?;
                self.resource.strategy.serve_one(&mut value).await?;
                self.object(value)
            }
            None => self.bookmark(event),
        };
        self.line(event.kind, object)
    }

    /// The line of an event, or its frame where the watcher wants metadata or tables in protobuf.
    fn line(&self, kind: EventKind, object: Value) -> Result<Bytes, Status> {
        if self.format == Format::Protobuf {
            return Ok(protobuf::frame(kind.as_str(), &protobuf::document(&object)?));
        }
        Ok(json_line(kind.as_str(), &object))
    }

    /// The event in protobuf, with the object as it is served.
    fn protobuf(&self, event: &WatchEvent) -> Result<Bytes, Status> {
        let object = match &event.entry {
            Some(entry) => protobuf::cached(&self.resource, &entry.bytes)?,
            None => protobuf::document(&self.bookmark(event))?,
        };
        Ok(protobuf::frame(event.kind.as_str(), &object))
    }

    fn object(&self, mut value: Value) -> Value {
        match &self.transform {
            Transform::None => {
                self.resource.from_stored(&mut value);
                value
            }
            Transform::Table(version) => {
                let columns = if self.headed {
                    Value::Null
                } else {
                    self.resource.strategy.columns()
                };
                let now = jiff::Timestamp::now().as_second();
                let metadata = json!({"resourceVersion": skiff_registry::object::resource_version(&value)});
                let row = table::row(&self.resource, &value, version, self.include, now);
                table::table(version, metadata, columns, vec![row])
            }
            Transform::PartialObjectMetadata(version) | Transform::PartialObjectMetadataList(version) => {
                let hidden = self.resource.served_annotation;
                table::partial(&value, &format!("meta.k8s.io/{version}"), hidden)
            }
        }
    }

    fn bookmark(&self, event: &WatchEvent) -> Value {
        debug_assert_eq!(event.kind, EventKind::Bookmark);
        let mut metadata = json!({"resourceVersion": event.revision.to_string()});
        if event.initial_events_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        match &self.transform {
            Transform::None => {
                let mut object = self.resource.never_written();
                for (key, value) in metadata.as_object().into_iter().flatten() {
                    match (key.as_str(), value.as_object()) {
                        ("annotations", Some(annotations)) => {
                            for (key, value) in annotations {
                                let at = ["metadata", "annotations", key.as_str()];
                                skiff_registry::object::put(&mut object, &at, value.clone());
                            }
                        }
                        (key, _) => {
                            skiff_registry::object::put(&mut object, &["metadata", key], value.clone())
                        }
                    }
                }
                object
            }
            // COMPAT: upstream's bookmark in a table is a row like any other.
            Transform::Table(_) => self.object(json!({"metadata": metadata})),
            Transform::PartialObjectMetadata(version) | Transform::PartialObjectMetadataList(version) => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": format!("meta.k8s.io/{version}"), "metadata": metadata})
            }
        }
    }
}
