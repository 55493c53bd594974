//! From marks to the path of one apply: which writes a write brought about, and the one chain of them that
//! decided how long it took.
//!
//! The chain is cut into steps without gaps or overlaps, so the steps add up to the wall clock:
//!
//! ```text
//! mark A (request)   |--gates--|
//! mark B, caused by A          |--watch event--|--B's own stages--|--gates--|
//! ```

mod root;
#[cfg(test)]
mod tests;

use crate::{COMPLETE, Cause, Mark, NEXT_TRY, SERVICE_RULES, Stage};
use root::Root;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// The step between a write and the first that its watcher says of its own work.
const WATCH_EVENT: &str = "watch event";
/// What a writer did without naming it.
const OWN_WORK: &str = "own work";

/// Begins the names of nodes as users.
const NODE_USER: &str = "system:node:";

/// Whose path, and which of its paths.
#[derive(Debug, Clone, Copy, Default)]
pub struct Question<'a> {
    /// Resource and group as in [`Cause`].
    pub resource: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    /// Resources such as `endpointslices.discovery.k8s.io`: the path ends in the last write to one of them that
    /// the object needed to be complete.
    pub ends: &'a [&'a str],
    /// 1: the last write that somebody asked for, 2: the one before it. `None`: the last one that had effects.
    pub last: Option<usize>,
}

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
    /// The server on which it was spent, where there are several; empty for what a node spent by itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub server: String,
}

/// The path of an apply, from the request to the last write that it brought about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waterfall {
    pub object: String,
    /// The request at which the path begins, such as `create deployments.apps web`.
    pub request: String,
    pub resource_version: String,
    /// Whether the object was said to be [complete](COMPLETE) at the end of the path.
    pub complete: bool,
    pub total_us: i64,
    pub steps: Vec<Step>,
    /// How many writes the request brought about until then, on and off the path, itself included.
    pub writes: usize,
    /// How many requests about the object came after the one shown.
    pub later: usize,
}

/// The path of a write that somebody asked for, to the object or to what the object was made for.
///
/// An object goes on living after its apply: a probe that flaps an hour later writes the same resources for
/// causes that go back to the same apply. So the path ends where the object was first said to be
/// [complete](COMPLETE): only what was caused before that moment is on it. Without such a word it ends in the
/// last caused write.
pub fn waterfall(marks: &[Mark], question: &Question<'_>) -> Option<Waterfall> {
    let marks: Vec<&Mark> = marks.iter().filter(|m| (200..300).contains(&m.code)).collect();
    let is_object = |m: &Mark| {
        (m.resource.as_str(), m.namespace.as_str(), m.name.as_str())
            == (question.resource, question.namespace, question.name)
    };
    let Root {
        root,
        creation,
        later,
    } = root::find(&marks, &is_object, question.last)?;
    let after: Vec<&Mark> = marks
        .iter()
        .copied()
        .filter(|m| m.end_us() >= root.start_us && !std::ptr::eq(*m, root))
        .collect();
    let complete = after
        .iter()
        .copied()
        .filter(|m| is_object(m))
        .filter(|m| m.start_us >= root.start_us && m.client_stages.iter().any(|s| s.name == COMPLETE))
        .min_by_key(|m| m.start_us);
    let caused = caused_by(root, &after);
    let leads_through = through(&caused, creation);
    let is_end = |m: &Mark| question.ends.contains(&m.resource.as_str());
    let in_time = |c: &Caused| {
        // The rules that an endpoint brought about are on the path if the endpoint is.
        let c = match c.cause {
            Some(cause) if c.mark.resource == SERVICE_RULES => &caused[cause],
            _ => c,
        };
        complete.is_none_or(|complete| {
            if is_end(c.mark) {
                c.since_us <= complete.end_us()
            } else {
                c.mark.start_us <= complete.start_us
            }
        })
    };
    let latest = |wanted: &dyn Fn(&Mark) -> bool| {
        (0..caused.len())
            .filter(|i| leads_through[*i] && in_time(&caused[*i]) && wanted(caused[*i].mark))
            .max_by_key(|i| caused[*i].mark.end_us())
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
        object: format!("{} {}", question.resource, question.name),
        request: request(root),
        resource_version: root.resource_version.clone(),
        complete: complete.is_some(),
        total_us: builder.at - builder.origin,
        steps: builder.steps,
        writes: caused
            .iter()
            .filter(|c| in_time(c) && c.mark.resource != SERVICE_RULES)
            .count()
            + 1,
        later,
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
    let makers = makers(marks);
    for mark in marks {
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

/// Which write made each object version. A write that changes nothing answers with the version that is there,
/// perhaps the one that woke it. What that version brings about is the effect of the write that made it, which is
/// the first one.
fn makers<'a>(marks: &[&'a Mark]) -> HashMap<Cause, &'a Mark> {
    let mut makers: HashMap<Cause, &'a Mark> = HashMap::new();
    for mark in marks {
        let maker = makers.entry(mark.made()).or_insert(mark);
        if mark.end_us() < maker.end_us() {
            *maker = mark;
        }
    }
    makers
}

/// Which of the caused writes are the creation of the object or an effect of it; all, where the path begins at the
/// object itself.
fn through(caused: &[Caused<'_>], creation: Option<&Mark>) -> Vec<bool> {
    let mut through: Vec<bool> = Vec::with_capacity(caused.len());
    for c in caused {
        let is_creation = creation.is_none_or(|creation| std::ptr::eq(c.mark, creation));
        // Effects stand after their causes.
        through.push(is_creation || c.cause.is_some_and(|cause| through[cause]));
    }
    through
}

struct Builder {
    origin: i64,
    /// Everything before this is accounted for.
    at: i64,
    steps: Vec<Step>,
}

impl Builder {
    /// What the writer of `mark` did before it sent that.
    fn push(&mut self, until: i64, mark: &Mark, what: String) {
        // Whoever is no node is in the process of the server.
        let server = if mark.user.starts_with(NODE_USER) {
            ""
        } else {
            &mark.server
        };
        self.push_step(until, mark, what, vec![], server);
    }

    fn push_step(&mut self, until: i64, mark: &Mark, what: String, gates: Vec<Stage>, server: &str) {
        if until <= self.at {
            return;
        }
        self.steps.push(Step {
            start_us: self.at - self.origin,
            dur_us: until - self.at,
            actor: mark.user.clone(),
            what,
            gates,
            server: server.to_owned(),
        });
        self.at = until;
    }

    /// The step of `mark` and what led to it; `until` is where the next one begins, if that is before its end.
    fn follow(&mut self, mark: &Mark, before: &[&Mark], until: i64) {
        let earlier = before
            .iter()
            .flat_map(|m| m.client_stages.iter().cloned().chain([request_stage(m)]));
        let mut stages: Vec<Stage> = mark.client_stages.iter().cloned().chain(earlier).collect();
        stages.retain(|s| {
            s.name != COMPLETE
                && !s.name.starts_with(NEXT_TRY)
                && s.start_us.saturating_add(s.dur_us) > self.at
        });
        stages.sort_by_key(|s| s.start_us);
        let mut gap = WATCH_EVENT;
        for stage in stages {
            self.push(stage.start_us.min(mark.start_us), mark, gap.to_owned());
            let end = stage.start_us.saturating_add(stage.dur_us).min(mark.start_us);
            self.push(end, mark, stage.name);
            gap = OWN_WORK;
        }
        let gap = if gap == WATCH_EVENT {
            format!("{WATCH_EVENT}, {OWN_WORK}")
        } else {
            gap.to_owned()
        };
        self.push(mark.start_us, mark, gap);
        let gates = mark.stages.iter().filter_map(|gate| clip(gate, self.at, until));
        let gates = gates.collect();
        self.push_step(until, mark, request(mark), gates, &mark.server);
    }
}

/// The part of a stage that lies between two moments, so that what is shown inside a step fits into it.
fn clip(stage: &Stage, from: i64, until: i64) -> Option<Stage> {
    let start_us = stage.start_us.max(from);
    let dur_us = stage.start_us.saturating_add(stage.dur_us).min(until) - start_us;
    (dur_us > 0).then(|| Stage {
        name: stage.name.clone(),
        start_us,
        dur_us,
    })
}

fn same_object(a: &Mark, b: &Mark) -> bool {
    (&a.resource, &a.namespace, &a.name) == (&b.resource, &b.namespace, &b.name)
}

/// A request in words: `patch pods/status web-1`.
fn request(mark: &Mark) -> String {
    if mark.resource == SERVICE_RULES {
        return format!("service rule in the kernel ({})", mark.name);
    }
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
