//! Asking etcd how far its watch stream is: the answer is a message without events that promises that there are
//! none up to its revision. Here is when to ask; what the answer does is [`super::feed`]'s business.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::proto::{WatchProgressRequest, WatchRequest, Watching};

/// However many wait, etcd is not asked more often. A stream that is not up to date gives no answer.
pub const AGAIN: Duration = Duration::from_millis(20);

#[derive(Default)]
pub struct Progress(Mutex<State>);

#[derive(Default)]
struct State {
    /// Absent while there is no stream. Weak: the stream ends when its feeder lets go.
    requests: Option<mpsc::WeakSender<WatchRequest>>,
    /// Whether the member at the other end answers truly. Kept when the stream ends.
    unsound: bool,
    last: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressRequest {
    /// Now, or a moment ago.
    Yes,
    /// There is nobody to ask at present.
    NoStream,
    /// The answer could not be trusted.
    Unsound,
}

impl Progress {
    pub fn opened(&self, requests: &mpsc::Sender<WatchRequest>, sound: bool) {
        *self.0.lock() = State {
            requests: Some(requests.downgrade()),
            unsound: !sound,
            last: None,
        };
    }

    pub fn closed(&self) {
        self.0.lock().requests = None;
    }

    pub fn ask(&self) -> ProgressRequest {
        self.ask_at(Instant::now())
    }

    fn ask_at(&self, now: Instant) -> ProgressRequest {
        let mut state = self.0.lock();
        if state.unsound {
            return ProgressRequest::Unsound;
        }
        let Some(requests) = state.requests.as_ref().and_then(mpsc::WeakSender::upgrade) else {
            return ProgressRequest::NoStream;
        };
        if state.last.is_none_or(|last| now.duration_since(last) >= AGAIN) {
            state.last = Some(now);
            // A full queue holds a request already.
            let watching = Some(Watching::Progress(WatchProgressRequest {}));
            let _ = requests.try_send(WatchRequest { watching });
        }
        ProgressRequest::Yes
    }
}

/// Whether a member of this version keeps the promise: older ones may answer before they have sent all events
/// (etcd's issues 15220 and 17507). What is no version is not trusted.
pub fn is_sound(version: &str) -> bool {
    let mut numbers = version
        .split(['.', '-', '+'])
        .map_while(|part| part.parse::<u32>().ok());
    let (Some(major), Some(minor), Some(patch)) = (numbers.next(), numbers.next(), numbers.next()) else {
        return false;
    };
    let version = (major, minor, patch);
    version >= (3, 5, 13) || ((3, 4, 31)..(3, 5, 0)).contains(&version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sound_versions() {
        for sound in ["3.4.31", "3.4.40", "3.5.13", "3.6.0", "4.0.0", "3.6.0-rc.1"] {
            assert!(is_sound(sound), "{sound}");
        }
        for unsound in [
            "3.4.23", "3.4.30", "3.5.0", "3.5.12", "3.3.27", "", "3.5", "x.y.z",
        ] {
            assert!(!is_sound(unsound), "{unsound}");
        }
    }

    #[test]
    fn many_who_wait_ask_once() {
        let progress = Progress::default();
        assert_eq!(progress.ask(), ProgressRequest::NoStream);
        let (requests, mut receiver) = mpsc::channel(4);
        progress.opened(&requests, true);
        let now = Instant::now();
        for _ in 0..10 {
            assert_eq!(progress.ask_at(now), ProgressRequest::Yes);
        }
        assert!(receiver.try_recv().is_ok() && receiver.try_recv().is_err());
        assert_eq!(progress.ask_at(now + AGAIN), ProgressRequest::Yes);
        assert!(receiver.try_recv().is_ok());
        drop(requests);
        assert_eq!(progress.ask(), ProgressRequest::NoStream, "the stream ended");
        let (requests, _receiver) = mpsc::channel(1);
        progress.opened(&requests, false);
        assert_eq!(progress.ask(), ProgressRequest::Unsound);
        progress.closed();
        assert_eq!(
            progress.ask(),
            ProgressRequest::Unsound,
            "as long as nobody else is there"
        );
    }
}
