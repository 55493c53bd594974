//! Events for another server: lists of them are posted to it. In mode `batch` they are gathered first, and no request
//! waits; what waits is bounded in number and in bytes, and what comes on top is lost.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use skiff_https::{Backoff, BadKubeconfig, Endpoint};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::log::Mode;

/// How much may wait in all.
const WAITING_MAX: usize = 64 * 1024 * 1024;
/// Upstream's time for a call.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Lists under way at a time.
const CALLS: usize = 16;
/// How long the end of the process waits for the last of them.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub struct WebhookOptions {
    /// A kubeconfig.
    pub file: PathBuf,
    pub mode: Mode,
    /// Before a failed call is made again.
    pub initial_backoff: Duration,
    /// In mode `batch`: how many events may wait, how many go into one call, and for how long they are gathered.
    pub buffer_size: usize,
    pub max_size: usize,
    pub max_wait: Duration,
    /// Calls a second, and how many may come at once; none: as many as there are.
    pub throttle: Option<(f32, u32)>,
}

struct Shared {
    endpoint: Endpoint,
    backoff: Backoff,
    waiting: AtomicUsize,
    failed: AtomicU64,
}

enum Item {
    Event(Bytes),
    /// Everything before it is to be sent; then it is told.
    Flush(oneshot::Sender<()>),
}

pub struct Webhook {
    shared: Arc<Shared>,
    pub mode: Mode,
    queue: Option<mpsc::Sender<Item>>,
}

impl Webhook {
    pub fn open(options: WebhookOptions) -> Result<Webhook, BadKubeconfig> {
        let shared = Arc::new(Shared {
            endpoint: Endpoint::load(&options.file, TIMEOUT)?,
            backoff: Backoff {
                first: options.initial_backoff,
                every_failure: true,
                ..Backoff::default()
            },
            waiting: AtomicUsize::new(0),
            failed: AtomicU64::new(0),
        });
        let mode = options.mode;
        let queue = (mode == Mode::Batch).then(|| {
            let (sender, queue) = mpsc::channel(options.buffer_size.max(1));
            let (shared, queue) = (shared.clone(), Arc::new(tokio::sync::Mutex::new(queue)));
            tokio::spawn(skiff_supervise::finished("audit-webhook", move || {
                gather(shared.clone(), queue.clone(), options.clone())
            }));
            sender
        });
        Ok(Webhook { shared, mode, queue })
    }

    /// Events that were lost.
    pub fn failed(&self) -> u64 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Hands a line over without waiting: whether there was room.
    pub fn send(&self, line: Bytes) -> bool {
        let length = line.len();
        let waiting = self.shared.waiting.fetch_add(length, Ordering::AcqRel) + length;
        let handed = waiting <= WAITING_MAX
            && match &self.queue {
                Some(queue) => queue.try_send(Item::Event(line)).is_ok(),
                None => {
                    let shared = self.shared.clone();
                    tokio::spawn(async move {
                        shared.post(&[line]).await;
                        shared.waiting.fetch_sub(length, Ordering::AcqRel);
                    });
                    true
                }
            };
        if !handed {
            self.shared.waiting.fetch_sub(length, Ordering::AcqRel);
            self.shared.failed.fetch_add(1, Ordering::Relaxed);
        }
        handed
    }

    /// Hands a line over and waits as the mode says: whether it has arrived, as far as that was waited for.
    pub async fn write(&self, line: Bytes) -> bool {
        match self.mode {
            Mode::Batch => self.send(line),
            Mode::Blocking | Mode::BlockingStrict => self.shared.post(&[line]).await,
        }
    }

    /// Waits until what was handed over is sent, but not for ever.
    pub async fn flush(&self) {
        let Some(queue) = &self.queue else { return };
        let (sender, sent) = oneshot::channel();
        let flushed = async {
            if queue.send(Item::Flush(sender)).await.is_ok() {
                let _ = sent.await;
            }
        };
        if tokio::time::timeout(LAST_PATIENCE, flushed).await.is_err() {
            tracing::error!("the audit webhook is too slow: its last events are lost");
        }
    }
}

impl Shared {
    async fn post(&self, lines: &[Bytes]) -> bool {
        let head = br#"{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{},"items":["#;
        let length: usize = lines.iter().map(|line| line.len() + 1).sum();
        let mut body = Vec::with_capacity(head.len() + length + 2);
        body.extend_from_slice(head);
        for (at, line) in lines.iter().enumerate() {
            if at > 0 {
                body.push(b',');
            }
            body.extend_from_slice(line.trim_ascii_end());
        }
        body.extend_from_slice(b"]}");
        let body = Bytes::from(body);
        let answer = self.backoff.run(|| self.endpoint.post(body.clone())).await;
        let why = match answer {
            Ok(answer) if answer.is_success() => return true,
            Ok(answer) => answer.document().err().unwrap_or_default(),
            Err(failure) => self.endpoint.explain(&failure),
        };
        self.failed.fetch_add(lines.len() as u64, Ordering::Relaxed);
        tracing::error!(
            why,
            events = lines.len(),
            "the audit webhook does not take events"
        );
        false
    }
}

/// Gathers events into lists, and sends each on its own.
async fn gather(
    shared: Arc<Shared>,
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Item>>>,
    options: WebhookOptions,
) {
    let mut queue = queue.lock().await;
    let calls = Arc::new(Semaphore::new(CALLS));
    let mut throttle = options.throttle.map(|(rate, burst)| Throttle::new(rate, burst));
    let mut ended = false;
    while !ended {
        let (mut lines, mut flush) = (Vec::new(), None);
        let until = tokio::time::Instant::now() + options.max_wait;
        while lines.len() < options.max_size.max(1) {
            match tokio::time::timeout_at(until, queue.recv()).await {
                Ok(Some(Item::Event(line))) => lines.push(line),
                Ok(Some(Item::Flush(sender))) => {
                    flush = Some(sender);
                    break;
                }
                Ok(None) => {
                    ended = true;
                    break;
                }
                Err(_) => break,
            }
        }
        if !lines.is_empty() {
            if let Some(throttle) = &mut throttle
                && flush.is_none()
            {
                tokio::time::sleep(throttle.next(Instant::now())).await;
            }
            let turn = calls.clone().acquire_owned().await;
            let shared = shared.clone();
            tokio::spawn(async move {
                shared.post(&lines).await;
                let length = lines.iter().map(Bytes::len).sum();
                shared.waiting.fetch_sub(length, Ordering::AcqRel);
                drop(turn);
            });
        }
        if let Some(flush) = flush {
            let _ = calls.acquire_many(CALLS as u32).await;
            let _ = flush.send(());
        }
    }
}

/// So many a second, and a few at once.
struct Throttle {
    between: Duration,
    burst: u32,
    /// When the next call would be due if nothing were allowed at once.
    due: Option<Instant>,
}

impl Throttle {
    fn new(rate: f32, burst: u32) -> Throttle {
        let between = Duration::try_from_secs_f32(1.0 / rate).unwrap_or(Duration::MAX);
        Throttle {
            between: between.min(Duration::from_secs(3600)),
            burst: burst.max(1),
            due: None,
        }
    }

    /// How long to wait before the next call.
    fn next(&mut self, now: Instant) -> Duration {
        let due = self.due.map_or(now, |due| due.max(now));
        self.due = Some(due + self.between);
        let ahead = due.saturating_duration_since(now);
        ahead.saturating_sub(self.between * (self.burst - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_throttled_after_a_burst() {
        let now = Instant::now();
        let mut throttle = Throttle::new(10.0, 3);
        let waits: Vec<u128> = (0..5).map(|_| throttle.next(now).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        assert_eq!(throttle.next(now + Duration::from_secs(10)), Duration::ZERO);
    }

    #[tokio::test]
    async fn what_waits_for_a_silent_server_has_a_limit_in_every_mode() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = silent.local_addr().expect("an address");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config");
        let config = format!(
            r#"{{"clusters": [{{"name": "c", "cluster": {{"server": "https://{address}", "insecure-skip-tls-verify": true}}}}],
                "users": [{{"name": "u", "user": {{}}}}], "current-context": "x",
                "contexts": [{{"name": "x", "context": {{"cluster": "c", "user": "u"}}}}]}}"#
        );
        std::fs::write(&file, config).expect("a file");
        for mode in [Mode::Batch, Mode::Blocking, Mode::BlockingStrict] {
            let webhook = Webhook::open(WebhookOptions {
                file: file.clone(),
                mode,
                initial_backoff: Duration::from_secs(10),
                buffer_size: 10_000,
                max_size: 400,
                max_wait: Duration::from_secs(30),
                throttle: None,
            });
            let webhook = webhook.expect("opens");
            // One piece of memory for all lines: what counts is what they would take.
            let line = Bytes::from(vec![b'x'; 1 << 20]);
            let taken = (0..100).filter(|_| webhook.send(line.clone())).count();
            assert_eq!((taken, webhook.failed()), (64, 36), "{mode:?}");
        }
    }
}
