//! Lists: an array of the object, a vector, or two lists one after the other.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value as Json;

use super::{Eval, Key, Value};
use crate::error::EvalError;
use crate::limits::MAX_BUILT_SIZE;
use crate::meter::spend;
use crate::schema::Schema;

/// How a list of an object treats its elements when compared or added to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ListKind<'a> {
    /// A list that an expression built.
    Built,
    /// `x-kubernetes-list-type: atomic`, or none.
    Atomic,
    Set,
    /// With the keys that tell elements apart.
    Map(&'a [String]),
}

/// A list value.
#[derive(Debug, Clone)]
pub struct List<'a>(Repr<'a>);

#[derive(Debug, Clone)]
enum Repr<'a> {
    Owned {
        items: Arc<Vec<Value<'a>>>,
        kind: ListKind<'a>,
    },
    Json {
        items: &'a [Json],
        schema: &'a Schema,
        kind: ListKind<'a>,
    },
    /// Data without a schema.
    Plain(&'a [Json]),
    Joined(Arc<(List<'a>, List<'a>, usize)>),
}

/// Below this, joining copies.
const SMALL: usize = 64;

impl<'a> List<'a> {
    pub(crate) fn owned(items: Vec<Value<'a>>) -> Self {
        Self::with_kind(items, ListKind::Built)
    }

    pub(crate) fn with_kind(items: Vec<Value<'a>>, kind: ListKind<'a>) -> Self {
        Self(Repr::Owned {
            items: Arc::new(items),
            kind,
        })
    }

    pub(crate) fn json(items: &'a [Json], schema: &'a Schema, kind: ListKind<'a>) -> Self {
        Self(Repr::Json { items, schema, kind })
    }

    pub(crate) fn plain(items: &'a [Json]) -> Self {
        Self(Repr::Plain(items))
    }

    pub fn len(&self) -> usize {
        match &self.0 {
            Repr::Owned { items, .. } => items.len(),
            Repr::Json { items, .. } | Repr::Plain(items) => items.len(),
            Repr::Joined(parts) => parts.2,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn kind(&self) -> ListKind<'a> {
        match &self.0 {
            Repr::Owned { kind, .. } | Repr::Json { kind, .. } => *kind,
            Repr::Plain(_) | Repr::Joined(_) => ListKind::Built,
        }
    }

    /// True for lists that an expression built.
    pub(crate) fn is_built(&self) -> bool {
        matches!(self.kind(), ListKind::Built)
    }

    /// The element at a position that exists.
    pub(crate) fn get(&self, index: usize) -> Eval<Value<'a>> {
        let missing = || EvalError::new(format!("index out of bounds: {index}"));
        match &self.0 {
            Repr::Owned { items, .. } => items.get(index).cloned().ok_or_else(missing),
            Repr::Json { items, schema, .. } => {
                let item = items.get(index).ok_or_else(missing)?;
                match &schema.items {
                    Some(items) => Value::typed(item, items),
                    None => Err(EvalError::new(
                        "invalid array type, expected Items with a non-empty Schema",
                    )),
                }
            }
            Repr::Plain(items) => items.get(index).map(Value::plain).ok_or_else(missing),
            Repr::Joined(parts) => {
                let first = parts.0.len();
                if index < first {
                    parts.0.get(index)
                } else {
                    parts.1.get(index - first)
                }
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Eval<Value<'a>>> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    /// One list after the other.
    pub(crate) fn joined(&self, other: &Self) -> Eval<Self> {
        match self.kind() {
            ListKind::Set => return self.union(other),
            ListKind::Map(keys) => return self.merged(other, keys),
            ListKind::Built | ListKind::Atomic => {}
        }
        let total = self.len().saturating_add(other.len());
        if total > MAX_BUILT_SIZE {
            return Err(EvalError::new("list is too large"));
        }
        if other.is_empty() {
            return Ok(self.clone());
        }
        if self.is_empty() {
            return Ok(other.clone());
        }
        if total <= SMALL {
            let items: Eval<Vec<_>> = self.iter().chain(other.iter()).collect();
            return Ok(Self::owned(items?));
        }
        Ok(Self(Repr::Joined(Arc::new((self.clone(), other.clone(), total)))))
    }

    /// Adds to a list that nobody else holds without copying it: what comprehensions do with their result.
    pub(crate) fn push(&mut self, item: Value<'a>) {
        if let Repr::Owned { items, .. } = &mut self.0 {
            Arc::make_mut(items).push(item);
        }
    }

    /// Elements of the other list that this one lacks are added at the end.
    fn union(&self, other: &Self) -> Eval<Self> {
        spend((self.len() + other.len()) * 8)?;
        let mut items: Vec<Value<'a>> = self.iter().collect::<Eval<_>>()?;
        let mut known: HashSet<Identity> = items.iter().map(identity).collect();
        for item in other.iter() {
            let item = item?;
            if known.insert(identity(&item)) {
                items.push(item);
            }
        }
        Ok(Self::with_kind(items, ListKind::Set))
    }

    /// Elements of the other list replace those with the same keys; the rest are added at the end.
    fn merged(&self, other: &Self, keys: &'a [String]) -> Eval<Self> {
        spend((self.len() + other.len()) * 16)?;
        let mut items: Vec<Value<'a>> = self.iter().collect::<Eval<_>>()?;
        let places = positions(&items, keys)?;
        for item in other.iter() {
            let item = item?;
            match places.get(&keys_of(&item, keys)?) {
                Some(position) => items[*position] = item,
                None => items.push(item),
            }
        }
        Ok(Self::with_kind(items, ListKind::Map(keys)))
    }

    /// Whether an element equals the value.
    pub(crate) fn contains(&self, wanted: &Value<'a>) -> Eval<bool> {
        let mut failed = None;
        for item in self.iter() {
            match item.and_then(|item| item.equals(wanted)) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) if error.is_final() => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            // Lists that expressions build compare anything with anything.
            Some(error) if !self.is_built() => Err(error),
            _ => Ok(false),
        }
    }
}

/// What tells scalars apart, so that large sets need not be searched element by element.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    Key(Key),
    Double(u64),
    Bytes(Arc<[u8]>),
    Duration(i64),
    Timestamp(i128),
    Null,
    Missing,
    /// What cannot be an element of a set; all of these are taken for the same.
    Other,
}

pub(crate) fn identity(value: &Value<'_>) -> Identity {
    match value {
        Value::Double(double) => Key::of(value).map_or(Identity::Double(double.to_bits()), Identity::Key),
        Value::Bytes(bytes) => Identity::Bytes(bytes.clone()),
        Value::Duration(nanos) => Identity::Duration(*nanos),
        Value::Timestamp(at) => Identity::Timestamp(at.instant()),
        Value::Null => Identity::Null,
        other => Key::of(other).map_or(Identity::Other, Identity::Key),
    }
}

/// The keys of an element of a list of type map.
pub(super) fn keys_of(item: &Value<'_>, keys: &[String]) -> Eval<Vec<Identity>> {
    let Value::Map(map) = item else {
        return Ok(vec![Identity::Other]);
    };
    keys.iter()
        .map(|key| {
            Ok(map
                .property(key)?
                .map_or(Identity::Missing, |value| identity(&value)))
        })
        .collect()
}

/// Where the elements are, by their keys; the last of several with the same keys counts.
pub(super) fn positions(items: &[Value<'_>], keys: &[String]) -> Eval<HashMap<Vec<Identity>, usize>> {
    let pairs = items.iter().enumerate();
    pairs
        .map(|(position, item)| Ok((keys_of(item, keys)?, position)))
        .collect()
}
