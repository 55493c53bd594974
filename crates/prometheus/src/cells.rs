//! The values of single series. All are updated without a lock.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A sum that is kept as the bits of a float.
#[derive(Debug, Default)]
struct AtomicFloat(AtomicU64);

impl AtomicFloat {
    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    fn add(&self, value: f64) {
        let sum = |bits| Some((f64::from_bits(bits) + value).to_bits());
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
    }
}

/// Only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn inc(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicFloat);

impl Gauge {
    pub fn set(&self, value: f64) {
        self.0.set(value);
    }

    pub fn add(&self, value: f64) {
        self.0.add(value);
    }

    pub fn get(&self) -> f64 {
        self.0.get()
    }
}

/// Observations, counted by the bucket that they fall into.
#[derive(Debug)]
pub struct Histogram {
    bounds: Arc<[f64]>,
    /// One more than bounds: the last counts what is above all of them.
    counts: Box<[AtomicU64]>,
    sum: AtomicFloat,
}

impl Histogram {
    pub(crate) fn new(bounds: Arc<[f64]>) -> Histogram {
        Histogram {
            counts: (0..=bounds.len()).map(|_| AtomicU64::default()).collect(),
            bounds,
            sum: AtomicFloat::default(),
        }
    }

    pub fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.add(value);
    }

    pub fn observe_duration(&self, elapsed: Duration) {
        self.observe(elapsed.as_secs_f64());
    }

    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

/// What the registry writes of a series.
pub(crate) trait Cell {
    const TYPE: &'static str;
    fn write(&self, out: &mut String, name: &str, labels: &str);
}

impl Cell for Counter {
    const TYPE: &'static str = "counter";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        line(out, name, labels, &self.get());
    }
}

impl Cell for Gauge {
    const TYPE: &'static str = "gauge";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        line(out, name, labels, &self.get());
    }
}

impl Cell for Histogram {
    const TYPE: &'static str = "histogram";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let separator = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (at, count) in self.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let _ = match self.bounds.get(at) {
                Some(bound) => {
                    let bound = bound_text(*bound);
                    writeln!(out, "{name}_bucket{{{labels}{separator}le=\"{bound}\"}} {total}")
                }
                None => writeln!(out, "{name}_bucket{{{labels}{separator}le=\"+Inf\"}} {total}"),
            };
        }
        line(out, &format!("{name}_sum"), labels, &self.sum.get());
        // The same number as the last bucket, though observations may come meanwhile.
        line(out, &format!("{name}_count"), labels, &total);
    }
}

/// COMPAT: as Go prints it, because queries compare `le` as text: `0.005`, `1`, `1e-08`, `2.592e+06`.
fn bound_text(bound: f64) -> String {
    let scientific = format!("{bound:e}");
    let exponent = scientific
        .split_once('e')
        .and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?)));
    match exponent {
        Some((digits, exponent)) if !(-4..6).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => bound.to_string(),
    }
}

pub(crate) fn line(out: &mut String, name: &str, labels: &str, value: &dyn std::fmt::Display) {
    let _ = if labels.is_empty() {
        writeln!(out, "{name} {value}")
    } else {
        writeln!(out, "{name}{{{labels}}} {value}")
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_printed_as_go_prints_them() {
        for (bound, text) in [
            (0.0, "0"),
            (0.005, "0.005"),
            (1.0, "1"),
            (1.25, "1.25"),
            (1e-8, "1e-08"),
            (604_800.0, "604800"),
            (2_592_000.0, "2.592e+06"),
        ] {
            assert_eq!(bound_text(bound), text);
        }
    }
}
