//! What keeps the runtime from running pods, in upstream's words. Pure: `health.rs` asks the runtime, `pleg.rs` lists it.

use std::time::{Duration, Instant};

use skiff_cri::v1;

use crate::durations::go_duration;

/// How long the runtime may give no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimePatience {
    /// Without a status of a runtime that is ready.
    pub status: Duration,
    /// Without a list of pods.
    pub relist: Duration,
}

impl Default for RuntimePatience {
    fn default() -> Self {
        RuntimePatience {
            status: Duration::from_secs(30),
            relist: Duration::from_secs(180),
        }
    }
}

impl RuntimePatience {
    /// What one call for the status may take: a runtime that lost a request is asked again.
    pub fn status_call(&self) -> Duration {
        self.status / 3
    }

    /// How often a runtime with an event stream is listed.
    pub fn safety_relist(&self) -> Duration {
        self.relist / 6
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    Unchecked,
    Down,
    LateRelist { last: Instant },
    Runtime(String),
    Network(String),
}

impl Trouble {
    pub fn message(&self, patience: &RuntimePatience, now: Instant) -> String {
        match self {
            Trouble::Unchecked => "container runtime status check may not have completed yet".to_owned(),
            Trouble::Down => "container runtime is down".to_owned(),
            Trouble::LateRelist { last } => format!(
                "PLEG is not healthy: pleg was last seen active {} ago; threshold is {}",
                go_duration(now.saturating_duration_since(*last)),
                go_duration(patience.relist)
            ),
            Trouble::Runtime(why) | Trouble::Network(why) => why.clone(),
        }
    }
}

/// What the runtime last said, and when.
#[derive(Debug)]
pub struct RuntimeHealth {
    /// It was ready.
    last_ready: Option<Instant>,
    last_relist: Instant,
    runtime: Option<String>,
    network: Option<String>,
}

impl RuntimeHealth {
    /// It was just listed.
    pub fn new(now: Instant) -> Self {
        RuntimeHealth {
            last_ready: None,
            last_relist: now,
            runtime: None,
            network: None,
        }
    }

    pub fn relisted(&mut self, now: Instant) {
        self.last_relist = now;
    }

    pub fn answered(&mut self, status: Option<&v1::RuntimeStatus>, now: Instant) {
        self.runtime = missing(status, "RuntimeReady", "container runtime not ready");
        self.network = missing(status, "NetworkReady", "container runtime network not ready");
        if self.runtime.is_none() {
            self.last_ready = Some(now);
        }
    }

    /// In upstream's order.
    pub fn troubles(&self, patience: &RuntimePatience, now: Instant) -> Vec<Trouble> {
        let mut troubles = Vec::new();
        match self.last_ready {
            None => troubles.push(Trouble::Unchecked),
            Some(last) if now.saturating_duration_since(last) >= patience.status => {
                troubles.push(Trouble::Down);
            }
            Some(_) => {}
        }
        let last = self.last_relist;
        if now.saturating_duration_since(last) > patience.relist {
            troubles.push(Trouble::LateRelist { last });
        }
        troubles.extend(self.runtime.clone().map(Trouble::Runtime));
        troubles.extend(self.network.clone().map(Trouble::Network));
        troubles
    }
}

fn missing(status: Option<&v1::RuntimeStatus>, name: &str, subject: &str) -> Option<String> {
    let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
    match conditions.find(|condition| condition.r#type == name) {
        Some(condition) if condition.status => None,
        Some(condition) => Some(format!(
            "{subject}: {name}=false reason:{} message:{}",
            condition.reason, condition.message
        )),
        None => Some(format!("{subject}: {name} condition is not reported")),
    }
}

/// Several reasons as one, as upstream joins them. `None` without any.
pub fn joined(mut messages: Vec<String>) -> Option<String> {
    match messages.len() {
        0 => None,
        1 => messages.pop(),
        _ => Some(format!("[{}]", messages.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(runtime: bool, network: bool) -> v1::RuntimeStatus {
        let condition = |name: &str, status: bool| v1::RuntimeCondition {
            r#type: name.into(),
            status,
            reason: "NotReady".into(),
            message: "not yet".into(),
        };
        v1::RuntimeStatus {
            conditions: vec![
                condition("RuntimeReady", runtime),
                condition("NetworkReady", network),
            ],
        }
    }

    fn said(health: &RuntimeHealth, now: Instant) -> Option<String> {
        let patience = RuntimePatience::default();
        let troubles = health.troubles(&patience, now);
        joined(troubles.iter().map(|one| one.message(&patience, now)).collect())
    }

    #[test]
    fn what_keeps_it_from_being_ready() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut health = RuntimeHealth::new(start);
        assert_eq!(
            said(&health, start).as_deref(),
            Some("container runtime status check may not have completed yet")
        );
        health.answered(Some(&status(true, false)), at(1));
        assert_eq!(
            said(&health, at(1)).as_deref(),
            Some("container runtime network not ready: NetworkReady=false reason:NotReady message:not yet")
        );
        health.answered(Some(&status(true, true)), at(2));
        assert_eq!(said(&health, at(31)), None);
        assert_eq!(
            said(&health, at(32)).as_deref(),
            Some("container runtime is down")
        );
        assert_eq!(
            said(&health, at(187)).as_deref(),
            Some(
                "[container runtime is down, PLEG is not healthy: pleg was last seen active 3m7s ago; threshold is 3m0s]"
            )
        );
        // A runtime that answers that it is not ready has not been ready all the while.
        health.relisted(at(190));
        health.answered(Some(&status(false, true)), at(190));
        assert_eq!(
            said(&health, at(190)).as_deref(),
            Some(
                "[container runtime is down, container runtime not ready: RuntimeReady=false reason:NotReady message:not yet]"
            )
        );
        health.answered(Some(&status(true, true)), at(191));
        assert_eq!(said(&health, at(191)), None);
        health.answered(None, at(192));
        assert_eq!(
            said(&health, at(192)).as_deref(),
            Some(
                "[container runtime not ready: RuntimeReady condition is not reported, container runtime network not ready: NetworkReady condition is not reported]"
            )
        );
    }
}
