//! Remembers which version our own last write of an object made, so that a reconcile can tell that its
//! informer does not show that write yet.

use std::collections::HashMap;

use parking_lot::Mutex;
use skiff_client::Key;

#[derive(Default)]
pub(crate) struct Written {
    versions: Mutex<HashMap<Key, u64>>,
}

fn number(version: Option<&str>) -> u64 {
    version.and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl Written {
    pub(crate) fn note(&self, key: &Key, version: Option<&str>) {
        self.versions.lock().insert(key.clone(), number(version));
    }

    /// True if a copy of this version shows our last write. A version that was seen is forgotten.
    pub(crate) fn is_seen(&self, key: &Key, version: Option<&str>) -> bool {
        let mut versions = self.versions.lock();
        match versions.get(key) {
            Some(written) if number(version) < *written => false,
            Some(_) => {
                versions.remove(key);
                true
            }
            None => true,
        }
    }

    /// The object is gone, or its next version is not ours to wait for.
    pub(crate) fn forget(&self, key: &Key) {
        self.versions.lock().remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_copies_are_told_apart() {
        let written = Written::default();
        let key = Key::new("a", "b");
        assert!(written.is_seen(&key, Some("3")));
        written.note(&key, Some("10"));
        assert!(!written.is_seen(&key, Some("9")));
        assert!(written.is_seen(&key, Some("12")));
        assert!(
            written.is_seen(&key, Some("1")),
            "seen once, it is not asked again"
        );
    }
}
