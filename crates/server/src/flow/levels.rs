//! The seats of the priority levels, and the queues before them. Each level has its share of the server's seats;
//! what it does not use, others may borrow as far as it lends. Who finds no seat waits in the queue of its flow, and
//! flows take turns, so that one busy client does not hold up the rest.
//!
//! Thinner than upstream: every request takes one seat, and a flow has one queue instead of a hand of shuffled ones.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::oneshot;

/// Upstream's `--max-requests-inflight` and `--max-mutating-requests-inflight` together.
const SERVER_SEATS: u64 = 400 + 200;

/// All limited levels. One leaf lock for all of them: they lend each other seats.
#[derive(Default)]
pub struct Levels {
    state: Mutex<HashMap<Arc<str>, Level>>,
}

#[derive(Default)]
struct Level {
    shares: u64,
    lendable_percent: u64,
    /// Queueing, with the number of waiting requests of one flow and of all.
    queue: Option<(usize, usize)>,
    /// Its part of the server's seats, and what of it others may not have.
    nominal: u64,
    kept: u64,
    executing: u64,
    waiting: usize,
    /// Flows in the order of their turns.
    flows: VecDeque<(u64, VecDeque<oneshot::Sender<Seat>>)>,
}

/// The right to execute; goes back when it is dropped.
pub struct Seat {
    levels: Arc<Levels>,
    level: Arc<str>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.levels.clone().release(&self.level);
    }
}

/// What became of a request that wants a seat.
pub enum Admission {
    Seated(Seat),
    Waiting(oneshot::Receiver<Seat>),
    Refused,
}

impl Levels {
    /// Takes over a level's configuration. Exempt levels need no seats and are not kept here.
    pub fn configure(self: &Arc<Self>, name: &str, spec: &Value) {
        let mut state = self.state.lock();
        let Some(limited) = spec.get("limited").filter(|limited| limited.is_object()) else {
            state.remove(name);
            return share_out(&mut state);
        };
        let number = |value: &Value, or: u64| value.as_u64().unwrap_or(or);
        let level = state.entry(name.into()).or_default();
        level.shares = number(&limited["nominalConcurrencyShares"], 30);
        level.lendable_percent = number(&limited["lendablePercent"], 0).min(100);
        let response = &limited["limitResponse"];
        level.queue = (response["type"] == "Queue").then(|| {
            let queuing = &response["queuing"];
            let length = number(&queuing["queueLengthLimit"], 50) as usize;
            let hand = number(&queuing["handSize"], 8) as usize;
            let queues = number(&queuing["queues"], 64) as usize;
            (length.saturating_mul(hand), length.saturating_mul(queues))
        });
        share_out(&mut state);
    }

    pub fn forget(self: &Arc<Self>, name: &str) {
        let mut state = self.state.lock();
        state.remove(name);
        share_out(&mut state);
    }

    /// The nominal concurrency limit of a level; 0 of one that is exempt.
    pub fn nominal_seats(&self, name: &str) -> u64 {
        self.state.lock().get(name).map_or(0, |level| level.nominal)
    }

    /// A seat for a request of a flow, or a place in its queue. A level that is not known is exempt.
    pub fn admit(self: &Arc<Self>, name: &Arc<str>, flow: u64) -> Option<Admission> {
        let mut state = self.state.lock();
        let level = state.get_mut(name)?;
        if level.waiting == 0 && level.executing < level.nominal {
            level.executing += 1;
            return Some(Admission::Seated(self.seat(name)));
        }
        if level.waiting == 0 && has_room(&state, name) {
            state.get_mut(name)?.executing += 1;
            return Some(Admission::Seated(self.seat(name)));
        }
        let level = state.get_mut(name)?;
        let Some((of_flow, of_all)) = level.queue else {
            return Some(Admission::Refused);
        };
        if level.waiting >= of_all {
            return Some(Admission::Refused);
        }
        let (sender, receiver) = oneshot::channel();
        match level.flows.iter_mut().find(|(known, _)| *known == flow) {
            Some((_, queue)) if queue.len() >= of_flow => return Some(Admission::Refused),
            Some((_, queue)) => queue.push_back(sender),
            None => level.flows.push_back((flow, VecDeque::from([sender]))),
        }
        level.waiting += 1;
        Some(Admission::Waiting(receiver))
    }

    fn seat(self: &Arc<Self>, level: &Arc<str>) -> Seat {
        Seat {
            levels: self.clone(),
            level: level.clone(),
        }
    }

    fn release(self: Arc<Self>, name: &Arc<str>) {
        // Seats that nobody takes any more come back through here again; they are sent without the lock.
        let mut granted = Vec::new();
        {
            let mut state = self.state.lock();
            if let Some(level) = state.get_mut(name) {
                level.executing = level.executing.saturating_sub(1);
            }
            // Its own level first: the seat was its.
            if state.values().all(|level| level.waiting == 0) {
                return;
            }
            let mut names = vec![name.clone()];
            let others = state
                .iter()
                .filter(|(other, level)| *other != name && level.waiting > 0);
            names.extend(others.map(|(other, _)| other.clone()));
            for name in names {
                while state.get(&name).is_some_and(|level| level.waiting > 0) && has_room(&state, &name) {
                    let Some(level) = state.get_mut(&name) else { break };
                    let Some(sender) = level.next() else { break };
                    if sender.is_closed() {
                        continue;
                    }
                    level.executing += 1;
                    granted.push((sender, name.clone()));
                }
            }
        }
        for (sender, name) in granted {
            // Whoever gave up in this instant drops the seat, which releases it.
            let _ = sender.send(self.seat(&name));
        }
    }
}

impl Level {
    /// The request whose turn it is: the oldest of the flow that has waited longest for a turn.
    fn next(&mut self) -> Option<oneshot::Sender<Seat>> {
        let (flow, mut queue) = self.flows.pop_front()?;
        let sender = queue.pop_front();
        if !queue.is_empty() {
            self.flows.push_back((flow, queue));
        }
        self.waiting = self.waiting.saturating_sub(1);
        sender
    }
}

/// Divides the server's seats by the shares.
fn share_out(levels: &mut HashMap<Arc<str>, Level>) {
    let shares: u64 = levels.values().map(|level| level.shares).sum();
    for level in levels.values_mut() {
        level.nominal = (SERVER_SEATS * level.shares).div_ceil(shares.max(1)).max(1);
        level.kept = level.nominal - level.nominal * level.lendable_percent / 100;
    }
}

/// Whether a level may have one more seat: of its own, or of those that nobody uses and that are not kept.
fn has_room(levels: &HashMap<Arc<str>, Level>, name: &str) -> bool {
    let Some(level) = levels.get(name) else {
        return true;
    };
    if level.executing < level.nominal {
        return true;
    }
    let spoken_for: u64 = levels
        .iter()
        .map(|(other, level)| {
            if other.as_ref() == name {
                level.executing
            } else {
                level.executing.max(level.kept)
            }
        })
        .sum();
    spoken_for < SERVER_SEATS
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Name, shares, lendable percentage; queues, hand size and length.
    type Row = (&'static str, u64, u64, Option<(u64, u64, u64)>);

    fn levels(rows: &[Row]) -> Arc<Levels> {
        let levels = Arc::new(Levels::default());
        for (name, shares, lendable, queuing) in rows {
            let response = match queuing {
                None => json!({"type": "Reject"}),
                Some((queues, hand, length)) => {
                    json!({"type": "Queue", "queuing": {"queues": queues, "handSize": hand, "queueLengthLimit": length}})
                }
            };
            levels.configure(
                name,
                &json!({"limited": {"nominalConcurrencyShares": shares, "lendablePercent": lendable, "limitResponse": response}}),
            );
        }
        levels
    }

    fn fill(levels: &Arc<Levels>, name: &str, flow: u64) -> Vec<Seat> {
        let mut seats = Vec::new();
        while let Some(Admission::Seated(seat)) = levels.admit(&name.into(), flow) {
            seats.push(seat);
        }
        seats
    }

    #[test]
    fn seats_are_shared_and_lent() {
        let levels = levels(&[("a", 1, 0, None), ("b", 1, 50, None)]);
        // Its own 300, and the half of the other's that is lent.
        let of_a = fill(&levels, "a", 0);
        assert_eq!(of_a.len(), 450);
        assert_eq!(fill(&levels, "b", 0).len(), 300, "nominal seats are always there");
        drop(of_a);
        assert_eq!(fill(&levels, "b", 0).len(), 300, "nothing of a is lent");
        assert!(levels.admit(&"unknown".into(), 0).is_none());
    }

    #[test]
    fn flows_take_turns() {
        let levels = levels(&[("a", 1, 0, Some((4, 1, 2)))]);
        let mut seats = fill(&levels, "a", 0);
        let wait = |flow: u64| match levels.admit(&"a".into(), flow) {
            Some(Admission::Waiting(receiver)) => receiver,
            _ => panic!("waits"),
        };
        let (mut first, mut second, mut other) = (wait(1), wait(1), wait(2));
        assert!(
            matches!(levels.admit(&"a".into(), 1), Some(Admission::Refused)),
            "the queue is full"
        );
        seats.pop();
        let _first = first.try_recv().expect("its turn");
        seats.pop();
        assert!(second.try_recv().is_err(), "the other flow comes before");
        let _other = other.try_recv().expect("its turn");
        // Who gave up loses the turn, not the seat.
        drop(second);
        let mut last = wait(3);
        seats.pop();
        let _last = last.try_recv().expect("its turn");
    }

    #[test]
    fn a_level_has_room_for_so_many_in_all() {
        let levels = levels(&[("a", 1, 0, Some((3, 1, 1)))]);
        // The last that found no seat has a place in a queue.
        let _seats = fill(&levels, "a", 0);
        let mut waiting = Vec::new();
        for flow in 1..=2 {
            match levels.admit(&"a".into(), flow) {
                Some(Admission::Waiting(receiver)) => waiting.push(receiver),
                _ => panic!("waits"),
            }
        }
        assert!(matches!(levels.admit(&"a".into(), 3), Some(Admission::Refused)));
    }
}
