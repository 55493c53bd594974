//! The one thread that writes: group commit, expiry of leases, compaction. It alone touches the disk
//! and it alone changes the state, always in this order: decide, commit to disk, change memory, tell
//! the watchers, acknowledge. So nobody sees what is not on disk, and a failed commit leaves no trace.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::Shared;
use super::disk::{Disk, Row};
use super::state::Version;
use crate::hub::Limits;
use crate::{Error, Expect, Op, Outcome, Result};

/// Writes in one transaction. More does not make a commit much cheaper per write, only later.
const BATCH: usize = 512;
/// How often history is looked at while nothing else happens.
const HOUSEKEEPING: Duration = Duration::from_secs(30);

pub fn stopped() -> Error {
    Error::Unavailable("the store was closed".to_owned())
}

pub struct Write {
    pub key: Arc<str>,
    pub expect: Expect,
    pub op: Op,
    pub lease_seconds: Option<i64>,
    /// `None` for the store's own writes.
    pub reply: Option<oneshot::Sender<Result<Outcome>>>,
    pub _place: Option<OwnedSemaphorePermit>,
}

pub enum Request {
    Write(Write),
    Compact {
        revision: i64,
        reply: oneshot::Sender<Result<()>>,
    },
    Tick {
        reply: oneshot::Sender<Result<()>>,
    },
    /// The values of old revisions.
    Read {
        revisions: Vec<i64>,
        reply: oneshot::Sender<Result<Vec<Option<Bytes>>>>,
    },
}

#[derive(Default)]
pub struct Queue {
    inner: Mutex<QueueInner>,
    arrived: Condvar,
}

#[derive(Default)]
struct QueueInner {
    requests: VecDeque<Request>,
    closed: bool,
}

impl Queue {
    pub fn push(&self, request: Request) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(stopped());
        }
        inner.requests.push_back(request);
        self.arrived.notify_one();
        Ok(())
    }

    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.arrived.notify_one();
    }

    /// All that waits, up to a batch; nothing when `patience` ran out. `None`: closed and drained.
    fn take(&self, patience: Duration) -> Option<Vec<Request>> {
        let mut inner = self.inner.lock();
        if inner.requests.is_empty() && !inner.closed {
            self.arrived.wait_for(&mut inner, patience);
        }
        if inner.requests.is_empty() && inner.closed {
            return None;
        }
        let count = inner.requests.len().min(BATCH);
        Some(inner.requests.drain(..count).collect())
    }
}

/// However the thread ends, callers must not wait for it.
struct CloseOnExit(Arc<Shared>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let mut inner = self.0.queue.inner.lock();
        inner.closed = true;
        inner.requests.clear();
    }
}

pub struct Writer {
    shared: Arc<Shared>,
    disk: Disk,
    limits: Limits,
    /// One for each key that has a lease.
    expiries: BTreeSet<(u64, Arc<str>)>,
    events_since_look: usize,
    bytes_since_look: usize,
}

/// A decided write.
struct Decided {
    outcome: Outcome,
    row: Option<Row>,
}

impl Writer {
    pub fn new(shared: Arc<Shared>, disk: Disk, limits: Limits, expiries: Vec<(u64, Arc<str>)>) -> Writer {
        let expiries = expiries.into_iter().collect();
        Writer {
            shared,
            disk,
            limits,
            expiries,
            events_since_look: 0,
            bytes_since_look: 0,
        }
    }

    pub fn run(mut self) {
        let _close = CloseOnExit(self.shared.clone());
        let mut next_look = self.now() + HOUSEKEEPING.as_secs();
        loop {
            let now = self.now();
            let due = self
                .expiries
                .first()
                .map_or(next_look, |(expires, _)| next_look.min(*expires));
            // Not less than a second, so that a disk that refuses the expiry does not make this spin.
            let patience = Duration::from_secs(due.saturating_sub(now).clamp(1, HOUSEKEEPING.as_secs()));
            let Some(requests) = self.shared.queue.take(patience) else {
                return;
            };
            let mut writes = Vec::with_capacity(requests.len());
            for request in requests {
                match request {
                    Request::Write(write) => writes.push(write),
                    Request::Compact { revision, reply } => {
                        self.write_all(std::mem::take(&mut writes));
                        let _ = reply.send(self.compact(revision));
                    }
                    Request::Tick { reply } => {
                        self.write_all(std::mem::take(&mut writes));
                        self.expire();
                        let _ = reply.send(self.trim());
                    }
                    Request::Read { revisions, reply } => {
                        let _ = reply.send(self.disk.values(&revisions));
                    }
                }
            }
            self.write_all(writes);
            self.expire();
            let crowded = self.events_since_look > self.limits.events / 8
                || self.bytes_since_look > self.limits.bytes / 8;
            if crowded || self.now() >= next_look {
                next_look = self.now() + HOUSEKEEPING.as_secs();
                if let Err(error) = self.trim() {
                    tracing::warn!(%error, "cannot compact the store");
                }
            }
        }
    }

    fn now(&self) -> u64 {
        (self.shared.clock)()
    }

    /// Commits the writes together. When that fails they are tried one by one, so that only those fail
    /// which cannot be stored: on a nearly full disk a small one may still fit.
    fn write_all(&mut self, writes: Vec<Write>) {
        if writes.is_empty() {
            return;
        }
        let decided = self.decide(&writes);
        match self.commit(&decided) {
            Ok(()) => {
                for (write, decided) in writes.into_iter().zip(decided) {
                    if let Some(reply) = write.reply {
                        let _ = reply.send(Ok(decided.outcome));
                    }
                }
            }
            Err(_) if writes.len() > 1 => {
                for write in writes {
                    self.write_all(vec![write]);
                }
            }
            Err(error) => {
                for write in writes {
                    tracing::warn!(key = %write.key, %error, "a write failed");
                    if let Some(reply) = write.reply {
                        let _ = reply.send(Err(error.clone()));
                    }
                }
            }
        }
    }

    /// What each write comes to, each seeing those before it.
    fn decide(&self, writes: &[Write]) -> Vec<Decided> {
        let now = self.now();
        let state = self.shared.state.read();
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

    fn commit(&mut self, decided: &[Decided]) -> Result<()> {
        let rows = || decided.iter().filter_map(|decided| decided.row.as_ref());
        let Some(last) = rows().last() else { return Ok(()) };
        self.disk.commit(rows())?;
        let mut events = Vec::with_capacity(decided.len());
        {
            let mut state = self.shared.state.write();
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
        self.shared
            .hub
            .publish(events, last.revision, (self.shared.clock)());
        Ok(())
    }

    /// Deletes the keys whose time has come.
    fn expire(&mut self) {
        let now = self.now();
        let mut writes = Vec::new();
        while let Some((expires, _)) = self.expiries.first()
            && *expires <= now
            && writes.len() < BATCH
        {
            let Some((expires, key)) = self.expiries.pop_first() else {
                break;
            };
            let state = self.shared.state.read();
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
                reply: None,
                _place: None,
            });
        }
        let due: Vec<_> = writes.iter().map(|write| write.key.clone()).collect();
        self.write_all(writes);
        // What the disk refused is tried again at the next turn.
        let state = self.shared.state.read();
        for key in due {
            if let Some((_, version)) = state.version(&key)
                && version.value.is_some()
                && version.expires > 0
            {
                self.expiries.insert((version.expires, key));
            }
        }
    }

    /// Compacts as far as the limits of history ask.
    fn trim(&mut self) -> Result<()> {
        self.events_since_look = 0;
        self.bytes_since_look = 0;
        match self.shared.hub.excess(&self.limits, self.now()) {
            Some(revision) => self.compact(revision),
            None => Ok(()),
        }
    }

    fn compact(&mut self, revision: i64) -> Result<()> {
        let (superseded, events) = {
            let state = self.shared.state.read();
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
            let events = self.shared.hub.events_up_to(revision);
            (state.superseded(&events), events)
        };
        self.disk.compact(&superseded, revision)?;
        self.shared.state.write().compact(&events, revision);
        self.shared.hub.forget(revision);
        Ok(())
    }
}
