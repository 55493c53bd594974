//! Which keys have a value: of an indexed field, or of a label. What a selector pins to one value is
//! looked up here instead of in every object. Knows keys and values only.

use std::collections::btree_set::Range;
use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

/// Keys in order. Many values are those of one object alone; that takes no tree.
#[derive(Debug)]
pub enum Keys {
    One(Arc<str>),
    Many(BTreeSet<Arc<str>>),
}

impl Keys {
    pub fn len(&self) -> usize {
        match self {
            Keys::One(_) => 1,
            Keys::Many(keys) => keys.len(),
        }
    }

    fn insert(&mut self, key: &Arc<str>) {
        match self {
            Keys::One(only) if only == key => {}
            Keys::One(only) => *self = Keys::Many(BTreeSet::from([only.clone(), key.clone()])),
            Keys::Many(keys) => {
                keys.insert(key.clone());
            }
        }
    }

    /// Whether none is left.
    fn remove(&mut self, key: &Arc<str>) -> bool {
        match self {
            Keys::One(only) => only == key,
            Keys::Many(keys) => {
                keys.remove(key);
                keys.is_empty()
            }
        }
    }

    pub fn range<'a>(&'a self, bounds: (Bound<&str>, Bound<&str>)) -> impl Iterator<Item = &'a Arc<str>> {
        let (one, many): (Option<&Arc<str>>, Option<Range<'a, Arc<str>>>) = match self {
            Keys::One(only) => {
                use std::ops::RangeBounds;
                let inside = RangeBounds::<str>::contains(&bounds, &**only);
                (inside.then_some(only), None)
            }
            Keys::Many(keys) => (None, Some(keys.range::<str, _>(bounds))),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

/// The keys by value.
#[derive(Debug, Default)]
pub struct Index(HashMap<Arc<str>, Keys>);

impl Index {
    pub fn get(&self, value: &str) -> Option<&Keys> {
        self.0.get(value)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The keys of every value.
    pub fn all(&self) -> impl Iterator<Item = &Keys> {
        self.0.values()
    }

    pub fn insert(&mut self, value: &Arc<str>, key: &Arc<str>) {
        match self.0.get_mut(value) {
            Some(keys) => keys.insert(key),
            None => {
                self.0.insert(value.clone(), Keys::One(key.clone()));
            }
        }
    }

    pub fn remove(&mut self, value: &str, key: &Arc<str>) {
        if let Some(keys) = self.0.get_mut(value)
            && keys.remove(key)
        {
            self.0.remove(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_and_go() {
        let mut index = Index::default();
        let key = |name: &str| -> Arc<str> { name.into() };
        let check = |index: &Index, bounds: (Bound<&str>, Bound<&str>), expected: &[&str]| {
            let found: Vec<&str> = index
                .get("v")
                .into_iter()
                .flat_map(|keys| keys.range(bounds))
                .map(|key| &**key)
                .collect();
            assert_eq!(found, expected);
        };
        const ALL: (Bound<&str>, Bound<&str>) = (Bound::Unbounded, Bound::Unbounded);
        check(&index, ALL, &[]);
        index.insert(&key("v"), &key("b"));
        index.insert(&key("v"), &key("b"));
        check(&index, ALL, &["b"]);
        check(&index, (Bound::Excluded("b"), Bound::Unbounded), &[]);
        index.remove("v", &key("x"));
        index.insert(&key("v"), &key("a"));
        index.insert(&key("v"), &key("c"));
        check(&index, ALL, &["a", "b", "c"]);
        check(&index, (Bound::Excluded("a"), Bound::Excluded("c")), &["b"]);
        for name in ["a", "b", "c"] {
            index.remove("v", &key(name));
        }
        assert!(index.is_empty());
    }
}
