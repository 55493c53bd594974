//! What writes: group commit, expiry of leases, compaction. Whoever holds the [`Writer`] alone touches the disk and
//! alone changes the state, always in this order: decide, commit to disk, change memory, tell the watchers,
//! acknowledge. So nobody sees what is not on disk, and a failed commit leaves no trace. One thread ([`run`]) holds it
//! for all who wait; a caller that is alone may hold it for its own write ([`write_here`]).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Shared;
use super::disk::{Disk, Row};
use super::queue::{BATCH, Reply, Request, STALL, Waiting, Write, spare_runtime, stopped};
use super::state::Version;
use crate::hub::Limits;
use crate::{Error, Expect, Op, Outcome, Result};

/// How often history is looked at while nothing else happens.
const HOUSEKEEPING: Duration = Duration::from_secs(30);

/// However a holder of the writer ends, callers must not wait: after a panic memory may lack what is on disk.
struct AbandonOnPanic<'a>(&'a Shared);

impl Drop for AbandonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.queue.abandon();
        }
    }
}

/// Takes the writer, also from a caller whose commit takes long.
fn hold(shared: &Shared) -> MutexGuard<'_, Writer> {
    loop {
        match shared.writer.try_lock_for(STALL) {
            Some(writer) => return writer,
            None => shared.queue.relieve(),
        }
    }
}

/// Makes a write on this thread, if nobody else writes and that takes a moment only; else gives it back.
pub fn write_here(shared: &Shared, write: Write) -> std::result::Result<Result<Outcome>, Write> {
    // What has a lease is for the thread, which must know when to wake.
    let Some(runtime) = spare_runtime().filter(|_| write.lease_seconds.is_none()) else {
        return Err(write);
    };
    let Some(mut writer) = shared.writer.try_lock() else {
        shared.queue.met();
        return Err(write);
    };
    if !writer.quick() || !shared.queue.enter(runtime) {
        return Err(write);
    }
    let _abandon = AbandonOnPanic(shared);
    let outcome = writer.write_one(shared, &write);
    shared.queue.leave();
    Ok(outcome)
}

/// The writer thread.
pub fn run(shared: &Shared) {
    let _abandon = AbandonOnPanic(shared);
    let now = || (shared.clock)();
    let mut looked = now();
    let mut next_look = looked + HOUSEKEEPING.as_secs();
    let mut due = next_look;
    loop {
        // Not less than a second, so that a disk that refuses the expiry does not make this spin.
        let patience = Duration::from_secs(due.saturating_sub(now()).clamp(1, HOUSEKEEPING.as_secs()));
        let Some(requests) = shared.queue.take(patience) else {
            return;
        };
        if requests.is_empty() && now() == looked {
            // Woken only to see how a caller gets on.
            shared.queue.relieve();
            continue;
        }
        looked = now();
        let answers = {
            let mut writer = hold(shared);
            let _abandon = AbandonOnPanic(shared);
            writer.serve(shared, requests)
        };
        // After the writer was let go: who has an answer may write at once.
        for (reply, outcome) in answers {
            reply.send(outcome);
        }
        let mut writer = hold(shared);
        let _abandon = AbandonOnPanic(shared);
        writer.expire(shared);
        if writer.crowded() || now() >= next_look {
            next_look = now() + HOUSEKEEPING.as_secs();
            if let Err(error) = writer.trim(shared) {
                tracing::warn!(%error, "cannot compact the store");
            }
        }
        due = writer
            .expiries
            .first()
            .map_or(next_look, |(expires, _)| next_look.min(*expires));
    }
}

pub struct Writer {
    disk: Disk,
    limits: Limits,
    /// One for each key that has a lease.
    expiries: BTreeSet<(u64, Arc<str>)>,
    events_since_look: usize,
    bytes_since_look: usize,
    /// How long a commit takes of late; not known at first.
    usual: Option<Duration>,
    /// What counts as a moment.
    quick: Duration,
}

/// A decided write.
struct Decided {
    outcome: Outcome,
    row: Option<Row>,
}

impl Writer {
    pub fn new(disk: Disk, limits: Limits, quick: Duration, expiries: Vec<(u64, Arc<str>)>) -> Writer {
        let expiries = expiries.into_iter().collect();
        Writer {
            disk,
            limits,
            expiries,
            events_since_look: 0,
            bytes_since_look: 0,
            usual: None,
            quick,
        }
    }

    /// Whether a commit takes a moment only.
    fn quick(&self) -> bool {
        self.usual.is_some_and(|usual| usual < self.quick)
    }

    /// Whether much was written since history was last looked at.
    fn crowded(&self) -> bool {
        self.events_since_look > self.limits.events / 8 || self.bytes_since_look > self.limits.bytes / 8
    }

    /// What comes out for the writes among the requests is left to the caller to say.
    fn serve(&mut self, shared: &Shared, requests: Vec<Request>) -> Vec<(Reply, Result<Outcome>)> {
        let (mut writes, mut replies) = (Vec::with_capacity(requests.len()), Vec::new());
        let mut outcomes = Vec::new();
        for request in requests {
            match request {
                Request::Write(Waiting { write, reply }) => {
                    writes.push(write);
                    replies.push(reply);
                }
                Request::Compact { revision, reply } => {
                    outcomes.extend(self.write_all(shared, &std::mem::take(&mut writes)));
                    let _ = reply.send(self.compact(shared, revision));
                }
                Request::Tick { reply } => {
                    outcomes.extend(self.write_all(shared, &std::mem::take(&mut writes)));
                    self.expire(shared);
                    let _ = reply.send(self.trim(shared));
                }
                Request::Read { revisions, reply } => {
                    let _ = reply.send(self.disk.values(&revisions));
                }
            }
        }
        outcomes.extend(self.write_all(shared, &writes));
        replies.into_iter().zip(outcomes).collect()
    }

    /// Commits the writes together. When that fails they are tried one by one, so that only those fail
    /// which cannot be stored: on a nearly full disk a small one may still fit.
    fn write_all(&mut self, shared: &Shared, writes: &[Write]) -> Vec<Result<Outcome>> {
        if let [write] = writes {
            return vec![self.write_one(shared, write)];
        }
        let decided = self.decide(shared, writes);
        match self.commit(shared, &decided) {
            Ok(()) => decided.into_iter().map(|decided| Ok(decided.outcome)).collect(),
            Err(_) => writes.iter().map(|write| self.write_one(shared, write)).collect(),
        }
    }

    fn write_one(&mut self, shared: &Shared, write: &Write) -> Result<Outcome> {
        let mut decided = self.decide(shared, std::slice::from_ref(write));
        let committed = self.commit(shared, &decided);
        match (committed, decided.pop()) {
            (Ok(()), Some(decided)) => Ok(decided.outcome),
            (Err(error), _) => {
                tracing::warn!(key = %write.key, %error, "a write failed");
                Err(error)
            }
            (Ok(()), None) => Err(stopped()),
        }
    }

    /// What each write comes to, each seeing those before it.
    fn decide(&self, shared: &Shared, writes: &[Write]) -> Vec<Decided> {
        let now = (shared.clock)();
        let state = shared.state.read();
        let mut revision = state.revision;
        let mut ahead: HashMap<Arc<str>, Version> = HashMap::new();
        let mut decided = Vec::with_capacity(writes.len());
        for write in writes {
            let (key, version) = match state.version(&write.key) {
                Some((key, version)) => (key.clone(), Some(version)),
                None => (write.key.clone(), None),
            };
            let current = ahead
                .get(&key)
                .or(version)
                .and_then(|version| version.key_value(&key));
            if !write.expect.holds(current.as_ref().map(|kv| kv.mod_revision)) {
                decided.push(Decided {
                    outcome: Outcome::Conflict { current, revision },
                    row: None,
                });
                continue;
            }
            let value = match &write.op {
                Op::Put(value) => Some(value.clone()),
                Op::Delete if current.is_none() => {
                    decided.push(Decided {
                        outcome: Outcome::Done {
                            revision,
                            previous: None,
                        },
                        row: None,
                    });
                    continue;
                }
                Op::Delete => None,
            };
            revision += 1;
            let create_revision = match (&value, &current) {
                (None, _) => 0,
                (Some(_), Some(current)) => current.create_revision,
                (Some(_), None) => revision,
            };
            let expires = match write.lease_seconds {
                Some(seconds) if value.is_some() => now.saturating_add(seconds.max(1).unsigned_abs()),
                _ => 0,
            };
            let version = Version {
                revision,
                create_revision,
                value: value.clone(),
                expires,
            };
            ahead.insert(key.clone(), version);
            decided.push(Decided {
                outcome: Outcome::Done {
                    revision,
                    previous: current,
                },
                row: Some(Row {
                    revision,
                    key,
                    create_revision,
                    value,
                    expires,
                }),
            });
        }
        decided
    }

    fn commit(&mut self, shared: &Shared, decided: &[Decided]) -> Result<()> {
        let rows = || decided.iter().filter_map(|decided| decided.row.as_ref());
        let Some(last) = rows().last() else { return Ok(()) };
        let began = Instant::now();
        self.disk.commit(rows())?;
        let took = began.elapsed();
        self.usual = Some(self.usual.map_or(took, |usual| (usual * 7 + took) / 8));
        let mut events = Vec::with_capacity(decided.len());
        {
            let mut state = shared.state.write();
            for row in rows() {
                self.bytes_since_look += row.value.as_ref().map_or(0, |value| value.len());
                if let Some((key, before)) = state.version(&row.key)
                    && before.expires > 0
                {
                    self.expiries.remove(&(before.expires, key.clone()));
                }
                if row.expires > 0 {
                    self.expiries.insert((row.expires, row.key.clone()));
                }
                events.push(state.apply(row.clone()));
            }
        }
        self.events_since_look += events.len();
        shared.hub.publish(events, last.revision, (shared.clock)());
        Ok(())
    }

    /// Deletes the keys whose time has come.
    fn expire(&mut self, shared: &Shared) {
        let now = (shared.clock)();
        let mut writes = Vec::new();
        while let Some((expires, _)) = self.expiries.first()
            && *expires <= now
            && writes.len() < BATCH
        {
            let Some((expires, key)) = self.expiries.pop_first() else {
                break;
            };
            let state = shared.state.read();
            let Some((_, version)) = state.version(&key) else {
                continue;
            };
            // A start finds those of old versions too.
            if version.expires != expires || version.value.is_none() {
                continue;
            }
            let expect = Expect::Revision(version.revision);
            writes.push(Write {
                key,
                expect,
                op: Op::Delete,
                lease_seconds: None,
            });
        }
        self.write_all(shared, &writes);
        // What the disk refused is tried again at the next turn.
        let state = shared.state.read();
        for key in writes.into_iter().map(|write| write.key) {
            if let Some((_, version)) = state.version(&key)
                && version.value.is_some()
                && version.expires > 0
            {
                self.expiries.insert((version.expires, key));
            }
        }
    }

    /// Compacts as far as the limits of history ask.
    fn trim(&mut self, shared: &Shared) -> Result<()> {
        self.events_since_look = 0;
        self.bytes_since_look = 0;
        match shared.hub.excess(&self.limits, (shared.clock)()) {
            Some(revision) => self.compact(shared, revision),
            None => Ok(()),
        }
    }

    fn compact(&mut self, shared: &Shared, revision: i64) -> Result<()> {
        let (superseded, events) = {
            let state = shared.state.read();
            if revision > state.revision {
                return Err(Error::FutureRevision {
                    requested: revision,
                    current: state.revision,
                });
            }
            if revision <= state.compacted {
                return Err(Error::Compacted {
                    revision: state.compacted,
                });
            }
            let events = shared.hub.events_up_to(revision);
            (state.superseded(&events), events)
        };
        self.disk.compact(&superseded, revision)?;
        shared.state.write().compact(&events, revision);
        shared.hub.forget(revision);
        Ok(())
    }
}
