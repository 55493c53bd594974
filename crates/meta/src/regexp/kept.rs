//! Compiled patterns that are kept, up to an amount of memory. When it is full, one of them goes, whichever: a definition
//! may have more patterns than fit, and whoever asks for all of them in turn still finds most.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::Regex;

/// Some ten thousand patterns of the usual size.
const MOST_BYTES: usize = 64 << 20;
/// What an entry takes beside its text and its pattern.
const ENTRY: usize = 256;

/// Those of the process. Held for a look-up or an insert, never while a pattern is compiled.
pub(super) fn all() -> MutexGuard<'static, Kept> {
    static ALL: LazyLock<Mutex<Kept>> = LazyLock::new(|| Mutex::new(Kept::new(MOST_BYTES)));
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct Kept {
    most: usize,
    bytes: usize,
    places: HashMap<Arc<str>, usize>,
    entries: Vec<Entry>,
    /// Which one goes next is drawn from this.
    draws: u64,
}

struct Entry {
    text: Arc<str>,
    regex: Arc<Regex>,
    bytes: usize,
}

impl Kept {
    fn new(most: usize) -> Kept {
        Kept {
            most,
            bytes: 0,
            places: HashMap::new(),
            entries: Vec::new(),
            draws: 0,
        }
    }

    pub fn get(&self, text: &str) -> Option<Arc<Regex>> {
        let place = self.places.get(text)?;
        Some(self.entries[*place].regex.clone())
    }

    pub fn insert(&mut self, text: &str, regex: &Arc<Regex>) {
        let bytes = ENTRY + text.len() + regex.bytes();
        if bytes > self.most || self.places.contains_key(text) {
            return;
        }
        while self.bytes + bytes > self.most {
            self.remove_one();
        }
        self.bytes += bytes;
        let text: Arc<str> = text.into();
        self.places.insert(text.clone(), self.entries.len());
        self.entries.push(Entry {
            text,
            regex: regex.clone(),
            bytes,
        });
    }

    fn remove_one(&mut self) {
        // Knuth's constants: nobody must be able to say less of it than that it is not always the same one.
        self.draws = self
            .draws
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let place = (self.draws >> 33) as usize % self.entries.len();
        let gone = self.entries.swap_remove(place);
        self.bytes -= gone.bytes;
        self.places.remove(&gone.text);
        if let Some(moved) = self.entries.get(place) {
            self.places.insert(moved.text.clone(), place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile;
    use super::*;

    #[test]
    fn as_many_as_fit_and_no_more_are_kept() {
        let all: Vec<(String, Arc<Regex>)> = (0..300)
            .map(|n| format!("^a{n}[x-z]*$"))
            .map(|text| (text.clone(), Arc::new(compile(&text).expect("compiles"))))
            .collect();
        let room = |count: usize| -> usize {
            let one = |(text, regex): &(String, Arc<Regex>)| ENTRY + text.len() + regex.bytes();
            all[..count].iter().map(one).sum()
        };
        let mut kept = Kept::new(room(200));
        for (text, regex) in &all[..200] {
            kept.insert(text, regex);
            kept.insert(text, regex);
        }
        assert!(all[..200].iter().all(|(text, _)| kept.get(text).is_some()));
        // More than fit, again and again in the same order: most are found.
        let mut found = 0;
        for _ in 0..10 {
            for (text, regex) in &all[..220] {
                match kept.get(text) {
                    Some(known) => {
                        assert!(Arc::ptr_eq(&known, regex));
                        found += 1;
                    }
                    None => kept.insert(text, regex),
                }
                assert!(kept.bytes <= kept.most);
                assert_eq!(kept.places.len(), kept.entries.len());
            }
        }
        assert!(found > 1100, "{found}");
        let held: usize = kept.entries.iter().map(|entry| entry.bytes).sum();
        assert_eq!(kept.bytes, held);
        // One that is larger than all of it is not kept, and takes nobody's place.
        let mut small = Kept::new(10);
        small.insert(&all[0].0, &all[0].1);
        assert!(small.get(&all[0].0).is_none());
    }
}
