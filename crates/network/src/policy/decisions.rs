//! What an ordered list of rules says about traffic with one peer, by protocol and port: the first rule that matches
//! decides. In one canonical form, without overlaps: the kernel's maps take no others. No I/O.

use super::ports::{PortBox, PortSet};
use super::tiers::Action;
use crate::proxy::Protocol;

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
/// The protocols between those that have ports.
const OTHERS: [(u8, u8); 4] = [(0, 5), (7, 16), (18, 131), (133, u8::MAX)];

/// Ports of one protocol, both ends included and in order, and what becomes of them.
type Lane = Vec<(u16, u16, Action)>;

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Decisions {
    lanes: [Lane; 3],
    /// What has no ports.
    other: Option<Action>,
}

impl Decisions {
    /// Decides what no rule before has decided.
    pub(super) fn add(&mut self, ports: &PortSet, action: Action) {
        match ports {
            PortSet::All => {
                for lane in &mut self.lanes {
                    fill(lane, 0, u16::MAX, action);
                }
                self.other.get_or_insert(action);
            }
            PortSet::Ranges(ranges) => {
                for range in ranges {
                    let lane = PROTOCOLS.iter().position(|known| *known == range.protocol);
                    if let Some(lane) = lane.and_then(|lane| self.lanes.get_mut(lane)) {
                        fill(lane, range.first, range.last, action);
                    }
                }
            }
        }
    }

    /// The one decision about everything, if there is one; `Some(None)` if nothing is decided.
    pub(super) fn whole(&self) -> Option<Option<Action>> {
        let wanted: &[(u16, u16, Action)] = match self.other {
            None => &[],
            Some(action) => &[(0, u16::MAX, action)],
        };
        self.lanes.iter().all(|lane| lane == wanted).then_some(self.other)
    }

    pub(super) fn boxes(&self) -> Vec<(PortBox, Action)> {
        match self.whole() {
            Some(None) => return Vec::new(),
            Some(Some(action)) => return vec![(PortBox::ALL, action)],
            None => {}
        }
        let of_lanes = PROTOCOLS.iter().zip(&self.lanes).flat_map(|(protocol, lane)| {
            let number = protocol.number();
            lane.iter().map(move |(first, last, action)| {
                let ports = PortBox {
                    protocols: (number, number),
                    ports: (*first, *last),
                };
                (ports, *action)
            })
        });
        let of_others = self.other.into_iter().flat_map(|action| {
            OTHERS.map(|protocols| {
                let ports = PortBox {
                    protocols,
                    ..PortBox::ALL
                };
                (ports, action)
            })
        });
        of_lanes.chain(of_others).collect()
    }
}

/// Fills the gaps of a lane between two ports.
fn fill(lane: &mut Lane, first: u16, last: u16, action: Action) {
    let mut filled: Lane = Vec::with_capacity(lane.len() + 1);
    let mut push = |first: u32, last: u32, action: Action| {
        // Both come from ports.
        let (Ok(first), Ok(last)) = (u16::try_from(first), u16::try_from(last)) else {
            return;
        };
        match filled.last_mut() {
            Some(before) if before.2 == action && u32::from(before.1) + 1 == u32::from(first) => {
                before.1 = last
            }
            _ => filled.push((first, last, action)),
        }
    };
    // The first port that is not filled yet.
    let mut next = u32::from(first);
    let end = u32::from(last) + 1;
    for (from, to, decided) in lane.iter().copied() {
        let gap_end = u32::from(from).min(end);
        if next < gap_end {
            push(next, gap_end - 1, action);
        }
        push(u32::from(from), u32::from(to), decided);
        next = next.max(u32::from(to) + 1);
    }
    if next < end {
        push(next, end - 1, action);
    }
    *lane = filled;
}

#[cfg(test)]
mod tests {
    use super::super::ports::PortRange;
    use super::*;

    fn tcp(first: u16, last: u16) -> PortSet {
        [PortRange {
            protocol: Protocol::Tcp,
            first,
            last,
        }]
        .into_iter()
        .collect()
    }

    fn check(rules: &[(PortSet, Action)], expected: &str) {
        let mut decisions = Decisions::default();
        for (ports, action) in rules {
            decisions.add(ports, *action);
        }
        let shown: Vec<String> = decisions
            .boxes()
            .iter()
            .map(|(ports, action)| {
                let (protocols, numbers) = (ports.protocols, ports.ports);
                format!(
                    "{}-{}:{}-{}={action:?}",
                    protocols.0, protocols.1, numbers.0, numbers.1
                )
            })
            .collect();
        assert_eq!(shown.join(" "), expected);
    }

    #[test]
    fn the_first_rule_decides() {
        use Action::{Accept, Deny, Pass};
        check(&[], "");
        check(
            &[(PortSet::All, Deny), (tcp(80, 80), Accept)],
            "0-255:0-65535=Deny",
        );
        check(
            &[
                (tcp(80, 80), Accept),
                (tcp(70, 90), Deny),
                (tcp(60, 100), Accept),
                (tcp(91, 91), Deny),
            ],
            "6-6:60-69=Accept 6-6:70-79=Deny 6-6:80-80=Accept 6-6:81-90=Deny 6-6:91-100=Accept",
        );
        check(
            &[
                (tcp(1, 10), Accept),
                (tcp(20, 30), Accept),
                (tcp(11, 19), Accept),
                (tcp(65535, 65535), Pass),
            ],
            "6-6:1-30=Accept 6-6:65535-65535=Pass",
        );
        check(
            &[(tcp(80, 80), Pass), (PortSet::All, Deny)],
            "6-6:0-79=Deny 6-6:80-80=Pass 6-6:81-65535=Deny 17-17:0-65535=Deny 132-132:0-65535=Deny \
             0-5:0-65535=Deny 7-16:0-65535=Deny 18-131:0-65535=Deny 133-255:0-65535=Deny",
        );
    }

    /// Port by port, as slowly as it can be said.
    #[test]
    fn lanes_are_filled_like_ports_one_by_one() {
        let mut seed = 5u64;
        let mut random = |limit: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((seed >> 33) % limit) as u16
        };
        for _ in 0..500 {
            let (mut decisions, mut model) = (Decisions::default(), [None; 20]);
            for _ in 0..6 {
                let (first, length) = (random(20), random(8));
                let last = (first + length).min(19);
                let action = [Action::Accept, Action::Deny, Action::Pass][usize::from(random(3))];
                decisions.add(&tcp(first, last), action);
                for port in first..=last {
                    model[usize::from(port)].get_or_insert(action);
                }
            }
            let boxes = decisions.boxes();
            for (port, expected) in model.iter().enumerate() {
                let mut matching = boxes.iter().filter(|(ports, _)| ports.contains(6, port as u16));
                assert_eq!(matching.next().map(|(_, action)| action), expected.as_ref());
                assert!(matching.next().is_none());
            }
            assert!(
                boxes
                    .windows(2)
                    .all(|pair| pair[0].1 != pair[1].1 || pair[0].0.ports.1 + 1 < pair[1].0.ports.0)
            );
        }
    }
}
