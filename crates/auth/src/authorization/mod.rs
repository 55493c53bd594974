//! What a user may do: authorizers in a row. Each allows, denies or has no opinion; the first that has one decides, and
//! what nobody allows is forbidden, with the reasons of all who were asked.

mod abac;
mod config;
mod matching;
mod webhook;

pub use abac::{Abac, BadPolicy};
pub use config::{AuthorizationConfiguration, BadConfiguration};
pub use webhook::{AuthorizationWebhook, OnError, WebhookOptions};

use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

use crate::bootstrap::node_rules;
use crate::{Attributes, MASTERS_GROUP, Rbac, Rule, UserInfo, node};

/// The answer of an authorizer, or of all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decision {
    pub allowed: bool,
    /// It must not be, whatever others say.
    pub denied: bool,
    /// Shown to the user when nothing allows.
    pub reason: String,
    /// What went wrong with the asking.
    pub error: Option<String>,
}

impl Decision {
    pub fn allow() -> Decision {
        Decision {
            allowed: true,
            ..Decision::default()
        }
    }

    pub fn no_opinion(reason: impl Into<String>) -> Decision {
        Decision {
            reason: reason.into(),
            ..Decision::default()
        }
    }

    /// Adds what the next one said. True: that is it.
    fn join(&mut self, next: Decision) -> bool {
        if next.allowed || next.denied {
            *self = next;
            return true;
        }
        if !next.reason.is_empty() {
            if !self.reason.is_empty() {
                self.reason.push('\n');
            }
            self.reason.push_str(&next.reason);
        }
        self.error = match (self.error.take(), next.error) {
            (Some(one), Some(other)) => {
                // Lists of what went wrong are one list.
                let one = one
                    .strip_prefix('[')
                    .and_then(|one| one.strip_suffix(']'))
                    .unwrap_or(&one);
                Some(format!("[{one}, {other}]"))
            }
            (one, other) => one.or(other),
        };
        false
    }
}

/// One of the authorizers, `system:masters` aside, which is always asked first.
#[derive(Clone)]
pub enum Mode {
    Node,
    Rbac,
    AlwaysAllow,
    AlwaysDeny,
    Abac(Arc<Abac>),
    Webhook(Arc<AuthorizationWebhook>),
}

impl Mode {
    fn name(&self) -> &'static str {
        match self {
            Mode::Node => "Node",
            Mode::Rbac => "RBAC",
            Mode::AlwaysAllow => "AlwaysAllow",
            Mode::AlwaysDeny => "AlwaysDeny",
            Mode::Abac(_) => "ABAC",
            Mode::Webhook(_) => "Webhook",
        }
    }
}

/// Questions to webhooks that hold a thread, because who asks cannot wait otherwise. More than that are not asked.
static HELD: Semaphore = Semaphore::const_new(64);

pub struct Authorizer {
    pub rbac: Rbac,
    /// What belongs to which node.
    pub nodes: node::Graph,
    /// What every node may do.
    node_rules: Vec<Rule>,
    modes: ArcSwap<Vec<Mode>>,
}

impl Default for Authorizer {
    fn default() -> Authorizer {
        Authorizer::serving(|_, _, _| false)
    }
}

/// How far a question has come.
enum Step {
    Decided(Decision),
    /// This webhook is next.
    Ask(Arc<AuthorizationWebhook>),
}

/// A question on its way through the modes.
struct Question<'a> {
    authorizer: &'a Authorizer,
    modes: Arc<Vec<Mode>>,
    at: usize,
    so_far: Decision,
    user: &'a UserInfo,
    attributes: &'a Attributes<'a>,
    explain: bool,
}

impl Question<'_> {
    fn next(&mut self) -> Step {
        if self.at == 0 && self.user.in_group(MASTERS_GROUP) {
            return Step::Decided(Decision::allow());
        }
        while let Some(mode) = self.modes.get(self.at) {
            self.at += 1;
            let decision = match mode {
                Mode::Webhook(webhook) => return Step::Ask(webhook.clone()),
                Mode::AlwaysAllow => Decision::allow(),
                Mode::AlwaysDeny => Decision::no_opinion("Everything is forbidden."),
                Mode::Abac(policy) => policy.authorize(self.user, self.attributes),
                Mode::Node => match self.authorizer.of_node(self.user, self.attributes) {
                    None => continue,
                    Some(node::Opinion::Allowed) => Decision::allow(),
                    Some(node::Opinion::None(why)) => Decision::no_opinion(why),
                },
                Mode::Rbac if self.explain => self.authorizer.rbac.explain(self.user, self.attributes),
                Mode::Rbac => self.authorizer.rbac.authorize(self.user, self.attributes),
            };
            if self.so_far.join(decision) {
                break;
            }
        }
        Step::Decided(std::mem::take(&mut self.so_far))
    }

    async fn answer(mut self) -> Decision {
        loop {
            match self.next() {
                Step::Decided(decision) => return decision,
                Step::Ask(webhook) => {
                    let decision = webhook.authorize(self.user, self.attributes).await;
                    if self.so_far.join(decision) {
                        return self.so_far;
                    }
                }
            }
        }
    }
}

impl Authorizer {
    fn of_node(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Option<node::Opinion> {
        node::authorize(&self.nodes, &self.node_rules, user, attributes)
    }

    /// `serves` answers for resources that are off by default, by group, version and plural name.
    pub fn serving(serves: impl Fn(&str, &str, &str) -> bool) -> Authorizer {
        Authorizer {
            rbac: Rbac::default(),
            nodes: node::Graph::default(),
            node_rules: node_rules(serves),
            modes: ArcSwap::from_pointee(vec![Mode::Node, Mode::Rbac]),
        }
    }

    /// Who is asked, in this order.
    pub fn set_modes(&self, modes: Vec<Mode>) {
        self.modes.store(Arc::new(modes));
    }

    /// Takes over a changed configuration: webhooks may come and go, the other authorizers are those of the start.
    pub fn change_modes(&self, modes: Vec<Mode>) -> Result<(), BadConfiguration> {
        fn lasting(modes: &[Mode]) -> std::collections::BTreeSet<&'static str> {
            let names = modes.iter().map(Mode::name);
            names.filter(|name| *name != "Webhook").collect()
        }
        let (known, new) = (lasting(&self.modes()), lasting(&modes));
        if known != new {
            return Err(BadConfiguration(format!(
                "authorizers: {new:?} besides webhooks, but {known:?} at the start"
            )));
        }
        self.set_modes(modes);
        Ok(())
    }

    pub fn modes(&self) -> Arc<Vec<Mode>> {
        self.modes.load_full()
    }

    fn question<'a>(
        &'a self,
        user: &'a UserInfo,
        attributes: &'a Attributes<'a>,
        explain: bool,
    ) -> Question<'a> {
        Question {
            authorizer: self,
            modes: self.modes.load_full(),
            at: 0,
            so_far: Decision::default(),
            user,
            attributes,
            explain,
        }
    }

    /// The decision, unless a webhook has to be asked for it.
    pub fn known(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Option<Decision> {
        match self.question(user, attributes, false).next() {
            Step::Decided(decision) => Some(decision),
            Step::Ask(_) => None,
        }
    }

    /// The decision, with the reason why something is allowed if it is to be explained.
    pub async fn decide(&self, user: &UserInfo, attributes: &Attributes<'_>, explain: bool) -> Decision {
        self.question(user, attributes, explain).answer().await
    }

    /// The decision for who cannot wait for it. A webhook that has to be asked holds the thread, within bounds.
    pub fn authorize(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        if let Some(decision) = self.known(user, attributes) {
            return decision;
        }
        let refused = |why: &str| Decision {
            error: Some(why.to_owned()),
            ..Decision::default()
        };
        let Ok(runtime) = Handle::try_current() else {
            return refused("no webhook can be asked here");
        };
        if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread {
            return refused("no webhook can be asked here");
        }
        let Ok(_held) = HELD.try_acquire() else {
            return refused("too many questions wait for webhooks");
        };
        tokio::task::block_in_place(|| runtime.block_on(self.decide(user, attributes, false)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_opinion_decides_and_reasons_add_up() {
        let authorizer = Authorizer::default();
        let check = |modes: Vec<Mode>, user: &UserInfo, allowed: bool, reason: &str| {
            authorizer.set_modes(modes);
            let attributes = Attributes {
                verb: "get",
                path: "/x",
                ..Attributes::default()
            };
            let decision = authorizer.authorize(user, &attributes);
            assert_eq!((decision.allowed, decision.reason.as_str()), (allowed, reason));
        };
        let (jane, node) = (
            UserInfo::new("jane", ["devs"]),
            UserInfo::new("system:node:", ["system:nodes"]),
        );
        let master = UserInfo::new("root", [MASTERS_GROUP]);
        check(vec![Mode::AlwaysDeny], &master, true, "");
        check(vec![Mode::AlwaysDeny], &jane, false, "Everything is forbidden.");
        check(vec![Mode::AlwaysDeny, Mode::AlwaysAllow], &jane, true, "");
        check(vec![Mode::Rbac], &jane, false, "");
        check(
            vec![Mode::Node, Mode::Rbac, Mode::AlwaysDeny],
            &node,
            false,
            "unknown node for user \"system:node:\"\nEverything is forbidden.",
        );
    }

    #[test]
    fn a_change_keeps_who_is_asked_besides_webhooks() {
        let authorizer = Authorizer::default();
        assert!(authorizer.change_modes(vec![Mode::Rbac, Mode::Node]).is_ok());
        for other in [
            vec![Mode::Rbac],
            vec![Mode::Node, Mode::Rbac, Mode::AlwaysAllow],
            vec![],
        ] {
            assert!(authorizer.change_modes(other).is_err());
        }
        assert_eq!(authorizer.modes().len(), 2);
    }

    #[test]
    fn errors_are_one_list() {
        let mut decision = Decision::default();
        for text in ["a", "b", "c"] {
            assert!(!decision.join(Decision {
                error: Some(text.to_owned()),
                ..Decision::default()
            }));
        }
        assert_eq!(decision.error.as_deref(), Some("[a, b, c]"));
        let deny = Decision {
            denied: true,
            ..Decision::default()
        };
        assert!(decision.join(deny.clone()));
        assert_eq!(decision, deny);
    }
}
