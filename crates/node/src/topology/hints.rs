//! NUMA nodes that resources could come from, and how the wishes of several providers become one: upstream's topology
//! policies. Pure.

use std::collections::BTreeMap;
use std::fmt;

use super::machine::{MAX_NUMA_NODES, Topology};

/// A set of NUMA nodes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Mask(u64);

impl Mask {
    pub fn contains(self, node: u32) -> bool {
        node < MAX_NUMA_NODES && self.0 & (1 << node) != 0
    }

    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn nodes(self) -> Vec<u32> {
        (0..MAX_NUMA_NODES).filter(|node| self.contains(*node)).collect()
    }

    pub fn intersects(self, other: Mask) -> bool {
        self.0 & other.0 != 0
    }

    pub fn is_superset(self, other: Mask) -> bool {
        self.0 & other.0 == other.0
    }

    fn and(self, other: Mask) -> Mask {
        Mask(self.0 & other.0)
    }

    /// Fewer nodes; of as many, those with the lower ids.
    pub fn is_narrower_than(self, other: Mask) -> bool {
        (self.count(), self.0) < (other.count(), other.0)
    }
}

impl FromIterator<u32> for Mask {
    /// Nodes beyond what a mask holds are left out; no machine that is supported has them.
    fn from_iter<I: IntoIterator<Item = u32>>(nodes: I) -> Self {
        let known = nodes.into_iter().filter(|node| *node < MAX_NUMA_NODES);
        Mask(known.fold(0, |mask, node| mask | (1 << node)))
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.nodes()).finish()
    }
}

/// Calls `each` with every set of these nodes: the small ones first, and of one size in the order of the nodes.
pub fn each_mask(nodes: &[u32], mut each: impl FnMut(Mask)) {
    fn go(nodes: &[u32], size: usize, mask: Mask, each: &mut dyn FnMut(Mask)) {
        if size == 0 {
            return each(mask);
        }
        for (place, node) in nodes.iter().enumerate() {
            let more = Mask(mask.0 | Mask::from_iter([*node]).0);
            go(&nodes[place + 1..], size - 1, more, each);
        }
    }
    for size in 1..=nodes.len() {
        go(nodes, size, Mask::default(), &mut each);
    }
}

/// Nodes that a resource could come from. Without nodes, there is no wish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    pub nodes: Option<Mask>,
    pub preferred: bool,
}

impl Hint {
    pub fn new(nodes: Mask, preferred: bool) -> Self {
        Hint {
            nodes: Some(nodes),
            preferred,
        }
    }
}

/// What a provider says of each resource: `None` for no wish; no hints at all for a wish that cannot be met.
pub type ProviderHints = BTreeMap<String, Option<Vec<Hint>>>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    #[default]
    None,
    BestEffort,
    Restricted,
    SingleNumaNode,
}

impl Policy {
    pub const ALL: [Policy; 4] = [
        Policy::None,
        Policy::BestEffort,
        Policy::Restricted,
        Policy::SingleNumaNode,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::BestEffort => "best-effort",
            Policy::Restricted => "restricted",
            Policy::SingleNumaNode => "single-numa-node",
        }
    }
}

/// What hints are merged by.
pub struct Merger<'a> {
    pub policy: Policy,
    pub prefer_closest: bool,
    pub topology: &'a Topology,
}

impl Merger<'_> {
    fn all_nodes(&self) -> Mask {
        self.topology.node_ids().into_iter().collect()
    }

    /// The nodes that resources shall come from, or `None` if the pod cannot be admitted.
    pub fn merge(&self, providers: &[ProviderHints]) -> Option<Hint> {
        let mut all = by_resource(providers);
        if self.policy == Policy::SingleNumaNode {
            for hints in &mut all {
                hints.retain(|hint| hint.preferred && hint.nodes.is_none_or(|nodes| nodes.count() == 1));
            }
        }
        let mut best = self.best(&all);
        if self.policy == Policy::SingleNumaNode && best.nodes == Some(self.all_nodes()) {
            best.nodes = None;
        }
        let admitted = best.preferred || matches!(self.policy, Policy::None | Policy::BestEffort);
        admitted.then_some(best)
    }

    fn best(&self, all: &[Vec<Hint>]) -> Hint {
        let everywhere = self.all_nodes();
        // The widest of the narrowest: no merged hint that is not preferred can sensibly have fewer nodes.
        let narrowest = |hints: &Vec<Hint>| {
            let nodes = hints.iter().filter_map(|hint| hint.nodes);
            nodes.map(Mask::count).min()
        };
        let sensible = all.iter().filter_map(narrowest).max().unwrap_or(0);
        let mut best: Option<Hint> = None;
        self.each_combination(all, everywhere, None, true, &mut |nodes, preferred| {
            if nodes.is_empty() {
                return;
            }
            let candidate = Hint::new(nodes, preferred);
            best = Some(match best {
                None => candidate,
                Some(current) => self.better(current, candidate, sensible),
            });
        });
        best.unwrap_or(Hint::new(everywhere, false))
    }

    /// Calls `each` with what every choice of one hint for each resource has in common.
    fn each_combination(
        &self,
        rest: &[Vec<Hint>],
        nodes: Mask,
        first: Option<Mask>,
        preferred: bool,
        each: &mut dyn FnMut(Mask, bool),
    ) {
        let Some((hints, rest)) = rest.split_first() else {
            return each(nodes, preferred);
        };
        for hint in hints {
            let (nodes, first, same) = match hint.nodes {
                Some(wanted) => (nodes.and(wanted), first.or(Some(wanted)), first),
                None => (nodes, first, None),
            };
            let alike = same.is_none_or(|same| Some(same) == hint.nodes);
            self.each_combination(rest, nodes, first, preferred && hint.preferred && alike, each);
        }
    }

    fn better(&self, current: Hint, candidate: Hint, sensible: u32) -> Hint {
        let size = |hint: Hint| hint.nodes.map_or(0, Mask::count);
        match (current.preferred, candidate.preferred) {
            (false, true) => return candidate,
            (true, false) => return current,
            (true, true) => return self.closer(current, candidate),
            (false, false) => {}
        }
        let (now, new) = (size(current), size(candidate));
        if now > sensible {
            return self.closer(current, candidate);
        }
        if now == sensible {
            return match new == sensible {
                true => self.closer(current, candidate),
                false => current,
            };
        }
        if new > sensible {
            return current;
        }
        match new.cmp(&now) {
            std::cmp::Ordering::Greater => candidate,
            std::cmp::Ordering::Less => current,
            std::cmp::Ordering::Equal => self.closer(current, candidate),
        }
    }

    fn closer(&self, current: Hint, candidate: Hint) -> Hint {
        let (Some(now), Some(new)) = (current.nodes, candidate.nodes) else {
            return current;
        };
        if now == new {
            return current;
        }
        let by_distance =
            self.prefer_closest && self.policy != Policy::SingleNumaNode && now.count() == new.count();
        let stays = match (self.average_distance(now), self.average_distance(new)) {
            (before, after) if by_distance && before != after => before < after,
            _ => now.is_narrower_than(new),
        };
        if stays { current } else { candidate }
    }

    fn average_distance(&self, mask: Mask) -> f64 {
        let ids = self.topology.node_ids();
        let place = |node: &u32| ids.iter().position(|id| id == node);
        let nodes = mask.nodes();
        let mut sum = 0.0;
        for from in &nodes {
            let known = self.topology.nodes.get(from);
            for to in &nodes {
                let distance = known.zip(place(to)).and_then(|(node, to)| node.distances.get(to));
                sum += distance.copied().unwrap_or(0) as f64;
            }
        }
        let pairs = (nodes.len() * nodes.len()).max(1);
        sum / pairs as f64
    }
}

/// The hints of all resources of all providers. No wish is met anywhere; one that cannot be met is not preferred.
fn by_resource(providers: &[ProviderHints]) -> Vec<Vec<Hint>> {
    let no_wish = |preferred| {
        vec![Hint {
            nodes: None,
            preferred,
        }]
    };
    let mut all = Vec::new();
    for hints in providers {
        if hints.is_empty() {
            all.push(no_wish(true));
        }
        for of_resource in hints.values() {
            all.push(match of_resource {
                None => no_wish(true),
                Some(hints) if hints.is_empty() => no_wish(false),
                Some(hints) => hints.clone(),
            });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::machine::made_up::machine;
    use super::*;

    fn mask(nodes: &[u32]) -> Mask {
        nodes.iter().copied().collect()
    }

    #[test]
    fn masks_come_small_ones_first() {
        let mut seen = Vec::new();
        each_mask(&[0, 1, 3], |mask| seen.push(mask.nodes()));
        let expected: Vec<Vec<u32>> = vec![
            vec![0],
            vec![1],
            vec![3],
            vec![0, 1],
            vec![0, 3],
            vec![1, 3],
            vec![0, 1, 3],
        ];
        assert_eq!(seen, expected);
        assert!(mask(&[3]).is_narrower_than(mask(&[0, 1])));
        assert!(mask(&[0, 2]).is_narrower_than(mask(&[1, 2])));
        assert!(mask(&[0, 1, 2]).is_superset(mask(&[0, 2])) && !mask(&[0]).is_superset(mask(&[1])));
        assert!(!mask(&[0, 70]).contains(70));
    }

    type Wishes<'a> = &'a [(&'a [u32], bool)];

    fn provider(resource: &str, hints: Option<Wishes<'_>>) -> ProviderHints {
        let hints = hints.map(|hints| {
            let hints = hints.iter();
            hints
                .map(|(nodes, preferred)| Hint::new(mask(nodes), *preferred))
                .collect()
        });
        [(resource.to_owned(), hints)].into()
    }

    #[track_caller]
    fn check(
        topology: &Topology,
        policy: Policy,
        prefer_closest: bool,
        providers: &[ProviderHints],
        expected: Option<(Option<&[u32]>, bool)>,
    ) {
        let merger = Merger {
            policy,
            prefer_closest,
            topology,
        };
        let expected = expected.map(|(nodes, preferred)| Hint {
            nodes: nodes.map(mask),
            preferred,
        });
        assert_eq!(merger.merge(providers), expected, "{policy:?}");
    }

    #[test]
    fn two_nodes() {
        let two = machine(2, 1, 2, 2);
        let cpus: Wishes<'_> = &[(&[0], true), (&[1], true), (&[0, 1], false)];
        let only_one: Wishes<'_> = &[(&[1], true), (&[0, 1], false)];
        let wide: Wishes<'_> = &[(&[0, 1], true)];
        use Policy::{BestEffort, Restricted, SingleNumaNode};
        // Nobody wishes anything.
        for policy in [BestEffort, Restricted] {
            check(
                &two,
                policy,
                false,
                &[ProviderHints::new()],
                Some((Some(&[0, 1]), true)),
            );
        }
        check(
            &two,
            SingleNumaNode,
            false,
            &[ProviderHints::new(), provider("d", None)],
            Some((None, true)),
        );
        // One provider; two that agree.
        for policy in [BestEffort, Restricted, SingleNumaNode] {
            check(
                &two,
                policy,
                false,
                &[provider("cpu", Some(cpus))],
                Some((Some(&[0]), true)),
            );
            let both = [provider("cpu", Some(cpus)), provider("gpu", Some(only_one))];
            check(&two, policy, false, &both, Some((Some(&[1]), true)));
        }
        // Two that cannot agree on one node.
        let other: Wishes<'_> = &[(&[0], true), (&[0, 1], false)];
        let apart = [provider("cpu", Some(other)), provider("gpu", Some(only_one))];
        check(&two, BestEffort, false, &apart, Some((Some(&[0]), false)));
        check(&two, Restricted, false, &apart, None);
        check(&two, SingleNumaNode, false, &apart, None);
        // More than one node has.
        let large = [provider("cpu", Some(wide))];
        check(&two, Restricted, false, &large, Some((Some(&[0, 1]), true)));
        check(&two, SingleNumaNode, false, &large, None);
        // A wish that cannot be met at all.
        let nothing = [provider("gpu", Some(&[]))];
        check(&two, BestEffort, false, &nothing, Some((Some(&[0, 1]), false)));
        check(&two, Restricted, false, &nothing, None);
    }

    #[test]
    fn the_closest_nodes() {
        // Nodes 0 and 1 are in one socket, 2 and 3 in the other.
        let four = machine(2, 2, 2, 1);
        let pairs: Wishes<'_> = &[(&[0, 2], true), (&[1, 3], true), (&[2, 3], true)];
        let wishes = [provider("cpu", Some(pairs))];
        check(
            &four,
            Policy::BestEffort,
            false,
            &wishes,
            Some((Some(&[0, 2]), true)),
        );
        check(
            &four,
            Policy::BestEffort,
            true,
            &wishes,
            Some((Some(&[2, 3]), true)),
        );
    }

    #[test]
    fn not_narrower_than_sensible() {
        let four = machine(2, 2, 2, 1);
        // One needs two nodes; what they have in common is one, but two is what can be hoped for.
        let one: Wishes<'_> = &[(&[0], true), (&[1], true), (&[0, 1], false), (&[1, 2], false)];
        let wide: Wishes<'_> = &[(&[0, 1], true), (&[1, 2], false)];
        let wishes = [provider("cpu", Some(one)), provider("memory", Some(wide))];
        check(
            &four,
            Policy::BestEffort,
            false,
            &wishes,
            Some((Some(&[0, 1]), false)),
        );
        check(&four, Policy::Restricted, false, &wishes, None);
    }
}
