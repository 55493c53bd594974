//! Waking many readers at once. A task may run several of them, as an HTTP/2 connection runs its watches: woken by the
//! first, it would start on another core, find one event, and send it alone. So such a task is woken when all of its
//! readers are.

use std::cell::RefCell;
use std::task::Waker;

thread_local! {
    /// The tasks to wake in the end; `None` while nobody wakes many.
    static TASKS: RefCell<Option<Vec<Waker>>> = const { RefCell::new(None) };
}

/// Ends the collection also if a waker panics: a task that is not woken would sleep for ever.
struct Collecting;

impl Drop for Collecting {
    fn drop(&mut self) {
        let tasks = TASKS.take();
        tasks.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Wakes the readers, and then the tasks that they have handed to [`postpone`] meanwhile.
pub(crate) fn wake_all(readers: &mut Vec<Waker>) {
    TASKS.set(Some(Vec::new()));
    let _collecting = Collecting;
    readers.drain(..).for_each(Waker::wake);
}

/// Wakes a task that runs several readers: at once, or after the last of those who are being woken on this thread.
pub fn postpone(task: Waker) {
    let now = TASKS.with_borrow_mut(|tasks| match tasks {
        Some(tasks) => {
            tasks.push(task);
            None
        }
        None => Some(task),
    });
    if let Some(task) = now {
        task.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Wake;

    use parking_lot::Mutex;

    use super::*;

    /// Notes its name; a reader also wakes the task that it belongs to.
    struct Noted(&'static str, Option<Arc<Noted>>, Arc<Mutex<Vec<&'static str>>>);

    impl Wake for Noted {
        fn wake(self: Arc<Self>) {
            self.2.lock().push(self.0);
            if let Some(task) = &self.1 {
                postpone(task.clone().into());
            }
        }
    }

    #[test]
    fn a_task_is_woken_after_all_of_its_readers() {
        let seen = Arc::new(Mutex::default());
        let task = Arc::new(Noted("task", None, seen.clone()));
        let reader = |name| Waker::from(Arc::new(Noted(name, Some(task.clone()), seen.clone())));
        wake_all(&mut vec![reader("a"), reader("b")]);
        assert_eq!(std::mem::take(&mut *seen.lock()), ["a", "b", "task", "task"]);
        reader("alone").wake();
        assert_eq!(*seen.lock(), ["alone", "task"]);
    }
}
