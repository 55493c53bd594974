//! Ranges of sizes and of costs. Arithmetic saturates: past the largest number, more is the same.

/// The least and the most that something can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Range {
    pub min: u64,
    pub max: u64,
}

impl Range {
    pub const UNKNOWN: Self = Self {
        min: 0,
        max: u64::MAX,
    };

    pub fn new(min: u64, max: u64) -> Self {
        Self { min, max }
    }

    pub fn fixed(value: u64) -> Self {
        Self {
            min: value,
            max: value,
        }
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self::new(
            self.min.saturating_add(other.min),
            self.max.saturating_add(other.max),
        )
    }

    #[must_use]
    pub fn times(self, other: Self) -> Self {
        Self::new(
            self.min.saturating_mul(other.min),
            self.max.saturating_mul(other.max),
        )
    }

    /// Multiplies by a factor and rounds up.
    #[must_use]
    pub fn factor(self, factor: f64) -> Self {
        Self::new(scale(self.min, factor), scale(self.max, factor))
    }

    /// The range that holds both.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self::new(self.min.min(other.min), self.max.max(other.max))
    }
}

/// Rust's conversion from float saturates, which is what is wanted here.
pub(crate) fn scale(value: u64, factor: f64) -> u64 {
    (value as f64 * factor).ceil() as u64
}
