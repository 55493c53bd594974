//! A set of fields as a tree. A node is a member itself, or has members below it, or both.

use serde_json::{Map, Value};

use super::element::{Path, PathElement};
use super::types::{Atom, TypeRef};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Set {
    /// Sorted by element; none is without members.
    nodes: Vec<Node>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub element: PathElement,
    pub member: bool,
    pub children: Set,
}

impl Set {
    /// A set of paths of field names.
    pub fn of_fields(paths: &[&[&str]]) -> Set {
        let mut set = Set::default();
        for path in paths {
            set.insert(
                path.iter()
                    .map(|name| PathElement::Field(name.to_string()))
                    .collect(),
            );
        }
        set
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub(super) fn nodes_mut(&mut self) -> impl Iterator<Item = &mut Node> {
        self.nodes.iter_mut()
    }

    pub(super) fn node(&self, element: &PathElement) -> Option<&Node> {
        let at = self
            .nodes
            .binary_search_by(|node| node.element.cmp(element))
            .ok()?;
        Some(&self.nodes[at])
    }

    /// By the name of a field, without making an element of it.
    pub(super) fn field(&self, name: &str) -> Option<&Node> {
        let at = self
            .nodes
            .binary_search_by(|node| match &node.element {
                PathElement::Field(field) => field.as_str().cmp(name),
                _ => std::cmp::Ordering::Greater,
            })
            .ok()?;
        Some(&self.nodes[at])
    }

    /// Adds a node that sorts after all others.
    pub(super) fn push(&mut self, element: PathElement, member: bool, children: Set) {
        debug_assert!(self.nodes.last().is_none_or(|last| last.element < element));
        if member || !children.is_empty() {
            self.nodes.push(Node {
                element,
                member,
                children,
            });
        }
    }

    /// The node of an element, made without members when it is not there; the caller adds some.
    pub(super) fn entry(&mut self, element: PathElement) -> &mut Node {
        let at = match self.nodes.binary_search_by(|node| node.element.cmp(&element)) {
            Ok(at) => at,
            Err(at) => {
                let node = Node {
                    element,
                    member: false,
                    children: Set::default(),
                };
                self.nodes.insert(at, node);
                at
            }
        };
        &mut self.nodes[at]
    }

    /// Adds a path; the empty one means the whole object, which nobody owns.
    pub fn insert(&mut self, path: Vec<PathElement>) {
        let mut here = self;
        let last = path.len().saturating_sub(1);
        for (at, element) in path.into_iter().enumerate() {
            let node = here.entry(element);
            if at == last {
                node.member = true;
                return;
            }
            here = &mut node.children;
        }
    }

    pub fn has(&self, path: &[PathElement]) -> bool {
        let Some((last, parents)) = path.split_last() else {
            return false;
        };
        let mut here = self;
        for element in parents {
            match here.node(element) {
                Some(node) => here = &node.children,
                None => return false,
            }
        }
        here.node(last).is_some_and(|node| node.member)
    }

    pub fn union(&self, other: &Set) -> Set {
        let mut all = self.clone();
        all.absorb(other.clone());
        all
    }

    /// Adds all of another set.
    pub fn absorb(&mut self, other: Set) {
        if self.is_empty() {
            *self = other;
        } else if !other.is_empty() {
            let own = std::mem::take(&mut self.nodes);
            self.nodes.reserve(own.len().max(other.nodes.len()));
            let (mut a, mut b) = (own.into_iter().peekable(), other.nodes.into_iter().peekable());
            loop {
                let order = match (a.peek(), b.peek()) {
                    (Some(x), Some(y)) => x.element.cmp(&y.element),
                    (Some(_), None) => std::cmp::Ordering::Less,
                    (None, Some(_)) => std::cmp::Ordering::Greater,
                    (None, None) => return,
                };
                match order {
                    std::cmp::Ordering::Less => self.nodes.extend(a.next()),
                    std::cmp::Ordering::Greater => self.nodes.extend(b.next()),
                    std::cmp::Ordering::Equal => {
                        if let (Some(mut x), Some(y)) = (a.next(), b.next()) {
                            x.member |= y.member;
                            x.children.absorb(y.children);
                            self.nodes.push(x);
                        }
                    }
                }
            }
        }
    }

    pub fn intersection(&self, other: &Set) -> Set {
        let mut out = Set::default();
        let mut theirs = other.nodes.iter().peekable();
        for node in &self.nodes {
            while theirs.next_if(|their| their.element < node.element).is_some() {}
            if let Some(their) = theirs.next_if(|their| their.element == node.element) {
                let children = node.children.intersection(&their.children);
                let member = node.member && their.member;
                if member || !children.is_empty() {
                    out.push(node.element.clone(), member, children);
                }
            }
        }
        out
    }

    /// Runs `with` on each node that has a counterpart in `other`; what has no members then is dropped.
    fn subtract(&mut self, other: &Set, with: impl Fn(&mut Node, &Node)) {
        if other.is_empty() {
            return;
        }
        let mut theirs = other.nodes.iter().peekable();
        self.nodes.retain_mut(|node| {
            while theirs.next_if(|their| their.element < node.element).is_some() {}
            if let Some(their) = theirs.next_if(|their| their.element == node.element) {
                with(node, their);
            }
            node.member || !node.children.is_empty()
        });
    }

    /// Takes away what is in the other set. A member of the other says nothing about what is below it.
    pub fn remove(&mut self, other: &Set) {
        self.subtract(other, |node, their| {
            node.member &= !their.member;
            node.children.remove(&their.children);
        });
    }

    /// As [`Set::remove`], but a member of the other takes away all that is below it too.
    pub fn remove_recursively(&mut self, other: &Set) {
        self.subtract(other, |node, their| {
            if their.member {
                node.member = false;
                node.children = Set::default();
            } else {
                node.children.remove_recursively(&their.children);
            }
        });
    }

    /// What [`Set::remove`] leaves.
    pub fn difference(&self, other: &Set) -> Set {
        let mut left = self.clone();
        left.remove(other);
        left
    }

    /// With every struct field on the way to a member as a member too.
    pub(super) fn ensure_named_fields(&self, of: Option<TypeRef<'_>>) -> Set {
        let atom = of.map(|of| of.atom(None));
        let mut out = Set::default();
        for node in &self.nodes {
            let mut member = node.member;
            let below = match (&node.element, &atom) {
                (PathElement::Field(name), Some(Atom::Map(map))) => {
                    let field = map.field(name);
                    member |= field.is_some() && !node.children.is_empty();
                    field.or(map.element)
                }
                (PathElement::Key(_), Some(Atom::List(list))) => Some(list.element),
                _ => None,
            };
            out.push(
                node.element.clone(),
                member,
                node.children.ensure_named_fields(below),
            );
        }
        out
    }

    /// All members: on each level first the members, then what is below them.
    pub fn paths(&self) -> Vec<Path> {
        let mut out = Vec::new();
        self.collect(&mut Vec::new(), &mut out);
        out
    }

    fn collect(&self, prefix: &mut Vec<PathElement>, out: &mut Vec<Path>) {
        for node in self.nodes.iter().filter(|node| node.member) {
            let mut path = prefix.clone();
            path.push(node.element.clone());
            out.push(Path(path));
        }
        for node in &self.nodes {
            if !node.children.is_empty() {
                prefix.push(node.element.clone());
                node.children.collect(prefix, out);
                prefix.pop();
            }
        }
    }

    /// As `FieldsV1`.
    pub fn to_value(&self) -> Value {
        Value::Object(self.to_map(false))
    }

    fn to_map(&self, with_self: bool) -> Map<String, Value> {
        let mut map = Map::new();
        if with_self {
            map.insert(".".to_string(), Value::Object(Map::new()));
        }
        for node in &self.nodes {
            let below = if node.children.is_empty() {
                Map::new()
            } else {
                node.children.to_map(node.member)
            };
            map.insert(node.element.encode(), Value::Object(below));
        }
        map
    }

    /// Reads `FieldsV1`.
    pub fn from_value(value: &Value) -> Result<Set, String> {
        match value {
            Value::Object(map) => Ok(Set::from_map(map)?.1),
            Value::Null => Ok(Set::default()),
            _ => Err("fieldsV1 is not an object".to_string()),
        }
    }

    /// Whether the map says that its own place is a member, and the set below.
    fn from_map(map: &Map<String, Value>) -> Result<(bool, Set), String> {
        let mut set = Set {
            nodes: Vec::with_capacity(map.len()),
        };
        let mut member = false;
        let mut sorted = true;
        for (key, value) in map {
            if key == "." {
                member = true;
                continue;
            }
            let Some(element) = PathElement::parse(key)? else {
                continue;
            };
            let (own, children) = match value {
                Value::Object(below) => Set::from_map(below)?,
                _ => return Err(format!("the value of {key} is not an object")),
            };
            sorted &= set.nodes.last().is_none_or(|last| last.element < element);
            set.nodes.push(Node {
                element,
                member: own,
                children,
            });
        }
        if !sorted {
            set.nodes.sort_by(|a, b| a.element.cmp(&b.element));
            // Two spellings of one element.
            set.nodes.dedup_by(|later, kept| {
                let same = later.element == kept.element;
                if same {
                    kept.member |= later.member;
                    kept.children.absorb(std::mem::take(&mut later.children));
                }
                same
            });
        }
        Ok((member || set.nodes.is_empty(), set))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn set(value: Value) -> Set {
        Set::from_value(&value).expect("parses")
    }

    #[test]
    fn sets_round_trip() {
        for value in [
            json!({}),
            json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}}, "f:spec": {"f:ports": {"k:{\"port\":80}": {".": {}, "f:name": {}}, "k:{\"port\":443}": {}}}}),
            json!({"f:finalizers": {"v:\"b\"": {}, "v:\"a\"": {}}}),
        ] {
            assert_eq!(set(value.clone()).to_value(), value);
        }
        assert!(Set::from_value(&json!({"f:a": 1})).is_err());
        assert!(Set::from_value(&json!({"zz": {}})).is_err());
    }

    #[test]
    fn set_algebra() {
        let a = set(json!({"f:a": {".": {}, "f:b": {}, "f:c": {}}, "f:d": {}}));
        let b = set(json!({"f:a": {"f:b": {}}, "f:e": {}}));
        assert_eq!(
            a.union(&b),
            set(json!({"f:a": {".": {}, "f:b": {}, "f:c": {}}, "f:d": {}, "f:e": {}}))
        );
        assert_eq!(a.intersection(&b), set(json!({"f:a": {"f:b": {}}})));
        assert_eq!(
            a.difference(&b),
            set(json!({"f:a": {".": {}, "f:c": {}}, "f:d": {}}))
        );
        assert_eq!(b.difference(&set(json!({"f:a": {}}))), b);
        let mut left = b.clone();
        left.remove_recursively(&set(json!({"f:a": {}})));
        assert_eq!(left, set(json!({"f:e": {}})));
        assert!(b.difference(&b).is_empty());
        let paths: Vec<String> = a.paths().iter().map(ToString::to_string).collect();
        assert_eq!(paths, [".a", ".d", ".a.b", ".a.c"]);
        assert!(a.has(&a.paths()[2].0) && !b.has(&a.paths()[0].0));
    }
}
