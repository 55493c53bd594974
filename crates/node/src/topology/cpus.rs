//! Which CPUs a container gets: upstream's two algorithms, so that a node gives the same CPUs under either kubelet. Pure.

mod distributed;
mod packed;

use super::cpu_set::CpuSet;
use super::machine::Topology;
use packed::Accumulator;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("not enough cpus available to satisfy request: requested={wanted}, available={available}")]
    NotEnough { wanted: usize, available: usize },
    #[error("failed to allocate cpus")]
    Failed,
}

/// How CPUs are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// CPUs that share a last-level cache, where possible.
    pub prefer_uncore: bool,
    /// The same number on each NUMA node, where one is too small, in groups of so many.
    pub distribute_in_groups_of: Option<usize>,
}

/// Takes so many of the available CPUs.
pub fn take(topology: &Topology, available: &CpuSet, wanted: usize, choice: Choice) -> Result<CpuSet, Error> {
    match choice.distribute_in_groups_of {
        Some(group) => distributed::take(topology, available, wanted, group.max(1)),
        None => packed::take(topology, available, wanted, choice.prefer_uncore),
    }
}

#[cfg(test)]
mod tests {
    use super::super::machine::made_up::{machine, with_caches};
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[track_caller]
    fn check(topology: &Topology, choice: Choice, available: &str, wanted: usize, expected: &str) {
        let available = match available {
            "all" => topology.all_cpus(),
            listed => set(listed),
        };
        let taken = take(topology, &available, wanted, choice).unwrap();
        assert_eq!(taken.to_string(), expected);
    }

    #[test]
    fn packed_on_one_socket_with_threads() {
        // Cores 0 to 3; their second threads are 4 to 7.
        let one = machine(1, 1, 4, 2);
        let packed = Choice::default();
        check(&one, packed, "all", 0, "");
        check(&one, packed, "all", 1, "0");
        check(&one, packed, "all", 2, "0,4");
        check(&one, packed, "all", 3, "0-1,4");
        check(&one, packed, "all", 8, "0-7");
        // Whole cores first, then the thread of a core that is taken in part.
        check(&one, packed, "0-3,5-7", 2, "1,5");
        check(&one, packed, "0-3,5-7", 3, "0-1,5");
        check(&one, packed, "0-3,5-7", 1, "0");
        let error = take(&one, &set("0-1"), 3, packed).unwrap_err();
        assert_eq!(
            error.to_string(),
            "not enough cpus available to satisfy request: requested=3, available=2"
        );
    }

    #[test]
    fn packed_on_two_sockets() {
        // Socket 0 has cores 0 to 2, socket 1 cores 3 to 5; second threads are 6 to 11.
        let two = machine(2, 1, 3, 2);
        let packed = Choice::default();
        check(&two, packed, "all", 6, "0-2,6-8");
        check(&two, packed, "all", 7, "0-3,6-8");
        // A whole socket that is free, not the one that is taken in part.
        check(&two, packed, "1-11", 6, "3-5,9-11");
        // The socket with fewer free CPUs first.
        check(&two, packed, "2-5,8-11", 2, "2,8");
        check(&two, packed, "2-5,8-11", 4, "2-3,8-9");
    }

    #[test]
    fn packed_where_sockets_have_several_nodes() {
        // Two sockets with two nodes of two cores each: node 0 is CPUs 0-1 and 8-9, node 2 is 4-5 and 12-13.
        let large = machine(2, 2, 2, 2);
        let packed = Choice::default();
        check(&large, packed, "all", 4, "0-1,8-9");
        check(&large, packed, "all", 8, "0-3,8-11");
        check(&large, packed, "all", 12, "0-5,8-13");
        // Node 0 is not free any more: node 1 of the same socket.
        check(&large, packed, "1-15", 4, "2-3,10-11");
        // The socket that is used already, and there the node with fewer free CPUs.
        check(&large, packed, "1-15", 2, "1,9");
        check(&large, packed, "1-15", 1, "8");
    }

    #[test]
    fn one_cache() {
        let uncore = Choice {
            prefer_uncore: true,
            ..Choice::default()
        };
        // Caches of four cores with two threads each: 0-3 and 8-11, 4-7 and 12-15.
        let two = with_caches(machine(1, 1, 8, 2), 4);
        check(&two, uncore, "all", 8, "0-3,8-11");
        check(&two, uncore, "all", 3, "0-1,8");
        check(&two, uncore, "all", 10, "0-4,8-12");
        // What does not fit into what is left of the first goes into the second.
        check(&two, uncore, "2-7,10-15", 6, "4-6,12-14");
        check(&two, uncore, "2-7,10-15", 4, "2-3,10-11");
        // It fits nowhere: whole cores.
        check(&two, uncore, "2-5,10-13", 6, "2-4,10-12");
        check(&two, Choice::default(), "2-7,10-15", 6, "2-4,10-12");
    }

    #[test]
    fn evenly_over_nodes() {
        let distribute = |group| Choice {
            distribute_in_groups_of: Some(group),
            ..Choice::default()
        };
        // Two nodes of three cores with two threads: 0-2 and 6-8, 3-5 and 9-11.
        let two = machine(2, 1, 3, 2);
        check(&two, distribute(1), "all", 4, "0-1,6-7");
        check(&two, distribute(1), "all", 6, "0-2,6-8");
        check(&two, distribute(1), "all", 8, "0-1,3-4,6-7,9-10");
        check(&two, distribute(2), "all", 10, "0-4,6-10");
        // One is not enough, both give the same.
        check(&two, distribute(1), "1-2,4-5,7-8,10-11", 6, "1-2,4-5,7,10");
        // It cannot be even: packed.
        check(&two, distribute(1), "0,3-5,9-11", 7, "0,3-5,9-11");
        // Not a number of whole groups: packed.
        check(&two, distribute(2), "all", 7, "0-3,6-8");
        let four = machine(2, 2, 2, 2);
        check(&four, distribute(1), "all", 6, "0-3,8,10");
        check(&four, distribute(1), "all", 16, "0-15");
    }
}
