//! The threads that serve connections. Each has a runtime of its own, and a connection stays with one thread, with the
//! connections to endpoints that its requests use: no request waits for another thread to wake up.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// More threads than these would not have idle connections of their own.
pub const MAX_WORKERS: usize = 16;

thread_local!(static NUMBER: Cell<usize> = const { Cell::new(0) });

/// Of this thread, below [`MAX_WORKERS`]; threads that serve no connections have 0 too.
pub fn number() -> usize {
    NUMBER.get()
}

struct Worker {
    runtime: Handle,
    connections: Arc<AtomicUsize>,
}

/// The threads end when this is dropped, with all that runs on them.
pub struct Workers {
    all: Vec<Worker>,
    _stop: DropGuard,
}

impl Workers {
    /// As many as there are processors. `on_park` is called when one has nothing to do.
    pub fn start(on_park: Arc<dyn Fn() + Send + Sync>) -> io::Result<Workers> {
        let count = std::thread::available_parallelism()?.get().min(MAX_WORKERS);
        let stop = CancellationToken::new();
        let start = |number: usize| -> io::Result<Worker> {
            let (on_park, stop) = (on_park.clone(), stop.clone());
            let runtime = Builder::new_current_thread()
                .enable_all()
                .on_thread_park(move || on_park())
                .build()?;
            let handle = runtime.handle().clone();
            std::thread::Builder::new()
                .name(format!("ingress-{number}"))
                .spawn(move || {
                    NUMBER.set(number);
                    runtime.block_on(stop.cancelled());
                    runtime.shutdown_background();
                })?;
            Ok(Worker {
                runtime: handle,
                connections: Arc::default(),
            })
        };
        Ok(Workers {
            all: (0..count).map(start).collect::<io::Result<_>>()?,
            _stop: stop.drop_guard(),
        })
    }

    /// The runtime of the thread with the fewest connections, and a place there.
    pub fn next(&self) -> Option<(&Handle, Place)> {
        let load = |worker: &&Worker| worker.connections.load(Ordering::Relaxed);
        let worker = self.all.iter().min_by_key(load)?;
        worker.connections.fetch_add(1, Ordering::Relaxed);
        Some((&worker.runtime, Place(worker.connections.clone())))
    }
}

/// A connection of a thread, until it is dropped.
pub struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
