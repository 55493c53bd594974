//! The last two readings of every node and container, and the usage between them. Pure: times come with the readings.
//! The rules are metrics-server's, so that both show the same numbers.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// A container that runs for less than this gets no usage from one reading: it would say more of its start than of
/// what it does.
const YOUNGEST: Duration = Duration::from_secs(10);

/// One reading. Times are in Unix nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Point {
    /// When the container started and had used no CPU time; 0 for nodes.
    pub(crate) started: i64,
    pub(crate) time: i64,
    pub(crate) cpu_nanos: u64,
    pub(crate) memory: u64,
}

/// Namespace and name.
pub(crate) type PodName = (String, String);

/// Everything that was read at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) nodes: HashMap<String, Point>,
    pub(crate) pods: HashMap<PodName, BTreeMap<String, Point>>,
}

/// What a node or a container used over a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) nano_cores: u64,
    pub(crate) memory: u64,
    pub(crate) time: i64,
    pub(crate) window: i64,
}

/// What a pod used, container by container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodUsage {
    pub(crate) containers: Vec<(String, Usage)>,
    pub(crate) time: i64,
    pub(crate) window: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Points {
    last: Batch,
    /// Earlier readings of what is in `last`, and of nothing else.
    previous: Batch,
}

fn usage(last: &Point, previous: &Point) -> Option<Usage> {
    let window = last
        .time
        .checked_sub(previous.time)
        .filter(|window| *window > 0)?;
    if last.started < previous.started {
        return None;
    }
    let used = u128::from(last.cpu_nanos.checked_sub(previous.cpu_nanos)?);
    let nano_cores = used * 1_000_000_000 / u128::try_from(window).ok()?;
    Some(Usage {
        nano_cores: u64::try_from(nano_cores).ok()?,
        memory: last.memory,
        time: last.time,
        window,
    })
}

/// The reading to compare `new` with, given the two that were there.
fn earlier(new: &Point, last: Option<&Point>, previous: Option<&Point>) -> Option<Point> {
    let last = last?;
    if new.time > last.time {
        return Some(*last);
    }
    // The same reading again, or one from a clock that was set back.
    previous.filter(|previous| previous.time < new.time).copied()
}

impl Points {
    /// Takes in the readings of a scrape. What it lacks is forgotten.
    pub(crate) fn store(&mut self, batch: Batch, resolution: Duration) {
        let mut kept = Batch::default();
        for (name, point) in &batch.nodes {
            let (last, previous) = (self.last.nodes.get(name), self.previous.nodes.get(name));
            if let Some(earlier) = earlier(point, last, previous) {
                kept.nodes.insert(name.clone(), earlier);
            }
        }
        for (name, containers) in &batch.pods {
            let (last, previous) = (self.last.pods.get(name), self.previous.pods.get(name));
            let mut earlier_points = BTreeMap::new();
            for (container, point) in containers {
                let age = point.time.checked_sub(point.started);
                let age = age
                    .and_then(|age| u64::try_from(age).ok())
                    .map(Duration::from_nanos);
                let earlier = if age.is_some_and(|age| age >= YOUNGEST && age < resolution) {
                    Some(Point {
                        time: point.started,
                        cpu_nanos: 0,
                        ..*point
                    })
                } else {
                    // A container that was started since is another one.
                    let last = last.and_then(|last| last.get(container));
                    let last = last.filter(|last| point.started < last.time);
                    earlier(point, last, previous.and_then(|previous| previous.get(container)))
                };
                if let Some(earlier) = earlier {
                    earlier_points.insert(container.clone(), earlier);
                }
            }
            if !earlier_points.is_empty() {
                kept.pods.insert(name.clone(), earlier_points);
            }
        }
        self.previous = kept;
        self.last = batch;
    }

    pub(crate) fn node(&self, name: &str) -> Option<Usage> {
        usage(self.last.nodes.get(name)?, self.previous.nodes.get(name)?)
    }

    /// A pod is shown when all its containers can be.
    pub(crate) fn pod(&self, name: &PodName) -> Option<PodUsage> {
        let (last, previous) = (self.last.pods.get(name)?, self.previous.pods.get(name)?);
        let mut containers = Vec::with_capacity(last.len());
        let mut earliest: Option<Usage> = None;
        for (container, point) in last {
            let Some(usage) = usage(point, previous.get(container)?) else {
                continue;
            };
            if earliest.is_none_or(|earliest| usage.time < earliest.time) {
                earliest = Some(usage);
            }
            containers.push((container.clone(), usage));
        }
        let earliest = earliest?;
        Some(PodUsage {
            containers,
            time: earliest.time,
            window: earliest.window,
        })
    }

    /// The pods that were in the last scrape.
    pub(crate) fn pods(&self) -> impl Iterator<Item = &PodName> {
        self.last.pods.keys()
    }

    /// Whether a scrape has found any node, and whether one of them has been read once only.
    pub(crate) fn progress(&self) -> (bool, bool) {
        let once = |name: &String| !self.previous.nodes.contains_key(name);
        (!self.last.nodes.is_empty(), self.last.nodes.keys().any(once))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESOLUTION: Duration = Duration::from_secs(15);

    /// Seconds, for all three.
    fn point(started: i64, time: i64, cpu: u64) -> Point {
        Point {
            started: started * 1_000_000_000,
            time: time * 1_000_000_000,
            cpu_nanos: cpu * 1_000_000_000,
            memory: 7,
        }
    }

    fn name() -> PodName {
        ("ns".into(), "p".into())
    }

    fn batch(node: Point, containers: &[(&str, Point)]) -> Batch {
        let containers = containers
            .iter()
            .map(|(name, point)| ((*name).to_owned(), *point));
        Batch {
            nodes: HashMap::from([("n".to_owned(), node)]),
            pods: HashMap::from([(name(), containers.collect())]),
        }
    }

    #[test]
    fn two_readings_give_a_rate() {
        let mut points = Points::default();
        points.store(batch(point(0, 100, 10), &[("c", point(10, 100, 1))]), RESOLUTION);
        assert_eq!((points.node("n"), points.pod(&name())), (None, None));
        assert_eq!(points.progress(), (true, true));
        points.store(batch(point(0, 110, 15), &[("c", point(10, 110, 3))]), RESOLUTION);
        let usage = points.node("n").unwrap();
        assert_eq!((usage.nano_cores, usage.memory), (500_000_000, 7));
        assert_eq!((usage.time, usage.window), (110_000_000_000, 10_000_000_000));
        assert_eq!(points.progress(), (true, false));
        let pod = points.pod(&name()).unwrap();
        assert_eq!(pod.containers[0].1.nano_cores, 200_000_000);
        points.store(Batch::default(), RESOLUTION);
        assert_eq!((points.node("n"), points.pods().count()), (None, 0));
        assert_eq!(points.previous, Batch::default(), "nothing else is kept");
    }

    #[test]
    fn the_same_reading_again() {
        let mut points = Points::default();
        for time in [100, 110, 110] {
            points.store(batch(point(0, time, 10), &[]), RESOLUTION);
        }
        assert_eq!(points.node("n").unwrap().window, 10_000_000_000);
        points.store(batch(point(0, 90, 10), &[]), RESOLUTION);
        assert_eq!(points.node("n"), None, "older than both");
    }

    #[test]
    fn containers_come_and_go() {
        let check = |first: &[(&str, Point)], second: &[(&str, Point)], expected: Option<&[(&str, u64)]>| {
            let mut points = Points::default();
            points.store(batch(Point::default(), first), RESOLUTION);
            points.store(batch(Point::default(), second), RESOLUTION);
            let found = points.pod(&name()).map(|pod| {
                let shown = pod.containers.into_iter();
                shown
                    .map(|(name, usage)| (name, usage.nano_cores / 1_000_000))
                    .collect::<Vec<_>>()
            });
            let expected = expected.map(|all| {
                let all = all.iter();
                all.map(|(name, cores)| ((*name).to_owned(), *cores)).collect()
            });
            assert_eq!(found, expected);
        };
        let old = ("a", point(10, 100, 1));
        // Young, but old enough: counted from its start.
        check(&[], &[("b", point(100, 112, 6))], Some(&[("b", 500)]));
        check(&[], &[("b", point(100, 109, 6))], None);
        check(&[], &[("b", point(90, 115, 6))], None);
        // One of two is not known yet: the pod is not shown.
        check(
            &[old],
            &[("a", point(10, 115, 1)), ("b", point(110, 115, 1))],
            None,
        );
        // Restarted: another container of the same name.
        check(&[old], &[("a", point(110, 115, 1))], None);
        // A counter that went back is left out, the rest is shown.
        check(
            &[old, ("b", point(10, 100, 5))],
            &[("a", point(10, 110, 2)), ("b", point(10, 110, 4))],
            Some(&[("a", 100)]),
        );
    }
}
