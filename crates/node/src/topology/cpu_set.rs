//! A set of CPUs by their ids, in the kernel's notation: `0-3,6`. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The kernel knows fewer CPUs than this: a larger number in a range is a mistake, not a machine.
const MAX_CPUS: u32 = 1 << 16;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<u32>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error("{0:?} is not the number of a CPU")]
    Number(String),
    #[error("invalid range {0:?}")]
    Range(String),
}

impl CpuSet {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    pub fn union(&self, other: &Self) -> Self {
        CpuSet(&self.0 | &other.0)
    }

    pub fn intersection(&self, other: &Self) -> Self {
        CpuSet(&self.0 & &other.0)
    }

    pub fn difference(&self, other: &Self) -> Self {
        CpuSet(&self.0 - &other.0)
    }

    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        CpuSet(cpus.into_iter().collect())
    }
}

impl Extend<u32> for CpuSet {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, cpus: I) {
        self.0.extend(cpus);
    }
}

impl FromStr for CpuSet {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut set = CpuSet::default();
        if text.is_empty() {
            return Ok(set);
        }
        let number = |text: &str| match text.parse::<u32>() {
            Ok(number) if number < MAX_CPUS => Ok(number),
            _ => Err(ParseError::Number(text.to_owned())),
        };
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return Err(ParseError::Range(range.to_owned()));
            }
            set.extend(first..=last);
        }
        Ok(set)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_written_as_the_kernel_does() {
        for (text, canonical, size) in [
            ("", "", 0),
            ("0", "0", 1),
            ("0-3,6", "0-3,6", 5),
            ("6,0,1,2,2-3", "0-3,6", 5),
            ("1,2", "1-2", 2),
        ] {
            let set: CpuSet = text.parse().unwrap();
            assert_eq!((set.to_string().as_str(), set.len()), (canonical, size), "{text}");
        }
        for bad in ["a", "1.3", "3-1", "1-", "-1", "0-4294967295", "1,,2", " 1"] {
            assert!(bad.parse::<CpuSet>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sets_are_combined() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(set("0-2").union(&set("2-4")), set("0-4"));
        assert_eq!(set("0-2").intersection(&set("2-4")), set("2"));
        assert_eq!(set("0-2").difference(&set("2-4")), set("0-1"));
        assert!(set("1-2").is_subset(&set("0-3")) && !set("0-3").is_subset(&set("1-2")));
    }
}
