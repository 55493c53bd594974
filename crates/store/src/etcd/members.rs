//! Which member of etcd is used. A member that dies is noticed by its connection; one that is silent (its process
//! hangs, its machine is cut off), or that has lost the others, is noticed here: whoever is in use and not heard for
//! a moment is asked for its status, on the same connection. If it gives no answer and another one does, calls and
//! the watch are told to leave it.
//!
//! Nobody is left without a better one at hand: on a machine that is slow as a whole, all stay where they are. Pings of
//! HTTP/2 would not do: etcd ends connections that send more than one in five seconds.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use http::uri::PathAndQuery;
use tokio::sync::watch;
use tonic::client::Grpc;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use super::client::STATUS;
use super::proto::{StatusRequest, StatusResponse};

/// The most an answer may be: a page of the largest objects.
const ANSWER: usize = 512 << 20;

const TICK: Duration = Duration::from_millis(100);
/// A member that said something in this time needs not be asked.
const QUIET: Duration = Duration::from_millis(300);
/// How long its status may take before the other members are asked too.
const SUSPICIOUS: Duration = Duration::from_millis(150);
/// How long its status may take in all.
const SILENT: Duration = Duration::from_millis(600);
/// How often a member that was left is asked whether it is back.
const RECHECK: Duration = Duration::from_secs(2);

pub struct Members {
    members: Vec<Member>,
    /// The member that is used.
    current: AtomicUsize,
    began: Instant,
}

struct Member {
    channel: Channel,
    /// Calls under way and open watches.
    users: AtomicUsize,
    /// Milliseconds since `Members::began`.
    heard: AtomicU64,
    /// Whether it was left for a better one. Sent again at each time that happens.
    lost: watch::Sender<bool>,
    checked: AtomicU64,
}

/// What a member says of itself, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Silent,
    NoLeader,
    Led,
}

/// A member that somebody uses, until this is dropped.
pub struct InUse {
    members: Arc<Members>,
    pub at: usize,
    lost: watch::Receiver<bool>,
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.members.members[self.at]
            .users
            .fetch_sub(1, Ordering::Relaxed);
    }
}

impl InUse {
    /// It has answered.
    pub fn heard(&self) {
        self.members.heard(self.at);
    }

    /// Returns when the member was left for another one since it came into use.
    pub async fn lost(&mut self) {
        loop {
            if self.lost.changed().await.is_err() {
                // The members are gone, and whoever uses one with them.
                return std::future::pending().await;
            }
            if *self.lost.borrow_and_update() {
                return;
            }
        }
    }

    pub fn grpc(&self) -> Grpc<Channel> {
        self.members.grpc(self.at)
    }
}

impl Members {
    pub fn new(channels: Vec<Channel>) -> Members {
        let members = channels.into_iter().map(|channel| Member {
            channel,
            users: AtomicUsize::new(0),
            heard: AtomicU64::new(0),
            lost: watch::Sender::new(false),
            checked: AtomicU64::new(0),
        });
        Members {
            members: members.collect(),
            current: AtomicUsize::new(0),
            began: Instant::now(),
        }
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Takes the current member into use.
    pub fn enter(self: &Arc<Self>) -> InUse {
        loop {
            let at = self.current.load(Ordering::SeqCst);
            let member = &self.members[at];
            // Others are told to leave after the current one was changed: who subscribed before is told.
            let lost = member.lost.subscribe();
            if self.current.load(Ordering::SeqCst) != at {
                continue;
            }
            member.users.fetch_add(1, Ordering::Relaxed);
            return InUse {
                members: self.clone(),
                at,
                lost,
            };
        }
    }

    /// The next member takes over from this one, unless another call has seen to that already.
    pub fn turn_from(&self, at: usize) {
        let count = self.members.len();
        let after = (1..=count).map(|step| (at + step) % count);
        let next = after
            .clone()
            .find(|next| *next != at && !*self.members[*next].lost.borrow());
        self.turn(at, next.unwrap_or((at + 1) % count));
    }

    fn turn(&self, at: usize, next: usize) {
        let _ = self
            .current
            .compare_exchange(at, next, Ordering::SeqCst, Ordering::SeqCst);
    }

    fn grpc(&self, at: usize) -> Grpc<Channel> {
        Grpc::new(self.members[at].channel.clone()).max_decoding_message_size(ANSWER)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn heard(&self, at: usize) {
        let member = &self.members[at];
        member.heard.store(self.now(), Ordering::Relaxed);
        member
            .lost
            .send_if_modified(|lost| std::mem::replace(lost, false));
    }

    fn is_older(&self, then: &AtomicU64, than: Duration) -> bool {
        let age = self.now().saturating_sub(then.load(Ordering::Relaxed));
        u128::from(age) >= than.as_millis()
    }

    /// Looks after the members until they are gone.
    pub async fn look_after(members: Weak<Members>) {
        loop {
            tokio::time::sleep(TICK).await;
            let Some(members) = members.upgrade() else {
                return;
            };
            let mut looks = tokio::task::JoinSet::new();
            for (at, member) in members.members.iter().enumerate() {
                let in_use = member.users.load(Ordering::Relaxed) > 0;
                let is_lost = *member.lost.borrow();
                let is_current = members.current.load(Ordering::SeqCst) == at;
                if in_use && (!is_lost || is_current) && members.is_older(&member.heard, QUIET) {
                    let members = members.clone();
                    looks.spawn(async move { members.examine(at).await });
                } else if is_lost && members.is_older(&member.checked, RECHECK) {
                    member.checked.store(members.now(), Ordering::Relaxed);
                    let members = members.clone();
                    looks.spawn(async move {
                        members.ask(at, SILENT).await;
                    });
                }
            }
            while looks.join_next().await.is_some() {}
        }
    }

    /// Asks a member how it is, and the others whether they are better.
    async fn examine(self: &Arc<Self>, at: usize) {
        let mut own = {
            let members = self.clone();
            tokio::spawn(async move { members.ask(at, SILENT).await })
        };
        let early = tokio::time::timeout(SUSPICIOUS, &mut own).await;
        if matches!(early, Ok(Ok(Standing::Led))) {
            return;
        }
        let mut asked = tokio::task::JoinSet::new();
        for other in (0..self.len()).filter(|other| *other != at) {
            let members = self.clone();
            asked.spawn(async move { (members.ask(other, SILENT - SUSPICIOUS).await, other) });
        }
        let mut others = Vec::new();
        while let Some(answer) = asked.join_next().await {
            others.extend(answer);
        }
        let own = match early {
            Ok(answered) => answered,
            Err(_) => own.await,
        };
        let own = own.unwrap_or(Standing::Silent);
        // Of equal ones the next in order, so that not all servers go to the same.
        let distance = |other: usize| (other + self.len() - at) % self.len();
        let best = others
            .into_iter()
            .max_by_key(|(standing, other)| (*standing, std::cmp::Reverse(distance(*other))));
        let Some((standing, next)) = best.filter(|(standing, _)| *standing > own) else {
            return;
        };
        tracing::info!(member = at, state = ?own, next, next_state = ?standing, "leaving a member of etcd");
        self.members[at].checked.store(self.now(), Ordering::Relaxed);
        self.turn(at, next);
        self.members[at].lost.send_replace(true);
    }

    async fn ask(&self, at: usize, within: Duration) -> Standing {
        let status = tokio::time::timeout(within, status(self.grpc(at))).await;
        match status {
            Ok(Ok(status)) if status.leader != 0 => {
                self.heard(at);
                Standing::Led
            }
            Ok(Ok(_)) => Standing::NoLeader,
            Ok(Err(_)) | Err(_) => Standing::Silent,
        }
    }
}

/// What a member says of itself, without asking the others.
pub async fn status(mut grpc: Grpc<Channel>) -> Result<StatusResponse, Status> {
    super::client::ready(&mut grpc).await?;
    let path = PathAndQuery::from_static(STATUS);
    let answer = grpc
        .unary(Request::new(StatusRequest {}), path, ProstCodec::default())
        .await?;
    Ok(answer.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::transport::Endpoint;

    fn members(count: usize) -> Arc<Members> {
        let channel = || Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Arc::new(Members::new((0..count).map(|_| channel()).collect()))
    }

    #[tokio::test]
    async fn turning_passes_over_members_that_were_left() {
        let members = members(3);
        members.members[1].lost.send_replace(true);
        members.turn_from(0);
        assert_eq!(members.enter().at, 2);
        members.turn_from(0);
        assert_eq!(members.enter().at, 2, "another has seen to it");
        members.members[0].lost.send_replace(true);
        members.turn_from(2);
        assert_eq!(members.enter().at, 0, "all the same if all were left");
        members.heard(1);
        members.turn_from(0);
        assert_eq!(members.enter().at, 1, "it is back");
    }

    #[tokio::test]
    async fn users_are_told_of_losses_since_they_came() {
        let members = members(2);
        members.members[0].lost.send_replace(true);
        let mut used = members.enter();
        let told = tokio::time::timeout(Duration::from_millis(20), used.lost()).await;
        assert!(told.is_err(), "that was before");
        members.members[0].lost.send_replace(true);
        used.lost().await;
        assert_eq!(members.members[0].users.load(Ordering::Relaxed), 1);
        drop(used);
        assert_eq!(members.members[0].users.load(Ordering::Relaxed), 0);
    }
}
