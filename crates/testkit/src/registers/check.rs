//! Whether the history of one register is linearizable: whether there is an order of its operations, each taking effect
//! at one moment between its call and its answer, in which every answer is right. After Wing and Gong, with Lowe's
//! memory of the states that led nowhere.
//!
//! Each value is written at most once, so a value names the write, and "compare with resourceVersion" is "compare with
//! the value that was read with it". The versions are checked on the way: one for each value, and rising.
//!
//! ```text
//! a  ├─ create 1: done ─┤                        read: 1 by b is right while a's swap is under way,
//! a                       ├─ swap 1→2: done ─┤   and wrong when it was called after the swap's answer
//! b                         ├─ read: 1 ─┤
//! ```

use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// So many moves of the search at most; then the history is undecided, which is an error too.
const MAX_MOVES: usize = 5_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Writes if there is nothing.
    Create {
        value: u64,
    },
    Read,
    /// Writes if `expected` is there.
    Swap {
        expected: u64,
        value: u64,
    },
    /// Deletes if `expected` is there.
    Delete {
        expected: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The write was acknowledged.
    Done,
    /// The write was refused: its condition did not hold.
    Refused,
    /// What a read found.
    Found(Option<u64>),
    /// No answer, or one that leaves it open. A write may take effect at any time after its call, or never.
    Unknown,
}

#[derive(Clone, Debug)]
pub struct Operation {
    pub client: usize,
    pub call: Call,
    pub answer: Answer,
    /// The resourceVersion of what was written or read, where the answer tells.
    pub version: Option<u64>,
    /// Both by one monotonic clock. `returned` means nothing if the answer is unknown.
    pub invoked: Duration,
    pub returned: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Violation {
    /// There is no order in which all answers are right.
    NotLinearizable(String),
    /// One value came with two versions.
    TwoVersions { value: u64, versions: [u64; 2] },
    /// The search gave up.
    Undecided,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Violation::NotLinearizable(why) => write!(f, "not linearizable: {why}"),
            Violation::TwoVersions {
                value,
                versions: [a, b],
            } => write!(f, "the value {value} has the versions {a} and {b}"),
            Violation::Undecided => write!(f, "undecided after {MAX_MOVES} moves"),
        }
    }
}

impl std::error::Error for Violation {}

/// The register between two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct State {
    value: Option<u64>,
    /// The newest version that is known to have been written.
    version: u64,
}

/// The operations that have taken effect, as bits, and what the register holds.
type Place = (Box<[u64]>, State);

struct Search<'a> {
    /// By their calls.
    operations: Vec<&'a Operation>,
    versions: HashMap<u64, u64>,
    done: Box<[u64]>,
    /// Answered operations that have yet to take effect.
    left: usize,
    dead_ends: HashSet<Place>,
    moves: usize,
    /// The deepest the search came: operations left, the state, and what was in the way.
    best: (usize, String),
}

/// One move: the operation, where the scan of candidates stood, and the state before.
struct Move {
    index: usize,
    before: State,
}

/// Checks all operations on one register that did not exist before the first of them.
pub fn check(history: &[Operation]) -> Result<(), Violation> {
    let mut operations: Vec<&Operation> = history
        .iter()
        // A read without an answer says nothing.
        .filter(|one| !(one.call == Call::Read && one.answer == Answer::Unknown))
        .collect();
    operations.sort_by_key(|one| one.invoked);
    let left = operations
        .iter()
        .filter(|one| one.answer != Answer::Unknown)
        .count();
    let search = Search {
        versions: versions(&operations)?,
        done: vec![0; operations.len().div_ceil(64)].into(),
        operations,
        left,
        dead_ends: HashSet::new(),
        moves: 0,
        best: (usize::MAX, String::new()),
    };
    search.run()
}

fn versions(operations: &[&Operation]) -> Result<HashMap<u64, u64>, Violation> {
    let mut versions = HashMap::new();
    for one in operations {
        let value = match (one.call, one.answer) {
            (Call::Create { value } | Call::Swap { value, .. }, Answer::Done) => Some(value),
            (Call::Read, Answer::Found(value)) => value,
            _ => None,
        };
        let (Some(value), Some(version)) = (value, one.version) else {
            continue;
        };
        let known = *versions.entry(value).or_insert(version);
        if known != version {
            let versions = [known, version];
            return Err(Violation::TwoVersions { value, versions });
        }
    }
    Ok(versions)
}

impl Search<'_> {
    fn run(mut self) -> Result<(), Violation> {
        let (mut state, mut path, mut from) = (State::default(), Vec::<Move>::new(), 0);
        loop {
            if self.left == 0 {
                return Ok(());
            }
            self.moves += 1;
            if self.moves > MAX_MOVES {
                return Err(Violation::Undecided);
            }
            match self.next(state, from) {
                Some((index, after)) => {
                    self.set(index, true);
                    if self.dead_ends.contains(&(self.done.clone(), after)) {
                        self.set(index, false);
                        from = index + 1;
                        continue;
                    }
                    path.push(Move { index, before: state });
                    (state, from) = (after, 0);
                }
                None => {
                    self.note(state);
                    self.dead_ends.insert((self.done.clone(), state));
                    let Some(Move { index, before }) = path.pop() else {
                        return Err(Violation::NotLinearizable(self.best.1));
                    };
                    self.set(index, false);
                    (state, from) = (before, index + 1);
                }
            }
        }
    }

    fn is_done(&self, index: usize) -> bool {
        self.done[index / 64] & (1 << (index % 64)) != 0
    }

    fn set(&mut self, index: usize, done: bool) {
        self.done[index / 64] ^= 1 << (index % 64);
        if self.operations[index].answer != Answer::Unknown {
            self.left = if done { self.left - 1 } else { self.left + 1 };
        }
    }

    /// The first operation from `from` on that may take effect now, and the state after it.
    fn next(&self, state: State, from: usize) -> Option<(usize, State)> {
        self.candidates()
            .filter(|index| *index >= from)
            .find_map(|index| Some((index, self.step(state, self.operations[index])?)))
    }

    /// Operations that were called before any other pending one was answered.
    fn candidates(&self) -> impl Iterator<Item = usize> {
        let first = self.done.iter().position(|word| *word != u64::MAX);
        let mut deadline = Duration::MAX;
        let pending = (first.unwrap_or(0) * 64..self.operations.len()).filter(|index| !self.is_done(*index));
        pending.take_while(move |index| {
            let one = self.operations[*index];
            if one.invoked > deadline {
                return false;
            }
            if one.answer != Answer::Unknown {
                deadline = deadline.min(one.returned);
            }
            true
        })
    }

    fn step(&self, state: State, one: &Operation) -> Option<State> {
        let holds = match one.call {
            Call::Create { .. } => state.value.is_none(),
            Call::Swap { expected, .. } | Call::Delete { expected } => state.value == Some(expected),
            Call::Read => return (one.answer == Answer::Found(state.value)).then_some(state),
        };
        match one.answer {
            Answer::Refused => return (!holds).then_some(state),
            Answer::Found(_) => return None,
            Answer::Done | Answer::Unknown if !holds => return None,
            Answer::Done | Answer::Unknown => {}
        }
        let value = match one.call {
            Call::Create { value } | Call::Swap { value, .. } => Some(value),
            Call::Delete { .. } | Call::Read => None,
        };
        let version = value.and_then(|value| self.versions.get(&value)).copied();
        if version.is_some_and(|version| version <= state.version) {
            return None;
        }
        let version = version.unwrap_or(state.version);
        Some(State { value, version })
    }

    /// Remembers where the search came furthest, for the message.
    fn note(&mut self, state: State) {
        if self.left >= self.best.0 {
            return;
        }
        let stuck: Vec<String> = self
            .candidates()
            .take(12)
            .map(|index| describe(self.operations[index]))
            .collect();
        let told = format!(
            "{} answers are left when the register holds {:?} of version {}, and none of these fits:\n{}",
            self.left,
            state.value,
            state.version,
            stuck.join("\n")
        );
        self.best = (self.left, told);
    }
}

fn describe(one: &Operation) -> String {
    let Operation {
        client,
        call,
        answer,
        version,
        invoked,
        returned,
    } = one;
    format!(
        "  client {client}: {call:?} → {answer:?}, version {version:?}, {:.6} to {:.6} s",
        invoked.as_secs_f64(),
        returned.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `client FROM-TO call answer`, one a line: `create V`, `read`, `swap E V`, `delete E`; `done`, `refused`, `unknown`,
    /// `= V`, `= none`, and after `@` the version.
    fn history(text: &str) -> Vec<Operation> {
        let line = |line: &str| {
            let (line, version) = match line.split_once('@') {
                Some((line, version)) => (line, Some(version.trim().parse().unwrap())),
                None => (line, None),
            };
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |index: usize| words[index].parse::<u64>().unwrap();
            let (from, to) = words[1].split_once('-').unwrap();
            let (call, rest) = match words[2] {
                "create" => (Call::Create { value: number(3) }, 4),
                "read" => (Call::Read, 3),
                "swap" => {
                    let (expected, value) = (number(3), number(4));
                    (Call::Swap { expected, value }, 5)
                }
                _ => (Call::Delete { expected: number(3) }, 4),
            };
            let answer = match words[rest] {
                "done" => Answer::Done,
                "refused" => Answer::Refused,
                "unknown" => Answer::Unknown,
                _ => Answer::Found(words[rest + 1].parse().ok()),
            };
            Operation {
                client: words[0].parse().unwrap(),
                call,
                answer,
                version,
                invoked: Duration::from_secs(from.parse().unwrap()),
                returned: Duration::from_secs(to.parse().unwrap_or(0)),
            }
        };
        text.lines()
            .filter(|text| !text.trim().is_empty())
            .map(line)
            .collect()
    }

    fn good(name: &str, text: &str) {
        assert_eq!(check(&history(text)), Ok(()), "{name}");
    }

    fn bad(name: &str, text: &str) {
        let found = check(&history(text));
        assert!(
            matches!(found, Err(Violation::NotLinearizable(_))),
            "{name}: {found:?}"
        );
    }

    #[test]
    fn one_after_the_other() {
        good(
            "all calls",
            "1 0-1 read = none
             1 2-3 create 1 done @10
             2 4-5 create 2 refused
             2 6-7 read = 1 @10
             2 8-9 swap 1 3 done @12
             1 10-11 swap 1 4 refused
             1 12-13 delete 1 refused
             1 14-15 delete 3 done
             2 16-17 read = none
             2 18-19 swap 3 5 refused
             2 20-21 create 6 done @15",
        );
    }

    #[test]
    fn reads_beside_writes() {
        good(
            "the old value",
            "1 0-1 create 1 done\n1 2-9 swap 1 2 done\n2 3-4 read = 1",
        );
        good(
            "the new value",
            "1 0-1 create 1 done\n1 2-9 swap 1 2 done\n2 3-4 read = 2",
        );
        good(
            "first the old, then the new",
            "1 0-1 create 1 done\n1 2-9 swap 1 2 done\n2 3-4 read = 1\n2 5-6 read = 2",
        );
        bad(
            "a stale read",
            "1 0-1 create 1 done\n1 2-3 swap 1 2 done\n2 4-5 read = 1",
        );
        bad(
            "reads that go back",
            "1 0-1 create 1 done\n1 2-9 swap 1 2 done\n2 3-4 read = 2\n3 5-6 read = 1",
        );
        bad("a read of the future", "1 0-1 read = 1\n2 2-3 create 1 done");
        bad("a value from nowhere", "1 0-1 create 1 done\n2 2-3 read = 7");
        bad(
            "a deleted value",
            "1 0-1 create 1 done\n1 2-3 delete 1 done\n2 4-5 read = 1",
        );
        bad("a lost create", "1 0-1 create 1 done\n2 2-3 read = none");
    }

    #[test]
    fn writes_that_compete() {
        good(
            "one of two swaps",
            "1 0-1 create 1 done\n1 2-9 swap 1 2 done\n2 3-8 swap 1 3 refused\n3 10-11 read = 2",
        );
        bad(
            "both swaps",
            "1 0-1 create 1 done\n1 2-9 swap 1 2 done\n2 3-8 swap 1 3 done",
        );
        bad("both creates", "1 0-9 create 1 done\n2 0-9 create 2 done");
        bad(
            "both deletes",
            "1 0-1 create 1 done\n1 2-9 delete 1 done\n2 2-9 delete 1 done",
        );
        bad(
            "a lost update",
            "1 0-1 create 1 done\n1 2-3 swap 1 2 done\n2 4-5 swap 2 3 done\n3 6-7 read = 2",
        );
        bad(
            "refused without a reason",
            "1 0-1 create 1 done\n2 2-3 swap 1 2 refused\n2 4-5 read = 1",
        );
        bad(
            "exists, and does not",
            "1 0-1 create 1 refused\n2 2-3 read = none",
        );
        bad(
            "refused, yet in force",
            "1 0-1 create 1 done\n1 2-3 swap 1 2 refused\n2 4-5 read = 2",
        );
    }

    #[test]
    fn unknown_writes() {
        good(
            "never",
            "1 0-1 create 1 done\n1 2-x swap 1 2 unknown\n2 9-10 read = 1",
        );
        good(
            "long after",
            "1 0-1 create 1 done\n1 2-x swap 1 2 unknown\n2 9-10 read = 1\n2 20-21 read = 2",
        );
        good(
            "as the reason of a refusal",
            "1 0-1 create 1 done\n1 2-x swap 1 2 unknown\n2 9-10 swap 1 3 refused\n2 20-21 read = 2",
        );
        good(
            "a delete, then a create",
            "1 0-1 create 1 done\n1 2-x delete 1 unknown\n2 9-10 create 2 done\n2 20-21 read = 2",
        );
        bad(
            "and back again",
            "1 0-1 create 1 done\n1 2-x swap 1 2 unknown\n2 9-10 read = 2\n2 20-21 read = 1",
        );
        bad(
            "before its call",
            "1 0-1 create 1 done\n2 2-3 read = 2\n1 4-x swap 1 2 unknown",
        );
        bad(
            "twice",
            "1 0-1 create 1 done\n1 2-x delete 1 unknown\n2 3-4 read = none\n2 5-6 create 2 done\n2 7-8 read = none",
        );
    }

    #[test]
    fn versions_rise() {
        good(
            "rising",
            "1 0-1 create 1 done @5\n1 2-3 swap 1 2 done @6\n2 4-5 read = 2 @6",
        );
        bad("falling", "1 0-1 create 1 done @5\n1 2-3 swap 1 2 done @4");
        bad(
            "falling over a delete",
            "1 0-1 create 1 done @5\n1 2-3 delete 1 done\n1 4-5 create 2 done @3",
        );
        let found = check(&history("1 0-1 create 1 done @5\n2 2-3 read = 1 @6"));
        let versions = [5, 6];
        assert_eq!(found, Err(Violation::TwoVersions { value: 1, versions }));
    }

    /// Thousands of operations with many unknown ones among them are decided, and one wrong answer is found.
    #[test]
    fn a_long_history() {
        let (mut history, mut current) = (Vec::new(), 1);
        let mut at = 0;
        let mut add = |call, answer| {
            at += 10;
            history.push(Operation {
                client: 0,
                call,
                answer,
                version: None,
                invoked: Duration::from_secs(at),
                returned: Duration::from_secs(at + 15),
            });
        };
        add(Call::Create { value: 1 }, Answer::Done);
        for value in 2..600 {
            let swap = Call::Swap {
                expected: current,
                value,
            };
            match value % 5 {
                // Some of them took effect.
                0 => add(swap, Answer::Unknown),
                1 => {
                    add(swap, Answer::Unknown);
                    add(Call::Read, Answer::Found(Some(value)));
                    current = value;
                }
                _ => {
                    add(swap, Answer::Done);
                    current = value;
                }
            }
            add(Call::Read, Answer::Found(Some(current)));
        }
        assert_eq!(check(&history), Ok(()));
        let last = history.len() - 1;
        history[last].answer = Answer::Found(Some(2));
        let found = check(&history);
        assert!(matches!(found, Err(Violation::NotLinearizable(_))), "{found:?}");
    }
}
