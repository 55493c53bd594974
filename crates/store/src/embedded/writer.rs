//! What writes: group commit, expiry of leases, compaction. Whoever holds the [`Writer`] alone touches the disk and
//! alone changes the state, always in this order: decide, commit to disk, change memory, tell the watchers,
//! acknowledge. So nobody sees what is not on disk, and a failed commit leaves no trace. One thread ([`run`]) holds it
//! for all who wait; a caller that is alone may hold it for its own write ([`write_here`]).

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Shared;
use super::disk::{Disk, Row};
use super::queue::{BATCH, Reply, Request, STALL, Waiting, spare_runtime, unfinished};
use super::reserve::{self, Keep, Reserve};
use super::state::Version;
use crate::hub::Limits;
use crate::{Error, Event, Expect, KeyValue, Merged, Op, Result, Transacted, Write, Written};

/// How often history is looked at while nothing else happens.
const HOUSEKEEPING: Duration = Duration::from_secs(30);

/// While writes fail, the disk is tried this often.
const PROBE: Duration = Duration::from_secs(1);
/// What an object may grow by when it is marked as being deleted, or loses a finalizer.
const BARELY: usize = 512;
/// A full disk that has this much room again is not full.
const ROOM: u64 = 4 << 20;

/// However a holder of the writer ends, others go on: after a panic memory may lack what is on disk, so whoever is next
/// looks there first.
struct SuspectOnPanic<'a>(&'a Shared);

impl Drop for SuspectOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.suspect.store(true, Ordering::Release);
            self.0.queue.leave();
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

/// Writes that happen together.
type Transaction = Vec<Write>;

/// Makes writes on this thread, if nobody else writes and that takes a moment only; else gives them back.
pub fn write_here(
    shared: &Shared,
    writes: Transaction,
) -> std::result::Result<Result<Transacted>, Transaction> {
    // What has a lease is for the thread, which must know when to wake.
    let leased = writes.iter().any(|write| write.lease_seconds.is_some());
    let Some(runtime) = spare_runtime().filter(|_| !leased) else {
        return Err(writes);
    };
    let Some(mut writer) = shared.writer.try_lock() else {
        shared.queue.met();
        return Err(writes);
    };
    // Nor is a disk in trouble anything to hold up a caller's thread for.
    if !writer.quick() || shared.trouble.lock().is_some() || !shared.queue.enter(runtime) {
        return Err(writes);
    }
    let _suspect = SuspectOnPanic(shared);
    let outcome = writer.write_one(shared, &writes);
    shared.queue.leave();
    Ok(outcome)
}

/// The writer thread.
pub fn run(shared: &Shared) {
    let now = || (shared.clock)();
    let mut turns = Turns::default();
    loop {
        let turn = catch_unwind(AssertUnwindSafe(|| turn(shared, &mut turns, &now)));
        match turn {
            Ok(true) => {}
            Ok(false) => return,
            // The requests of this turn are answered with an error. A panic that comes again must not spin.
            Err(_) => {
                tracing::error!("the store's writer panicked; it goes on");
                std::thread::sleep(STALL);
            }
        }
    }
}

/// When the writer thread did what.
#[derive(Default)]
struct Turns {
    /// When it last looked at what is due.
    looked: Option<u64>,
    next_look: u64,
    due: u64,
}

/// Serves what waits; false when there will be nothing any more.
fn turn(shared: &Shared, turns: &mut Turns, now: &dyn Fn() -> u64) -> bool {
    let _suspect = SuspectOnPanic(shared);
    let looked = *turns.looked.get_or_insert_with(|| {
        turns.next_look = now() + HOUSEKEEPING.as_secs();
        turns.due = turns.next_look;
        now()
    });
    // Not less than a second, so that a disk that refuses the expiry does not make this spin.
    let mut patience = Duration::from_secs(turns.due.saturating_sub(now()).clamp(1, HOUSEKEEPING.as_secs()));
    if shared.trouble.lock().is_some() {
        patience = patience.min(PROBE);
    }
    let Some(requests) = shared.queue.take(patience) else {
        return false;
    };
    if shared.trouble.lock().is_some() {
        hold(shared).heal(shared);
    }
    if requests.is_empty() && now() == looked {
        // Woken only to see how a caller gets on.
        shared.queue.relieve();
        return true;
    }
    turns.looked = Some(now());
    let answers = hold(shared).serve(shared, requests);
    // After the writer was let go: who has an answer may write at once.
    for (reply, outcome) in answers {
        reply.send(outcome);
    }
    let mut writer = hold(shared);
    writer.expire(shared);
    if writer.crowded() || now() >= turns.next_look {
        turns.next_look = now() + HOUSEKEEPING.as_secs();
        if let Err(error) = writer.trim(shared) {
            tracing::warn!(%error, "cannot compact the store");
        }
    }
    turns.due = writer
        .expiries
        .first()
        .map_or(turns.next_look, |(expires, _)| turns.next_look.min(*expires));
    true
}

pub struct Writer {
    disk: Disk,
    reserve: Reserve,
    /// Only what uses the reserve is written, until that is whole again.
    full: bool,
    healed: Instant,
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

/// A decided transaction.
struct Decided {
    outcome: Transacted,
    rows: Vec<Row>,
}

impl Writer {
    pub fn new(
        disk: Disk,
        reserve: Reserve,
        limits: Limits,
        quick: Duration,
        expiries: Vec<(u64, Arc<str>)>,
    ) -> Writer {
        let expiries = expiries.into_iter().collect();
        Writer {
            disk,
            reserve,
            full: false,
            healed: Instant::now(),
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
    fn serve(&mut self, shared: &Shared, requests: Vec<Request>) -> Vec<(Reply, Result<Transacted>)> {
        let (mut writes, mut replies) = (Vec::with_capacity(requests.len()), Vec::new());
        let mut outcomes = Vec::new();
        for request in requests {
            match request {
                Request::Write(Waiting {
                    writes: together,
                    reply,
                }) => {
                    writes.push(together);
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

    /// Commits the transactions together. When that fails they are tried one by one, so that only those fail
    /// which cannot be stored: on a nearly full disk a small one may still fit.
    fn write_all(&mut self, shared: &Shared, transactions: &[Transaction]) -> Vec<Result<Transacted>> {
        if !self.full
            && let [_, _, ..] = transactions
            && self.catch_up(shared).is_ok()
        {
            let decided = self.decide(shared, transactions);
            if self.commit(shared, &decided).is_ok() {
                self.note_success(shared, &decided);
                return decided.into_iter().map(|decided| Ok(decided.outcome)).collect();
            }
        }
        let one = |writes| self.write_one(shared, writes);
        transactions.iter().map(one).collect()
    }

    fn write_one(&mut self, shared: &Shared, writes: &Transaction) -> Result<Transacted> {
        self.catch_up(shared)?;
        let mut decided = self.decide(shared, std::slice::from_ref(writes));
        let grows = || decided.iter().any(|decided| !decided.rows.is_empty());
        let mut committed = if self.full && grows() && may_use_reserve(shared, writes).is_none() {
            Err(self.fullness(shared))
        } else {
            self.commit(shared, &decided)
        };
        if let (Err(Error::DiskFull(_)), Some(keep)) = (&committed, may_use_reserve(shared, writes)) {
            while matches!(committed, Err(Error::DiskFull(_))) && self.reserve.release(keep) {
                committed = self.commit(shared, &decided);
            }
        }
        match &committed {
            Ok(()) => self.note_success(shared, &decided),
            Err(error) => {
                let key = writes.first().map(|write| &*write.key).unwrap_or_default();
                tracing::warn!(key, %error, "a write failed");
                note_failure(shared, error);
            }
        }
        committed?;
        decided
            .pop()
            .map(|decided| decided.outcome)
            .ok_or_else(unfinished)
    }

    fn note_success(&mut self, shared: &Shared, decided: &[Decided]) {
        let mut trouble = shared.trouble.lock();
        if !self.reserve.is_whole() {
            // From now on until there is room again.
            self.full = true;
            trouble.get_or_insert_with(|| Error::DiskFull(self.disk.dir().display().to_string()));
        } else if !matches!(*trouble, Some(Error::DiskFull(_)))
            && decided.iter().any(|decided| !decided.rows.is_empty())
        {
            // That a small write found room does not make a full disk well: `heal` looks for more.
            *trouble = None;
        }
    }

    fn fullness(&self, shared: &Shared) -> Error {
        let known = shared.trouble.lock().clone();
        known.unwrap_or_else(|| Error::DiskFull(self.disk.dir().display().to_string()))
    }

    /// Sees whether the disk is well again. What was acknowledged is on it; what was refused is not in memory.
    fn heal(&mut self, shared: &Shared) {
        if self.healed.elapsed() < PROBE {
            return;
        }
        self.healed = Instant::now();
        let Some(trouble) = shared.trouble.lock().clone() else {
            return;
        };
        let healed = match trouble {
            Error::DiskFull(_) => {
                self.reserve.refill() && has_room(self.disk.dir()) && self.disk.probe().is_ok()
            }
            _ => {
                shared.suspect.store(true, Ordering::Release);
                self.disk.probe().or_else(|_| self.disk.reopen()).is_ok()
                    && self.disk.probe().is_ok()
                    && self.catch_up(shared).is_ok()
            }
        };
        if healed {
            tracing::info!("the store's disk works again");
            self.full = false;
            *shared.trouble.lock() = None;
        }
    }

    /// Brings memory up to the disk, if somebody panicked between the two.
    fn catch_up(&mut self, shared: &Shared) -> Result<()> {
        if !shared.suspect.load(Ordering::Acquire) {
            return Ok(());
        }
        shared.suspect.store(false, Ordering::Release);
        let mut rows = Vec::new();
        if let Err(error) = self.disk.load(shared.hub.revision(), |row| rows.push(row)) {
            shared.suspect.store(true, Ordering::Release);
            return Err(error);
        }
        let Some(last) = rows.last().map(|row| row.revision) else {
            return Ok(());
        };
        let mut events = Vec::with_capacity(rows.len());
        {
            let mut state = shared.state.write();
            for row in rows {
                if row.expires > 0 {
                    self.expiries.insert((row.expires, row.key.clone()));
                }
                events.push(if row.revision > state.revision {
                    state.apply(row)
                } else {
                    Event {
                        key: row.key,
                        revision: row.revision,
                        create_revision: row.create_revision,
                        value: row.value,
                    }
                });
            }
        }
        shared.hub.publish(events, last, (shared.clock)());
        Ok(())
    }

    /// What each transaction comes to, each seeing those before it.
    fn decide(&self, shared: &Shared, transactions: &[Transaction]) -> Vec<Decided> {
        let now = (shared.clock)();
        let state = shared.state.read();
        let mut revision = state.revision;
        let mut ahead: HashMap<Arc<str>, Version> = HashMap::new();
        let mut decided = Vec::with_capacity(transactions.len());
        for writes in transactions {
            let before = revision;
            let mut rows: Vec<Row> = Vec::with_capacity(writes.len());
            let mut written = Vec::with_capacity(writes.len());
            let mut conflict = None;
            for (at, write) in writes.iter().enumerate() {
                let (key, version) = match state.version(&write.key) {
                    Some((key, version)) => (key.clone(), Some(version)),
                    None => (write.key.clone(), None),
                };
                let current = ahead
                    .get(&key)
                    .or(version)
                    .and_then(|version| version.key_value(&key));
                let value = match next(write, current.as_ref()) {
                    Next::Refused => {
                        conflict = Some((at, current));
                        break;
                    }
                    Next::Unchanged => {
                        let previous = None;
                        written.push(Written { revision, previous });
                        continue;
                    }
                    Next::Value(value) => value,
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
                written.push(Written {
                    revision,
                    previous: current,
                });
                rows.push(Row {
                    revision,
                    key,
                    create_revision,
                    value,
                    expires,
                });
            }
            let outcome = match conflict {
                Some((at, current)) => {
                    revision = before;
                    rows.clear();
                    Transacted::Conflict {
                        at,
                        current,
                        revision,
                    }
                }
                None => Transacted::Done(written),
            };
            for row in &rows {
                let version = Version {
                    revision: row.revision,
                    create_revision: row.create_revision,
                    value: row.value.clone(),
                    expires: row.expires,
                };
                ahead.insert(row.key.clone(), version);
            }
            decided.push(Decided { outcome, rows });
        }
        decided
    }

    fn commit(&mut self, shared: &Shared, decided: &[Decided]) -> Result<()> {
        let rows = || decided.iter().flat_map(|decided| &decided.rows);
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
            writes.push(vec![Write::new(key, expect, Op::Delete)]);
        }
        self.write_all(shared, &writes);
        // What the disk refused is tried again at the next turn.
        let state = shared.state.read();
        for key in writes.into_iter().flatten().map(|write| write.key) {
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
        let mut compacted = self.disk.compact(&superseded, revision);
        // It makes room.
        while matches!(compacted, Err(Error::DiskFull(_))) && self.reserve.release(Keep::Nothing) {
            compacted = self.disk.compact(&superseded, revision);
        }
        compacted?;
        shared.state.write().compact(&events, revision);
        shared.hub.forget(revision);
        Ok(())
    }
}

fn note_failure(shared: &Shared, error: &Error) {
    // Anything else is the write's own fault.
    if let Error::DiskFull(_) | Error::Io(_) | Error::Corrupt(_) | Error::InUse(_) = error {
        *shared.trouble.lock() = Some(error.clone());
    }
}

/// What a write makes of its key.
enum Next {
    Refused,
    Unchanged,
    /// `None`: the key goes.
    Value(Option<bytes::Bytes>),
}

fn next(write: &Write, current: Option<&KeyValue>) -> Next {
    if !write.expect.holds(current.map(|kv| kv.mod_revision)) {
        return Next::Refused;
    }
    match &write.op {
        Op::Put(value) => Next::Value(Some(value.clone())),
        Op::Delete if current.is_none() => Next::Unchanged,
        Op::Delete => Next::Value(None),
        Op::Merge(merge) => match merge.apply(current.map(|kv| &*kv.value)) {
            Merged::Put(value) => Next::Value(Some(value)),
            Merged::Keep => Next::Unchanged,
            Merged::Refuse => Next::Refused,
        },
    }
}

/// Whether writes are let through on a full disk, and how much of the reserve they must leave.
fn may_use_reserve(shared: &Shared, writes: &Transaction) -> Option<Keep> {
    let state = shared.state.read();
    let mut keep = Keep::Nothing;
    for write in writes {
        let present = || {
            state
                .version(&write.key)?
                .1
                .value
                .as_ref()
                .map(|value| value.len())
        };
        match &write.op {
            Op::Delete => continue,
            Op::Put(value) if value.len() <= present()? + BARELY => {}
            Op::Put(_) => return None,
            // A record of a fixed size.
            Op::Merge(_) => {
                present()?;
                continue;
            }
        }
        keep = Keep::Half;
    }
    Some(keep)
}

fn has_room(dir: &std::path::Path) -> bool {
    reserve::free(dir) >= ROOM.min(reserve::total(dir) / 8)
}
