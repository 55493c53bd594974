//! Stored values that cannot be read: undecodable, undecryptable, or damaged on disk. Such an object exists all the
//! same. It is never reported as deleted; reads that would have to show it fail.

use std::fmt;
use std::sync::Arc;

use crate::filter::Filter;
use crate::snapshot::Scope;
use crate::state::State;

/// How many unreadable objects an error names, as upstream.
pub const NAMED_UNREADABLE: usize = 100;
/// Bytes of a reason that are kept.
const REASON: usize = 256;

/// One stored value that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    pub key: Arc<str>,
    /// The revision that wrote the value.
    pub revision: i64,
    pub reason: Box<str>,
}

impl Unreadable {
    pub fn new(key: Arc<str>, revision: i64, reason: &dyn fmt::Display) -> Unreadable {
        let mut reason = reason.to_string();
        let end = (0..=REASON.min(reason.len()))
            .rev()
            .find(|at| reason.is_char_boundary(*at));
        reason.truncate(end.unwrap_or(0));
        Unreadable {
            key,
            revision,
            reason: reason.into(),
        }
    }
}

impl fmt::Display for Unreadable {
    /// COMPAT: upstream's words; clients of its delete option look for "corrupt object".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unreadable {
            key,
            revision,
            reason,
        } = self;
        write!(
            f,
            "StorageError: corrupt object, Code: 7, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: object not decodable revision={revision}: {reason}"
        )
    }
}

impl State {
    /// The unreadable objects that a read of this scope at revision `at` would have to show, at most one more than an
    /// error names. Selectors cannot be applied to them, but for the name, which is part of the key.
    pub fn unreadable_in(&self, scope: &Scope, filter: &Filter, at: i64) -> Vec<Arc<Unreadable>> {
        if self.unreadable.is_empty() {
            return Vec::new();
        }
        let name = filter.fields.required_value("metadata.name");
        let selected = |key: &str| name.is_none_or(|name| key.rsplit('/').next() == Some(name));
        self.unreadable
            .range::<str, _>(scope.bounds())
            .filter(|(key, value)| value.revision <= at && selected(key))
            .map(|(_, value)| value.clone())
            .take(NAMED_UNREADABLE + 1)
            .collect()
    }

    /// Takes in that the newest value of a key cannot be read. What was last known of the object stays, so that a
    /// later change of it is told with the right state before.
    pub fn mark_unreadable(&mut self, value: Unreadable) {
        self.revision = self.revision.max(value.revision);
        self.unreadable.insert(value.key.clone(), Arc::new(value));
    }
}
