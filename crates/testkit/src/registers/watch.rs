//! Watchers of registers, and what must be true of what they were told: every acknowledged write once, nothing that was
//! refused, in the order of versions, and the same to everybody, also when a watch goes on at another server.

use super::clients::{MAPS, event, version};
use super::{Answer, Call, Operation, PATIENCE, Shared};
use anyhow::{Context, Result, bail, ensure};
use http::Request;
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A watch that is silent for so long goes on at another server.
const SILENCE: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) value: u64,
    pub(super) version: u64,
}

#[derive(Default)]
pub(super) struct Recorded {
    pub(super) events: Vec<Event>,
    pub(super) resumed: usize,
    /// The newest version that was told.
    last: u64,
    is_complete: bool,
}

/// Watches from `version` on, at the server `first` and then at the others, until the last object was seen.
pub(super) async fn run(shared: Arc<Shared>, first: usize, version: u64) -> Result<Recorded> {
    let mut recorded = Recorded {
        last: version,
        ..Recorded::default()
    };
    let (mut at, mut ended) = (first, None::<Instant>);
    loop {
        let server = &shared.servers[at % shared.servers.len()];
        let why = recorded.follow(&shared, server).await?;
        if recorded.is_complete {
            return Ok(recorded);
        }
        if shared.stop.load(Ordering::Relaxed) {
            let since = ended.get_or_insert_with(Instant::now).elapsed();
            // All clients first have to end, and to read everything.
            ensure!(
                since < PATIENCE * 3,
                "a watch from {} on is not told the last object: {why}",
                recorded.last
            );
        }
        at += 1;
        recorded.resumed += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

impl Recorded {
    /// One watch until it ends; why it did. An error is a violation.
    async fn follow(&mut self, shared: &Shared, server: &kube::Client) -> Result<String> {
        let (selector, last) = (shared.selector(), shared.last());
        let path = format!(
            "{MAPS}?watch=true&allowWatchBookmarks=true&{selector}&resourceVersion={}",
            self.last
        );
        let request = Request::get(path).body(Body::empty())?;
        let response = match tokio::time::timeout(SILENCE, server.send(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Ok(error.to_string()),
            Err(_) => return Ok("no answer".to_owned()),
        };
        if !response.status().is_success() {
            return Ok(response.status().to_string());
        }
        let (mut body, mut buffer) = (response.into_body(), Vec::new());
        loop {
            let frame = match tokio::time::timeout(SILENCE, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => return Ok(error.to_string()),
                Ok(None) => return Ok("it ended".to_owned()),
                Err(_) => return Ok("silence".to_owned()),
            };
            buffer.extend_from_slice(frame.data_ref().map_or(&[], |bytes| bytes));
            while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=end).collect();
                if let Some(ended) = self.take(&serde_json::from_slice(&line)?, &last)? {
                    return Ok(ended);
                }
            }
        }
    }

    /// Records one line of a watch; answers why the watch has ended, if it has.
    fn take(&mut self, line: &Value, last: &str) -> Result<Option<String>> {
        let (kind, object) = (line["type"].as_str().unwrap_or_default(), &line["object"]);
        if kind == "ERROR" {
            return Ok(Some(object.to_string()));
        }
        let version = version(object).with_context(|| format!("no version: {line}"))?;
        if kind == "BOOKMARK" {
            ensure!(
                version >= self.last,
                "a bookmark of {version} after {}",
                self.last
            );
            self.last = version;
            return Ok(None);
        }
        let event = event(kind, object).with_context(|| format!("not an event of a register: {line}"))?;
        ensure!(version > self.last, "{event:?} was told after {}", self.last);
        self.last = version;
        self.is_complete = event.name == last;
        if self.is_complete {
            return Ok(Some("all is told".to_owned()));
        }
        self.events.push(event);
        Ok(None)
    }
}

/// Compares what all watchers were told with each other and with what was answered to clients.
pub(super) fn check_all(watches: &[Recorded], operations: &BTreeMap<String, Vec<Operation>>) -> Result<()> {
    for watch in watches {
        check(&watch.events, operations)?;
    }
    for pair in watches.windows(2) {
        let (a, b) = (&pair[0].events, &pair[1].events);
        if let Some(at) = (0..a.len().max(b.len())).find(|at| a.get(*at) != b.get(*at)) {
            bail!("two watches differ: {:?} and {:?}", a.get(at), b.get(at));
        }
    }
    Ok(())
}

fn check(events: &[Event], operations: &BTreeMap<String, Vec<Operation>>) -> Result<()> {
    /// What became of a write, and how often it was told.
    struct Write {
        answer: Answer,
        version: Option<u64>,
        told: usize,
    }
    let (mut writes, mut deletes) = (HashMap::new(), HashMap::<u64, (usize, usize)>::new());
    for one in operations.values().flatten() {
        match one.call {
            Call::Create { value } | Call::Swap { value, .. } => {
                let write = Write {
                    answer: one.answer,
                    version: one.version,
                    told: 0,
                };
                writes.insert(value, write);
            }
            Call::Delete { expected } => {
                let (done, possible) = deletes.entry(expected).or_default();
                match one.answer {
                    Answer::Done => *done += 1,
                    Answer::Unknown => *possible += 1,
                    Answer::Refused | Answer::Found(_) => {}
                }
            }
            Call::Read => {}
        }
    }
    let mut present = HashMap::<&str, u64>::new();
    for event in events {
        let before = present.get(event.name.as_str()).copied();
        match (event.kind.as_str(), before) {
            ("ADDED", None) | ("MODIFIED", Some(_)) => {
                let write = writes.get_mut(&event.value);
                let write = write.with_context(|| format!("{event:?} was written by nobody"))?;
                write.told += 1;
                ensure!(write.told == 1, "{event:?} was told twice");
                ensure!(write.answer != Answer::Refused, "{event:?} was refused");
                let version = write.version.unwrap_or(event.version);
                ensure!(
                    version == event.version,
                    "{event:?} was acknowledged as {version}"
                );
                present.insert(&event.name, event.value);
            }
            ("DELETED", Some(value)) => {
                ensure!(value == event.value, "{event:?} deletes {value}");
                let (done, possible) = deletes.remove(&value).unwrap_or_default();
                ensure!(done + possible > 0, "{event:?} was deleted by nobody");
                present.remove(event.name.as_str());
            }
            _ => bail!("{event:?} after {before:?}"),
        }
    }
    for (value, write) in &writes {
        let missing = write.answer == Answer::Done && write.told == 0;
        ensure!(!missing, "the write of {value} was acknowledged and not told");
    }
    let untold = deletes.iter().find(|(_, (done, _))| *done > 0);
    ensure!(
        untold.is_none(),
        "a delete was acknowledged and not told: {untold:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Vec<Event> {
        let event = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            Event {
                kind: words[0].to_owned(),
                name: "a".to_owned(),
                value: words[1].parse().unwrap(),
                version: words[2].parse().unwrap(),
            }
        };
        text.split(',').map(event).collect()
    }

    #[test]
    fn what_a_watch_tells() {
        let operation = |call, answer, version| Operation {
            client: 0,
            call,
            answer,
            version,
            invoked: Duration::ZERO,
            returned: Duration::ZERO,
        };
        let swap = |expected, value| Call::Swap { expected, value };
        let history = BTreeMap::from([(
            "a".to_owned(),
            vec![
                operation(Call::Create { value: 1 }, Answer::Done, Some(5)),
                operation(swap(1, 2), Answer::Done, Some(6)),
                operation(swap(2, 3), Answer::Refused, None),
                operation(swap(2, 4), Answer::Unknown, None),
                operation(Call::Delete { expected: 2 }, Answer::Unknown, None),
                operation(Call::Delete { expected: 4 }, Answer::Done, None),
            ],
        )]);
        let is_good = |text: &str| check(&told(text), &history).is_ok();
        let good = "ADDED 1 5, MODIFIED 2 6, MODIFIED 4 7, DELETED 4 8";
        assert!(is_good(good));
        for (name, bad) in [
            ("one is missing", "ADDED 1 5, MODIFIED 4 7, DELETED 4 8"),
            ("a delete is missing", "ADDED 1 5, MODIFIED 2 6, MODIFIED 4 7"),
            (
                "refused",
                "ADDED 1 5, MODIFIED 2 6, MODIFIED 3 7, MODIFIED 4 8, DELETED 4 9",
            ),
            (
                "twice",
                "ADDED 1 5, MODIFIED 2 6, MODIFIED 2 6, MODIFIED 4 7, DELETED 4 8",
            ),
            (
                "another version",
                "ADDED 1 5, MODIFIED 2 9, MODIFIED 4 10, DELETED 4 11",
            ),
            (
                "by nobody",
                "ADDED 1 5, MODIFIED 2 6, MODIFIED 4 7, MODIFIED 9 8, DELETED 9 9",
            ),
            ("deleted by nobody", "ADDED 1 5, DELETED 1 6"),
            (
                "added to what is there",
                "ADDED 1 5, ADDED 2 6, MODIFIED 4 7, DELETED 4 8",
            ),
        ] {
            assert!(!is_good(bad), "{name}");
        }
        let other = Recorded {
            events: told("ADDED 1 5, MODIFIED 2 6, MODIFIED 4 9, DELETED 4 10"),
            ..Recorded::default()
        };
        let one = Recorded {
            events: told(good),
            ..Recorded::default()
        };
        assert!(check_all(&[one, other], &history).is_err());
    }

    #[test]
    fn versions_do_not_go_back() {
        let line = |kind: &str, version: u64| {
            serde_json::json!({"type": kind, "object": {"metadata": {"name": "a", "resourceVersion": version.to_string()},
                "data": {"value": "1"}}})
        };
        let mut recorded = Recorded::default();
        assert!(recorded.take(&line("ADDED", 5), "end").is_ok());
        assert!(recorded.take(&line("BOOKMARK", 7), "end").is_ok());
        assert!(recorded.take(&line("MODIFIED", 7), "end").is_err());
        assert!(recorded.take(&line("BOOKMARK", 6), "end").is_err());
    }
}
