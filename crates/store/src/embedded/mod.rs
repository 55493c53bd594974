//! The embedded store: SQLite on disk, everything that is read often in memory.
//!
//! Writes that come together go to one thread ([`writer`]), which takes all that wait, decides them one after the
//! other, commits them in one transaction with one fsync, and acknowledges them together; a write that is alone is
//! committed where it is asked for ([`queue`]). Reads of the present touch memory only ([`state`]); those of the past,
//! which are rare, get values from the writer thread. On disk there is a log of versions by revision ([`disk`]), so
//! that a write is an append and history survives a restart.

mod disk;
mod load;
mod queue;
mod reserve;
mod state;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, oneshot};

use crate::hub::Hub;
pub use crate::hub::Limits;
use crate::{Error, Expect, KeyValue, Op, Outcome, RangeResult, Result, Store, Transacted, Watch, Write};
use disk::Disk;
pub use load::Loader;
use queue::{Queue, Reply, Request, Waiting, stopped, unfinished};
use reserve::Reserve;
use state::State;
use writer::Writer;

/// Writes that may wait for the writer thread; more callers wait for a place.
const WAITING_WRITES: usize = 4096;

/// Damaged values that are named in the log, each.
const NAMED_DAMAGED: usize = 20;

/// Unix time in seconds. Tests bring their own.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

#[derive(Clone)]
pub struct Options {
    /// The directory of the database; made with mode 0700 if it is missing.
    pub dir: PathBuf,
    pub limits: Limits,
    pub clock: Clock,
    /// Refuses writes as on a full disk beyond this many bytes of database.
    pub max_bytes: Option<u64>,
    /// While commits take less than this, a caller that is alone makes its own.
    pub quick: Duration,
}

impl Options {
    pub fn new(dir: impl Into<PathBuf>) -> Options {
        let clock = || {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs())
        };
        Options {
            dir: dir.into(),
            limits: Limits::default(),
            clock: Arc::new(clock),
            max_bytes: None,
            quick: Duration::from_millis(1),
        }
    }
}

pub struct Embedded {
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    dir: PathBuf,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What readers and writers share. Lock order: `writer`, `state`, then the hub's.
struct Shared {
    /// Why the last write did not reach the disk, if it did not. Leaf lock.
    trouble: Mutex<Option<Error>>,
    /// Whoever held the writer panicked: memory may lack what is on disk. Whoever holds it next looks.
    suspect: AtomicBool,
    /// Whoever has it may write; over a commit, so it is never waited for but by the writer thread.
    writer: Mutex<Writer>,
    /// Written with `writer` only, after a commit.
    state: RwLock<State>,
    hub: Hub,
    queue: Queue,
    clock: Clock,
}

impl Embedded {
    /// Opens the data in `dir`, or starts new data there. Blocks while the state is read.
    pub fn open(dir: impl AsRef<Path>) -> Result<Embedded> {
        Embedded::open_with(Options::new(dir.as_ref()))
    }

    pub fn open_with(options: Options) -> Result<Embedded> {
        let mut disk = Disk::open(&options.dir)?;
        if let Some(bytes) = options.max_bytes {
            disk.limit_size(bytes)?;
        }
        let mut state = State::new(disk.compacted()?);
        let mut history = Vec::new();
        let mut expiries = Vec::new();
        let mut damaged = 0;
        disk.load(0, |row| {
            if row.value.as_deref().and_then(crate::unreadable).is_some() {
                damaged += 1;
                if damaged <= NAMED_DAMAGED {
                    tracing::error!(key = %row.key, revision = row.revision, "{}", disk::DAMAGED);
                }
            }
            let recent = row.revision > state.compacted;
            let expires = row.expires;
            let event = state.apply(row);
            if expires > 0 {
                expiries.push((expires, event.key.clone()));
            }
            if recent {
                history.push(event);
            }
        })?;
        if damaged > 0 {
            tracing::error!(damaged, dir = %options.dir.display(), "stored values are damaged");
        }
        let now = (options.clock)();
        let hub = Hub::new(state.revision, state.compacted, history, now);
        let reserve = Reserve::open(&options.dir);
        let shared = Arc::new(Shared {
            trouble: Mutex::default(),
            suspect: AtomicBool::new(false),
            writer: Mutex::new(Writer::new(
                disk,
                reserve,
                options.limits,
                options.quick,
                expiries,
            )),
            state: RwLock::new(state),
            hub,
            queue: Queue::default(),
            clock: options.clock.clone(),
        });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || writer::run(&of_thread))
            .map_err(|error| Error::Io(format!("cannot start the writer thread: {error}")))?;
        Ok(Embedded {
            shared,
            places: Arc::new(Semaphore::new(WAITING_WRITES)),
            dir: options.dir,
            thread: Some(thread),
        })
    }

    /// Runs what the writer thread does by itself from time to time: expiry of leases, compaction.
    pub async fn tick(&self) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.shared.queue.push(Request::Tick { reply })?;
        answer.await.map_err(|_| stopped())?
    }
}

impl Drop for Embedded {
    /// Waits for the writer, so that the data can be opened again as soon as this returns.
    fn drop(&mut self) {
        self.shared.queue.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[async_trait]
impl Store for Embedded {
    async fn get(&self, key: &str) -> Result<(Option<KeyValue>, i64)> {
        let state = self.shared.state.read();
        Ok((state.get(key), state.revision))
    }

    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> Result<RangeResult> {
        let (mut range, on_disk) = self.shared.state.read().range(prefix, start_after, limit, at)?;
        if on_disk.is_empty() {
            return Ok(range);
        }
        let revisions = on_disk.iter().map(|&nth| range.items[nth].mod_revision).collect();
        let (reply, answer) = oneshot::channel();
        self.shared.queue.push(Request::Read { revisions, reply })?;
        let values = answer.await.map_err(|_| stopped())??;
        for (nth, value) in on_disk.into_iter().zip(values) {
            // Compacted since.
            let Some(value) = value else {
                return Err(Error::Compacted {
                    revision: self.compacted(),
                });
            };
            range.items[nth].value = value;
        }
        Ok(range)
    }

    async fn write(&self, key: &str, expect: Expect, op: Op, lease_seconds: Option<i64>) -> Result<Outcome> {
        let write = Write {
            key: key.into(),
            expect,
            op,
            lease_seconds,
        };
        let transacted = self.transact(vec![write]).await?;
        transacted.single().ok_or_else(unfinished)
    }

    async fn transact(&self, mut writes: Vec<Write>) -> Result<Transacted> {
        for write in &mut writes {
            // A value stays for long: without the room that its maker left for more, or for neighbours.
            if let Op::Put(value) = &mut write.op {
                *value = bytes::Bytes::copy_from_slice(value);
            }
        }
        let writes = match writer::write_here(&self.shared, writes) {
            Ok(outcome) => return outcome,
            Err(writes) => writes,
        };
        let place = self.places.clone().acquire_owned().await;
        let (reply, answer) = Reply::new(place.map_err(|_| stopped())?);
        self.shared
            .queue
            .push(Request::Write(Waiting { writes, reply }))?;
        answer.await.map_err(|_| unfinished())?
    }

    async fn health(&self) -> Result<()> {
        match &*self.shared.trouble.lock() {
            Some(trouble) => Err(trouble.clone()),
            None => Ok(()),
        }
    }

    async fn watch(&self, prefix: &str, from: i64) -> Result<Watch> {
        self.shared.hub.watch(prefix, from)
    }

    async fn compact(&self, revision: i64) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.shared.queue.push(Request::Compact { revision, reply })?;
        answer.await.map_err(|_| stopped())?
    }

    fn compacted(&self) -> i64 {
        self.shared.state.read().compacted
    }

    async fn revision(&self) -> Result<i64> {
        Ok(self.shared.hub.revision())
    }

    async fn is_stale(&self, _key: &str) -> Result<bool> {
        Ok(false)
    }

    async fn size(&self) -> Result<u64> {
        Ok(disk::size(&self.dir))
    }
}
