//! Node ports: which of the range are taken. In memory, filled from the services at start.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::time::Instant;

use parking_lot::Mutex;

use super::ledger::Ledger;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PortError {
    #[error("provided port is already allocated")]
    Allocated,
    #[error("provided port is not in the valid range. The range of valid ports is {0}-{1}")]
    NotInRange(u16, u16),
    #[error("range is full")]
    Full,
}

pub struct PortAllocator {
    range: RangeInclusive<u16>,
    /// Leaf lock.
    taken: Mutex<Ledger<u16>>,
}

impl PortAllocator {
    pub fn new(range: RangeInclusive<u16>) -> PortAllocator {
        PortAllocator {
            range,
            taken: Mutex::default(),
        }
    }

    pub fn allocate(&self, port: u16) -> Result<(), PortError> {
        if !self.range.contains(&port) {
            return Err(self.not_in_range());
        }
        if self.taken.lock().take(port) {
            Ok(())
        } else {
            Err(PortError::Allocated)
        }
    }

    pub fn not_in_range(&self) -> PortError {
        PortError::NotInRange(*self.range.start(), *self.range.end())
    }

    pub fn has(&self, port: u16) -> bool {
        self.taken.lock().has(port)
    }

    pub fn allocate_next(&self) -> Result<u16, PortError> {
        let (first, size) = (*self.range.start(), self.range.len());
        if size == 0 {
            return Err(PortError::Full);
        }
        // As upstream: the lower band is left to those who choose their port themselves.
        let lower = (size / 32).clamp(0, 128).max(if size > 16 { 16 } else { 0 });
        let mut taken = self.taken.lock();
        for (offset, size) in [(lower, size - lower), (0, lower)] {
            if size == 0 {
                continue;
            }
            let start = rand::random_range(0..size);
            for step in 0..size.min(taken.len() + 1) {
                let port = first + (offset + (start + step) % size) as u16;
                if taken.take(port) {
                    return Ok(port);
                }
            }
        }
        Err(PortError::Full)
    }

    pub fn release(&self, port: u16) {
        self.taken.lock().release(port);
    }

    /// The write that took the port is in the store.
    pub(super) fn hold(&self, port: u16) {
        self.taken.lock().hold(port);
    }

    /// Whether the write that took the port is in the store is unknown.
    pub(super) fn doubt(&self, port: u16, now: Instant) {
        self.taken.lock().doubt(port, now);
    }

    pub(super) fn has_overdue(&self, now: Instant) -> bool {
        self.taken.lock().has_overdue(now)
    }

    pub(super) fn settled(&self, now: Instant) -> Vec<(u16, u64)> {
        self.taken.lock().settled(now)
    }

    /// Frees those of `settled` that are not `held`; how many.
    pub(super) fn free_unheld(&self, settled: Vec<(u16, u64)>, held: &HashSet<u16>) -> usize {
        let is_held = |port| held.contains(&port);
        self.taken.lock().free_unheld(settled, is_held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_is_given_once() {
        let allocator = PortAllocator::new(30000..=30019);
        let ports: HashSet<u16> = (0..20)
            .map(|_| allocator.allocate_next().expect("room"))
            .collect();
        assert_eq!(ports.len(), 20);
        assert_eq!(allocator.allocate_next(), Err(PortError::Full));
        assert_eq!(allocator.allocate(30000), Err(PortError::Allocated));
        assert_eq!(
            allocator.allocate(80).expect_err("out of range").to_string(),
            "provided port is not in the valid range. The range of valid ports is 30000-30019"
        );
        allocator.release(30007);
        assert_eq!(allocator.allocate_next(), Ok(30007));
    }
}
