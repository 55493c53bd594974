//! The families of one component, and their text form.

use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cells::{Cell, Counter, Gauge, Histogram, line};
use crate::family::{Family, label_text};

/// Writes the series of a family.
type WriteSeries = Box<dyn Fn(&mut String, &str) + Send + Sync>;

struct Entry {
    name: &'static str,
    help: &'static str,
    kind: &'static str,
    write: WriteSeries,
}

/// The families of one component.
#[derive(Default)]
pub struct Registry {
    entries: Mutex<Vec<Entry>>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self
            .entries
            .lock()
            .iter()
            .map(|entry| entry.name)
            .collect::<Vec<_>>();
        f.debug_tuple("Registry").field(&names).finish()
    }
}

impl Registry {
    pub fn new() -> Arc<Registry> {
        Arc::default()
    }

    /// A family of counters with at most `limit` series. Labels are declared in the order of the alphabet, as
    /// upstream prints them.
    pub fn counters(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        limit: usize,
    ) -> Arc<Family<Counter>> {
        self.add(name, help, Family::new(labels, limit, Counter::default))
    }

    pub fn gauges(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        limit: usize,
    ) -> Arc<Family<Gauge>> {
        self.add(name, help, Family::new(labels, limit, Gauge::default))
    }

    pub fn histograms(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        limit: usize,
        bounds: &[f64],
    ) -> Arc<Family<Histogram>> {
        let bounds: Arc<[f64]> = bounds.into();
        self.add(
            name,
            help,
            Family::new(labels, limit, move || Histogram::new(bounds.clone())),
        )
    }

    /// A family whose values are read when somebody asks. `read` answers label values and a value for each series;
    /// it must answer from a closed set.
    pub fn read_gauges(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        read: impl Fn() -> Vec<(Vec<String>, f64)> + Send + Sync + 'static,
    ) {
        self.read(name, help, "gauge", labels, read);
    }

    /// As [`read_gauges`](Self::read_gauges), for values that only grow.
    pub fn read_counters(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        read: impl Fn() -> Vec<(Vec<String>, f64)> + Send + Sync + 'static,
    ) {
        self.read(name, help, "counter", labels, read);
    }

    fn read(
        &self,
        name: &'static str,
        help: &'static str,
        kind: &'static str,
        labels: &'static [&'static str],
        read: impl Fn() -> Vec<(Vec<String>, f64)> + Send + Sync + 'static,
    ) {
        let write: WriteSeries = Box::new(move |out, name| {
            let mut rows = read();
            rows.sort_by(|(a, _), (b, _)| a.cmp(b));
            for (values, value) in rows {
                let text = label_text(labels, values.iter().map(String::as_str));
                line(out, name, &text, &value);
            }
        });
        self.insert(name, help, kind, write);
    }

    fn add<T: Cell + Send + Sync + 'static>(
        &self,
        name: &'static str,
        help: &'static str,
        family: Family<T>,
    ) -> Arc<Family<T>> {
        let family = Arc::new(family);
        let written = family.clone();
        let write: WriteSeries = Box::new(move |out, name| {
            for (labels, cell) in written.rows() {
                cell.write(out, name, &labels);
            }
        });
        self.insert(name, help, T::TYPE, write);
        family
    }

    /// A component that is started again registers its families again: the new ones take the place of the old.
    fn insert(&self, name: &'static str, help: &'static str, kind: &'static str, write: WriteSeries) {
        let entry = Entry {
            name,
            help,
            kind,
            write,
        };
        let mut entries = self.entries.lock();
        match entries.binary_search_by(|present| present.name.cmp(name)) {
            Ok(at) => entries[at] = entry,
            Err(at) => entries.insert(at, entry),
        }
    }

    /// The Prometheus text format, version 0.0.4, families in the order of their names.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for entry in self.entries.lock().iter() {
            let before = out.len();
            let (name, help, kind) = (entry.name, entry.help, entry.kind);
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
            let head = out.len();
            (entry.write)(&mut out, name);
            // As upstream: a family without series is not shown.
            if out.len() == head {
                out.truncate(before);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OVERFLOW;

    #[test]
    fn text_is_prometheus_own() {
        let registry = Registry::new();
        let duration = registry.histograms("b_seconds", "Time.", &["verb"], 10, &[0.5, 1.0]);
        let total = registry.counters("a_total", "Sum.", &["code", "name"], 10);
        registry.gauges("unused", "Never.", &[], 1);
        registry.read_gauges("c", "Read.", &[], || vec![(vec![], 1.5)]);
        total.with(&["200", "a\"b\\c\nd"]).inc();
        for value in [0.25, 0.5, 0.75, 3.0] {
            duration.with(&["GET"]).observe(value);
        }
        let expected = "\
# HELP a_total Sum.
# TYPE a_total counter
a_total{code=\"200\",name=\"a\\\"b\\\\c\\nd\"} 1
# HELP b_seconds Time.
# TYPE b_seconds histogram
b_seconds_bucket{verb=\"GET\",le=\"0.5\"} 2
b_seconds_bucket{verb=\"GET\",le=\"1\"} 3
b_seconds_bucket{verb=\"GET\",le=\"+Inf\"} 4
b_seconds_sum{verb=\"GET\"} 4.5
b_seconds_count{verb=\"GET\"} 4
# HELP c Read.
# TYPE c gauge
c 1.5
";
        assert_eq!(registry.text(), expected);
        total.clear();
        assert!(!registry.text().contains("a_total"));
    }

    #[test]
    fn label_values_end_at_their_budget() {
        let registry = Registry::new();
        let total = registry.counters("a_total", "Sum.", &["name"], 100_000);
        let filler = "x".repeat(200);
        for number in 0..10_000 {
            total.with(&[&format!("{filler}{number}")]).inc();
        }
        assert!(registry.text().len() < 700_000, "{}", registry.text().len());
        total.remove(&[&format!("{filler}0")]);
        let before = total.len();
        total.with(&["new"]).inc();
        assert_eq!(total.len(), before + 1, "what is removed makes room");
    }

    #[test]
    fn a_family_ends_at_its_limit() {
        let registry = Registry::new();
        let total = registry.counters("a_total", "Sum.", &["name"], 100);
        for number in 0..10_000 {
            total.with(&[&number.to_string()]).inc();
            total.with(&[&"x".repeat(1_000)]).inc();
        }
        assert_eq!(total.len(), 101);
        assert!(registry.text().len() < 10_000);
        // What is known is still counted by itself, what is not is not lost.
        total.with(&["7"]).inc();
        assert_eq!(total.with(&["7"]).get(), 2);
        assert_eq!(total.with(&["unknown"]).get(), 19_900);
        let overflow = format!("a_total{{name=\"{OVERFLOW}\"}} 19900");
        assert!(registry.text().contains(&overflow));
    }
}
