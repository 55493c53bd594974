//! How many watches clients from outside have open. A watch costs some kilobytes for as long as it is open, and takes
//! no seat of priority and fairness while it is.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Of all clients together.
const ALL: usize = 65_536;
/// Of one user. A kubelet has one for each Secret and ConfigMap of its pods: some hundreds.
const OF_USER: usize = 16_384;

pub struct OpenWatches {
    all: usize,
    of_user: usize,
    /// Users without a watch are not in it. Leaf lock.
    by_user: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    users: HashMap<Arc<str>, usize>,
    sum: usize,
}

impl Default for OpenWatches {
    fn default() -> Self {
        OpenWatches {
            all: ALL,
            of_user: OF_USER,
            by_user: Mutex::default(),
        }
    }
}

impl OpenWatches {
    /// Counts a watch of a user until it is dropped. None if it would be one too many.
    pub fn open(self: &Arc<Self>, user: &str) -> Option<OpenWatch> {
        let counts = &mut *self.by_user.lock();
        if counts.sum >= self.all {
            return None;
        }
        let user: Arc<str> = match counts.users.get_key_value(user) {
            Some((_, count)) if *count >= self.of_user => return None,
            Some((known, _)) => known.clone(),
            None => user.into(),
        };
        counts.sum += 1;
        *counts.users.entry(user.clone()).or_default() += 1;
        Some(OpenWatch {
            watches: self.clone(),
            user,
        })
    }
}

pub struct OpenWatch {
    watches: Arc<OpenWatches>,
    user: Arc<str>,
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        let counts = &mut *self.watches.by_user.lock();
        counts.sum -= 1;
        if let Some(count) = counts.users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                counts.users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_and_all_users_have_so_many() {
        let watches = Arc::new(OpenWatches {
            all: 5,
            of_user: 3,
            by_user: Mutex::default(),
        });
        let open =
            |user: &str, times: usize| (0..times).map_while(|_| watches.open(user)).collect::<Vec<_>>();
        let of_a = open("a", 10);
        assert_eq!(of_a.len(), 3);
        let of_b = open("b", 10);
        assert_eq!(of_b.len(), 2, "all together");
        drop(of_a);
        assert_eq!(open("b", 10).len(), 1);
        drop(of_b);
        assert!(
            watches.by_user.lock().users.is_empty(),
            "who has none is not remembered"
        );
    }
}
