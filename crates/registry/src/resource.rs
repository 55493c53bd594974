//! A served resource with everything the verbs need to know of it: names, rules, storage. Made once at
//! start from the fact tables; knows no kind by name.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use serde_json::Value;
use skiff_api::{facts, kind::Kind};
use skiff_meta::{GroupKind, GroupResource};
use skiff_schema::TypeId;
use skiff_schema::apply::{Set, TypeRef};

use crate::custom::Custom;
use crate::hooks::{Converter, Hook, NoHook, converter, reset_fields, storage_facts};
use crate::{Codec, encode, fields, object};

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

pub struct Resource {
    pub facts: &'static facts::Resource,
    pub rules: &'static Kind,
    /// The validation of the group that is asked: events have two.
    pub checks: &'static Kind,
    pub hook: Arc<dyn Hook>,
    pub group_resource: GroupResource,
    pub group_kind: GroupKind,
    pub plural: String,
    pub kind: String,
    pub namespaced: bool,
    /// `v1`, `apps/v1`: as this resource is served.
    pub api_version: String,
    /// As its objects are stored.
    pub stored_api_version: String,
    /// The type that objects are stored in.
    pub stored_type: TypeId,
    /// `/registry/pods/`; empty for what is never stored.
    pub prefix: String,
    pub codec: Arc<Codec>,
    /// The first bytes of every cached object (see `encode`).
    pub opening: String,
    pub ttl_seconds: Option<i64>,
    pub orphan: Orphan,
    /// A delete that removes at once answers with the object.
    pub returns_deleted: bool,
    /// Upstream deletes the kind in its own way, and words a failed precondition differently.
    pub own_delete: bool,
    /// What a client is told who deletes without saying what becomes of dependents.
    pub orphan_warning: Option<&'static str>,
    /// An annotation that metadata alone does not show.
    pub served_annotation: Option<&'static str>,
    converter: Option<Converter>,
    /// The rules of a resource that was defined at run time; `rules` are then the generic ones.
    pub custom: Option<Arc<dyn Custom>>,
    /// An object of which nothing is set, in the served version.
    empty: OnceLock<Value>,
    /// What a write through the resource (the empty name) and through each subresource never owns.
    unowned: OnceLock<Vec<(String, Set)>>,
}

impl Resource {
    pub fn new(facts: &'static facts::Resource, hook: Arc<dyn Hook>) -> Resource {
        let kept = storage_facts(facts.group, facts.plural);
        let (group, version) = facts
            .storage
            .as_ref()
            .map_or((facts.group, facts.version), |s| (s.group, s.version));
        let stored_api_version = if group.is_empty() {
            version.to_string()
        } else {
            format!("{group}/{version}")
        };
        let stored_type = facts::schema()
            .by_gvk(group, version, facts.kind)
            .unwrap_or(facts.type_id);
        Resource {
            codec: Arc::new(Codec::typed(
                &stored_api_version,
                facts.kind,
                stored_type,
                !kept.json,
            )),
            rules: skiff_api::kind::kind(group, facts.kind),
            checks: skiff_api::kind::kind(facts.group, facts.kind),
            hook,
            group_resource: GroupResource::new(facts.group, facts.plural),
            group_kind: GroupKind::new(group, facts.kind),
            plural: facts.plural.to_string(),
            kind: facts.kind.to_string(),
            namespaced: facts.namespaced,
            api_version: facts.api_version(),
            stored_type,
            prefix: facts
                .storage
                .as_ref()
                .map(|s| format!("/registry/{}/", s.key))
                .unwrap_or_default(),
            opening: encode::opening(&stored_api_version, facts.kind),
            ttl_seconds: kept.ttl_seconds,
            orphan: kept.orphan,
            returns_deleted: facts.returns_deleted_object,
            own_delete: kept.own_delete,
            orphan_warning: kept.orphan_warning,
            served_annotation: kept.served_annotation,
            converter: converter(facts.group, facts.version, facts.kind),
            empty: OnceLock::new(),
            unowned: OnceLock::new(),
            stored_api_version,
            facts,
            custom: None,
        }
    }

    /// A resource that was defined at run time.
    pub fn custom(facts: &'static facts::Resource, custom: Arc<dyn Custom>) -> Resource {
        let resource = Resource::new(facts, Arc::new(NoHook));
        Resource {
            codec: Arc::new(Codec::json(&resource.stored_api_version, facts.kind)),
            rules: &skiff_api::kind::GENERIC,
            checks: &skiff_api::kind::GENERIC,
            custom: Some(custom),
            ..resource
        }
    }

    /// The served type of a built-in resource as server-side apply sees it.
    pub fn apply_type(&self) -> TypeRef<'_> {
        TypeRef::Object(facts::schema(), self.facts.type_id)
    }

    /// Gives an object of the served version the shape in which upstream would answer it.
    pub fn normalise_served(&self, object: &mut Value) {
        if self.custom.is_some() {
            return;
        }
        skiff_schema::normalise(facts::schema(), self.facts.type_id, object);
    }

    /// An object of which nothing is set, in the served version.
    pub fn empty(&self) -> &Value {
        self.empty.get_or_init(|| {
            let mut empty = serde_json::json!({"kind": self.kind, "apiVersion": self.api_version});
            self.normalise_served(&mut empty);
            empty
        })
    }

    /// The fields that a write through `subresource` (empty for the resource itself) never owns.
    pub fn unowned(&self, subresource: &str) -> &Set {
        let all = self.unowned.get_or_init(|| {
            let names = self.facts.subresources.iter().map(|subresource| subresource.name);
            std::iter::once("")
                .chain(names)
                .map(|name| {
                    let resets = reset_fields(self, name);
                    (name.to_string(), fields::unowned(&resets))
                })
                .collect()
        });
        all.iter()
            .find(|(name, _)| name == subresource)
            .map_or(&all[0].1, |(_, set)| set)
    }

    /// A stored object in the served version.
    pub fn served<'v>(&self, stored: &'v Value) -> Cow<'v, Value> {
        // Custom objects are in the served version from the start of a write.
        if self.served_as_stored() || self.custom.is_some() {
            return Cow::Borrowed(stored);
        }
        let mut served = stored.clone();
        self.from_stored(&mut served);
        self.normalise_served(&mut served);
        Cow::Owned(served)
    }

    pub fn is_stored(&self) -> bool {
        !self.prefix.is_empty()
    }

    /// Whether stored objects can be sent as they are.
    pub fn served_as_stored(&self) -> bool {
        self.api_version == self.stored_api_version && !self.converts_elsewhere()
    }

    /// Whether objects of other versions can only be had by asking someone else.
    pub fn converts_elsewhere(&self) -> bool {
        self.custom
            .as_ref()
            .is_some_and(|custom| custom.converts_elsewhere())
    }

    pub fn key(&self, namespace: &str, name: &str) -> String {
        if self.namespaced {
            format!("{}{namespace}/{name}", self.prefix)
        } else {
            format!("{}{name}", self.prefix)
        }
    }

    /// Turns an object of the served version into one of the stored version.
    pub fn to_stored(&self, value: &mut Value) {
        if self.served_as_stored() || self.custom.is_some() {
            return;
        }
        if let Some(converter) = &self.converter {
            (converter.to_stored)(value);
        }
        object::put(
            value,
            &["apiVersion"],
            Value::String(self.stored_api_version.clone()),
        );
    }

    pub fn from_stored(&self, value: &mut Value) {
        if self.served_as_stored() || self.converts_elsewhere() {
            return;
        }
        if let Some(converter) = &self.converter {
            (converter.from_stored)(value);
            // The versions differ in what Go prints of a field that nobody set.
            self.normalise_served(value);
        }
        if let Some(custom) = &self.custom {
            custom.prune(value, &self.api_version);
        }
        object::put(value, &["apiVersion"], Value::String(self.api_version.clone()));
    }
}

/// All served resources, found by group, version and plural name. The built-in ones never change; those
/// that were defined at run time are a snapshot, replaced as a whole.
pub struct Resources {
    all: Vec<Arc<Resource>>,
    /// Indexes into `all` by plural name: few resources share one.
    by_plural: HashMap<&'static str, Vec<usize>>,
    customs: ArcSwap<Customs>,
}

/// The resources that were defined at run time, in the order of discovery.
#[derive(Default)]
pub struct Customs {
    pub all: Vec<Arc<Resource>>,
    /// By group, version and plural name.
    by_name: HashMap<(&'static str, &'static str, &'static str), usize>,
}

impl Customs {
    pub fn new(all: Vec<Arc<Resource>>) -> Customs {
        let by_name = all
            .iter()
            .enumerate()
            .map(|(at, r)| ((r.facts.group, r.facts.version, r.facts.plural), at))
            .collect();
        Customs { all, by_name }
    }
}

impl Resources {
    pub fn new(hook_of: impl Fn(&facts::Resource) -> Arc<dyn Hook>) -> Resources {
        let all: Vec<Arc<Resource>> = facts::resources()
            .iter()
            .map(|facts| Arc::new(Resource::new(facts, hook_of(facts))))
            .collect();
        let mut by_plural: HashMap<&'static str, Vec<usize>> = HashMap::new();
        for (index, resource) in all.iter().enumerate() {
            by_plural.entry(resource.facts.plural).or_default().push(index);
        }
        Resources {
            all,
            by_plural,
            customs: ArcSwap::default(),
        }
    }

    /// What was defined at run time, as of now.
    pub fn customs(&self) -> Arc<Customs> {
        self.customs.load_full()
    }

    pub fn set_customs(&self, customs: Customs) {
        self.customs.store(Arc::new(customs));
    }

    /// A resource by name, built-in or defined at run time.
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        if let Some(resource) = self.get(group, version, plural) {
            return Some(resource.clone());
        }
        let customs = self.customs.load();
        let at = *customs.by_name.get(&(group, version, plural))?;
        Some(customs.all[at].clone())
    }

    /// Any served version of a resource, built-in or not.
    pub fn find_any(&self, group: &str, plural: &str) -> Option<Arc<Resource>> {
        if let Some(resource) = self.preferred(group, plural) {
            return Some(resource.clone());
        }
        let customs = self.customs.load();
        let found = customs
            .all
            .iter()
            .find(|r| r.facts.group == group && r.plural == plural);
        found.cloned()
    }

    pub fn all(&self) -> &[Arc<Resource>] {
        &self.all
    }

    pub fn get(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Resource>> {
        let found = self.by_plural.get(plural)?.iter().map(|index| &self.all[*index]);
        found
            .into_iter()
            .find(|r| r.facts.group == group && r.facts.version == version)
    }

    /// The resource in its preferred version.
    pub fn preferred(&self, group: &str, plural: &str) -> Option<&Arc<Resource>> {
        let found = self.by_plural.get(plural)?.iter().map(|index| &self.all[*index]);
        found.into_iter().find(|r| r.facts.group == group)
    }

    /// Whether a group is built in.
    pub fn has_group(&self, group: &str) -> bool {
        self.all.iter().any(|r| r.facts.group == group)
    }

    pub fn has_group_version(&self, group: &str, version: &str) -> bool {
        self.all
            .iter()
            .any(|r| r.facts.group == group && r.facts.version == version)
    }
}
