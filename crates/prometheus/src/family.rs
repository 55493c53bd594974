//! The series of one name, by the values of their labels.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use parking_lot::RwLock;

/// The value of every label in the series that takes what no longer fits.
pub const OVERFLOW: &str = "other";

/// The longest label value that is kept whole. Names of Kubernetes have up to 253 bytes.
const MAX_VALUE: usize = 253;

/// What all label values of one family may take together. A histogram repeats them in each of its lines.
const MAX_VALUES: usize = 512 * 1024;

struct Series<T> {
    values: Box<[Box<str>]>,
    cell: Arc<T>,
}

struct Known<T> {
    /// By the hash of their label values, so that finding one copies no text.
    by_hash: HashMap<u64, Series<T>>,
    /// The bytes of all label values.
    bytes: usize,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Known {
            by_hash: HashMap::new(),
            bytes: 0,
        }
    }
}

/// All series of one name.
pub struct Family<T> {
    labels: &'static [&'static str],
    /// How many series there are at most, besides the one that takes the rest.
    limit: usize,
    make: Box<dyn Fn() -> T + Send + Sync>,
    hasher: RandomState,
    /// A leaf lock.
    series: RwLock<Known<T>>,
    overflow: RwLock<Option<Arc<T>>>,
}

impl<T> Family<T> {
    pub(crate) fn new(
        labels: &'static [&'static str],
        limit: usize,
        make: impl Fn() -> T + Send + Sync + 'static,
    ) -> Family<T> {
        Family {
            labels,
            limit,
            make: Box::new(make),
            hasher: RandomState::new(),
            series: RwLock::default(),
            overflow: RwLock::default(),
        }
    }

    /// The series with these label values, in the order in which the labels were declared.
    pub fn with(&self, values: &[&str]) -> Arc<T> {
        debug_assert_eq!(values.len(), self.labels.len());
        let hash = self.hasher.hash_one(values);
        let same = |series: &Series<T>| series.values.iter().map(AsRef::as_ref).eq(values.iter().copied());
        if let Some(found) = self.series.read().by_hash.get(&hash).filter(|found| same(found)) {
            return found.cell.clone();
        }
        let mut all = self.series.write();
        if let Some(found) = all.by_hash.get(&hash).filter(|found| same(found)) {
            return found.cell.clone();
        }
        let bytes = all.bytes + text_bytes(values.iter());
        let short = values.iter().all(|value| value.len() <= MAX_VALUE);
        if !short || bytes > MAX_VALUES || all.by_hash.len() >= self.limit || all.by_hash.contains_key(&hash)
        {
            drop(all);
            return self
                .overflow
                .write()
                .get_or_insert_with(|| Arc::new((self.make)()))
                .clone();
        }
        let cell = Arc::new((self.make)());
        let series = Series {
            values: values.iter().map(|value| Box::from(*value)).collect(),
            cell: cell.clone(),
        };
        all.bytes = bytes;
        all.by_hash.insert(hash, series);
        cell
    }

    /// Forgets the series with these label values.
    pub fn remove(&self, values: &[&str]) {
        let mut all = self.series.write();
        if let Some(gone) = all.by_hash.remove(&self.hasher.hash_one(values)) {
            all.bytes -= text_bytes(gone.values.iter());
        }
    }

    /// Forgets all series.
    pub fn clear(&self) {
        *self.series.write() = Known::default();
        *self.overflow.write() = None;
    }

    pub fn len(&self) -> usize {
        self.series.read().by_hash.len() + usize::from(self.overflow.read().is_some())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All series with their labels as text, in the order of the text.
    pub(crate) fn rows(&self) -> Vec<(String, Arc<T>)> {
        let mut rows: Vec<(String, Arc<T>)> = {
            let all = self.series.read();
            let row = |series: &Series<T>| {
                let values = series.values.iter().map(AsRef::as_ref);
                (label_text(self.labels, values), series.cell.clone())
            };
            all.by_hash.values().map(row).collect()
        };
        rows.sort_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(cell) = self.overflow.read().clone() {
            let values = self.labels.iter().map(|_| OVERFLOW);
            rows.push((label_text(self.labels, values), cell));
        }
        rows
    }
}

fn text_bytes(values: impl Iterator<Item = impl AsRef<str>>) -> usize {
    values.map(|value| value.as_ref().len()).sum()
}

/// `a="x",b="y"`.
pub(crate) fn label_text<'a>(names: &[&str], values: impl Iterator<Item = &'a str>) -> String {
    let mut out = String::new();
    for (name, value) in names.iter().zip(values) {
        let separator = if out.is_empty() { "" } else { "," };
        let _ = write!(out, "{separator}{name}=\"");
        for char in value.chars() {
            match char {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                char => out.push(char),
            }
        }
        out.push('"');
    }
    out
}
