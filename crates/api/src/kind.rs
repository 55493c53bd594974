//! What the front door asks of a built-in kind: one record of plain functions over `serde_json::Value`.
//! A kind's own file fills in what is special to it and takes the rest from [`BASE`].
//! Nothing here does I/O or reads a clock: the caller passes the time.
//!
//! The order of a write, which the registry follows through the methods of [`Kind`]:
//! `default` → admission → `begin_create` / `begin_update` → `check_create` / `check_update` → store.

use serde_json::Value;
use skiff_meta::field;

use crate::core::pod_gates::{self, Features};
use crate::{object_meta, strategy};

/// One column of the Table answer, as `kubectl get` prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    pub name: &'static str,
    /// OpenAPI type: `string`, `integer`, `boolean`, `date`, …
    pub kind: &'static str,
    /// OpenAPI format; the name column says `name`.
    pub format: &'static str,
    /// 0 is always shown, 1 with `-o wide`.
    pub priority: i32,
}

/// A column of type string.
pub const fn text(name: &'static str) -> Column {
    Column {
        name,
        kind: "string",
        format: "",
        priority: 0,
    }
}

/// A column of type string that only `-o wide` shows.
pub const fn wide(name: &'static str) -> Column {
    Column {
        priority: 1,
        ..text(name)
    }
}

/// A column of type integer.
pub const fn integer(name: &'static str) -> Column {
    Column {
        kind: "integer",
        ..text(name)
    }
}

/// A column of type boolean.
pub const fn boolean(name: &'static str) -> Column {
    Column {
        kind: "boolean",
        ..text(name)
    }
}

/// The name column, first in nearly every table.
pub const NAME: Column = Column {
    format: "name",
    ..text("Name")
};

/// The age column of built-in tables: a string, already rounded.
pub const AGE: Column = text("Age");

/// What a delete with options does before it removes an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Graceful {
    /// Removed at once (finalizers aside).
    Immediate,
    /// Marked with this grace period in seconds; zero removes at once.
    After(i64),
}

/// Which checks of the metadata a kind repeats on update. COMPAT: every complaint is reported once more for each, and
/// in the causes it is seen before or after which rules of the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    None,
    /// Those of every object.
    Object,
    /// Those of a change.
    Change,
    /// Those of a change, the rules of a change, those of every object, the rules of every object.
    Both,
    /// The other way round.
    ObjectFirst,
    /// Those of a change, those of every object, and then all rules.
    ChangeObject,
    ObjectChange,
    /// Those of every object with its rules, twice.
    Twice,
}

/// When a create checks the metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    First,
    /// Last, and only if there is nothing else to complain about.
    Otherwise,
}

/// What a delete without a policy does to dependents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orphan {
    /// They are deleted in the background.
    Never,
    /// They are orphaned.
    ByDefault,
    /// The kind has no dependents, and options about them are ignored.
    Unsupported,
}

/// The paths of fields.
pub type Fields = &'static [&'static [&'static str]];

/// A subresource that is a part of its object, with rules of its own for who writes it.
pub struct Part {
    pub name: &'static str,
    pub prepare: fn(new: &mut Value, old: &Value),
    pub validate: fn(new: &Value, old: &Value) -> Vec<field::Error>,
}

/// How to get from a version to the stored one and back, where more differs than `apiVersion`.
pub struct Converter {
    pub version: &'static str,
    pub to_stored: fn(&mut Value),
    pub from_stored: fn(&mut Value),
}

/// The rules of one kind. All functions see the whole object.
pub struct Kind {
    pub group: &'static str,
    pub kind: &'static str,
    /// The version whose shape `validate`, `prepare_*`, `selectable` and `row` read.
    pub version: &'static str,
    /// Where a pod spec stands in the object; empty where none does.
    pub pod_spec: &'static str,
    /// Fills in upstream's defaults; `version` is the API version the object is written in.
    pub default: fn(version: &str, object: &mut Value),
    /// A new object as its fields are attributed to who made it, where that is more than the object: what upstream
    /// has filled in by then and we fill in later.
    pub tracked: fn(object: &Value) -> Option<Value>,
    /// What a create clears or sets (status, generation). Metadata is already prepared.
    pub prepare_create: fn(object: &mut Value),
    /// What a write of the main resource may not touch, and the generation.
    pub prepare_update: fn(new: &mut Value, old: &Value),
    /// What a write of the status subresource may not touch.
    pub prepare_status_update: fn(new: &mut Value, old: &Value),
    /// The rules of the object beside its metadata.
    pub validate: fn(object: &Value) -> Vec<field::Error>,
    /// The rules of a change beside metadata. Runs in place of `validate`, so it calls it where upstream does.
    pub validate_update: fn(new: &Value, old: &Value) -> Vec<field::Error>,
    pub validate_status_update: fn(new: &Value, old: &Value) -> Vec<field::Error>,
    /// Field selectors beyond `metadata.name` and `metadata.namespace`. Always the same names in the same order.
    pub selectable: fn(object: &Value) -> Vec<(&'static str, String)>,
    pub columns: &'static [Column],
    /// The cells of one row, in the order of `columns`; `now` is Unix seconds.
    pub row: fn(object: &Value, now: i64) -> Vec<Value>,
    /// How a delete treats the object; `requested` is DeleteOptions' gracePeriodSeconds.
    pub graceful: fn(object: &Value, requested: Option<i64>) -> Graceful,
    /// Whether the kind has a status subresource whose content the main resource may not write.
    pub has_status: bool,
    /// Warning headers of a write; `old` is there on update.
    pub warnings: fn(new: &Value, old: Option<&Value>) -> Vec<String>,
    /// The rule for names; `prefix` is true for generateName.
    pub name_rule: fn(name: &str, prefix: bool) -> Vec<String>,
    /// Whether PUT of a missing object creates it.
    pub allow_create_on_update: bool,
    /// Whether PUT without a resourceVersion overwrites.
    pub allow_unconditional_update: bool,
    /// What an update of the main resource repeats of the metadata's checks.
    pub update_again: Again,
    /// What an update of the status repeats.
    pub status_again: Again,
    /// Whether finalizers must be upstream's own or have a domain.
    pub qualified_finalizers: bool,
    /// When the metadata of a new object is checked.
    pub metadata: When,
    /// The versions that have another shape than the stored one.
    pub converters: &'static [Converter],
    /// Kept as JSON, though it has a protobuf form.
    pub stored_as_json: bool,
    /// After how long an object goes by itself.
    pub ttl_seconds: Option<i64>,
    pub orphan: Orphan,
    /// What a client is told who deletes without saying what becomes of dependents.
    pub orphan_warning: Option<&'static str>,
    /// Upstream deletes the kind in its own way, and words a failed precondition differently.
    pub own_delete: bool,
    /// An annotation that belongs to the served version: whoever asks for metadata alone does not see it.
    pub served_annotation: Option<&'static str>,
    /// The fields that a write through a subresource (empty for the resource itself) cannot change, whatever it says,
    /// where that is not the rule: the status through the resource, the spec through the status.
    pub reset_fields: &'static [(&'static str, Fields)],
    /// The subresources that are parts of the object, beside the status that follows the rule.
    pub parts: &'static [Part],
    /// Completes an object of which nothing was ever written: the object of a bookmark.
    ///
    /// COMPAT: upstream makes it of its internal types, where some fields are no pointers.
    pub never_written: fn(object: &mut Value),
    /// The selectable fields that are asked for so often that the cache keeps an index.
    pub indexed_fields: &'static [&'static str],
    /// Where the cache finds a selectable field that is not the path of its value: the first that is set counts.
    pub field_paths: &'static [(&'static str, &'static [&'static str])],
    /// Objects can be selected by these fields where they are stored, but not where they are served.
    pub hidden_fields: &'static [&'static str],
    /// Field selectors of the served version by the name that the stored version has for them.
    pub stored_fields: &'static [(&'static str, &'static str)],
    /// The complaint about a field that cannot be selected by; `version` is the API version of the request.
    pub unknown_field: fn(version: &str, label: &str) -> String,
    /// The warning that every request gets.
    pub deprecation: Option<&'static str>,
    /// Whether the status can be shown as a table.
    pub status_table: bool,
    /// Whether the spec says who asked for the object.
    pub keeps_requester: bool,
}

impl Kind {
    /// The converter of a version, if it has another shape than the stored one.
    pub fn converter(&self, version: &str) -> Option<&'static Converter> {
        self.converters
            .iter()
            .find(|converter| converter.version == version)
    }

    /// See [`Kind::reset_fields`].
    pub fn resets(&self, subresource: &str) -> Fields {
        let own = self.reset_fields.iter().find(|(name, _)| *name == subresource);
        match (own, subresource) {
            (Some((_, fields)), _) => fields,
            (None, "") if self.has_status => &[&["status"]],
            (None, "status") => &[&["spec"]],
            (None, _) => &[],
        }
    }
}

/// The complaint of kinds that know what can be selected by.
pub fn unsupported_field(_version: &str, label: &str) -> String {
    format!("field label not supported: {label}")
}

/// A status that is written without the metadata.
pub const STATUS_ALONE: &[(&str, Fields)] = &[("status", &[&["metadata"], &["spec"]])];

/// The kind that asks for nothing special.
pub const BASE: Kind = Kind {
    group: "",
    kind: "",
    version: "v1",
    pod_spec: "",
    default: |_, _| {},
    tracked: |_| None,
    prepare_create: |_| {},
    prepare_update: |_, _| {},
    prepare_status_update: strategy::status_only,
    validate: |_| Vec::new(),
    validate_update: |_, _| Vec::new(),
    validate_status_update: |_, _| Vec::new(),
    selectable: |_| Vec::new(),
    columns: &[NAME, CREATED_AT],
    row: crate::row::default,
    graceful: |_, _| Graceful::Immediate,
    has_status: false,
    warnings: |_, _| Vec::new(),
    name_rule: object_meta::dns_subdomain,
    allow_create_on_update: false,
    allow_unconditional_update: true,
    update_again: Again::Both,
    status_again: Again::Change,
    qualified_finalizers: true,
    metadata: When::First,
    converters: &[],
    stored_as_json: false,
    ttl_seconds: None,
    orphan: Orphan::Never,
    orphan_warning: None,
    own_delete: false,
    served_annotation: None,
    reset_fields: &[],
    parts: &[],
    never_written: |_| {},
    indexed_fields: &[],
    field_paths: &[],
    hidden_fields: &[],
    stored_fields: &[],
    unknown_field: |_, label| {
        let quoted = field::quote(label);
        format!("{quoted} is not a known field selector: only \"metadata.name\", \"metadata.namespace\"")
    },
    deprecation: None,
    status_table: true,
    keeps_requester: false,
};

/// The second column of kinds that upstream has no printer for.
const CREATED_AT: Column = Column {
    kind: "date",
    ..text("Created At")
};

impl Kind {
    /// Prepares an object for creation: clears what a client may not set, then the kind's own rules.
    /// The caller has set uid, creationTimestamp and the name (generated or not) before: a Job selects
    /// its pods by its uid.
    pub fn begin_create(&self, object: &mut Value) {
        self.begin_create_with(object, Features::default());
    }

    /// The same where features are on that are off by default.
    pub fn begin_create_with(&self, object: &mut Value, on: Features) {
        object_meta::before_create(object);
        self.drop_disabled(object, None, on);
        (self.prepare_create)(object);
    }

    /// Prepares a write of the main resource over `old`.
    pub fn begin_update(&self, new: &mut Value, old: &Value) {
        self.begin_update_with(new, old, Features::default());
    }

    /// The same where features are on that are off by default.
    pub fn begin_update_with(&self, new: &mut Value, old: &Value, on: Features) {
        object_meta::before_update(new, old);
        self.drop_disabled(new, Some(old), on);
        (self.prepare_update)(new, old);
    }

    /// Drops fields of features that are off.
    fn drop_disabled(&self, object: &mut Value, old: Option<&Value>, on: Features) {
        if !self.pod_spec.is_empty() {
            pod_gates::drop_disabled(object, old, self.pod_spec, on);
        }
    }

    /// Prepares a write of the status subresource over `old`.
    pub fn begin_status_update(&self, new: &mut Value, old: &Value) {
        object_meta::before_update(new, old);
        (self.prepare_status_update)(new, old);
    }

    /// All errors of a create, metadata first, as upstream orders them.
    pub fn check_create(&self, object: &Value, namespaced: bool) -> Vec<field::Error> {
        let mut errors = object_meta::validate(object, namespaced, self.name_rule);
        if self.qualified_finalizers {
            errors.extend(object_meta::qualified_finalizers(object));
        }
        let own = (self.validate)(object);
        let errors = match self.metadata {
            When::First => [errors, own].concat(),
            When::Otherwise if !own.is_empty() => own,
            When::Otherwise => errors,
        };
        self.shown(errors)
    }

    /// All errors of an update of the main resource.
    pub fn check_update(&self, new: &Value, old: &Value, namespaced: bool) -> Vec<field::Error> {
        let own = (self.validate_update)(new, old);
        self.shown(self.with_metadata(new, old, namespaced, self.update_again, own))
    }

    /// All errors of an update of the status subresource.
    pub fn check_status_update(&self, new: &Value, old: &Value, namespaced: bool) -> Vec<field::Error> {
        let own = (self.validate_status_update)(new, old);
        self.shown(self.with_metadata(new, old, namespaced, self.status_again, own))
    }

    /// What is checked of the metadata of every update, with the kind's own errors where upstream has them.
    fn with_metadata(
        &self,
        new: &Value,
        old: &Value,
        namespaced: bool,
        again: Again,
        mut own: Vec<field::Error>,
    ) -> Vec<field::Error> {
        let object = object_meta::validate(new, namespaced, self.name_rule);
        let change = object_meta::validate_update(new, old, namespaced);
        let finalizers = if self.qualified_finalizers && again != Again::None {
            object_meta::qualified_finalizers(new)
        } else {
            Vec::new()
        };
        if object.is_empty() && change.is_empty() && finalizers.is_empty() {
            return own;
        }
        let mut errors: Vec<field::Error> = object_meta::of_every_update(&object).collect();
        errors.extend_from_slice(&change);
        let object = [object, finalizers.clone()].concat();
        let change = [change, finalizers].concat();
        match again {
            Again::None => errors.extend(own),
            Again::Object => errors.extend(object.into_iter().chain(own)),
            Again::Change => errors.extend(change.into_iter().chain(own)),
            Again::ChangeObject => errors.extend([change, object, own].concat()),
            Again::ObjectChange => errors.extend([object, change, own].concat()),
            Again::Both => {
                let rules = (self.validate)(new);
                let pairs = own.iter().rev().zip(rules.iter().rev());
                let common = pairs.take_while(|(a, b)| a == b).count();
                let of_object = own.split_off(own.len() - common);
                errors.extend([change, own, object, of_object].concat());
            }
            Again::ObjectFirst | Again::Twice => {
                let rules = (self.validate)(new);
                let common = own.iter().zip(&rules).take_while(|(a, b)| a == b).count();
                let rest = own.split_off(common);
                let second = if again == Again::Twice {
                    object.clone()
                } else {
                    change
                };
                errors.extend([object, own, second, rest].concat());
            }
        }
        errors
    }

    /// The errors with their values as upstream shows them.
    pub fn shown(&self, mut errors: Vec<field::Error>) -> Vec<field::Error> {
        crate::internal::show_values(self.group, self.kind, &mut errors);
        errors
    }
}

/// The rules of a kind; kinds without special rules get [`GENERIC`].
pub fn kind(group: &str, kind: &str) -> &'static Kind {
    crate::KINDS
        .iter()
        .copied()
        .find(|k| k.kind == kind && k.group == group)
        .unwrap_or(&GENERIC)
}

/// What a kind without a file of its own gets.
pub static GENERIC: Kind = BASE;

#[cfg(test)]
mod tests {
    #[test]
    fn every_kind_is_listed_once() {
        for (i, a) in crate::KINDS.iter().enumerate() {
            assert!(
                !crate::KINDS[i + 1..]
                    .iter()
                    .any(|b| b.kind == a.kind && b.group == a.group),
                "{}",
                a.kind
            );
            assert!(!a.kind.is_empty());
        }
    }

    #[test]
    fn every_stored_resource_has_rules_and_the_right_status() {
        for resource in crate::facts::resources() {
            if resource.storage.is_none() {
                continue;
            }
            let rules = super::kind(resource.group, resource.kind);
            assert_eq!(rules.kind, resource.kind, "{} has no file", resource.kind);
            assert_eq!(
                rules.has_status,
                resource.subresource("status").is_some(),
                "{}",
                resource.kind
            );
        }
    }

    #[test]
    fn kinds_word_unknown_field_labels_in_their_own_way() {
        let check = |group, kind, expected: &str| {
            assert_eq!((super::kind(group, kind).unknown_field)("v1", "a.b"), expected);
        };
        check("", "Pod", "field label not supported: a.b");
        check("batch", "Job", "field label \"a.b\" not supported for Job");
        check(
            "resource.k8s.io",
            "ResourceSlice",
            "field label not supported for resource.k8s.io/v1, Kind=ResourceSlice: a.b",
        );
        check(
            "apps",
            "ReplicaSet",
            "\"a.b\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
        );
    }

    #[test]
    fn own_rules_name_what_there_is() {
        for resource in crate::facts::resources() {
            let rules = super::kind(resource.group, resource.kind);
            let parts = rules.parts.iter().map(|part| part.name);
            let resets = rules.reset_fields.iter().map(|(name, _)| *name);
            for name in parts.chain(resets).filter(|name| !name.is_empty()) {
                let found = resource.subresource(name).is_some();
                assert!(found, "{} has no {name}", resource.kind);
            }
        }
        for k in crate::KINDS {
            let empty = serde_json::json!({});
            let known: Vec<&str> = (k.selectable)(&empty).into_iter().map(|(name, _)| name).collect();
            let paths = k.field_paths.iter().map(|(name, _)| name);
            for name in k.indexed_fields.iter().chain(paths) {
                assert!(known.contains(name), "{} has no field {name}", k.kind);
            }
        }
    }

    #[test]
    fn rows_have_a_cell_for_every_column_even_of_an_empty_object() {
        for k in crate::KINDS {
            let row = (k.row)(&serde_json::json!({}), 0);
            let forgotten = usize::from(k.kind == "IPAddress");
            assert_eq!(row.len(), k.columns.len() + forgotten, "{}", k.kind);
        }
    }

    #[test]
    fn no_rule_panics_on_an_object_of_wrong_shape() {
        let wrong =
            serde_json::json!({"metadata": [], "spec": "x", "status": 4, "data": true, "rules": {"a": 1}});
        for k in crate::KINDS {
            for object in [serde_json::json!({}), wrong.clone()] {
                let mut o = object.clone();
                (k.default)(k.version, &mut o);
                k.begin_create(&mut o);
                k.begin_update(&mut o, &object);
                k.begin_status_update(&mut o, &object);
                k.check_create(&o, true);
                k.check_update(&o, &object, true);
                k.check_status_update(&o, &object, true);
                (k.selectable)(&o);
                (k.warnings)(&o, Some(&object));
                (k.row)(&o, 0);
                (k.graceful)(&o, None);
            }
        }
    }
}
