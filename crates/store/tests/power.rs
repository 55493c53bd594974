//! Power cuts. What the store writes and syncs is recorded; then the disk is put together as a cut would have left it:
//! what was not synced is lost, kept, reordered or torn at sectors. Whatever is opened from that must hold every
//! acknowledged write and be the state of exactly one revision.

#![allow(clippy::unwrap_used)]

mod vfs;

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use skiff_store::{Embedded, Expect, Op, Outcome, Store};
use vfs::Event;

const SECTOR: usize = 512;

/// Random numbers that are the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// What became of writes that were not synced.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Unsynced {
    Lost,
    Kept,
    /// Each for itself: lost, kept, or some of its sectors.
    Torn,
}

#[derive(Default)]
struct File {
    /// `None`: its name is not on disk.
    synced: Option<Vec<u8>>,
    pending: Vec<Event>,
}

fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if content.len() < at + bytes.len() {
        content.resize(at + bytes.len(), 0);
    }
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

fn apply(content: &mut Option<Vec<u8>>, event: &Event) {
    match event {
        Event::Delete(..) => *content = None,
        Event::Write(_, at, bytes) => put(content.get_or_insert_default(), *at as usize, bytes),
        Event::Truncate(_, size) => content.get_or_insert_default().resize(*size as usize, 0),
        _ => {
            content.get_or_insert_default();
        }
    }
}

/// The files that a disk would have after these events.
fn after_cut(events: &[Event], unsynced: Unsynced, dice: &mut Dice) -> BTreeMap<String, Vec<u8>> {
    let mut files: BTreeMap<String, File> = BTreeMap::new();
    // The store makes this one itself, and syncs the folder.
    files.entry("store.db".to_owned()).or_default().synced = Some(Vec::new());
    for event in events {
        match event {
            Event::Acknowledged(_) => {}
            Event::Sync(name) => {
                let file = files.entry(name.clone()).or_default();
                for event in std::mem::take(&mut file.pending) {
                    apply(&mut file.synced, &event);
                }
            }
            Event::Delete(name, true) => drop(files.remove(name)),
            Event::Extended(name, size) => {
                let file = files.entry(name.clone()).or_default();
                for event in std::mem::take(&mut file.pending) {
                    apply(&mut file.synced, &event);
                }
                let content = file.synced.get_or_insert_default();
                content.resize((*size as usize).max(content.len()), 0);
            }
            Event::Create(name)
            | Event::Write(name, ..)
            | Event::Truncate(name, _)
            | Event::Delete(name, false) => {
                files.entry(name.clone()).or_default().pending.push(event.clone());
            }
        }
    }
    let mut left = BTreeMap::new();
    for (name, file) in files {
        let mut content = file.synced;
        for event in &file.pending {
            let fate = match unsynced {
                Unsynced::Lost => 0,
                Unsynced::Kept => 1,
                Unsynced::Torn => dice.roll(3),
            };
            match (fate, event) {
                (0, _) => {}
                (2, Event::Write(_, at, bytes)) => {
                    for (nth, sector) in bytes.chunks(SECTOR).enumerate() {
                        if dice.roll(2) == 0 {
                            put(
                                content.get_or_insert_default(),
                                *at as usize + nth * SECTOR,
                                sector,
                            );
                        }
                    }
                }
                _ => apply(&mut content, event),
            }
        }
        left.extend(content.map(|content| (name, content)));
    }
    left
}

/// All writes of a run, by revision.
type History = BTreeMap<i64, (String, Option<Bytes>)>;

fn state_at(history: &History, revision: i64) -> BTreeMap<String, (Bytes, i64)> {
    let mut state = BTreeMap::new();
    for (at, (key, value)) in history.range(..=revision) {
        match value {
            Some(value) => state.insert(key.clone(), (value.clone(), *at)),
            None => state.remove(key),
        };
    }
    state
}

/// Opens what a cut left and compares it; says what is wrong.
async fn examine(
    files: &BTreeMap<String, Vec<u8>>,
    acknowledged: i64,
    history: &History,
    scratch: &Path,
) -> Result<(), String> {
    let _ = std::fs::remove_dir_all(scratch);
    std::fs::create_dir(scratch).unwrap();
    for (name, content) in files {
        std::fs::write(scratch.join(name), content).unwrap();
    }
    let store = Embedded::open(scratch).map_err(|error| format!("cannot be opened: {error}"))?;
    let found = store.range("/r/", None, 0, None).await.unwrap();
    if found.revision < acknowledged {
        return Err(format!(
            "revision {} although {acknowledged} was acknowledged",
            found.revision
        ));
    }
    let found_state: BTreeMap<String, (Bytes, i64)> = found
        .items
        .iter()
        .map(|kv| (kv.key.to_string(), (kv.value.clone(), kv.mod_revision)))
        .collect();
    let expected = state_at(history, found.revision);
    if found_state != expected {
        return Err(format!("not the state of revision {}", found.revision));
    }
    let next = store
        .write("/r/after", Expect::Any, Op::Put(Bytes::from_static(b"x")), None)
        .await;
    match next {
        Ok(Outcome::Done { revision, .. }) if revision == found.revision + 1 => Ok(()),
        other => Err(format!("the next write: {other:?}")),
    }
}

/// A run of writes, alone and together, with deletions, a compaction and checkpoints.
async fn run(folder: &Path) -> (Vec<Event>, History) {
    vfs::install();
    vfs::record(folder);
    let store = Embedded::open(folder).unwrap();
    let log = std::fs::metadata(folder.join("store.db-wal")).unwrap().len();
    vfs::note(Event::Extended("store.db-wal".to_owned(), log));
    let mut dice = Dice(0x5eed);
    let mut history = History::new();
    for round in 0..45_u64 {
        let together = 1 + dice.roll(4);
        let writes: Vec<(String, Option<Bytes>)> = (0..together)
            .map(|nth| {
                let key = format!("/r/{}", (round + nth * 7) % 13);
                let size = 1 + dice.roll(180 << 10) as usize;
                let value = Bytes::from(vec![dice.roll(256) as u8; size]);
                (key, (dice.roll(6) > 0).then_some(value))
            })
            .collect();
        let made = writes.into_iter().map(|(key, value)| {
            let op = value.clone().map_or(Op::Delete, Op::Put);
            let store = &store;
            async move {
                let outcome = store.write(&key, Expect::Any, op, None).await.unwrap();
                let Outcome::Done { revision, .. } = outcome else {
                    panic!("{outcome:?}");
                };
                vfs::note(Event::Acknowledged(revision));
                (revision, key, value)
            }
        });
        let mut made: Vec<_> = futures_like_join(made).await;
        // The deletion of what is not there has the revision of something else.
        made.sort_by_key(|(revision, _, value)| (*revision, value.is_none()));
        for (revision, key, value) in made {
            history.entry(revision).or_insert((key, value));
        }
        if round == 30 {
            let revision = store.revision().await.unwrap();
            store.compact(revision - 20).await.unwrap();
        }
    }
    let events = vfs::recorded();
    drop(store);
    (events, history)
}

/// All of them at once, in one task.
async fn futures_like_join<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut waiting: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut left = 0;
        for (future, done) in &mut waiting {
            if done.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *done = Some(value),
                    std::task::Poll::Pending => left += 1,
                }
            }
        }
        if left == 0 {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    waiting.into_iter().filter_map(|(_, done)| done).collect()
}

fn acknowledged_in(events: &[Event]) -> i64 {
    let acknowledged = events.iter().filter_map(|event| match event {
        Event::Acknowledged(revision) => Some(*revision),
        _ => None,
    });
    acknowledged.max().unwrap_or(1)
}

#[tokio::test]
async fn no_cut_loses_an_acknowledged_write() {
    let folder = tempfile::tempdir().unwrap();
    let (events, history) = run(&folder.path().join("data")).await;
    let syncs: Vec<usize> = (0..events.len())
        .filter(|at| matches!(events[*at], Event::Sync(_)))
        .collect();
    let checkpoints = events
        .iter()
        .skip_while(|event| !matches!(event, Event::Acknowledged(_)))
        .filter(|event| matches!(event, Event::Sync(name) if name == "store.db"))
        .count();
    assert!(
        syncs.len() > 45 && checkpoints > 0,
        "{} syncs, {checkpoints} of the database",
        syncs.len()
    );

    // In memory, if there is a file system for that: it is opened some hundred times.
    let shm = Path::new("/dev/shm");
    let scratch = if shm.is_dir() {
        tempfile::tempdir_in(shm)
    } else {
        tempfile::tempdir()
    }
    .unwrap();
    let scratch = scratch.path().join("cut");
    let mut dice = Dice(0xd1ce);
    let mut cuts: Vec<(usize, Unsynced)> = Vec::new();
    for at in &syncs {
        cuts.push((*at + 1, Unsynced::Lost));
        cuts.push((*at, Unsynced::Torn));
    }
    cuts.extend((0..30).map(|_| (dice.roll(events.len() as u64) as usize, Unsynced::Torn)));
    cuts.extend((0..5).map(|_| (dice.roll(events.len() as u64) as usize, Unsynced::Kept)));
    for (cut, unsynced) in cuts {
        let files = after_cut(&events[..cut], unsynced, &mut dice);
        let acknowledged = acknowledged_in(&events[..cut]);
        if let Err(wrong) = examine(&files, acknowledged, &history, &scratch).await {
            panic!("cut at {cut} of {}, unsynced {unsynced:?}: {wrong}", events.len());
        }
    }

    // The same disk without syncs, or without those of the log (`synchronous = OFF`, `NORMAL`), must be found out.
    for lying in ["", "store.db-wal"] {
        let unsynced: Vec<Event> = events
            .iter()
            .filter(|event| !matches!(event, Event::Sync(name) if lying.is_empty() || name == lying))
            .cloned()
            .collect();
        let mut wrong = 0;
        for _ in 0..12 {
            let cut = dice.roll(unsynced.len() as u64) as usize;
            let files = after_cut(&unsynced[..cut], Unsynced::Torn, &mut dice);
            let acknowledged = acknowledged_in(&unsynced[..cut]);
            wrong += usize::from(examine(&files, acknowledged, &history, &scratch).await.is_err());
        }
        assert!(wrong > 3, "{lying:?}: {wrong} of 12 cuts lost something");
    }
}
