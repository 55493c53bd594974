//! Writes: one transaction of etcd, which compares all keys and then writes all of them or, in its other branch, reads
//! them, so that a conflict comes with what is there. A value that depends on the present one is made here, and the
//! transaction repeated when that one was another.

use std::sync::Arc;

use super::client::Again;
use super::proto::{
    Compare, CompareTarget, CompareValue, DeleteRangeRequest, PutRequest, PutResponse, Request, RequestOp,
    Response, ResponseOp, TxnRequest, TxnResponse,
};
use super::{Etcd, FENCE, bytes, key_value, range_of};
use crate::{Error, Expect, KeyValue, Merged, Op, Result, Store, Transacted, Write, Written};

pub(super) const TXN: &str = "/etcdserverpb.KV/Txn";
/// A merge that keeps losing the race this often gives up.
const MERGE_ATTEMPTS: usize = 64;

pub(super) fn op(request: Request) -> RequestOp {
    RequestOp {
        request: Some(request),
    }
}

/// What may be done with a transaction whose first sending was not answered.
#[derive(Debug, PartialEq, Eq)]
enum Sent {
    /// It may be carried out later than another client's answer to it, and then overwrite that.
    AtMostOnce,
    /// It compares a revision that it changes, and no revision comes again: the second of two is refused.
    Fenced,
    /// It makes no difference how often it is carried out.
    Repeatedly,
}

fn how_often(writes: &[Write]) -> Sent {
    let is_fence = |write: &Write| {
        matches!(
            (write.expect, &write.op),
            (Expect::Revision(_), Op::Put(_) | Op::Delete)
        )
    };
    if writes.iter().any(is_fence) {
        Sent::Fenced
    } else if matches!(writes, [write] if &*write.key == FENCE && write.expect == Expect::Any) {
        Sent::Repeatedly
    } else {
        Sent::AtMostOnce
    }
}

impl Etcd {
    /// The writes as they are; a [`Op::Merge`] among them only compares.
    pub(super) async fn swap(&self, writes: &[Write]) -> Result<Transacted> {
        let shared = &self.shared;
        let before = shared.before_call()?;
        let mut tries = 0;
        let answer: TxnResponse = loop {
            let mut lease = None;
            let mut request = TxnRequest {
                compare: Vec::with_capacity(writes.len()),
                success: Vec::with_capacity(writes.len()),
                failure: Vec::with_capacity(writes.len()),
            };
            for write in writes {
                if let (Op::Put(_), Some(seconds)) = (&write.op, write.lease_seconds) {
                    let granted = self.leases.get(&shared.client, seconds).await;
                    lease = Some(granted.map_err(|status| shared.error(status))?);
                }
                self.add(&mut request, write, lease.unwrap_or(0));
            }
            let called = match how_often(writes) {
                Sent::AtMostOnce => shared.client.call(TXN, request, Again::Unsent).await,
                Sent::Fenced => {
                    let done = |answer: &TxnResponse| answer.succeeded;
                    shared.client.call_fenced(TXN, request, done).await
                }
                Sent::Repeatedly => shared.client.call(TXN, request, Again::Yes).await,
            };
            match called {
                Ok(answer) => break answer,
                Err(status) if status.code() == tonic::Code::NotFound && tries == 0 => {
                    let Some(lease) = lease else {
                        return Err(shared.error(status));
                    };
                    self.leases.forget(lease);
                    tries += 1;
                }
                Err(status) => return Err(shared.error(status)),
            }
        };
        let header = answer.header.unwrap_or_default();
        // Done is done: if this is another etcd than before, whoever follows it will be told.
        let _ = shared.history.check(&before, &header);
        let revision = shared.place.inner_revision(header.revision);
        self.read_answer(writes, answer, revision)
    }

    fn add(&self, request: &mut TxnRequest, write: &Write, lease: i64) {
        let key = &*self.shared.place.outer(&write.key);
        let compare = |revision: i64| Compare {
            result: 0,
            target: CompareTarget::Mod.into(),
            key: bytes(key),
            value: Some(CompareValue::ModRevision(revision)),
        };
        match write.expect {
            Expect::Any => {}
            Expect::Absent => request.compare.push(compare(0)),
            Expect::Revision(revision) => match self.shared.place.outer_revision(revision) {
                // To etcd 0 is an absent key, and no key is at -1.
                ..=0 => request.compare.push(compare(-1)),
                revision => request.compare.push(compare(revision)),
            },
        }
        match &write.op {
            Op::Put(value) => request.success.push(op(Request::Put(PutRequest {
                key: bytes(key),
                value: value.clone(),
                lease: if write.lease_seconds.is_some() { lease } else { 0 },
                prev_kv: true,
            }))),
            Op::Delete => request.success.push(op(Request::DeleteRange(DeleteRangeRequest {
                key: bytes(key),
                prev_kv: true,
                ..DeleteRangeRequest::default()
            }))),
            Op::Merge(_) => {}
        }
        request.failure.push(op(Request::Range(range_of(key))));
    }

    /// `revision` is the one of the answer, as skiff counts.
    fn read_answer(&self, writes: &[Write], answer: TxnResponse, revision: i64) -> Result<Transacted> {
        let place = &self.shared.place;
        let mut responses = answer.responses.into_iter();
        let mut next = || {
            let found = match responses.next().and_then(|ResponseOp { response }| response) {
                Some(Response::Put(PutResponse { prev_kv, .. })) => prev_kv,
                Some(Response::DeleteRange(answer)) => answer.prev_kvs.into_iter().next(),
                Some(Response::Range(answer)) => answer.kvs.into_iter().next(),
                None => None,
            };
            found.map(|kv| key_value(place, kv)).transpose()
        };
        if answer.succeeded {
            let mut written = Vec::with_capacity(writes.len());
            for write in writes {
                let previous = match write.op {
                    Op::Merge(_) => None,
                    Op::Put(_) | Op::Delete => next()?,
                };
                written.push(Written { revision, previous });
            }
            return Ok(Transacted::Done(written));
        }
        for (at, write) in writes.iter().enumerate() {
            let current = next()?;
            if !write.expect.holds(current.as_ref().map(|kv| kv.mod_revision)) {
                return Ok(Transacted::Conflict {
                    at,
                    current,
                    revision,
                });
            }
        }
        Err(Error::Unavailable(
            "etcd refused a transaction whose conditions hold".to_owned(),
        ))
    }

    /// Writes among which some depend on the present value.
    pub(super) async fn merge(&self, writes: &[Write]) -> Result<Transacted> {
        let mut merged = self.merged.lock().await;
        for _ in 0..MERGE_ATTEMPTS {
            let mut made = Vec::with_capacity(writes.len());
            for (at, write) in writes.iter().enumerate() {
                let Op::Merge(merge) = &write.op else {
                    made.push(write.clone());
                    continue;
                };
                let mut current = merged.get(&write.key).cloned();
                let was_known = current.is_some();
                if !was_known {
                    current = self.get(&write.key).await?.0;
                }
                let mut value = merge.apply(current.as_ref().map(|kv| &*kv.value));
                let holds = write.expect.holds(current.as_ref().map(|kv| kv.mod_revision));
                if was_known && (value == Merged::Refuse || !holds) {
                    // What is known may be old.
                    current = self.get(&write.key).await?.0;
                    value = merge.apply(current.as_ref().map(|kv| &*kv.value));
                }
                let holds = write.expect.holds(current.as_ref().map(|kv| kv.mod_revision));
                let op = match value {
                    Merged::Put(value) if holds => Op::Put(value),
                    Merged::Keep if holds => write.op.clone(),
                    _ => {
                        remember(&mut merged, &write.key, current.clone());
                        let revision = self.shared.hub.revision();
                        return Ok(Transacted::Conflict {
                            at,
                            current,
                            revision,
                        });
                    }
                };
                let expect = current
                    .as_ref()
                    .map_or(Expect::Absent, |kv| Expect::Revision(kv.mod_revision));
                remember(&mut merged, &write.key, current);
                made.push(Write {
                    expect,
                    op,
                    ..write.clone()
                });
            }
            let swapped = match self.swap(&made).await {
                Ok(swapped) => swapped,
                Err(error) => {
                    // Who knows what is there now.
                    writes.iter().for_each(|write| drop(merged.remove(&write.key)));
                    return Err(error);
                }
            };
            match swapped {
                Transacted::Conflict { at, current, .. } if matches!(writes[at].op, Op::Merge(_)) => {
                    remember(&mut merged, &writes[at].key, current);
                }
                Transacted::Done(written) => {
                    for ((write, made), Written { revision, .. }) in writes.iter().zip(made).zip(&written) {
                        if let (Op::Merge(_), Op::Put(value)) = (&write.op, made.op) {
                            let create_revision =
                                merged.get(&write.key).map_or(*revision, |kv| kv.create_revision);
                            let kept = KeyValue {
                                key: write.key.clone(),
                                value,
                                create_revision,
                                mod_revision: *revision,
                            };
                            merged.insert(write.key.clone(), kept);
                        }
                    }
                    return Ok(Transacted::Done(written));
                }
                conflict => return Ok(conflict),
            }
        }
        Err(Error::Unavailable(
            "a record that several servers share changes all the time".to_owned(),
        ))
    }
}

fn remember(
    merged: &mut std::collections::HashMap<Arc<str>, KeyValue>,
    key: &Arc<str>,
    current: Option<KeyValue>,
) {
    match current {
        Some(current) => drop(merged.insert(key.clone(), current)),
        None => drop(merged.remove(key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_revision_makes_a_second_sending_safe() {
        let write = |key: &str, expect: Expect, op: Op| Write {
            key: key.into(),
            expect,
            op,
            lease_seconds: None,
        };
        let put = || Op::Put(bytes("v"));
        let check = |writes: &[Write], expected: Sent| assert_eq!(how_often(writes), expected, "{writes:?}");
        check(&[write("a", Expect::Absent, put())], Sent::AtMostOnce);
        check(&[write("a", Expect::Any, put())], Sent::AtMostOnce);
        check(&[write("a", Expect::Any, Op::Delete)], Sent::AtMostOnce);
        check(&[write("a", Expect::Revision(7), put())], Sent::Fenced);
        check(&[write("a", Expect::Revision(7), Op::Delete)], Sent::Fenced);
        check(
            &[
                write("a", Expect::Absent, put()),
                write("b", Expect::Revision(7), put()),
            ],
            Sent::Fenced,
        );
        check(&[write(FENCE, Expect::Any, put())], Sent::Repeatedly);
    }
}
