//! The cycle of a PodGroup: all of its waiting pods are tried one after another, each seeing the earlier ones on their nodes.
//! Then either all that found a node are bound, or, if a gang has fewer pods than its `minCount`, none: the room is given
//! back before anything else is tried, so no two groups hold half of the cluster each.
//!
//! It writes the condition `PodGroupScheduled` of the group.

use crate::cycle::{Diagnosis, error};
use crate::framework::{CycleState, Points, PostFilter, Profile};
use crate::plugins::gang_scheduling;
use crate::pod::PodInfo;
use crate::queue::Queued;
use crate::run::{Decided, Scheduler};
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Api;
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_client::Key;
use skiff_trace::Work;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CONDITION: &str = "PodGroupScheduled";
/// COMPAT: upstream's words.
const UNSCHEDULABLE: &str = "pod group is unschedulable";
const NO_QUORUM: &str = "waiting for minCount pods from a gang to be scheduled";
const PREEMPTING: &str = "pod group is waiting for preemption to complete";

/// How often, and after which first pause, the status of a group is written.
const STATUS_TRIES: u32 = 4;
const FIRST_STATUS_PAUSE: Duration = Duration::from_millis(10);

/// What became of a pod of the group.
enum Tried {
    Placed {
        node: Arc<str>,
        state: CycleState,
        wait: Option<Duration>,
    },
    /// It fits on the node once the victims are gone, and counts there until the end of the cycle.
    Preempting(Diagnosis),
    Nowhere(Diagnosis),
}

struct Member {
    queued: Queued,
    tried: Tried,
    work: Arc<Work>,
    started: Instant,
}

/// What became of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Scheduled,
    /// The victims of a preemption must go first.
    Preempting,
    Unschedulable,
    Error(String),
}

impl Verdict {
    /// Status, reason and message of the group's condition.
    fn condition(&self) -> (&'static str, &'static str, String) {
        match self {
            Verdict::Scheduled => ("True", "Scheduled", String::new()),
            Verdict::Preempting => ("False", "Unschedulable", format!("{UNSCHEDULABLE}, {PREEMPTING}")),
            Verdict::Unschedulable => ("False", "Unschedulable", UNSCHEDULABLE.to_owned()),
            Verdict::Error(message) => ("False", "SchedulerError", message.clone()),
        }
    }
}

/// What was decided of groups and is not written yet, and what was written last.
#[derive(Default)]
pub(crate) struct GroupConditions {
    known: Mutex<KnownConditions>,
    /// Held while one is written: the last decision is the last write.
    writing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct KnownConditions {
    decided: HashMap<Key, Verdict>,
    /// With the uid of the group: `True` stays.
    written: HashMap<Key, (Option<String>, &'static str)>,
}

impl GroupConditions {
    /// The group is gone.
    pub(crate) fn forget(&self, key: &Key) {
        let mut known = self.known.lock();
        known.decided.remove(key);
        known.written.remove(key);
    }
}

impl Scheduler {
    /// One cycle of the group that the pod belongs to.
    pub(crate) async fn attempt_group(self: &Arc<Self>, first: Queued, key: Key) {
        let Some(profile) = self.queue.profile(&first.pod).cloned() else {
            return;
        };
        let mut queued = self.queue.take_group(&key);
        queued.push(first);
        queued.sort_by_key(Queued::group_order);
        if self.is_preempting(&key) {
            // Without that pod the others would be found too few, and give up the nodes that they are nominated to.
            for one in queued {
                self.queue.park(&one.pod.uid, 0);
            }
            return;
        }
        let group = self.listers.pod_groups.get(&key.namespace, &key.name);
        let (mut members, broken) = match (&group, other_scheduler(&profile, &queued)) {
            (_, Some(message)) => (self.refused(queued, &error(message)), true),
            (None, None) => {
                let message = format!(
                    "failed to get podGroup {key}: podgroup.scheduling.k8s.io {:?} not found",
                    key.name
                );
                (self.refused(queued, &waiting(message, &profile, 0)), true)
            }
            (Some(_), None) => (self.try_members(&profile, queued).await, false),
        };
        if members.is_empty() {
            return;
        }
        let verdict = match &group {
            Some(group) if !broken => self.judge(&profile, &key, group, &members),
            _ => Verdict::Error(message_of(&members)),
        };
        if verdict != Verdict::Scheduled {
            self.give_back(&profile, &members);
            explain(&profile, &verdict, &mut members);
        }
        tracing::debug!(group = %key, ?verdict, pods = members.len(), "tried a pod group");
        for member in members {
            self.finish(&profile, member);
        }
        if !broken {
            self.report_group(key, verdict);
        }
    }

    /// Whether victims are being deleted for a pod of the group.
    fn is_preempting(&self, key: &Key) -> bool {
        let is = |uid: &Arc<str>| self.preempting.contains(uid);
        !self.preempting.is_empty() && self.listers.group_members.uids(key).iter().any(is)
    }

    /// Every pod with the same reason.
    fn refused(&self, queued: Vec<Queued>, why: &Diagnosis) -> Vec<Member> {
        let one = |queued: Queued| Member {
            work: begin(&queued),
            queued,
            tried: Tried::Nowhere(why.clone()),
            started: Instant::now(),
        };
        queued.into_iter().map(one).collect()
    }

    async fn try_members(self: &Arc<Self>, profile: &Profile, queued: Vec<Queued>) -> Vec<Member> {
        let mut members: Vec<Member> = Vec::new();
        let mut broken: Option<String> = None;
        let mut victims: HashSet<Arc<str>> = HashSet::new();
        for queued in queued {
            // A large group takes its time; bindings that wait for this thread get their turn.
            tokio::task::consume_budget().await;
            let (work, started) = (begin(&queued), Instant::now());
            let began = skiff_trace::now_us();
            let tried = match &broken {
                Some(why) => Some(Tried::Nowhere(error(format!(
                    "failed to schedule other pod from a pod group: {why}"
                )))),
                None => {
                    let decided = self.decide_one(profile, &queued.pod).await;
                    self.metrics.algorithm(started);
                    match decided {
                        Ok(None) => None,
                        Ok(Some(decided)) => Some(self.tried(&queued.pod, decided, &mut victims)),
                        Err(_) => {
                            self.recover_from_panic(&queued.pod);
                            Some(Tried::Nowhere(error("scheduling the pod panicked".to_owned())))
                        }
                    }
                }
            };
            // Placed or deleted meanwhile.
            let Some(tried) = tried else { continue };
            if broken.is_none()
                && let Tried::Nowhere(diagnosis) = &tried
                && diagnosis.is_error
            {
                broken = Some(diagnosis.message.clone());
            }
            work.push("schedule", began, skiff_trace::now_us() - began);
            members.push(Member {
                queued,
                tried,
                work,
                started,
            });
        }
        members
    }

    fn tried(&self, pod: &Arc<PodInfo>, decided: Decided, victims: &mut HashSet<Arc<str>>) -> Tried {
        let mut diagnosis = match decided {
            Decided::Placed { node, state, wait } => return Tried::Placed { node, state, wait },
            Decided::Nowhere(diagnosis) => diagnosis,
        };
        let cache = &mut self.core.lock().cache;
        let nominated = match &diagnosis.post_filter.nominate {
            Some(node) => Some(node.clone()),
            None => cache.nomination(&pod.uid).map(str::to_owned).filter(|node| {
                // Its victims are going already.
                let going = |one: &Arc<PodInfo>| one.preempted && one.priority() < pod.priority();
                cache
                    .by_name(node)
                    .is_some_and(|node| node.pods.iter().any(going))
            }),
        };
        let Some(node) = nominated.filter(|node| !node.is_empty() && !diagnosis.is_error) else {
            return Tried::Nowhere(diagnosis);
        };
        cache.assume(Arc::clone(pod), &node);
        diagnosis.post_filter.nominate = Some(node);
        // Two pods may count on the room of one victim.
        diagnosis
            .post_filter
            .victims
            .retain(|victim| victims.insert(Arc::clone(&victim.uid)));
        Tried::Preempting(diagnosis)
    }

    fn judge(&self, profile: &Profile, key: &Key, group: &PodGroup, members: &[Member]) -> Verdict {
        let mut errors = members.iter().filter_map(|member| match &member.tried {
            Tried::Nowhere(diagnosis) if diagnosis.is_error => Some(&diagnosis.message),
            _ => None,
        });
        if let Some(message) = errors.next() {
            return Verdict::Error(format!(
                "failed to schedule other pod from a pod group: {message}"
            ));
        }
        let has_room = |member: &Member| !matches!(member.tried, Tried::Nowhere(_));
        let gang = group.spec.scheduling_policy.gang.as_ref();
        let enforced = profile
            .at(Points::PERMIT)
            .any(|(_, enabled)| enabled.plugin.name() == gang_scheduling::NAME);
        let quorum = match gang.filter(|_| enforced) {
            None => true,
            Some(gang) => {
                let uids = self.listers.group_members.uids(key);
                let core = self.core.lock();
                let scheduled = uids.iter().filter(|uid| core.cache.is_placed(uid)).count();
                scheduled >= usize::try_from(gang.min_count).unwrap_or(0)
            }
        };
        let preempts = |member: &Member| matches!(member.tried, Tried::Preempting(_));
        if !quorum || !members.iter().any(has_room) {
            Verdict::Unschedulable
        } else if members.iter().any(preempts) {
            Verdict::Preempting
        } else {
            Verdict::Scheduled
        }
    }

    /// Frees what the pods have taken, the last one first.
    fn give_back(&self, profile: &Profile, members: &[Member]) {
        let cache = &mut self.core.lock().cache;
        for member in members.iter().rev() {
            let pod = &member.queued.pod;
            match &member.tried {
                Tried::Placed { node, state, .. } => {
                    for (_, enabled) in profile.at(Points::RESERVE) {
                        enabled.plugin.unreserve(state, pod, node);
                    }
                    cache.forget_assumed(&pod.uid);
                }
                Tried::Preempting(_) => {
                    cache.forget_assumed(&pod.uid);
                }
                Tried::Nowhere(_) => {}
            }
        }
    }

    /// Binds the pod, or parks it and says why.
    fn finish(self: &Arc<Self>, profile: &Arc<Profile>, member: Member) {
        let Member {
            queued,
            tried,
            work,
            started,
        } = member;
        let (scheduler, profile) = (Arc::clone(self), Arc::clone(profile));
        match tried {
            Tried::Placed { node, state, wait } => self.spawn(skiff_trace::scope(work, async move {
                scheduler
                    .bind(&profile, queued, &node, &state, wait, started)
                    .await;
            })),
            Tried::Preempting(diagnosis) | Tried::Nowhere(diagnosis) => {
                let pod = queued.pod;
                let running = self.failed(&profile, &pod, &diagnosis, started);
                self.spawn(skiff_trace::scope(work, async move {
                    scheduler.report_failure(&profile, &pod, diagnosis, running).await;
                }));
            }
        }
    }

    fn report_group(self: &Arc<Self>, key: Key, verdict: Verdict) {
        self.group_conditions
            .known
            .lock()
            .decided
            .insert(key.clone(), verdict);
        let scheduler = Arc::clone(self);
        self.spawn(async move { scheduler.write_condition(&key).await });
    }

    async fn write_condition(&self, key: &Key) {
        let conditions = &self.group_conditions;
        let _one_at_a_time = conditions.writing.lock().await;
        // Who came before has written what was decided since.
        let Some(verdict) = conditions.known.lock().decided.remove(key) else {
            return;
        };
        let Some(group) = self.listers.pod_groups.get(&key.namespace, &key.name) else {
            return;
        };
        let wanted = {
            let mut known = conditions.known.lock();
            let written = known.written.get(key);
            let written = written.filter(|(uid, _)| *uid == group.metadata.uid);
            let Some(wanted) = condition(&group, &verdict, written.map(|(_, status)| *status)) else {
                return;
            };
            let entry = (group.metadata.uid.clone(), verdict.condition().0);
            known.written.insert(key.clone(), entry);
            wanted
        };
        let patch = json!({"metadata": {"uid": group.metadata.uid}, "status": {"conditions": [wanted]}});
        let api: Api<PodGroup> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut pause = FIRST_STATUS_PAUSE;
        for attempt in 1..=STATUS_TRIES {
            let written = api
                .patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(&patch))
                .await;
            let Err(error) = written else { return };
            tracing::debug!(group = %key, %error, "cannot write the status of the pod group");
            if attempt == STATUS_TRIES || !crate::binding::may_pass(&error) {
                break;
            }
            tokio::time::sleep(pause).await;
            pause *= 5;
        }
        conditions.known.lock().written.remove(key);
    }
}

fn begin(queued: &Queued) -> Arc<Work> {
    let work = Work::new(Some((*queued.cause).clone()));
    work.push(
        "queue",
        queued.entered_us,
        skiff_trace::now_us() - queued.entered_us,
    );
    work
}

/// Pods of one group are scheduled by one profile.
fn other_scheduler(profile: &Profile, queued: &[Queued]) -> Option<String> {
    let mut names = queued.iter().map(|one| &one.pod.shape.scheduler_name);
    let other = names.find(|name| **name != profile.scheduler_name)?;
    Some(format!(
        "all pods in a single pod group should have the same .spec.schedulerName set, got: {:?} and {other:?}",
        profile.scheduler_name
    ))
}

fn message_of(members: &[Member]) -> String {
    let mut messages = members.iter().filter_map(|member| match &member.tried {
        Tried::Nowhere(diagnosis) => Some(diagnosis.message.clone()),
        _ => None,
    });
    messages.next().unwrap_or_default()
}

/// Why a pod waits that fits by itself. What may help one of the others helps it too, and so does another pod of the group.
fn waiting(message: String, profile: &Profile, rejected_by: u64) -> Diagnosis {
    let gang = profile.number(gang_scheduling::NAME);
    Diagnosis {
        message,
        rejected_by: rejected_by | gang.map_or(0, |number| 1 << number),
        post_filter: PostFilter {
            nominate: Some(String::new()),
            ..PostFilter::default()
        },
        is_error: false,
    }
}

/// Says of each pod why it is not bound. None of them has room any more.
fn explain(profile: &Profile, verdict: &Verdict, members: &mut [Member]) {
    let rejected_by = members.iter().fold(0, |all, member| match &member.tried {
        Tried::Preempting(diagnosis) | Tried::Nowhere(diagnosis) => all | diagnosis.rejected_by,
        Tried::Placed { .. } => all,
    });
    for member in members {
        let why = match (verdict, &member.tried) {
            (_, Tried::Nowhere(_)) | (Verdict::Preempting, Tried::Preempting(_)) => continue,
            (Verdict::Preempting, Tried::Placed { node, .. }) => {
                let message = format!("{UNSCHEDULABLE}, {PREEMPTING}");
                let mut why = waiting(message, profile, rejected_by);
                why.post_filter.nominate = Some(node.to_string());
                why
            }
            (Verdict::Error(message), _) => error(message.clone()),
            _ => waiting(format!("{UNSCHEDULABLE}, {NO_QUORUM}"), profile, rejected_by),
        };
        member.tried = Tried::Nowhere(why);
    }
}

/// The condition to write, if it says something new. `written` is its status as it was written last.
fn condition(group: &PodGroup, verdict: &Verdict, written: Option<&'static str>) -> Option<Value> {
    let (status, reason, message) = verdict.condition();
    let conditions = group
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let known: Option<&Condition> = conditions.into_iter().find(|one| one.type_ == CONDITION);
    let before = written.or_else(|| known.map(|known| known.status.as_str()));
    // A group that was scheduled stays so, whatever becomes of pods that came later.
    if before == Some("True") && status != "True" {
        return None;
    }
    let same = known
        .is_some_and(|known| known.status == status && known.reason == reason && known.message == message);
    if same && before == Some(status) {
        return None;
    }
    let since = known.filter(|known| known.status == status);
    let since = since.map_or_else(k8s_openapi::jiff::Timestamp::now, |known| {
        known.last_transition_time.0
    });
    let mut condition = json!({
        "type": CONDITION, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": skiff_meta::time::format_seconds(since),
    });
    if let Some(generation) = group.metadata.generation {
        condition["observedGeneration"] = generation.into();
    }
    Some(condition)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_written_once_and_does_not_go_back() {
        let group = |conditions: Value| -> PodGroup {
            let group = json!({"metadata": {"name": "g"}, "spec": {"schedulingPolicy": {"basic": {}}},
                "status": {"conditions": conditions}});
            serde_json::from_value(group).unwrap()
        };
        let of = |status: &str, reason: &str, message: &str| {
            group(
                json!([{"type": CONDITION, "status": status, "reason": reason, "message": message,
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]),
            )
        };
        let none = group(json!([]));
        let first = condition(&none, &Verdict::Unschedulable, None).unwrap();
        assert_eq!(
            (&first["status"], &first["reason"], &first["message"]),
            (&json!("False"), &json!("Unschedulable"), &json!(UNSCHEDULABLE))
        );
        let failed = of("False", "Unschedulable", UNSCHEDULABLE);
        assert_eq!(condition(&failed, &Verdict::Unschedulable, None), None);
        let later = condition(&failed, &Verdict::Preempting, None).unwrap();
        assert_eq!(later["lastTransitionTime"], "2026-01-01T00:00:00Z");
        let done = condition(&failed, &Verdict::Scheduled, None).unwrap();
        assert_ne!(done["lastTransitionTime"], "2026-01-01T00:00:00Z");
        assert_eq!(condition(&failed, &Verdict::Unschedulable, Some("True")), None);
        let scheduled = of("True", "Scheduled", "");
        assert_eq!(condition(&scheduled, &Verdict::Scheduled, Some("True")), None);
        assert_eq!(condition(&scheduled, &Verdict::Error("e".into()), None), None);
    }
}
