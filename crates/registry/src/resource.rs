//! A served resource with everything the verbs need to know of it: names, rules, storage. Made once at
//! start from the fact tables; knows no kind by name.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use serde_json::Value;
use skiff_api::core::pod_gates::Features;
use skiff_api::facts;
use skiff_api::kind::{GENERIC, Kind, Orphan, kind};
use skiff_cache::Unreadable;
use skiff_meta::{GroupKind, GroupResource, Status};
use skiff_schema::TypeId;
use skiff_schema::apply::Set;
use skiff_store::KeyValue;

use crate::built_in::BuiltIn;
use crate::hooks::{Hook, NoHook};
use crate::strategy::Strategy;
use crate::{Codec, encode, fields};

pub struct Resource {
    pub facts: &'static facts::Resource,
    /// What is special to the kind, or to the version of a custom resource.
    pub strategy: Arc<dyn Strategy>,
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
    /// An object of which nothing is set, in the served version.
    empty: OnceLock<Value>,
    /// What a write through the resource (the empty name) and through each subresource never owns.
    unowned: OnceLock<Vec<(String, Set)>>,
}

impl Resource {
    pub fn built_in(facts: &'static facts::Resource, hook: Arc<dyn Hook>, features: Features) -> Resource {
        let rules = kind(facts.group, facts.kind);
        let (group, stored_api_version) = stored(facts);
        let version = facts.storage.as_ref().map_or(facts.version, |s| s.version);
        let stored_type = facts::schema()
            .by_gvk(group, version, facts.kind)
            .unwrap_or(facts.type_id);
        let codec = Arc::new(Codec::typed(
            &stored_api_version,
            facts.kind,
            stored_type,
            !rules.stored_as_json,
        ));
        let stored = (group, stored_api_version.as_str());
        let strategy = BuiltIn::new(facts, stored, stored_type, codec.clone(), features);
        Resource::new(facts, rules, Arc::new(strategy), hook, codec, stored_type)
    }

    /// A resource that was defined at run time.
    pub fn custom(facts: &'static facts::Resource, strategy: Arc<dyn Strategy>) -> Resource {
        let codec = Codec::json(&stored(facts).1, facts.kind);
        let (hook, codec) = (Arc::new(NoHook), Arc::new(codec));
        Resource::new(facts, &GENERIC, strategy, hook, codec, facts.type_id)
    }

    fn new(
        facts: &'static facts::Resource,
        rules: &Kind,
        strategy: Arc<dyn Strategy>,
        hook: Arc<dyn Hook>,
        codec: Arc<Codec>,
        stored_type: TypeId,
    ) -> Resource {
        let (group, stored_api_version) = stored(facts);
        Resource {
            strategy,
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
            codec,
            opening: encode::opening(&stored_api_version, facts.kind),
            ttl_seconds: rules.ttl_seconds,
            orphan: rules.orphan,
            returns_deleted: facts.returns_deleted_object,
            own_delete: rules.own_delete,
            orphan_warning: rules.orphan_warning,
            served_annotation: rules.served_annotation,
            empty: OnceLock::new(),
            unowned: OnceLock::new(),
            stored_api_version,
            facts,
        }
    }

    /// An object of which nothing is set, in the served version.
    pub fn empty(&self) -> &Value {
        self.empty.get_or_init(|| {
            let mut empty = serde_json::json!({"kind": self.kind, "apiVersion": self.api_version});
            self.strategy.normalise_served(&mut empty);
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
                    let resets = Set::of_fields(self.strategy.reset_fields(name));
                    (name.to_string(), fields::unowned(&resets))
                })
                .collect()
        });
        all.iter()
            .find(|(name, _)| name == subresource)
            .map_or(&all[0].1, |(_, set)| set)
    }

    /// An object on its way through a write, in the served version.
    pub fn served<'v>(&self, object: &'v Value) -> Cow<'v, Value> {
        self.strategy.served(object)
    }

    /// What a bookmark says of an object: nothing was ever written of it.
    pub fn never_written(&self) -> Value {
        let mut object = self.empty().clone();
        self.strategy.never_written(&mut object);
        object
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
        self.strategy.converts_elsewhere()
    }

    pub fn key(&self, namespace: &str, name: &str) -> String {
        if self.namespaced {
            format!("{}{namespace}/{name}", self.prefix)
        } else {
            format!("{}{name}", self.prefix)
        }
    }

    /// Turns an object of the served version into one that goes through a write.
    pub fn to_stored(&self, object: &mut Value) {
        self.strategy.to_stored(object);
    }

    /// Brings an object as it was read from the store into the served version, if nobody else has to be asked.
    pub fn from_stored(&self, object: &mut Value) {
        self.strategy.to_served(object);
    }

    /// An object as the store has it, in the stored version.
    pub fn decode(&self, found: &KeyValue) -> Result<Value, Status> {
        self.read(found).map_err(|unreadable| {
            tracing::error!(%unreadable, "a stored object cannot be read");
            Status::internal(unreadable)
        })
    }

    /// The same; the error is about the stored value and about nothing else.
    pub(crate) fn read(&self, found: &KeyValue) -> Result<Value, Unreadable> {
        let decoded = match skiff_store::unreadable(&found.value) {
            Some(why) => Err(why),
            None => self
                .strategy
                .read_value(&found.key, found.value.clone(), found.mod_revision),
        };
        decoded.map_err(|reason| Unreadable::new(found.key.clone(), found.mod_revision, &reason))
    }
}

/// The group and the `apiVersion` that the objects of a resource are stored in.
fn stored(facts: &facts::Resource) -> (&'static str, String) {
    let (group, version) = facts
        .storage
        .as_ref()
        .map_or((facts.group, facts.version), |s| (s.group, s.version));
    let api_version = match group {
        "" => version.to_string(),
        group => format!("{group}/{version}"),
    };
    (group, api_version)
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
    /// The built-in resources that `config` serves.
    pub fn new(
        config: &facts::RuntimeConfig,
        hook_of: impl Fn(&facts::Resource) -> Arc<dyn Hook>,
    ) -> Resources {
        let features = config.pod_features();
        let all: Vec<Arc<Resource>> = facts::resources()
            .iter()
            .filter(|facts| config.serves(facts))
            .map(|facts| Arc::new(Resource::built_in(facts, hook_of(facts), features)))
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

    /// The other resources that show the same objects.
    pub fn equivalents(&self, own: &Resource) -> Vec<Arc<Resource>> {
        let customs = self.customs.load();
        let all = self.all.iter().chain(&customs.all);
        all.filter(|other| {
            other.is_stored() && other.prefix == own.prefix && other.api_version != own.api_version
        })
        .cloned()
        .collect()
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
