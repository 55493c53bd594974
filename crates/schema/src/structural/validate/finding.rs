//! What the validator found, before it is told: with its sort, its place below the root, and how many checks
//! passed beside it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;
use skiff_meta::field::{self, Path};

/// A finding before it has its place in the object.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    pub kind: Sort,
    /// `None`: about no place in particular.
    pub name: Option<String>,
    pub value: Option<Value>,
    pub message: String,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Sort {
    Required,
    NotSupported(Vec<String>),
    TooLong(i64),
    TooMany { actual: i64, max: i64 },
    Type,
    Invalid,
}

impl Finding {
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.name, &self.message).hash(&mut hasher);
        hasher.finish()
    }

    pub fn into_error(self, root: &Path) -> field::Error {
        let path = match self
            .name
            .as_deref()
            .map(|name| name.strip_prefix('.').unwrap_or(name))
        {
            None | Some("") => root.clone(),
            Some(name) => root.child(name),
        };
        let value = self.value.unwrap_or_else(|| Value::String(String::new()));
        match self.kind {
            Sort::Required => field::Error::required(&path, ""),
            Sort::NotSupported(values) => {
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                field::Error::not_supported(&path, value, &values)
            }
            Sort::TooLong(max) => field::Error::too_long(&path, usize::try_from(max).unwrap_or(0)),
            Sort::TooMany { actual, max } => {
                let size = |n: i64| usize::try_from(n).unwrap_or(0);
                field::Error::too_many(&path, size(actual), size(max))
            }
            Sort::Type => field::Error::type_invalid(&path, value, self.message),
            Sort::Invalid => field::Error::invalid(&path, value, self.message),
        }
    }
}

/// From how many findings on a new one is looked for by its hash.
const INDEXED: usize = 16;

/// The findings of a node, and how many checks it passed: of alternatives that all fail, the one that
/// passed most explains itself.
#[derive(Debug, Default, Clone)]
pub struct Outcome {
    pub findings: Vec<Finding>,
    pub matches: usize,
    /// The places of the findings by their hash, once they are many: an object may be wrong in a hundred thousand places.
    index: HashMap<u64, Vec<usize>>,
}

impl Outcome {
    pub fn add(&mut self, finding: Finding) {
        if self.findings.len() < INDEXED {
            if !self.findings.contains(&finding) {
                self.findings.push(finding);
            }
            return;
        }
        if self.index.is_empty() {
            for (place, known) in self.findings.iter().enumerate() {
                self.index.entry(known.hash()).or_default().push(place);
            }
        }
        let places = self.index.entry(finding.hash()).or_default();
        if !places.iter().any(|place| self.findings[*place] == finding) {
            places.push(self.findings.len());
            self.findings.push(finding);
        }
    }

    /// Without its findings.
    pub fn forgiven(&self) -> Outcome {
        Outcome {
            matches: self.matches,
            ..Outcome::default()
        }
    }

    pub fn merge(&mut self, other: Outcome) {
        self.matches += other.matches;
        if self.findings.is_empty() {
            (self.findings, self.index) = (other.findings, other.index);
            return;
        }
        for finding in other.findings {
            self.add(finding);
        }
    }

    pub fn invalid(&mut self, path: &str, value: impl Into<Value>, message: String) {
        self.add(Finding {
            kind: Sort::Invalid,
            name: Some(path.to_owned()),
            value: Some(value.into()),
            message,
        });
    }

    /// A finding about the object as a whole.
    pub fn general(&mut self, message: String) {
        self.add(Finding {
            kind: Sort::Invalid,
            name: None,
            value: None,
            message,
        });
    }
}
