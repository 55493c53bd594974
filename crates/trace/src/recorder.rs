//! A bounded memory of marks, oldest out first.
//!
//! Heartbeats and events are many and say little of what an apply brought about. They have a small ring of
//! their own, so that an idle cluster does not forget its last apply.

use crate::Mark;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Keeps the latest marks. Cheap enough to be always on: one short lock a write.
#[derive(Debug)]
pub struct Recorder {
    capacity: usize,
    /// A leaf lock.
    rings: Mutex<Rings>,
}

#[derive(Debug, Default)]
struct Rings {
    marks: VecDeque<Mark>,
    chatter: VecDeque<Mark>,
}

impl Default for Recorder {
    /// Some 4,000 writes: about 2 MiB.
    fn default() -> Self {
        Self::with_capacity(4096)
    }
}

/// Writes that happen whether or not anybody asked for anything, or that only tell of others.
fn is_chatter(mark: &Mark) -> bool {
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
            rings: Mutex::default(),
        }
    }

    pub fn record(&self, mark: Mark) {
        let mut rings = self.rings.lock();
        let (ring, capacity) = if is_chatter(&mark) {
            (&mut rings.chatter, self.capacity.div_ceil(8))
        } else {
            (&mut rings.marks, self.capacity)
        };
        if ring.len() >= capacity {
            ring.pop_front();
        }
        ring.push_back(mark);
    }

    /// All marks kept, in the order in which the writes ended.
    pub fn marks(&self) -> Vec<Mark> {
        let mut all: Vec<Mark> = {
            let rings = self.rings.lock();
            rings.marks.iter().chain(&rings.chatter).cloned().collect()
        };
        all.sort_by_key(Mark::end_us);
        all
    }

    pub fn len(&self) -> usize {
        let rings = self.rings.lock();
        rings.marks.len() + rings.chatter.len()
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
}
