//! Node ports: which of the range are taken. In memory, filled from the services at start.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use parking_lot::Mutex;

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
    taken: Mutex<HashSet<u16>>,
}

impl PortAllocator {
    pub fn new(range: RangeInclusive<u16>) -> PortAllocator {
        PortAllocator {
            range,
            taken: Mutex::new(HashSet::new()),
        }
    }

    pub fn allocate(&self, port: u16) -> Result<(), PortError> {
        if !self.range.contains(&port) {
            return Err(self.not_in_range());
        }
        if self.taken.lock().insert(port) {
            Ok(())
        } else {
            Err(PortError::Allocated)
        }
    }

    pub fn not_in_range(&self) -> PortError {
        PortError::NotInRange(*self.range.start(), *self.range.end())
    }

    pub fn has(&self, port: u16) -> bool {
        self.taken.lock().contains(&port)
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
                if taken.insert(port) {
                    return Ok(port);
                }
            }
        }
        Err(PortError::Full)
    }

    pub fn release(&self, port: u16) {
        self.taken.lock().remove(&port);
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
