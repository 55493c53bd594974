//! A bounded memory of marks, oldest out first.

use crate::Mark;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Keeps the latest marks. Cheap enough to be always on: one short lock a write.
#[derive(Debug)]
pub struct Recorder {
    capacity: usize,
    /// A leaf lock.
    marks: Mutex<VecDeque<Mark>>,
}

impl Default for Recorder {
    /// Some 4,000 writes: about 2 MiB.
    fn default() -> Self {
        Self::with_capacity(4096)
    }
}

impl Recorder {
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            marks: Mutex::new(VecDeque::new()),
        }
    }

    pub fn record(&self, mark: Mark) {
        let mut marks = self.marks.lock();
        if marks.len() >= self.capacity {
            marks.pop_front();
        }
        marks.push_back(mark);
    }

    /// All marks kept, oldest first.
    pub fn marks(&self) -> Vec<Mark> {
        self.marks.lock().iter().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.marks.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
