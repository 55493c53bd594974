//! A cached object and the events about it. An object is held once: the bytes of its list item are a
//! slice of the frame that its watchers get.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::fields::{FieldSet, Interner};
use crate::scan::{self, Splice};
use crate::{Error, Result};

/// What selection needs to know of an object.
#[derive(Debug)]
pub struct Head {
    pub namespace: Arc<str>,
    pub name: Box<str>,
    pub uid: Box<str>,
    /// Sorted by key.
    pub labels: Box<[(Arc<str>, Arc<str>)]>,
    /// Whether it has a deletionTimestamp.
    pub deleting: bool,
    /// In the order of `fields`.
    pub(crate) values: Box<[Arc<str>]>,
    pub(crate) fields: Arc<FieldSet>,
}

impl Head {
    pub fn label(&self, key: &str) -> Option<&str> {
        let at = self
            .labels
            .binary_search_by(|(known, _)| (**known).cmp(key))
            .ok()?;
        Some(&self.labels[at].1)
    }

    /// The value of a selectable field; `None` when the kind has no such field.
    pub fn field(&self, name: &str) -> Option<&str> {
        match name {
            "metadata.name" => Some(&self.name),
            "metadata.namespace" => Some(&self.namespace),
            _ => self.fields.place(name).map(|place| &*self.values[place]),
        }
    }

    /// All selectable fields of the kind besides the two of metadata, with their values.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields
            .fields
            .iter()
            .zip(&self.values)
            .map(|(field, value)| (field.name.as_str(), &**value))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    Added,
    Modified,
    Deleted,
    Bookmark,
}

impl EventKind {
    pub fn as_str(self) -> &'static str {
        match self {
            EventKind::Added => "ADDED",
            EventKind::Modified => "MODIFIED",
            EventKind::Deleted => "DELETED",
            EventKind::Bookmark => "BOOKMARK",
        }
    }

    /// What stands in a frame before the object.
    fn opening(self) -> &'static str {
        match self {
            EventKind::Added => "{\"type\":\"ADDED\",\"object\":",
            EventKind::Modified => "{\"type\":\"MODIFIED\",\"object\":",
            EventKind::Deleted => "{\"type\":\"DELETED\",\"object\":",
            EventKind::Bookmark => "{\"type\":\"BOOKMARK\",\"object\":",
        }
    }
}

const CLOSING: &str = "}\n";

/// One version of one object.
#[derive(Debug)]
pub struct Entry {
    pub key: Arc<str>,
    /// The object's `resourceVersion`.
    pub revision: i64,
    /// The object as clients see it, in the storage version: JSON with `metadata.resourceVersion`.
    pub bytes: Bytes,
    pub head: Arc<Head>,
    /// The frame of the event that brought this version. `bytes` is a part of it.
    frame: Bytes,
    kind: EventKind,
    /// Where the quoted version is in `bytes`.
    version: (u32, u8),
    /// Where the metadata is in `bytes`: from, to.
    metadata: (u32, u32),
}

impl Entry {
    /// Makes an entry of a stored value. `kind` is the event that brings it.
    pub(crate) fn new(
        key: Arc<str>,
        revision: i64,
        value: &[u8],
        kind: EventKind,
        fields: &Arc<FieldSet>,
        interner: &mut Interner,
    ) -> Result<Entry> {
        if u32::try_from(value.len()).is_err() {
            return Err(Error::Malformed("larger than 4 GiB".to_owned()));
        }
        let scan::Scanned {
            head,
            splice,
            metadata,
        } = scan::scan(value, fields, interner)?;
        let head = Arc::new(head);
        Ok(Entry::build(key, revision, value, splice, metadata, kind, head))
    }

    fn build(
        key: Arc<str>,
        revision: i64,
        object: &[u8],
        splice: Splice,
        metadata: Range<usize>,
        kind: EventKind,
        head: Arc<Head>,
    ) -> Entry {
        let opening = kind.opening();
        let room = opening.len() + object.len() + 48 + CLOSING.len();
        let mut frame = Vec::with_capacity(room);
        frame.extend_from_slice(opening.as_bytes());
        let version = write_spliced(&mut frame, object, splice, revision);
        let end = frame.len();
        frame.extend_from_slice(CLOSING.as_bytes());
        frame.shrink_to_fit();
        let frame = Bytes::from(frame);
        let bytes = frame.slice(opening.len()..end);
        let at = (version.0 - opening.len()) as u32;
        // The version is within the metadata, which so ends as far from the object's end as before.
        let metadata_end = bytes.len() - (object.len() - metadata.end);
        Entry {
            key,
            revision,
            bytes,
            head,
            frame,
            kind,
            version: (at, version.1),
            metadata: (metadata.start as u32, metadata_end as u32),
        }
    }

    /// The same object with another `resourceVersion`, as it appears in a DELETED event.
    pub(crate) fn restamp(&self, revision: i64, kind: EventKind) -> Entry {
        let (at, len) = (self.version.0 as usize, usize::from(self.version.1));
        let splice = Splice {
            start: at,
            end: at + len,
            before: "",
            after: "",
        };
        Entry::build(
            self.key.clone(),
            revision,
            &self.bytes,
            splice,
            self.metadata.0 as usize..self.metadata.1 as usize,
            kind,
            self.head.clone(),
        )
    }

    /// The object's `metadata`, with its braces.
    pub fn metadata(&self) -> &[u8] {
        &self.bytes[self.metadata.0 as usize..self.metadata.1 as usize]
    }

    /// Bytes of memory, roughly.
    pub(crate) fn weight(&self) -> usize {
        self.frame.len() + 512
    }
}

/// Appends `object` with its version; where the quoted version is in `out`, and how long.
fn write_spliced(out: &mut Vec<u8>, object: &[u8], splice: Splice, revision: i64) -> (usize, u8) {
    out.extend_from_slice(&object[..splice.start]);
    out.extend_from_slice(splice.before.as_bytes());
    let at = out.len();
    out.extend_from_slice(format!("\"{revision}\"").as_bytes());
    let len = (out.len() - at) as u8;
    out.extend_from_slice(splice.after.as_bytes());
    out.extend_from_slice(&object[splice.end..]);
    (at, len)
}

/// An object's stored JSON with `metadata.resourceVersion` put in, without decoding it.
pub fn splice_resource_version(object: &[u8], revision: i64) -> Result<Bytes> {
    let splice = scan::locate(object)?;
    let mut out = Vec::with_capacity(object.len() + 48);
    write_spliced(&mut out, object, splice, revision);
    Ok(Bytes::from(out))
}

/// What a watcher gets. Watchers that see the same change the same way share one.
#[derive(Debug)]
pub struct WatchEvent {
    pub kind: EventKind,
    /// The `resourceVersion` of the object, or of the bookmark.
    pub revision: i64,
    /// `None` in a bookmark.
    pub entry: Option<Arc<Entry>>,
    /// The object before the change, in MODIFIED.
    pub before: Option<Arc<Entry>>,
    /// Whether this bookmark ends the initial events.
    pub initial_events_end: bool,
    frame: OnceLock<Bytes>,
    /// What was made of it for watchers that want another form. Leaf lock.
    forms: Mutex<Vec<(u64, Bytes)>>,
}

impl WatchEvent {
    pub(crate) fn new(kind: EventKind, entry: Arc<Entry>) -> WatchEvent {
        let revision = entry.revision;
        let frame = OnceLock::new();
        if kind == entry.kind {
            let _ = frame.set(entry.frame.clone());
        }
        WatchEvent {
            kind,
            revision,
            entry: Some(entry),
            before: None,
            initial_events_end: false,
            frame,
            forms: Mutex::default(),
        }
    }

    pub(crate) fn bookmark(api_version: &str, kind: &str, revision: i64, end: bool) -> WatchEvent {
        WatchEvent {
            kind: EventKind::Bookmark,
            revision,
            entry: None,
            before: None,
            initial_events_end: end,
            frame: OnceLock::from(bookmark_frame(api_version, kind, revision, end)),
            forms: Mutex::default(),
        }
    }

    /// The line on the wire: `{"type":"ADDED","object":{...}}` and a newline. Encoded at most once.
    pub fn json(&self) -> Bytes {
        let encode = || {
            let object = self.entry.as_ref().map_or(&b"null"[..], |entry| &entry.bytes);
            let opening = self.kind.opening();
            let mut frame = Vec::with_capacity(opening.len() + object.len() + CLOSING.len());
            frame.extend_from_slice(opening.as_bytes());
            frame.extend_from_slice(object);
            frame.extend_from_slice(CLOSING.as_bytes());
            Bytes::from(frame)
        };
        self.frame.get_or_init(encode).clone()
    }

    /// The event in another form than [`WatchEvent::json`], if a watcher has made it already. Forms are
    /// known by numbers that their makers give them.
    pub fn form(&self, form: u64) -> Option<Bytes> {
        let forms = self.forms.lock();
        forms
            .iter()
            .find(|(known, _)| *known == form)
            .map(|(_, made)| made.clone())
    }

    /// Keeps a form for the other watchers that want it.
    pub fn keep_form(&self, form: u64, made: &Bytes) {
        let mut forms = self.forms.lock();
        if !forms.iter().any(|(known, _)| *known == form) {
            forms.push((form, made.clone()));
        }
    }
}

/// The line of a bookmark in the given version of the kind.
pub fn bookmark_frame(api_version: &str, kind: &str, revision: i64, initial_events_end: bool) -> Bytes {
    let mut metadata = serde_json::json!({"resourceVersion": revision.to_string()});
    if initial_events_end {
        metadata["annotations"] = serde_json::json!({"k8s.io/initial-events-end": "true"});
    }
    let object = serde_json::json!({"kind": kind, "apiVersion": api_version, "metadata": metadata});
    Bytes::from(format!("{}{object}{CLOSING}", EventKind::Bookmark.opening()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(json: &str, revision: i64, kind: EventKind) -> Entry {
        let fields = Arc::new(FieldSet::new(Vec::new()));
        Entry::new(
            "k".into(),
            revision,
            json.as_bytes(),
            kind,
            &fields,
            &mut Interner::default(),
        )
        .unwrap()
    }

    #[test]
    fn frames_and_bytes_are_one_memory() {
        let entry = Arc::new(entry(r#"{"metadata":{"name":"a"}}"#, 9, EventKind::Modified));
        assert_eq!(
            &entry.bytes[..],
            br#"{"metadata":{"resourceVersion":"9","name":"a"}}"#
        );
        let event = WatchEvent::new(EventKind::Modified, entry.clone());
        assert_eq!(
            &event.json()[..],
            b"{\"type\":\"MODIFIED\",\"object\":{\"metadata\":{\"resourceVersion\":\"9\",\"name\":\"a\"}}}\n"
        );
        assert_eq!(
            event.json()[event.kind.opening().len()..].as_ptr(),
            entry.bytes.as_ptr()
        );
        let added = WatchEvent::new(EventKind::Added, entry.clone());
        assert_eq!(
            &added.json()[..],
            b"{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"resourceVersion\":\"9\",\"name\":\"a\"}}}\n"
        );
        assert_eq!(added.json().as_ptr(), added.json().as_ptr());
    }

    #[test]
    fn restamping_changes_the_version_only() {
        let entry = entry(r#"{"metadata":{"name":"a"},"x":"\"9\""}"#, 9, EventKind::Added);
        let gone = entry.restamp(1234, EventKind::Deleted);
        assert_eq!(
            &gone.bytes[..],
            br#"{"metadata":{"resourceVersion":"1234","name":"a"},"x":"\"9\""}"#
        );
        let again = gone.restamp(5, EventKind::Deleted);
        assert_eq!(
            &again.bytes[..],
            br#"{"metadata":{"resourceVersion":"5","name":"a"},"x":"\"9\""}"#
        );
        assert_eq!((gone.revision, again.revision, &*again.head.name), (1234, 5, "a"));
    }

    #[test]
    fn the_metadata_alone() {
        let check = |json: &str, expected: &str| {
            let entry = entry(json, 9, EventKind::Added);
            assert_eq!(std::str::from_utf8(entry.metadata()).unwrap(), expected);
            let gone = entry.restamp(12345, EventKind::Deleted);
            let expected = expected.replace("\"9\"", "\"12345\"");
            assert_eq!(std::str::from_utf8(gone.metadata()).unwrap(), expected);
        };
        check(
            r#"{"metadata":{"name":"a"},"spec":{"metadata":{}}}"#,
            r#"{"resourceVersion":"9","name":"a"}"#,
        );
        check(r#"{"a":[],"metadata":{}}"#, r#"{"resourceVersion":"9"}"#);
        check(
            r#"{"metadata":{"name":"a","resourceVersion":"77","uid":"u"},"z":0}"#,
            r#"{"name":"a","resourceVersion":"9","uid":"u"}"#,
        );
    }

    #[test]
    fn other_forms_are_kept() {
        let entry = Arc::new(entry(r#"{"metadata":{"name":"a"}}"#, 9, EventKind::Added));
        let event = WatchEvent::new(EventKind::Added, entry);
        assert_eq!(event.form(1), None);
        event.keep_form(1, &Bytes::from_static(b"one"));
        event.keep_form(1, &Bytes::from_static(b"again"));
        assert_eq!(event.form(1).unwrap(), "one");
        assert_eq!(event.form(2), None);
    }

    #[test]
    fn bookmarks() {
        assert_eq!(
            &bookmark_frame("v1", "Pod", 7, true)[..],
            b"{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"annotations\":{\"k8s.io/initial-events-end\":\"true\"},\"resourceVersion\":\"7\"}}}\n"
        );
    }
}
