//! Who answers for one address, as a state machine without I/O: time and what is heard come in, what to do goes out.
//!
//! The machines do not vote and need no server for this. Whoever answers for an address keeps it; a few others, those
//! with the first ranks, ask for it all the time, and the first of them takes it when nobody has answered so many
//! questions in a row. Ranks differ, so that they do not all take it at once. If two do answer (a link was cut and is
//! whole again), they hear each other's announcements and one of them gives way, both knowing which.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::wire::Hardware;

/// How many machines ask for an address that somebody else has.
pub(super) const CONTENDERS: usize = 3;
/// Between two questions.
const QUESTION_PERIOD: Duration = Duration::from_millis(250);
/// The same for an address that is new or has been given up, by the machine with the first rank.
const FIRST_PERIOD: Duration = Duration::from_millis(60);
/// Questions without an answer after which the first rank takes an address; each further rank waits for one more.
const UNANSWERED: u32 = 3;
/// An address is announced so long after it was taken: a host may miss one announcement, or ignore it because it
/// has just learned another.
const ANNOUNCED_AFTER: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_millis(300),
    Duration::from_millis(1100),
    Duration::from_millis(2300),
];
/// From then on, so that two who both answer find each other.
const ANNOUNCE_PERIOD: Duration = Duration::from_secs(3);
/// Not more often, whatever others say.
const DEFEND_PERIOD: Duration = Duration::from_millis(200);

/// What the machine must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Ask for the address: everybody, or the one who answered last.
    Ask(Option<Hardware>),
    /// Answer for it from now on, and announce it.
    Take,
    Announce,
    /// Answer for it no more.
    Release,
}

#[derive(Debug)]
pub(super) struct Contest {
    address: IpAddr,
    own: Hardware,
    /// Its place among the machines that may have the address; `None`: this one may not.
    rank: Option<usize>,
    held: bool,
    /// Nobody is known to have the address, so the first rank is quick.
    fresh: bool,
    heard: Option<Hardware>,
    unanswered: u32,
    next: Instant,
    taken_at: Instant,
    announced: usize,
    announced_at: Instant,
}

impl Contest {
    /// `held`: this machine's kernel answers for it already.
    pub(super) fn new(address: IpAddr, own: Hardware, held: bool, now: Instant) -> Contest {
        Contest {
            address,
            own,
            rank: None,
            held,
            fresh: true,
            heard: None,
            unanswered: 0,
            next: now,
            taken_at: now,
            announced: 0,
            announced_at: now,
        }
    }

    pub(super) fn held(&self) -> bool {
        self.held
    }

    /// The machines that may have the address have changed.
    pub(super) fn set_rank(&mut self, rank: Option<usize>, now: Instant) {
        if self.rank != rank {
            self.rank = rank;
            self.unanswered = 0;
            self.next = self.next.min(now);
        }
    }

    /// The others may have changed in a way that leaves the address without a machine.
    pub(super) fn refresh(&mut self, now: Instant) {
        self.fresh = true;
        self.unanswered = 0;
        self.next = self.next.min(now);
    }

    /// It could not be taken after all.
    pub(super) fn failed(&mut self, now: Instant) {
        self.held = false;
        self.fresh = false;
        self.unanswered = 0;
        self.next = now + QUESTION_PERIOD;
    }

    /// Somebody says that the address is theirs.
    pub(super) fn heard(&mut self, by: Hardware, now: Instant) -> Option<Action> {
        if by == self.own {
            return None;
        }
        self.heard = Some(by);
        self.fresh = false;
        self.unanswered = 0;
        if !self.held {
            return None;
        }
        if weight(self.address, &by) < weight(self.address, &self.own) {
            self.held = false;
            self.next = now + QUESTION_PERIOD;
            return Some(Action::Release);
        }
        // Hosts have learned that the other one has it: they are told until they must have heard.
        self.taken_at = now;
        self.announced = 1;
        if now.duration_since(self.announced_at) < DEFEND_PERIOD {
            return None;
        }
        self.announced_at = now;
        Some(Action::Announce)
    }

    /// What is due, and when to ask again.
    pub(super) fn tick(&mut self, now: Instant) -> (Option<Action>, Option<Instant>) {
        let Some(rank) = self.rank else {
            return (std::mem::take(&mut self.held).then_some(Action::Release), None);
        };
        if self.held {
            let due = match ANNOUNCED_AFTER.get(self.announced) {
                Some(after) => self.taken_at + *after,
                None => self.announced_at + ANNOUNCE_PERIOD,
            };
            if now < due {
                return (None, Some(due));
            }
            self.announced += 1;
            self.announced_at = now;
            return (Some(Action::Announce), Some(now));
        }
        if rank >= CONTENDERS {
            self.unanswered = 0;
            return (None, None);
        }
        if now < self.next {
            return (None, Some(self.next));
        }
        let quick = self.fresh && rank == 0;
        let patience = UNANSWERED + u32::try_from(rank).unwrap_or(u32::MAX);
        if self.unanswered >= patience {
            self.held = true;
            self.fresh = false;
            self.heard = None;
            self.taken_at = now;
            // Taking it is the first announcement.
            self.announced = 1;
            self.announced_at = now;
            return (Some(Action::Take), Some(now));
        }
        self.unanswered += 1;
        // The last one who had it may be gone while another has it.
        let to = self.heard.filter(|_| self.unanswered == 1);
        self.next = now + if quick { FIRST_PERIOD } else { QUESTION_PERIOD };
        (Some(Action::Ask(to)), Some(self.next))
    }
}

/// The order of machines for an address, the same on all of them: by a hash, so that addresses are spread.
pub(super) fn weight(address: IpAddr, name: &[u8]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    match address {
        IpAddr::V4(address) => add(&address.octets()),
        IpAddr::V6(address) => add(&address.octets()),
    }
    add(name);
    // Names that differ in their last letter alone are to be far apart.
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(10);

    fn address() -> IpAddr {
        "192.0.2.9".parse().unwrap()
    }

    /// Machines on one link, which hear each other as the kernel answers for them.
    struct Link {
        now: Instant,
        machines: Vec<(Contest, bool)>,
    }

    impl Link {
        fn new(ranks: &[Option<usize>]) -> Link {
            let now = Instant::now();
            let machine = |(number, rank): (usize, &Option<usize>)| {
                let mut contest = Contest::new(address(), hardware(number), false, now);
                contest.set_rank(*rank, now);
                (contest, true)
            };
            Link {
                now,
                machines: ranks.iter().enumerate().map(machine).collect(),
            }
        }

        fn holders(&self) -> Vec<usize> {
            let machines = self.machines.iter().enumerate();
            machines
                .filter(|(_, (contest, alive))| *alive && contest.held())
                .map(|(number, _)| number)
                .collect()
        }

        fn tell(&mut self, from: usize, to: Option<usize>) {
            for number in 0..self.machines.len() {
                let (contest, alive) = &mut self.machines[number];
                if *alive && number != from && to.is_none_or(|to| to == number) {
                    let said = contest.heard(hardware(from), self.now);
                    if said == Some(Action::Announce) {
                        self.tell(number, None);
                    }
                }
            }
        }

        /// Runs for so long; returns the largest number of machines that answered at the same time.
        fn run(&mut self, span: Duration) -> usize {
            let end = self.now + span;
            let mut most = 0;
            while self.now < end {
                for number in 0..self.machines.len() {
                    let (contest, alive) = &mut self.machines[number];
                    if !*alive {
                        continue;
                    }
                    match contest.tick(self.now).0 {
                        Some(Action::Ask(to)) => {
                            for holder in self.holders() {
                                if to.is_none_or(|to| to == hardware(holder)) {
                                    self.tell(holder, Some(number));
                                }
                            }
                        }
                        Some(Action::Take | Action::Announce) => self.tell(number, None),
                        Some(Action::Release) | None => {}
                    }
                }
                most = most.max(self.holders().len());
                self.now += STEP;
            }
            most
        }

        fn until_held(&mut self) -> Duration {
            let start = self.now;
            while self.holders().is_empty() {
                self.run(STEP);
                assert!(self.now - start < Duration::from_secs(60), "nobody takes it");
            }
            self.now - start
        }
    }

    fn hardware(number: usize) -> Hardware {
        [2, 0, 0, 0, 0, number as u8]
    }

    #[test]
    fn one_has_it_and_keeps_it() {
        let mut link = Link::new(&[Some(1), Some(0), Some(2), None, Some(3)]);
        assert!(link.until_held() < Duration::from_millis(400));
        assert_eq!(link.holders(), [1]);
        assert_eq!(link.run(Duration::from_secs(30)), 1);
        // A machine that comes back with a better rank does not take it away.
        link.machines[1].0.set_rank(Some(2), link.now);
        link.machines[0].0.set_rank(Some(0), link.now);
        assert_eq!(link.run(Duration::from_secs(30)), 1);
        assert_eq!(link.holders(), [1]);
    }

    #[test]
    fn when_it_dies_the_next_one_takes_over_within_two_seconds() {
        for alive in [vec![0, 1, 2], vec![0, 2], vec![2]] {
            let mut link = Link::new(&[Some(1), Some(0), Some(2)]);
            link.until_held();
            link.run(Duration::from_secs(5));
            for number in 0..3 {
                link.machines[number].1 = alive.contains(&number) && number != 1;
            }
            let took = link.until_held();
            assert!(took < Duration::from_millis(1800), "{alive:?}: {took:?}");
            assert_eq!(link.run(Duration::from_secs(10)), 1, "{alive:?}");
        }
    }

    #[test]
    fn who_may_not_have_it_gives_it_up() {
        let mut link = Link::new(&[Some(0), Some(1)]);
        link.until_held();
        let now = link.now;
        link.machines[0].0.set_rank(None, now);
        link.machines[1].0.set_rank(Some(0), now);
        link.machines[1].0.refresh(now);
        link.run(STEP);
        assert!(link.until_held() < Duration::from_millis(400));
        assert_eq!(link.holders(), [1]);
    }

    #[test]
    fn of_two_who_answer_one_gives_way() {
        let mut link = Link::new(&[Some(0), Some(1)]);
        // Cut apart, both take it.
        link.machines[1].1 = false;
        link.until_held();
        link.machines[0].1 = false;
        link.machines[1].1 = true;
        link.until_held();
        link.run(Duration::from_secs(5));
        link.machines[0].1 = true;
        assert_eq!(link.holders(), [0, 1]);
        link.run(ANNOUNCE_PERIOD + STEP);
        assert_eq!(link.holders().len(), 1);
        assert_eq!(link.run(Duration::from_secs(10)), 1);
    }

    #[test]
    fn a_machine_that_slept_asks_before_it_takes() {
        let now = Instant::now();
        let mut contest = Contest::new(address(), hardware(1), false, now);
        contest.set_rank(Some(0), now);
        contest.heard(hardware(2), now);
        let later = now + Duration::from_secs(3600);
        for _ in 0..UNANSWERED {
            assert!(matches!(contest.tick(later).0, Some(Action::Ask(_)) | None));
        }
        assert!(!contest.held());
    }

    #[test]
    fn addresses_are_spread_over_machines() {
        let names: Vec<String> = (0..10).map(|number| format!("node-{number}")).collect();
        let mut counts = [0; 10];
        for last in 0..200 {
            let address = IpAddr::from([192, 0, 2, last]);
            let first = (0..10).min_by_key(|number| weight(address, names[*number].as_bytes()));
            counts[first.unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| *count >= 8), "{counts:?}");
    }
}
