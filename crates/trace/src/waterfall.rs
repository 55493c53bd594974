//! From marks to the path of one apply: which writes a write brought about, and the one chain of them that
//! decided how long it took.
//!
//! The chain is cut into steps without gaps or overlaps, so the steps add up to the wall clock:
//!
//! ```text
//! mark A (request)   |--gates--|
//! mark B, caused by A          |--wake--|--B's own stages--|--gates--|
//! ```

use crate::{Cause, Mark, Stage};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt::Write;

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

/// The path of the last write to `resource` `namespace`/`name` that was not itself brought about by another
/// write, ending in the last caused write to one of `ends` (resources such as `endpointslices.discovery.k8s.io`),
/// or in the last caused write at all when there is none.
pub fn waterfall(
    marks: &[Mark],
    resource: &str,
    namespace: &str,
    name: &str,
    ends: &[&str],
) -> Option<Waterfall> {
    let root_index = marks.iter().rposition(|m| {
        m.resource == resource
            && m.namespace == namespace
            && m.name == name
            && m.cause.is_none()
            && m.subresource.is_empty()
            && (200..300).contains(&m.code)
            && m.verb != "delete"
    })?;
    let root = &marks[root_index];
    // Marks are recorded in the order in which they end, and a cause ends before its effect begins.
    let mut reached: HashSet<Cause> = HashSet::from([root.made()]);
    let mut caused: Vec<&Mark> = Vec::new();
    for mark in &marks[root_index + 1..] {
        if mark.cause.as_ref().is_some_and(|c| reached.contains(c)) && (200..300).contains(&mark.code) {
            reached.insert(mark.made());
            caused.push(mark);
        }
    }
    let last = caused
        .iter()
        .rev()
        .find(|m| ends.contains(&m.resource.as_str()))
        .or(caused.last())
        .copied();
    let mut chain = vec![];
    let mut at = last.unwrap_or(root);
    while !std::ptr::eq(at, root) {
        chain.push(at);
        let cause = at.cause.as_ref();
        at = caused
            .iter()
            .copied()
            .find(|m| cause.is_some_and(|c| *c == m.made()))
            .unwrap_or(root);
    }
    chain.push(root);
    chain.reverse();

    let mut builder = Builder {
        origin: root.start_us,
        at: root.start_us,
        steps: Vec::new(),
    };
    for mark in &chain {
        builder.follow(mark);
    }
    Some(Waterfall {
        object: format!("{resource} {name}"),
        resource_version: root.resource_version.clone(),
        total_us: builder.at - builder.origin,
        steps: builder.steps,
        writes: caused.len() + 1,
    })
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

    fn follow(&mut self, mark: &Mark) {
        let mut stages: Vec<&Stage> = mark.client_stages.iter().collect();
        stages.sort_by_key(|s| s.start_us);
        for stage in stages {
            let first = self.at;
            self.push(
                stage.start_us.min(mark.start_us),
                &mark.user,
                "wake".to_owned(),
                vec![],
            );
            if stage.start_us + stage.dur_us > first {
                self.push(
                    (stage.start_us + stage.dur_us).min(mark.start_us),
                    &mark.user,
                    stage.name.clone(),
                    vec![],
                );
            }
        }
        let gap = if mark.client_stages.is_empty() {
            "wake and work"
        } else {
            "work"
        };
        self.push(mark.start_us, &mark.user, gap.to_owned(), vec![]);
        let slash = if mark.subresource.is_empty() { "" } else { "/" };
        let what = format!(
            "{} {}{slash}{} {}",
            mark.verb, mark.resource, mark.subresource, mark.name
        );
        self.push(mark.end_us(), &mark.user, what, mark.stages.clone());
    }
}

impl Waterfall {
    /// Draws the path with one bar a step, at most `width` columns for the bars.
    pub fn render(&self, width: usize) -> String {
        let mut text = String::new();
        let total = self.total_us.max(1);
        let _ = writeln!(
            text,
            "{} at resourceVersion {}: {} from the request to the last of its {} writes\n",
            self.object,
            self.resource_version,
            millis(self.total_us),
            self.writes
        );
        let actors = self
            .steps
            .iter()
            .map(|s| short(&s.actor).len())
            .max()
            .unwrap_or(0);
        let whats = self.steps.iter().map(|s| s.what.len()).max().unwrap_or(0);
        let _ = writeln!(
            text,
            "{:>10} {:>10}  {:<actors$}  {:<whats$}",
            "AT", "TOOK", "WHO", "WHAT"
        );
        for step in &self.steps {
            let scale =
                |us: i64| usize::try_from(us).unwrap_or(0) * width / usize::try_from(total).unwrap_or(1);
            let (from, to) = (scale(step.start_us), scale(step.start_us + step.dur_us));
            let bar = format!("{}{}", " ".repeat(from), "█".repeat((to - from).max(1)));
            let _ = writeln!(
                text,
                "{:>10} {:>10}  {:<actors$}  {:<whats$}  {bar}",
                millis(step.start_us),
                millis(step.dur_us),
                short(&step.actor),
                step.what
            );
            if !step.gates.is_empty() {
                let gates: Vec<String> = step
                    .gates
                    .iter()
                    .map(|g| format!("{} {}", g.name, millis(g.dur_us)))
                    .collect();
                let _ = writeln!(text, "{:>23}{:<actors$}  └ {}", "", "", gates.join(", "));
            }
        }
        let _ = writeln!(text, "{:>10} {:>10}  total", "", millis(self.total_us));
        text
    }
}

fn millis(us: i64) -> String {
    format!("{}.{:02} ms", us / 1000, us % 1000 / 10)
}

/// `system:serviceaccount:kube-system:deployment-controller` reads better as its last part.
fn short(user: &str) -> &str {
    user.rsplit(':').next().unwrap_or(user)
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

    #[test]
    fn marks_survive_json() {
        let marks = example();
        let text = serde_json::to_string(&marks).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Mark>>(&text).unwrap(), marks);
    }
}
