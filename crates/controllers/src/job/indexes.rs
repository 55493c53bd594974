//! Sets of completion indexes in the compressed form of a Job's status, such as `1,3-5,7`.

use std::fmt;

/// Intervals in rising order that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Indexes(Vec<(i32, i32)>);

impl Indexes {
    /// Indexes at or beyond `completions` are dropped, and so is what cannot be read.
    pub(crate) fn parse(text: &str, completions: i32) -> Indexes {
        let interval = |part: &str| -> Option<(i32, i32)> {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (i32, i32) = (first.parse().ok()?, last.parse().ok()?);
            let last = last.min(completions.saturating_sub(1));
            (first >= 0 && first <= last).then_some((first, last))
        };
        Indexes::from_intervals(text.split(',').filter_map(interval).collect())
    }

    fn from_intervals(mut intervals: Vec<(i32, i32)>) -> Indexes {
        intervals.sort_unstable();
        let mut merged: Vec<(i32, i32)> = Vec::new();
        for (first, last) in intervals {
            match merged.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Indexes(merged)
    }

    pub(crate) fn with(&self, more: impl IntoIterator<Item = i32>) -> Indexes {
        let mut all = self.0.clone();
        all.extend(more.into_iter().map(|index| (index, index)));
        Indexes::from_intervals(all)
    }

    pub(crate) fn merge(&self, other: &Indexes) -> Indexes {
        Indexes::from_intervals(self.0.iter().chain(&other.0).copied().collect())
    }

    pub(crate) fn contains(&self, index: i32) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < index);
        self.0.get(at).is_some_and(|(first, _)| *first <= index)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn total(&self) -> i32 {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    /// How many indexes are in both.
    pub(crate) fn overlap(&self, other: &Indexes) -> i32 {
        let (mut left, mut right, mut count) = (0, 0, 0);
        while let (Some(mine), Some(theirs)) = (self.0.get(left), other.0.get(right)) {
            count += (mine.1.min(theirs.1) - mine.0.max(theirs.0) + 1).max(0);
            if mine.1 <= theirs.1 {
                left += 1;
            }
            if theirs.1 <= mine.1 {
                right += 1;
            }
        }
        count
    }

    /// The first `count` indexes below `completions` that are not in the set.
    pub(crate) fn first_missing(&self, count: usize, completions: i32) -> Vec<i32> {
        let mut missing = Vec::new();
        let mut candidate = 0;
        let end = (completions, completions);
        for (first, last) in self.0.iter().copied().chain([end]) {
            while candidate < first.min(completions) && missing.len() < count {
                missing.push(candidate);
                candidate += 1;
            }
            candidate = candidate.max(last.saturating_add(1));
        }
        missing
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (first, last)) in self.0.iter().enumerate() {
            let comma = if position > 0 { "," } else { "" };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_and_written() {
        let check = |text: &str, completions: i32, expected: &str| {
            assert_eq!(
                Indexes::parse(text, completions).to_string(),
                expected,
                "{text} {completions}"
            );
        };
        check("", 10, "");
        check("1,3-5,7", 10, "1,3-5,7");
        check("0-1,2", 10, "0-2");
        check("3,4", 10, "3,4");
        // After the Job was scaled down.
        check("1,3-5,7", 5, "1,3,4");
        check("1,3-5,7", 0, "");
        check("x,5-2,-1,4-,2", 10, "2");
        check("7,1", 10, "1,7");
    }

    #[test]
    fn sets() {
        let set = Indexes::parse("1,3-5,9", 20);
        assert_eq!(set.total(), 5);
        let members: Vec<i32> = (0..12).filter(|index| set.contains(*index)).collect();
        assert_eq!(members, [1, 3, 4, 5, 9]);
        assert_eq!(set.with([2, 6, 1, 15]).to_string(), "1-6,9,15");
        assert_eq!(set.merge(&Indexes::parse("0,4-8", 20)).to_string(), "0,1,3-9");
        assert_eq!(set.first_missing(4, 20), [0, 2, 6, 7]);
        assert_eq!(set.first_missing(100, 8), [0, 2, 6, 7]);
        assert_eq!(Indexes::default().first_missing(2, 5), [0, 1]);
        assert_eq!(set.overlap(&Indexes::parse("0-4,9-12", 20)), 4);
    }
}
