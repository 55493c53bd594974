//! What the verbs ask of a resource. A built-in kind answers by its record of functions (`built_in`), a version of a
//! custom resource by its schema (the server's `crd`); no verb asks which of the two it has before it.
//!
//! An object that passes here is in the stored version if it is of a built-in kind, and in the served one if it is of
//! a custom one, from the moment it is decoded until it is stored: `served` and `shown` make the served version of
//! either, `keep` the stored one.

use std::borrow::Cow;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;
use skiff_api::kind::Graceful;
use skiff_cache::Field;
use skiff_meta::{Status, field};
use skiff_schema::LeftOut;
use skiff_schema::apply::Versions;
use skiff_schema::patch::PatchType;
use skiff_schema::structural::publish::Published;

use crate::body::{Patched, Sent};
use crate::{Resource, WriteScope};

/// What the rules say of a change.
#[derive(Debug, Default)]
pub struct Findings {
    pub errors: Vec<field::Error>,
    /// What was wrong before and did not change: it is let through.
    pub warnings: Vec<String>,
}

impl From<Vec<field::Error>> for Findings {
    fn from(errors: Vec<field::Error>) -> Findings {
        Findings {
            errors,
            warnings: Vec::new(),
        }
    }
}

/// The path of a request, as far as it decides whether the resource has such a path.
pub struct Route<'a> {
    pub verb: &'a str,
    pub namespace: &'a str,
    /// `/namespaces//` stands before the resource.
    pub unnamed_namespace: bool,
    pub name: &'a str,
    pub subresource: &'a str,
    /// The parts from the resource on: resource, name, subresource, and what follows.
    pub parts: &'a [String],
}

/// Why a path is not served.
pub enum Unrouted {
    /// There is no such path: the page that every unknown path gets.
    NoPath,
    Refused(Status),
}

impl From<Status> for Unrouted {
    fn from(status: Status) -> Unrouted {
        Unrouted::Refused(status)
    }
}

/// How a resource is written on the wire, where upstream's servers differ.
#[derive(Debug)]
pub struct Wire {
    /// The type tables know the objects: they have a protobuf form, and a router reads `Accept` first.
    pub typed: bool,
    /// The items of a list say their kind and version, and a list that is whole says so by an empty `continue`.
    pub typed_items: bool,
    /// Discovery names the group and version of the kind, though they are those of the resource.
    pub full_names: bool,
    /// A POST may name the object in its path.
    pub post_to_name: bool,
    /// A table without rows has `null` for them.
    pub null_rows: bool,
}

#[async_trait]
pub trait Strategy: Versions + Send + Sync {
    // Paths.

    fn wire(&self) -> &'static Wire;

    /// Whether the resource has a path, and the verb there.
    fn check_route(&self, resource: &Resource, route: &Route<'_>) -> Result<(), Unrouted>;

    /// What a client is told who uses this version.
    fn deprecation(&self) -> Option<&str>;

    // Bodies: the outcome is defaulted.

    fn decode(&self, sent: &Sent<'_>) -> Result<Value, Status>;

    /// The sort of patch that a media type says, if the resource takes it.
    fn patch_type(&self, media_type: &str) -> Result<PatchType, Status>;

    /// Checks the outcome of a patch as if it had been sent. `Null` is a document that is read as one without a name.
    fn patched(&self, patched: Patched<'_>) -> Result<Value, Status>;

    /// Checks the outcome of an apply of `config`, which is in the served version.
    fn applied(&self, config: &Value, object: Value) -> Result<Value, Status>;

    /// Fills in the defaults of the served version.
    fn default(&self, object: &mut Value);

    // Admission.

    /// An object of the request, of this resource or of another version of it, as admission shows it.
    async fn shown(&self, object: &Value) -> Result<Value, Status>;

    /// The way back of an object that was changed in the served version: of the fields that its type knows, defaulted,
    /// and in the version of `current`.
    async fn taken_back(&self, object: Value, current: Option<&Value>) -> Result<Value, Status>;

    /// Refuses fields that a mutation must not bring.
    fn check_mutated(&self, object: &Value) -> Result<(), Status>;

    // Writes.

    /// Refuses new objects where none are taken.
    fn check_new(&self, name: &str) -> Result<(), Status>;

    /// A new object as its fields are attributed to who made it, where that is more than the object.
    fn tracked(&self, object: &Value) -> Option<Value>;

    /// The fields that a write through `subresource` (empty for the resource itself) cannot change, whatever it says.
    fn reset_fields(&self, subresource: &str) -> &'static [&'static [&'static str]];

    /// A subresource that is a part of its object, with rules of its own for who writes it.
    fn part(&self, subresource: &str) -> Option<WriteScope>;

    /// Whether the spec says who asked for the object.
    fn keeps_requester(&self) -> bool;

    fn begin_create(&self, object: &mut Value);
    fn begin_update(&self, new: &mut Value, old: &Value);
    fn begin_status_update(&self, new: &mut Value, old: &Value);

    fn check_create(&self, object: &Value) -> Vec<field::Error>;
    fn check_update(&self, new: &Value, old: &Value, part: &WriteScope) -> Findings;

    /// Warnings of a write; `old` is there on update.
    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String>;

    /// Whether a PUT of what is not there makes it.
    fn allows_create_on_update(&self) -> bool;

    /// Whether a write without a resourceVersion overwrites.
    fn allows_unconditional_update(&self) -> bool;

    fn graceful(&self, object: &Value, requested: Option<i64>) -> Graceful;

    // Shapes and versions.

    /// Gives an object the shape in which upstream would answer and store it.
    fn normalise(&self, object: &mut Value);

    /// The same of an object that was just sent; gives what only validation still tells from nothing.
    fn normalise_sent(&self, object: &mut Value) -> Vec<LeftOut>;

    /// Gives an object of the served version the shape in which upstream would answer it.
    fn normalise_served(&self, object: &mut Value);

    /// What a bookmark says of an object beside its metadata: nothing was ever written of it.
    fn never_written(&self, object: &mut Value);

    /// Turns an object of the served version into one that goes through a write.
    fn to_stored(&self, object: &mut Value);

    /// Brings an object as it was read from the store into the served version, if nobody else has to be asked.
    fn to_served(&self, object: &mut Value);

    /// An object on its way through a write, in the served version.
    fn served<'v>(&self, object: &'v Value) -> Cow<'v, Value>;

    /// The same, in the shape of an answer.
    fn presented<'v>(&self, object: &'v Value) -> Cow<'v, Value>;

    /// Whether objects of other versions can only be had by asking someone else.
    fn converts_elsewhere(&self) -> bool;

    /// Brings objects that were read from the store into the version in which writes and answers take them up.
    async fn serve(&self, objects: Vec<Value>) -> Result<Vec<Value>, Status>;

    /// The same of one, in place.
    async fn serve_one(&self, object: &mut Value) -> Result<(), Status>;

    // The store.

    /// The form in which an object is stored, if it is not the one that it has.
    async fn keep(&self, object: &mut Value) -> Result<Option<Value>, Status>;

    /// What there is to answer of an object that is stored in the form `kept`: what a read of it would give.
    fn answered(&self, kept: Option<&Value>, object: Value) -> Result<Value, Status>;

    /// A stored value as the JSON that the cache keeps.
    fn read(&self, key: &str, value: Bytes, revision: i64) -> Result<Bytes, String>;

    /// A stored value, decoded, with the revision as its version.
    fn read_value(&self, key: &str, value: Bytes, revision: i64) -> Result<Value, String>;

    /// Grows with the definition: of two caches of one storage the newer stays.
    fn revision(&self) -> i64;

    /// The fields beyond name and namespace that the cache selects by.
    fn cache_fields(&self) -> Vec<Field>;

    // Reads.

    /// The field selectors that a client may use beyond name and namespace.
    fn selectable(&self) -> Vec<&str>;

    /// The name that the stored version has for a field of the served one.
    fn stored_field(&self, name: &str) -> Option<&'static str>;

    /// Whether a client may select by namespace.
    fn selects_namespace(&self) -> bool;

    /// The complaint about a field that cannot be selected by.
    fn unknown_field(&self, label: &str) -> String;

    /// The kind of a list.
    fn list_kind(&self) -> Cow<'_, str>;

    /// COMPAT: some of upstream's messages name its type.
    fn go_type(&self) -> Cow<'_, str>;

    /// The column definitions of the Table answer.
    fn columns(&self) -> Value;

    /// The cells of an object as it was read from the store, or as someone else has converted it.
    fn row(&self, object: &Value, now: i64) -> Vec<Value>;

    /// Whether the status subresource can be shown as a table.
    fn has_status_table(&self) -> bool;

    /// What the OpenAPI documents are to say of it beside the built-in ones.
    fn published(&self) -> Option<Published<'_>>;

    // The scale subresource.

    fn scale(&self, object: &Value) -> Result<Value, Status>;

    /// Puts a Scale into its object.
    fn put_scale(&self, object: &Value, scale: &Value) -> Result<Value, Status>;

    /// The fields on the way to the number of replicas.
    fn replicas(&self) -> Vec<&str>;

    /// The columns that `kubectl get --subresource=scale` prints.
    fn scale_columns(&self) -> Value;
}
