//! A bounded memory of marks, oldest out first.
//!
//! Heartbeats and events are many and say little of what an apply brought about; refused requests changed nothing,
//! and anybody can send them. They have a small ring of their own, so that neither an idle cluster nor a stranger
//! makes it forget its last apply.
//!
//! Names come from clients, so a ring ends at a number of bytes as well as at a number of marks.

use crate::{Mark, Stage};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Keeps the latest marks. Cheap enough to be always on: one short lock a write.
#[derive(Debug)]
pub struct Recorder {
    /// How many marks the large ring holds, and how many bytes; the small one an eighth of both.
    capacity: usize,
    max_bytes: usize,
    /// A leaf lock.
    rings: Mutex<Rings>,
}

#[derive(Debug, Default)]
struct Rings {
    marks: Ring,
    chatter: Ring,
}

#[derive(Debug, Default)]
struct Ring {
    marks: VecDeque<Mark>,
    bytes: usize,
}

impl Ring {
    fn push(&mut self, mark: Mark, capacity: usize, max_bytes: usize) {
        self.bytes += weight(&mark);
        self.marks.push_back(mark);
        while self.marks.len() > capacity || self.bytes > max_bytes {
            let Some(oldest) = self.marks.pop_front() else {
                break;
            };
            self.bytes -= weight(&oldest);
        }
    }
}

/// What a mark takes in memory.
fn weight(mark: &Mark) -> usize {
    let texts = [
        &mark.user,
        &mark.verb,
        &mark.resource,
        &mark.subresource,
        &mark.namespace,
        &mark.name,
        &mark.uid,
        &mark.resource_version,
        &mark.server,
    ];
    let cause = mark.cause.iter();
    let cause = cause.flat_map(|cause| [&cause.resource, &cause.namespace, &cause.name, &cause.version]);
    let stages = || mark.client_stages.iter().chain(&mark.stages);
    let text: usize = texts
        .into_iter()
        .chain(cause)
        .chain(stages().map(|stage| &stage.name))
        .map(String::len)
        .sum();
    size_of::<Mark>() + stages().count() * size_of::<Stage>() + text
}

impl Default for Recorder {
    /// Some 4,000 writes: about 2 MiB, and 8 MiB whatever their names are.
    fn default() -> Self {
        Self {
            capacity: 4096,
            max_bytes: 8 << 20,
            rings: Mutex::default(),
        }
    }
}

/// Writes that happen whether or not anybody asked for anything, or that only tell of others; and what was refused.
fn is_chatter(mark: &Mark) -> bool {
    if matches!(mark.code, 401 | 403 | 429) {
        return true;
    }
    match mark.resource.as_str() {
        "leases.coordination.k8s.io" | "events" | "events.events.k8s.io" => true,
        "nodes" => mark.subresource == "status",
        _ => false,
    }
}

impl Recorder {
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            ..Self::default()
        }
    }

    pub fn record(&self, mark: Mark) {
        let mut rings = self.rings.lock();
        if is_chatter(&mark) {
            let (capacity, max_bytes) = (self.capacity.div_ceil(8), self.max_bytes.div_ceil(8));
            rings.chatter.push(mark, capacity, max_bytes);
        } else {
            rings.marks.push(mark, self.capacity, self.max_bytes);
        }
    }

    /// All marks kept, in the order in which the writes ended.
    pub fn marks(&self) -> Vec<Mark> {
        let mut all: Vec<Mark> = {
            let rings = self.rings.lock();
            let all = rings.marks.marks.iter().chain(&rings.chatter.marks);
            all.cloned().collect()
        };
        all.sort_by_key(Mark::end_us);
        all
    }

    pub fn len(&self) -> usize {
        let rings = self.rings.lock();
        rings.marks.marks.len() + rings.chatter.marks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(resource: &str, subresource: &str, start_us: i64) -> Mark {
        Mark {
            resource: resource.into(),
            subresource: subresource.into(),
            start_us,
            ..Mark::default()
        }
    }

    #[test]
    fn heartbeats_do_not_push_out_an_apply() {
        let recorder = Recorder::with_capacity(16);
        recorder.record(mark("deployments.apps", "", 0));
        for at in 1..100 {
            recorder.record(mark("leases.coordination.k8s.io", "", at));
            recorder.record(mark("nodes", "status", at));
            recorder.record(mark("events", "", at));
        }
        recorder.record(mark("pods", "status", 50));
        let kept = recorder.marks();
        assert_eq!(kept.len(), 4);
        assert_eq!(kept[0].resource, "deployments.apps");
        assert!(
            kept.is_sorted_by_key(|mark| mark.start_us),
            "one order for both rings"
        );
        for at in 100..200 {
            recorder.record(mark("pods", "", at));
        }
        assert_eq!(recorder.len(), 18);
    }

    #[test]
    fn marks_end_at_a_number_of_bytes() {
        let recorder = Recorder::default();
        let long = "x".repeat(60_000);
        let hostile = |code| Mark {
            code,
            name: long.clone(),
            user: long.clone(),
            client_stages: vec![
                Stage {
                    name: long.clone(),
                    start_us: 0,
                    dur_us: 0
                };
                8
            ],
            ..mark(&long, &long, 1)
        };
        recorder.record(mark("deployments.apps", "", 0));
        for _ in 0..1_000 {
            recorder.record(hostile(403));
        }
        let bytes = |recorder: &Recorder| recorder.marks().iter().map(weight).sum::<usize>();
        assert!(bytes(&recorder) < 2 << 20, "{}", bytes(&recorder));
        let kept = recorder.marks();
        assert!(
            kept.iter().any(|mark| mark.resource == "deployments.apps"),
            "what is refused pushes out nothing"
        );
        for _ in 0..1_000 {
            recorder.record(hostile(409));
        }
        assert!(bytes(&recorder) < 10 << 20, "{}", bytes(&recorder));
        let rings = recorder.rings.lock();
        assert_eq!(
            rings.marks.bytes,
            rings.marks.marks.iter().map(weight).sum::<usize>()
        );
    }
}
