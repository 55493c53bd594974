//! Selectable fields, as data: where in an object they are. One pass over the encoded object collects
//! them all and skips the rest.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// One selectable field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    /// Where the value is, in order of preference: keys joined by dots (a leading dot is fine).
    pub paths: Vec<String>,
    /// What an object without it has.
    pub default: String,
    /// Lists and watches that ask for one value of it do not look at other objects.
    pub indexed: bool,
}

impl Field {
    /// A field whose name is also its path.
    pub fn new(name: impl Into<String>) -> Field {
        let name = name.into();
        Field {
            paths: vec![name.clone()],
            name,
            default: String::new(),
            indexed: false,
        }
    }

    /// Another place to look when the ones before have nothing.
    pub fn or(mut self, path: impl Into<String>) -> Field {
        self.paths.push(path.into());
        self
    }

    pub fn default(mut self, default: impl Into<String>) -> Field {
        self.default = default.into();
        self
    }

    pub fn indexed(mut self) -> Field {
        self.indexed = true;
        self
    }
}

/// The fields of one cache, prepared for the scan.
#[derive(Debug)]
pub struct FieldSet {
    pub fields: Vec<Field>,
    /// Which of `fields` are indexed, by their place.
    pub indexed: Vec<usize>,
    root: Node,
}

#[derive(Debug, Default)]
pub struct Node {
    children: Vec<(Box<str>, Node)>,
    /// The fields whose value is here, with the rank of this place among their paths.
    here: Vec<(usize, usize)>,
}

impl Node {
    pub fn child(&self, key: &str) -> Option<&Node> {
        self.children
            .iter()
            .find(|(name, _)| &**name == key)
            .map(|(_, node)| node)
    }

    fn descend(&mut self, key: &str) -> &mut Node {
        let at = match self.children.iter().position(|(name, _)| &**name == key) {
            Some(at) => at,
            None => {
                self.children.push((key.into(), Node::default()));
                self.children.len() - 1
            }
        };
        &mut self.children[at].1
    }
}

impl FieldSet {
    pub fn new(fields: Vec<Field>) -> FieldSet {
        let mut root = Node::default();
        for (place, field) in fields.iter().enumerate() {
            for (rank, path) in field.paths.iter().enumerate() {
                let mut node = &mut root;
                for key in path.trim_start_matches('.').split('.') {
                    node = node.descend(key);
                }
                node.here.push((place, rank));
            }
        }
        let indexed = (0..fields.len()).filter(|&place| fields[place].indexed).collect();
        FieldSet {
            fields,
            indexed,
            root,
        }
    }

    pub fn root(&self) -> &Node {
        &self.root
    }

    pub fn place(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }
}

/// What the scan found so far: for each field the best-ranked value.
pub type Found = Vec<Option<(usize, String)>>;

/// Reads one JSON value at `node`.
pub struct Capture<'a> {
    pub node: &'a Node,
    pub found: &'a mut Found,
}

impl Capture<'_> {
    fn take(self, text: impl Into<String>) {
        let text = text.into();
        if text.is_empty() {
            return;
        }
        for &(place, rank) in &self.node.here {
            let slot = &mut self.found[place];
            if slot.as_ref().is_none_or(|(best, _)| rank < *best) {
                *slot = Some((rank, text.clone()));
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for Capture<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Capture<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.take(text);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.take(if value { "true" } else { "false" });
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.take(value.to_string());
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.take(value.to_string());
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.take(value.to_string());
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(child) = map.next_key_seed(ChildOf(self.node))? {
            match child {
                Some(node) => map.next_value_seed(Capture {
                    node,
                    found: self.found,
                })?,
                None => map.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        Ok(())
    }
}

/// Reads a key and finds its node, without keeping the key.
pub struct ChildOf<'a>(pub &'a Node);

impl<'de, 'a> DeserializeSeed<'de> for ChildOf<'a> {
    type Value = Option<&'a Node>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de, 'a> Visitor<'de> for ChildOf<'a> {
    type Value = Option<&'a Node>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.child(key))
    }
}

/// Keeps one copy of each of the few strings that most objects share: namespaces, labels, nodes.
#[derive(Debug, Default)]
pub struct Interner {
    known: HashSet<Arc<str>>,
    sweep_at: usize,
}

impl Interner {
    pub fn get(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.known.get(text) {
            return known.clone();
        }
        if self.known.len() >= self.sweep_at.max(1024) {
            self.known.retain(|text| Arc::strong_count(text) > 1);
            self.sweep_at = self.known.len() * 2;
        }
        let text: Arc<str> = text.into();
        self.known.insert(text.clone());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interner_lets_go_of_what_nobody_uses() {
        let mut interner = Interner::default();
        let kept = interner.get("kept");
        for n in 0..10_000 {
            interner.get(&n.to_string());
        }
        assert!(interner.known.len() <= 1024);
        assert!(Arc::ptr_eq(&kept, &interner.get("kept")));
    }
}
