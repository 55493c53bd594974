//! What a write does to the managers of an object, and what an apply does to the object.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use super::compare::{Comparison, compare};
use super::element::{Path, equal};
use super::field_set::field_set;
use super::managers::{Managed, Manager, ManagerId, Operation};
use super::merge::merge;
use super::reconcile::reconcile;
use super::remove::remove_items;
use super::set::Set;
use super::types::TypeRef;

/// The versions of a kind. An object's version is what its `apiVersion` says.
pub trait Versions {
    /// The kind's type in a version; `None` for a version that is not served.
    fn type_of(&self, version: &str) -> Option<TypeRef<'_>>;
    fn convert<'v>(&self, object: &'v Value, version: &str) -> Option<Cow<'v, Value>>;
}

/// A field that another manager owns and has another value for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    pub manager: ManagerId,
    pub path: Path,
}

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("{} conflicts", .0.len())]
    Conflicts(Vec<Conflict>),
    #[error("{0}")]
    Failed(String),
}

impl From<String> for ApplyError {
    fn from(text: String) -> ApplyError {
        ApplyError::Failed(text)
    }
}

/// The outcome of an apply.
#[derive(Debug)]
pub struct Applied {
    /// `None`: the configuration changes nothing of the object.
    pub object: Option<Value>,
    pub managed: Managed,
}

pub struct Updater<'a> {
    pub versions: &'a dyn Versions,
    /// Fields that this sort of write cannot change, whatever it says; they are never owned by it.
    pub ignored: &'a Set,
}

/// A change of an object in one version, and what it changed.
struct Write<'a> {
    old: &'a Value,
    new: &'a Value,
    version: &'a str,
    changes: &'a Comparison,
}

impl<'a> Updater<'a> {
    fn type_of(&self, version: &str) -> Result<TypeRef<'a>, String> {
        self.versions
            .type_of(version)
            .ok_or_else(|| format!("no corresponding type for {version}"))
    }

    /// Only the fields that a write changed, with those it may not change left out.
    pub fn changes(&self, old: &Value, new: &Value, version: &str) -> Result<Comparison, String> {
        Ok(compare(self.type_of(version)?, old, new)?.without(self.ignored))
    }

    /// Takes changed fields away from all managers but `writer`, and removed fields from everyone who had them.
    fn yield_fields(
        &self,
        write: &Write<'_>,
        managed: &mut Managed,
        writer: Option<&ManagerId>,
        force: bool,
    ) -> Result<(), ApplyError> {
        let Write {
            old,
            new,
            version,
            changes,
        } = *write;
        let mut versions: HashMap<String, Option<Comparison>> = HashMap::new();
        let mut conflicts: BTreeMap<ManagerId, Set> = BTreeMap::new();
        let mut removed: BTreeMap<ManagerId, Set> = BTreeMap::new();
        let mut gone = Vec::new();
        for (id, manager) in &managed.0 {
            if Some(id) == writer {
                continue;
            }
            let changes = if manager.api_version == version {
                changes
            } else {
                if !versions.contains_key(&manager.api_version) {
                    let converted = self.changes_in(old, new, &manager.api_version)?;
                    versions.insert(manager.api_version.clone(), converted);
                }
                match versions.get(&manager.api_version) {
                    Some(Some(changes)) => changes,
                    _ => {
                        gone.push(id.clone());
                        continue;
                    }
                }
            };
            let mut taken = manager.set.intersection(&changes.modified);
            taken.absorb(manager.set.intersection(&changes.added));
            if !taken.is_empty() {
                conflicts.insert(id.clone(), taken);
            }
            if !changes.removed.is_empty() {
                removed.insert(id.clone(), changes.removed.clone());
            }
        }
        for id in gone {
            managed.0.remove(&id);
        }
        if !force && !conflicts.is_empty() {
            let found = conflicts.into_iter().flat_map(|(manager, set)| {
                set.paths().into_iter().map(move |path| Conflict {
                    manager: manager.clone(),
                    path,
                })
            });
            return Err(ApplyError::Conflicts(found.collect()));
        }
        for (id, taken) in conflicts.iter().chain(&removed) {
            if let Some(manager) = managed.0.get_mut(id) {
                manager.set.remove(taken);
            }
        }
        managed.0.retain(|_, manager| !manager.set.is_empty());
        Ok(())
    }

    fn changes_in(&self, old: &Value, new: &Value, version: &str) -> Result<Option<Comparison>, String> {
        let (Some(old), Some(new)) = (
            self.versions.convert(old, version),
            self.versions.convert(new, version),
        ) else {
            return Ok(None);
        };
        self.changes(&old, &new, version).map(Some)
    }

    fn reconcile(&self, managed: &mut Managed) {
        managed.0.retain(|_, manager| {
            let Some(of) = self.versions.type_of(&manager.api_version) else {
                return false;
            };
            reconcile(&mut manager.set, of);
            true
        });
    }

    /// A write that is no apply: everyone loses what it changed, and the set of that is returned.
    pub fn update(
        &self,
        old: &Value,
        new: &Value,
        version: &str,
        changes: Comparison,
        managed: &mut Managed,
    ) -> Result<Set, ApplyError> {
        self.reconcile(managed);
        let write = Write {
            old,
            new,
            version,
            changes: &changes,
        };
        self.yield_fields(&write, managed, None, true)?;
        let mut changed = changes.modified;
        changed.absorb(changes.added);
        Ok(changed)
    }

    /// Applies a configuration, which is checked against its type, to a live object of the same version.
    pub fn apply(
        &self,
        live: &Value,
        config: &Value,
        version: &str,
        mut managed: Managed,
        applier: &ManagerId,
        force: bool,
    ) -> Result<Applied, ApplyError> {
        let of = self.type_of(version)?;
        self.reconcile(&mut managed);
        let merged = merge(of, live, config).map_err(|error| format!("failed to merge config: {error}"))?;
        let last = managed.0.get(applier).cloned();
        // What the configuration says of the object's identity is owned while it is merged, so that it stays.
        let manager = Manager {
            set: field_set(of, config),
            api_version: version.to_string(),
            time: last.as_ref().and_then(|last| last.time.clone()),
        };
        managed.0.insert(applier.clone(), manager);
        let object = self.prune(merged, &managed, version, last.as_ref());
        if let Some(manager) = managed.0.get_mut(applier) {
            manager.set.remove_recursively(self.ignored);
        }
        let changes = self
            .changes(live, &object, version)
            .map_err(|error| format!("failed to compare objects: {error}"))?;
        let write = Write {
            old: live,
            new: &object,
            version,
            changes: &changes,
        };
        self.yield_fields(&write, &mut managed, Some(applier), force)?;
        Ok(Applied {
            object: (!equal(live, &object)).then_some(object),
            managed,
        })
    }

    /// Removes what the applier owned by its last configuration, does not mention any more, and nobody else owns.
    fn prune(&self, merged: Value, managed: &Managed, version: &str, last: Option<&Manager>) -> Value {
        let Some(last) = last.filter(|last| !last.set.is_empty()) else {
            return merged;
        };
        let in_last = |object: &Value| {
            self.versions
                .convert(object, &last.api_version)
                .map(Cow::into_owned)
        };
        let Some(of) = self.versions.type_of(&last.api_version) else {
            return merged;
        };
        let Some(converted) = in_last(&merged) else {
            return merged;
        };
        let last_set = last.set.ensure_named_fields(Some(of));
        let pruned = remove_items(of, &converted, &last_set);
        let pruned = self.add_back_owned(&converted, pruned, &last.api_version, managed);
        // What nobody owned, or only updaters, was not the applier's to remove.
        let Some(pruned) = in_last(&pruned) else {
            return merged;
        };
        let left = field_set(of, &pruned).ensure_named_fields(Some(of));
        let had = field_set(of, &converted).ensure_named_fields(Some(of));
        let pruned = remove_items(of, &converted, &had.difference(&left).intersection(&last_set));
        match self.versions.convert(&pruned, version) {
            Some(pruned) => pruned.into_owned(),
            None => merged,
        }
    }

    fn add_back_owned(&self, merged: &Value, pruned: Value, version: &str, managed: &Managed) -> Value {
        let mut by_version: BTreeMap<&str, Set> = BTreeMap::new();
        for manager in managed.0.values() {
            let set = by_version.entry(&manager.api_version).or_default();
            *set = set.union(&manager.set);
        }
        let first = by_version.remove(version).map(|set| (version, set));
        let (mut merged, mut pruned) = (merged.clone(), pruned);
        for (version, owned) in first.into_iter().chain(by_version) {
            let (Some(of), Some(all), Some(left)) = (
                self.versions.type_of(version),
                self.versions.convert(&merged, version).map(Cow::into_owned),
                self.versions.convert(&pruned, version).map(Cow::into_owned),
            ) else {
                continue;
            };
            let named = |set: &Set| set.ensure_named_fields(Some(of));
            let keep = named(&field_set(of, &left)).union(&named(&owned));
            pruned = remove_items(of, &all, &named(&field_set(of, &all)).difference(&keep));
            merged = all;
        }
        pruned
    }
}

impl Managed {
    /// Gives a set of fields to an updater, beside what it had.
    pub fn give(&mut self, id: ManagerId, mut set: Set, api_version: &str, time: &str) {
        if let Some(before) = self.0.remove(&id) {
            set.absorb(before.set);
        }
        let manager = Manager {
            set,
            api_version: api_version.to_string(),
            time: Some(time.to_string()),
        };
        self.0.insert(id, manager);
    }

    /// Merges the oldest updaters of each version into one until no more than `limit` are left.
    pub fn cap_updaters(&mut self, limit: usize, bucket_name: &str) {
        let mut updaters: Vec<ManagerId> = self
            .0
            .keys()
            .filter(|id| id.operation == Operation::Update)
            .cloned()
            .collect();
        let mut left = updaters.len();
        if left <= limit {
            return;
        }
        updaters.sort_by_key(|id| {
            (
                self.0.get(id).and_then(|manager| manager.time.clone()),
                id.clone(),
            )
        });
        let mut first_of: HashMap<String, ManagerId> = HashMap::new();
        for id in updaters {
            if left <= limit {
                return;
            }
            let Some(version) = self.0.get(&id).map(|manager| manager.api_version.clone()) else {
                continue;
            };
            let Some(first) = first_of.get(&version) else {
                first_of.insert(version, id);
                continue;
            };
            let bucket = ManagerId::new(bucket_name, Operation::Update, &version, "");
            if !self.0.contains_key(&bucket)
                && let Some(manager) = self.0.remove(first)
            {
                self.0.insert(bucket.clone(), manager);
            }
            if let Some(manager) = self.0.remove(&id) {
                // The time of the later one.
                let set = match self.0.get(&bucket) {
                    Some(kept) => manager.set.union(&kept.set),
                    None => manager.set.clone(),
                };
                self.0.insert(bucket, Manager { set, ..manager });
                left -= 1;
            }
        }
    }
}
