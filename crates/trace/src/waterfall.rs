//! From marks to the path of one apply: which writes a write brought about, and the one chain of them that
//! decided how long it took.
//!
//! The chain is cut into steps without gaps or overlaps, so the steps add up to the wall clock:
//!
//! ```text
//! mark A (request)   |--gates--|
//! mark B, caused by A          |--wake--|--B's own stages--|--gates--|
//! ```

use crate::{COMPLETE, Cause, Mark, Stage};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// One stretch of the path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// Since the first request began.
    pub start_us: i64,
    pub dur_us: i64,
    /// Who spent it: a user name.
    pub actor: String,
    pub what: String,
    /// The gates inside a request; empty for other steps.
    pub gates: Vec<Stage>,
}

/// The path of an apply, from the request to the last write that it brought about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waterfall {
    pub object: String,
    pub resource_version: String,
    pub total_us: i64,
    pub steps: Vec<Step>,
    /// How many writes the apply brought about, on and off the path.
    pub writes: usize,
}

/// The path of the last write to `resource` `namespace`/`name` that somebody asked for, ending in the last write
/// to one of `ends` (resources such as `endpointslices.discovery.k8s.io`) that it needed to be complete.
///
/// An object goes on living after its apply: a probe that flaps an hour later writes the same resources for
/// causes that go back to the same apply. So the path ends where the object was first said to be
/// [complete](COMPLETE): only what was caused before that moment is on it. Without such a word it ends in the
/// last caused write.
pub fn waterfall(
    marks: &[Mark],
    resource: &str,
    namespace: &str,
    name: &str,
    ends: &[&str],
) -> Option<Waterfall> {
    let succeeded = |m: &&Mark| (200..300).contains(&m.code);
    let is_object = |m: &&Mark| m.resource == resource && m.namespace == namespace && m.name == name;
    let root = marks
        .iter()
        .filter(succeeded)
        .filter(is_object)
        .filter(|m| m.cause.is_none() && m.verb != "delete" && !is_component(&m.user))
        .filter(|m| m.subresource.is_empty() || m.subresource == "scale")
        .max_by_key(|m| m.start_us)?;
    let after: Vec<&Mark> = marks
        .iter()
        .filter(succeeded)
        .filter(|m| m.end_us() >= root.start_us && !std::ptr::eq(*m, root))
        .collect();
    let complete = after
        .iter()
        .copied()
        .filter(is_object)
        .filter(|m| m.start_us >= root.start_us && m.client_stages.iter().any(|s| s.name == COMPLETE))
        .min_by_key(|m| m.start_us);
    let caused = caused_by(root, &after);
    let is_end = |m: &Mark| ends.contains(&m.resource.as_str());
    let in_time = |c: &Caused| {
        complete.is_none_or(|complete| {
            let by_then = if is_end(c.mark) {
                c.since_us
            } else {
                c.mark.start_us
            };
            by_then <= complete.start_us
        })
    };
    let latest = |wanted: &dyn Fn(&Mark) -> bool| {
        let wanted = (0..caused.len()).filter(|i| in_time(&caused[*i]) && wanted(caused[*i].mark));
        wanted.max_by_key(|i| caused[*i].mark.end_us())
    };
    let last = latest(&is_end)
        .or_else(|| latest(&|m| complete.is_some_and(|complete| std::ptr::eq(m, complete))))
        .or_else(|| latest(&|_| true));
    let mut chain = vec![];
    let mut at = last;
    while let Some(index) = at {
        chain.push(caused[index].mark);
        at = caused[index].cause;
    }
    chain.push(root);
    chain.reverse();

    let mut builder = Builder {
        origin: root.start_us,
        at: root.start_us,
        steps: Vec::new(),
    };
    for (place, mark) in chain.iter().enumerate() {
        // A write wakes others when it is stored; by the time it is answered, they may be at work already.
        let until = chain
            .get(place + 1)
            .map_or(mark.end_us(), |next| mark.end_us().min(next.start_us));
        // The same writer may have written to the same object on the way, and told of its work then.
        let before: Vec<&Mark> = caused
            .iter()
            .map(|c| c.mark)
            .filter(|m| m.user == mark.user && same_object(m, mark) && m.start_us < mark.start_us)
            .collect();
        builder.follow(mark, &before, until);
    }
    Some(Waterfall {
        object: format!("{resource} {name}"),
        resource_version: root.resource_version.clone(),
        total_us: builder.at - builder.origin,
        steps: builder.steps,
        writes: caused.iter().filter(|c| in_time(c)).count() + 1,
    })
}

struct Caused<'a> {
    mark: &'a Mark,
    /// When its cause was there.
    since_us: i64,
    /// The write that made its cause, always one before it; `None`: the root.
    cause: Option<usize>,
}

/// What a write brought about, causes before effects. The order of `marks` does not matter: a write can wake
/// others before its own mark is kept.
fn caused_by<'a>(root: &Mark, marks: &[&'a Mark]) -> Vec<Caused<'a>> {
    let mut by_cause: HashMap<&Cause, Vec<&'a Mark>> = HashMap::new();
    // A write that changes nothing answers with the version that is there, perhaps the one that woke it. What
    // that version brings about is the effect of the write that made it, which is the first one.
    let mut makers: HashMap<Cause, &'a Mark> = HashMap::new();
    for mark in marks {
        let maker = makers.entry(mark.made()).or_insert(mark);
        if mark.end_us() < maker.end_us() {
            *maker = mark;
        }
        if let Some(cause) = &mark.cause {
            by_cause.entry(cause).or_default().push(mark);
        }
    }
    let mut caused: Vec<Caused<'a>> = Vec::new();
    let mut reached: HashSet<Cause> = HashSet::new();
    let mut next = vec![(root.made(), root.end_us(), None)];
    while let Some((version, since_us, cause)) = next.pop() {
        if !reached.insert(version.clone()) {
            continue;
        }
        let mut effects = by_cause.remove(&version).unwrap_or_default();
        effects.sort_by_key(|m| m.start_us);
        for mark in effects {
            let made = mark.made();
            if makers.get(&made).is_some_and(|maker| std::ptr::eq(*maker, mark)) {
                next.push((made, mark.end_us(), Some(caused.len())));
            }
            caused.push(Caused {
                mark,
                since_us,
                cause,
            });
        }
    }
    caused
}

/// Whether a user is a part of skiff: its writes without a cause are its own affair (a look at the clock), not
/// something that was asked for.
fn is_component(user: &str) -> bool {
    [
        "system:serviceaccount:kube-system:",
        "system:node:",
        "system:kube-",
    ]
    .iter()
    .any(|prefix| user.starts_with(prefix))
}

struct Builder {
    origin: i64,
    /// Everything before this is accounted for.
    at: i64,
    steps: Vec<Step>,
}

impl Builder {
    fn push(&mut self, until: i64, actor: &str, what: String, gates: Vec<Stage>) {
        if until <= self.at {
            return;
        }
        self.steps.push(Step {
            start_us: self.at - self.origin,
            dur_us: until - self.at,
            actor: actor.to_owned(),
            what,
            gates,
        });
        self.at = until;
    }

    /// The step of `mark` and what led to it; `until` is where the next one begins, if that is before its end.
    fn follow(&mut self, mark: &Mark, before: &[&Mark], until: i64) {
        let told = before
            .iter()
            .flat_map(|m| m.client_stages.iter().cloned().chain([request_stage(m)]));
        let mut stages: Vec<Stage> = mark.client_stages.iter().cloned().chain(told).collect();
        stages.retain(|s| s.name != COMPLETE && s.start_us + s.dur_us > self.at);
        stages.sort_by_key(|s| s.start_us);
        let told_nothing = stages.is_empty();
        for stage in stages {
            self.push(
                stage.start_us.min(mark.start_us),
                &mark.user,
                "wake".to_owned(),
                vec![],
            );
            let end = (stage.start_us + stage.dur_us).min(mark.start_us);
            self.push(end, &mark.user, stage.name, vec![]);
        }
        let gap = if told_nothing { "wake and work" } else { "work" };
        self.push(mark.start_us, &mark.user, gap.to_owned(), vec![]);
        self.push(until, &mark.user, request(mark), mark.stages.clone());
    }
}

fn same_object(a: &Mark, b: &Mark) -> bool {
    (&a.resource, &a.namespace, &a.name) == (&b.resource, &b.namespace, &b.name)
}

/// A request in words: `patch pods/status web-1`.
fn request(mark: &Mark) -> String {
    let slash = if mark.subresource.is_empty() { "" } else { "/" };
    format!(
        "{} {}{slash}{} {}",
        mark.verb, mark.resource, mark.subresource, mark.name
    )
}

fn request_stage(mark: &Mark) -> Stage {
    Stage {
        name: request(mark),
        start_us: mark.start_us,
        dur_us: mark.dur_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(object: (&str, &str, &str), start_us: i64, dur_us: i64, cause: Option<&str>) -> Mark {
        Mark {
            start_us,
            dur_us,
            user: "u".into(),
            verb: "create".into(),
            resource: object.0.into(),
            subresource: String::new(),
            namespace: "default".into(),
            name: object.1.into(),
            uid: String::new(),
            resource_version: object.2.into(),
            code: 201,
            cause: cause.map(|c| c.parse().unwrap()),
            client_stages: vec![],
            stages: vec![],
        }
    }

    fn example() -> Vec<Mark> {
        let mut pod = mark(
            ("pods", "web-1", "4"),
            5_000,
            500,
            Some("replicasets.apps/default/web@3"),
        );
        pod.client_stages = vec![Stage {
            name: "queue".into(),
            start_us: 3_500,
            dur_us: 500,
        }];
        vec![
            mark(("deployments.apps", "web", "1"), 0, 1, None),
            mark(("deployments.apps", "web", "2"), 1_000, 1_000, None),
            mark(("configmaps", "other", "9"), 1_500, 10, None),
            mark(
                ("replicasets.apps", "web", "3"),
                2_500,
                500,
                Some("deployments.apps/default/web@2"),
            ),
            pod,
            mark(("events", "e", "5"), 9_000, 500, Some("pods/default/web-1@4")),
        ]
    }

    #[test]
    fn steps_add_up_to_the_wall_clock() {
        let marks = example();
        let found = waterfall(&marks, "deployments.apps", "default", "web", &["pods"]).unwrap();
        assert_eq!(found.total_us, 4_500);
        assert_eq!(found.steps.iter().map(|s| s.dur_us).sum::<i64>(), found.total_us);
        let mut at = 0;
        for step in &found.steps {
            assert_eq!(step.start_us, at);
            at += step.dur_us;
        }
        let whats: Vec<&str> = found.steps.iter().map(|s| s.what.as_str()).collect();
        assert_eq!(
            whats,
            [
                "create deployments.apps web",
                "wake and work",
                "create replicasets.apps web",
                "wake",
                "queue",
                "work",
                "create pods web-1"
            ]
        );
        assert_eq!(found.writes, 4);
        assert!(found.render(20).contains("4.50 ms  total"));
    }

    #[test]
    fn without_an_end_the_path_runs_to_the_last_write() {
        let found = waterfall(&example(), "deployments.apps", "default", "web", &["nothing"]).unwrap();
        assert_eq!(found.total_us, 8_500);
        assert!(waterfall(&example(), "pods", "default", "missing", &[]).is_none());
    }

    /// Three replicas, two of them ready at once, the third later; then a probe flaps an hour after.
    fn rollout() -> Vec<Mark> {
        let hour = 3_600_000_000;
        let slice = "endpointslices.discovery.k8s.io";
        let status = |mut mark: Mark, complete: bool| {
            mark.subresource = "status".into();
            mark.user = "system:serviceaccount:kube-system:c".into();
            if complete {
                mark.client_stages.push(Stage {
                    name: COMPLETE.into(),
                    start_us: mark.start_us,
                    dur_us: 0,
                });
            }
            mark
        };
        let (dep, set) = ("deployments.apps", "replicasets.apps");
        let mut marks = vec![
            mark((dep, "web", "10"), 0, 100, None),
            mark(
                (set, "web-1", "11"),
                200,
                100,
                Some("deployments.apps/default/web@10"),
            ),
        ];
        for (n, at) in [(1, 400), (2, 410), (3, 420)] {
            let name = format!("p{n}");
            let made = |version: i32| format!("pods/default/{name}@{version}");
            let (created, bound, waiting, ready) = (n * 100, n * 100 + 1, n * 100 + 2, n * 100 + 3);
            let later = if n == 3 { 50_000 } else { 5_000 };
            marks.push(mark(
                ("pods", &name, &created.to_string()),
                at,
                50,
                Some("replicasets.apps/default/web-1@11"),
            ));
            marks.push(mark(
                ("pods", &name, &bound.to_string()),
                at + 200,
                50,
                Some(&made(created)),
            ));
            let node = |version: i32, at, cause: i32| {
                status(
                    mark(("pods", &name, &version.to_string()), at, 50, Some(&made(cause))),
                    false,
                )
            };
            marks.push(node(waiting, at + 1_000, bound));
            marks.push(node(ready, at + later, waiting));
            // The endpoint appears, not ready yet, and then becomes ready.
            marks.push(mark(
                (slice, "web", &format!("{n}90")),
                at + 1_500,
                50,
                Some(&made(waiting)),
            ));
            marks.push(mark(
                (slice, "web", &format!("{n}91")),
                at + later + 300,
                50,
                Some(&made(ready)),
            ));
            let counted = format!("{n}80");
            marks.push(status(
                mark((set, "web-1", &counted), at + later + 80, 50, Some(&made(ready))),
                false,
            ));
            let cause = format!("replicasets.apps/default/web-1@{counted}");
            marks.push(status(
                mark(
                    (dep, "web", &format!("{n}81")),
                    at + later + 150,
                    50,
                    Some(&cause),
                ),
                n == 3,
            ));
            if n == 1 {
                // Woken by a version and changing nothing: it answers with the version that woke it.
                marks.push(status(
                    mark(
                        (dep, "web", "10"),
                        300,
                        50,
                        Some("deployments.apps/default/web@10"),
                    ),
                    false,
                ));
                // A look at the clock, without a cause.
                let mut by_clock = mark((dep, "web", "183"), 9_000, 10, None);
                by_clock.user = "system:serviceaccount:kube-system:deployment-controller".into();
                marks.push(by_clock);
            }
        }
        let flap = status(
            mark(("pods", "p1", "900"), hour, 50, Some("pods/default/p1@103")),
            false,
        );
        marks.push(flap);
        marks.push(mark(
            (slice, "web", "901"),
            hour + 300,
            50,
            Some("pods/default/p1@900"),
        ));
        marks
    }

    #[test]
    fn the_path_ends_when_the_last_replica_is_served() {
        let mut marks = rollout();
        let check = |marks: &[Mark]| {
            let found = waterfall(
                marks,
                "deployments.apps",
                "default",
                "web",
                &["endpointslices.discovery.k8s.io"],
            )
            .unwrap();
            let whats: Vec<&str> = found
                .steps
                .iter()
                .map(|s| s.what.as_str())
                .filter(|w| w.contains(' ') && !w.starts_with("wake"))
                .collect();
            assert_eq!(
                whats,
                [
                    "create deployments.apps web",
                    "create replicasets.apps web-1",
                    "create pods p3",
                    "create pods p3",
                    "create pods/status p3",
                    "create pods/status p3",
                    "create endpointslices.discovery.k8s.io web"
                ]
            );
            assert_eq!(found.total_us, 420 + 50_000 + 300 + 50);
            assert_eq!(found.steps.iter().map(|s| s.dur_us).sum::<i64>(), found.total_us);
            assert_eq!(
                found.writes,
                2 + 3 * 8 + 1,
                "what came an hour later is not counted"
            );
        };
        check(&marks);
        // The order in which marks were kept decides nothing.
        marks.reverse();
        check(&marks);
    }

    #[test]
    fn without_a_service_the_path_ends_in_the_complete_status() {
        let marks: Vec<Mark> = rollout()
            .into_iter()
            .filter(|m| !m.resource.starts_with("endpointslices"))
            .collect();
        let found = waterfall(&marks, "deployments.apps", "default", "web", &["endpointslices"]).unwrap();
        assert_eq!(
            found.steps.last().unwrap().what,
            "create deployments.apps/status web"
        );
        assert_eq!(found.total_us, 420 + 50_000 + 150 + 50);
    }

    #[test]
    fn scaling_is_asked_for_too() {
        let mut scale = mark(("deployments.apps", "web", "2000"), 100_000, 10, None);
        scale.subresource = "scale".into();
        let mut marks = rollout();
        marks.push(scale);
        let found = waterfall(&marks, "deployments.apps", "default", "web", &[]).unwrap();
        assert_eq!((found.resource_version.as_str(), found.writes), ("2000", 1));
    }

    #[test]
    fn work_that_an_earlier_write_told_of_is_on_the_path() {
        let stage = |name: &str, start_us, dur_us| Stage {
            name: name.into(),
            start_us,
            dur_us,
        };
        let cause = Some("pods/default/web@1");
        let mut early = mark(("pods", "web", "2"), 3_000, 500, cause);
        early.client_stages = vec![stage("sandbox", 1_000, 2_000)];
        let mut late = mark(("pods", "web", "3"), 5_000, 500, cause);
        late.client_stages = vec![stage("start", 3_200, 1_800)];
        let marks = vec![mark(("pods", "web", "1"), 0, 1_000, None), early, late];
        let found = waterfall(&marks, "pods", "default", "web", &[]).unwrap();
        let steps: Vec<(&str, i64)> = found.steps.iter().map(|s| (s.what.as_str(), s.dur_us)).collect();
        assert_eq!(
            steps,
            [
                ("create pods web", 1_000),
                ("sandbox", 2_000),
                ("create pods web", 500),
                ("start", 1_500),
                ("create pods web", 500),
            ]
        );
    }

    #[test]
    fn an_effect_that_is_faster_than_the_answer_to_its_cause_is_on_the_path() {
        let marks = [
            mark(("deployments.apps", "web", "2"), 0, 9_000, None),
            mark(
                ("replicasets.apps", "web", "3"),
                2_000,
                1_000,
                Some("deployments.apps/default/web@2"),
            ),
        ];
        let found = waterfall(&marks, "deployments.apps", "default", "web", &[]).unwrap();
        let steps: Vec<(&str, i64)> = found.steps.iter().map(|s| (s.what.as_str(), s.dur_us)).collect();
        assert_eq!(
            steps,
            [
                ("create deployments.apps web", 2_000),
                ("create replicasets.apps web", 1_000)
            ]
        );
        assert_eq!(found.total_us, 3_000);
    }

    #[test]
    fn marks_survive_json() {
        let marks = example();
        let text = serde_json::to_string(&marks).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Mark>>(&text).unwrap(), marks);
    }
}
