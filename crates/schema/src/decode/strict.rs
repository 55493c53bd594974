//! The findings of strict decoding, in the order of the document: unknown and duplicate fields.

use super::node::Node;

/// Upstream stops counting here.
const MAX_ERRORS: usize = 100;

#[derive(Default)]
pub(super) struct Strict {
    path: String,
    errors: Vec<String>,
}

/// The duplicates in a value that stands at this path.
pub(crate) fn duplicates_below(path: String, node: &Node) -> Vec<String> {
    let mut strict = Strict {
        path,
        ..Strict::default()
    };
    strict.untyped(node);
    strict.into_errors()
}

impl Strict {
    /// Steps into a field or key; give the mark to [`Strict::pop`].
    pub fn push_key(&mut self, key: &str) -> usize {
        let mark = self.path.len();
        if mark > 0 {
            self.path.push('.');
        }
        self.path.push_str(key);
        mark
    }

    pub fn push_index(&mut self, index: usize) -> usize {
        let mark = self.path.len();
        self.path.push_str(&format!("[{index}]"));
        mark
    }

    pub fn pop(&mut self, mark: usize) {
        self.path.truncate(mark);
    }

    fn add(&mut self, what: &str, key: &str) {
        if self.errors.len() < MAX_ERRORS {
            let dot = if self.path.is_empty() { "" } else { "." };
            let error = format!(
                "{what} field {}",
                super::go_quote(&format!("{}{dot}{key}", self.path))
            );
            if !self.errors.contains(&error) {
                self.errors.push(error);
            }
        }
    }

    pub fn unknown(&mut self, key: &str) {
        self.add("unknown", key);
    }

    pub fn duplicate(&mut self, key: &str) {
        self.add("duplicate", key);
    }

    /// Looks for duplicates where there is no type.
    pub fn untyped(&mut self, node: &Node) {
        match node {
            Node::Array(nodes) => {
                for (index, node) in nodes.iter().enumerate() {
                    let mark = self.push_index(index);
                    self.untyped(node);
                    self.pop(mark);
                }
            }
            Node::Object(entries) => {
                let mut seen = std::collections::HashSet::with_capacity(entries.len());
                for (key, node) in entries {
                    if !seen.insert(key.as_str()) {
                        self.duplicate(key);
                    }
                    let mark = self.push_key(key);
                    self.untyped(node);
                    self.pop(mark);
                }
            }
            _ => {}
        }
    }

    pub fn into_errors(self) -> Vec<String> {
        self.errors
    }
}
