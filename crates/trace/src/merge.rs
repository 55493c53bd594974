//! The marks of several servers on one clock. Servers and writers have clocks of their own: those of servers are told
//! by who asked them for their marks, those of writers by what their requests said when they arrived.

use crate::{Mark, SERVICE_RULES, Stage};
use std::collections::HashMap;

/// Requests this close to each other are taken to have come by the same clock.
const SAME_CLOCK_US: u64 = 60_000_000;
/// Requests that differ by more than this were not slower or faster: the clock was set in between.
const LONGEST_WAY_US: u64 = 10_000_000;

/// How far a clock is ahead of the one of who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockOffset {
    pub ahead_us: i64,
    /// It is off by no more than this, either way.
    pub error_us: i64,
}

impl ClockOffset {
    /// From an answer that says what time it was there: sometime between the request and the answer.
    pub fn measured(sent_us: i64, told_us: i64, received_us: i64) -> ClockOffset {
        let error_us = received_us.saturating_sub(sent_us).max(0) / 2;
        ClockOffset {
            ahead_us: told_us.saturating_sub(sent_us.saturating_add(error_us)),
            error_us,
        }
    }
}

/// The marks of one server.
#[derive(Debug)]
pub struct Source {
    pub server: String,
    pub ahead_us: i64,
    pub marks: Vec<Mark>,
}

/// All marks by the clock of who asks, in the order in which the writes ended. Marks name their server if there are
/// several.
pub fn merge(sources: Vec<Source>) -> Vec<Mark> {
    let is_one = sources.len() == 1;
    let mut all = Vec::new();
    for mut source in sources {
        let writers = Writers::of(&source.marks);
        for mark in &mut source.marks {
            let by_writer = writers.behind_us(mark).saturating_sub(source.ahead_us);
            let by_server = source.ahead_us.saturating_neg();
            shift(&mut mark.client_stages, by_writer);
            shift(&mut mark.stages, by_server);
            // What is reported was timed by the reporter.
            let by = if mark.resource == SERVICE_RULES {
                by_writer
            } else {
                by_server
            };
            mark.start_us = mark.start_us.saturating_add(by);
            if !is_one {
                mark.server.clone_from(&source.server);
            }
        }
        all.append(&mut source.marks);
    }
    all.sort_by_key(Mark::end_us);
    all
}

fn shift(stages: &mut [Stage], by_us: i64) {
    for stage in stages {
        stage.start_us = stage.start_us.saturating_add(by_us);
    }
}

/// How far the clocks of writers are behind their server's: the least difference of what came at about the same time,
/// because what is more than that was spent on the way.
struct Writers {
    /// By writer: when it came, and the difference.
    seen: HashMap<String, Vec<(i64, i64)>>,
}

impl Writers {
    fn of(marks: &[Mark]) -> Writers {
        let mut seen: HashMap<String, Vec<(i64, i64)>> = HashMap::new();
        for mark in marks {
            if let Some(behind) = mark.behind_us {
                let of_writer = seen.entry(mark.user.clone()).or_default();
                of_writer.push((arrived_us(mark), behind));
            }
        }
        Writers { seen }
    }

    fn behind_us(&self, mark: &Mark) -> i64 {
        let (Some(own), Some(seen)) = (mark.behind_us, self.seen.get(&mark.user)) else {
            return 0;
        };
        let arrived = arrived_us(mark);
        let same_clock = seen.iter().filter(|(at, behind)| {
            at.saturating_sub(arrived).unsigned_abs() <= SAME_CLOCK_US
                && own.saturating_sub(*behind).unsigned_abs() <= LONGEST_WAY_US
        });
        same_clock.map(|(_, behind)| *behind).min().unwrap_or(own)
    }
}

/// When it arrived, by the server's clock.
fn arrived_us(mark: &Mark) -> i64 {
    match mark.resource.as_str() {
        SERVICE_RULES => mark.start_us.saturating_add(mark.behind_us.unwrap_or(0)),
        _ => mark.start_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000_000;

    fn mark(user: &str, resource: &str, start_us: i64, behind_us: Option<i64>, stage_us: i64) -> Mark {
        Mark {
            user: user.into(),
            resource: resource.into(),
            start_us,
            dur_us: 10,
            behind_us,
            client_stages: vec![Stage {
                name: "work".into(),
                start_us: stage_us,
                dur_us: 5,
            }],
            ..Mark::default()
        }
    }

    #[test]
    fn an_offset_is_known_as_well_as_the_answer_was_fast() {
        let check = |sent, told, received, ahead_us, error_us| {
            let expected = ClockOffset { ahead_us, error_us };
            assert_eq!(ClockOffset::measured(sent, told, received), expected);
        };
        check(1_000, 1_100, 1_200, 0, 100);
        check(1_000, HOUR, 1_200, HOUR - 1_100, 100);
        check(1_000, 600, 1_000, -400, 0);
        check(1_000, 600, 900, -400, 0);
        check(i64::MIN, i64::MAX, i64::MAX, i64::MAX, i64::MAX / 2);
    }

    #[test]
    fn marks_of_all_clocks_come_in_one_order() {
        let at = 1_000_000_000_000;
        // A node two hours behind its server, which is one ahead of who asks.
        let node = |sent: i64, delay: i64, resource| {
            let arrived = sent + 2 * HOUR + delay;
            let start = if resource == SERVICE_RULES { sent } else { arrived };
            mark("system:node:n", resource, start, Some(arrived - sent), sent - 50)
        };
        let one = Source {
            server: "one".into(),
            ahead_us: 0,
            marks: vec![mark("a", "deployments.apps", at, Some(0), at - 5)],
        };
        let two = Source {
            server: "two".into(),
            ahead_us: HOUR,
            marks: vec![
                node(at - HOUR + 1_000, 300, "pods"),
                node(at - HOUR + 3_000, 2_000_000, "pods"),
                // Before its clock was set.
                mark(
                    "system:node:n",
                    "pods",
                    at + HOUR + 500,
                    Some(200),
                    at + HOUR + 100,
                ),
                node(at - HOUR + 9_000, 400, SERVICE_RULES),
                mark("b", "endpoints", at + HOUR + 5_000, None, at + HOUR + 4_000),
            ],
        };
        let merged = merge(vec![two, one]);
        let brief: Vec<(&str, &str, i64, i64)> = merged
            .iter()
            .map(|mark| {
                let stage = mark.client_stages[0].start_us;
                (&*mark.server, &*mark.resource, mark.start_us - at, stage - at)
            })
            .collect();
        let expected = [
            ("one", "deployments.apps", 0, -5),
            ("two", "pods", 500, 300),
            ("two", "pods", 1_300, 1_250),
            ("two", "endpoints", 5_000, 4_000),
            // Off by the shortest time on the way.
            ("two", SERVICE_RULES, 9_300, 9_250),
            ("two", "pods", 2_003_000, 3_250),
        ];
        assert_eq!(brief, expected);
    }

    #[test]
    fn one_server_is_not_named_and_nonsense_does_no_harm() {
        let source = Source {
            server: "one".into(),
            ahead_us: i64::MIN,
            marks: vec![mark("u", "pods", i64::MAX, Some(i64::MIN), i64::MAX)],
        };
        let merged = merge(vec![source]);
        assert_eq!(merged[0].server, "");
    }
}
