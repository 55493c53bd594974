//! Answers of resolvers, kept as long as they may be: positive ones by their records, denials by RFC 2308. Bounded in bytes
//! and in number; an answer that was asked for again stays longer than one that was not.
//!
//! It knows neither resolvers nor who asks.

use crate::corefile::{CacheConfig, Kept};
use crate::names::longest;
use crate::wire::Forwarded;
use hickory_proto::rr::Name;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// What an entry takes besides its answer and its name.
const OVERHEAD: usize = 160;
/// The longest that anything is kept, whatever a resolver says.
const MAX_TTL: u32 = 24 * 3600;

/// What is asked for. Names are compared without regard to case.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    pub name: Name,
    pub kind: u16,
    pub class: u16,
    pub dnssec: bool,
    pub checking_disabled: bool,
}

struct Entry {
    answer: Arc<Forwarded>,
    stored: Instant,
    keeps: Duration,
    /// Asked for since it was last looked at.
    used: bool,
}

impl Entry {
    fn size(&self, key: &Key) -> usize {
        self.answer.size() + key.name.len() + OVERHEAD
    }
}

/// Answers of one sort.
struct Shelf {
    entries: HashMap<Arc<Key>, Entry>,
    /// Oldest first.
    order: VecDeque<Arc<Key>>,
    bytes: usize,
    max_bytes: usize,
    max_entries: usize,
}

impl Shelf {
    fn new(max_bytes: usize, max_entries: usize) -> Shelf {
        Shelf {
            entries: HashMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            max_bytes,
            max_entries,
        }
    }

    fn remove(&mut self, key: &Key) {
        if let Some((key, entry)) = self.entries.remove_entry(key) {
            self.bytes -= entry.size(&key);
        }
    }

    /// How many others had to go.
    fn insert(&mut self, key: Key, entry: Entry) -> usize {
        self.remove(&key);
        let key = Arc::new(key);
        let size = entry.size(&key);
        if size > self.max_bytes || self.max_entries == 0 {
            return 0;
        }
        let mut evicted = 0;
        while self.bytes + size > self.max_bytes || self.entries.len() >= self.max_entries {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            match self.entries.get_mut(&oldest) {
                Some(entry) if entry.used => {
                    entry.used = false;
                    self.order.push_back(oldest);
                }
                Some(_) => {
                    self.remove(&oldest);
                    evicted += 1;
                }
                None => {}
            }
        }
        self.bytes += size;
        self.order.push_back(key.clone());
        self.entries.insert(key, entry);
        // Keys of entries that were replaced are in the order twice.
        if self.order.len() > 2 * self.max_entries.min(self.entries.len() + 1024) {
            let mut seen = std::collections::HashSet::new();
            let entries = &self.entries;
            self.order
                .retain(|key| entries.contains_key(key) && seen.insert(key.clone()));
        }
        evicted
    }
}

/// An answer from the cache, and the seconds that it may still be kept.
#[derive(Debug, Clone)]
pub struct Hit {
    pub answer: Arc<Forwarded>,
    pub ttl: u32,
    pub denies: bool,
}

pub struct Cache {
    config: CacheConfig,
    /// Positive answers, and the others. A leaf lock.
    shelves: Mutex<[Shelf; 2]>,
}

/// What became of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Storing {
    NotKept,
    Kept { ttl: u32, evicted: usize, denies: bool },
}

impl Cache {
    pub fn new(config: CacheConfig, max_bytes: usize) -> Cache {
        let shelf = |kept: &Kept| Shelf::new(max_bytes / 2, kept.entries);
        let shelves = Mutex::new([shelf(&config.positive), shelf(&config.negative)]);
        Cache { config, shelves }
    }

    /// Whether answers about this name, which is in lower case, are looked for here.
    pub fn covers(&self, lower: &Name) -> bool {
        longest(&self.config.zones, lower).is_some()
    }

    pub fn get(&self, key: &Key) -> Option<Hit> {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        for (shelf, denies) in shelves.iter_mut().zip([false, true]) {
            let Some(entry) = shelf.entries.get_mut(key) else {
                continue;
            };
            let left = entry.keeps.saturating_sub(entry.stored.elapsed());
            if left.is_zero() {
                shelf.remove(key);
                continue;
            }
            entry.used = true;
            let told = if self.config.keep_ttl { entry.keeps } else { left };
            return Some(Hit {
                answer: entry.answer.clone(),
                // A second that has begun counts: an answer that is kept is never told with 0.
                ttl: u32::try_from(told.as_millis().div_ceil(1000)).unwrap_or(u32::MAX),
                denies,
            });
        }
        None
    }

    /// How long an answer may be kept, and whether it is a denial; `None` if it may not.
    fn keeps(&self, key: &Key, answer: &Forwarded) -> Option<(Duration, bool)> {
        const NO_ERROR: u8 = 0;
        const SERVFAIL: u8 = 2;
        const NOTIMP: u8 = 4;
        let bounded = |kept: &Kept| {
            let ttl = Duration::from_secs(answer.ttl.unwrap_or(0).min(MAX_TTL).into());
            let excepted = longest(&kept.except, &key.name.to_lowercase()).is_some();
            (!excepted).then(|| ttl.max(kept.min).min(kept.max))
        };
        let found = match answer.code {
            _ if answer.truncated => None,
            NO_ERROR if answer.answered => bounded(&self.config.positive).map(|ttl| (ttl, false)),
            _ if answer.denies => bounded(&self.config.negative).map(|ttl| (ttl, true)),
            SERVFAIL | NOTIMP => Some((self.config.servfail, true)),
            // COMPAT: an empty answer without a SOA, such as a referral, is kept by its records, if it has some.
            NO_ERROR if answer.ttl.is_some() => bounded(&self.config.positive).map(|ttl| (ttl, false)),
            _ => None,
        };
        found.filter(|(keeps, _)| !keeps.is_zero())
    }

    pub fn insert(&self, key: Key, answer: &Arc<Forwarded>) -> Storing {
        let Some((keeps, denies)) = self.keeps(&key, answer) else {
            return Storing::NotKept;
        };
        let entry = Entry {
            answer: answer.clone(),
            stored: Instant::now(),
            keeps,
            used: false,
        };
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        shelves[usize::from(!denies)].remove(&key);
        let evicted = shelves[usize::from(denies)].insert(key, entry);
        Storing::Kept {
            ttl: u32::try_from(keeps.as_secs()).unwrap_or(u32::MAX),
            evicted,
            denies,
        }
    }

    /// Entries: positive ones, and the others.
    pub fn len(&self) -> [usize; 2] {
        let shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        [shelves[0].entries.len(), shelves[1].entries.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corefile::parse;
    use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
    use hickory_proto::rr::rdata::SOA;
    use hickory_proto::rr::{RData, Record, RecordType};
    use std::collections::BTreeMap;

    fn cache(lines: &str, max_bytes: usize) -> Cache {
        let config = parse(&format!(". {{\n{lines}\n}}"), &BTreeMap::new()).unwrap();
        Cache::new(config.blocks[0].cache.clone().unwrap(), max_bytes)
    }

    fn key(name: &str) -> Key {
        Key {
            name: Name::from_ascii(name).unwrap(),
            kind: 1,
            class: 1,
            dnssec: false,
            checking_disabled: false,
        }
    }

    fn answer(code: ResponseCode, ttl: Option<u32>, soa: Option<u32>) -> Arc<Forwarded> {
        let name = Name::from_ascii("a.org.").unwrap();
        let mut message = Message::new(1, MessageType::Response, OpCode::Query);
        message.metadata.response_code = code;
        message.add_query(Query::query(name.clone(), RecordType::A));
        if let Some(ttl) = ttl {
            let data = RData::A(std::net::Ipv4Addr::LOCALHOST.into());
            message.add_answer(Record::from_rdata(name.clone(), ttl, data));
        }
        if let Some(minimum) = soa {
            let soa = SOA::new(name.clone(), name.clone(), 1, 1, 1, 1, minimum);
            message.add_authority(Record::from_rdata(name, 3600, RData::SOA(soa)));
        }
        Arc::new(Forwarded::read(&message.to_vec().unwrap()).unwrap())
    }

    #[test]
    fn answers_are_kept_as_long_as_they_say_within_bounds() {
        let cache = cache("cache 30 {\n disable denial no.org\n servfail 2s\n}", 1 << 20);
        let check = |name: &str, answer: Arc<Forwarded>, expected: Option<(u32, bool)>| {
            let found = match cache.insert(key(name), &answer) {
                Storing::NotKept => None,
                Storing::Kept { ttl, denies, .. } => Some((ttl, denies)),
            };
            assert_eq!(found, expected, "{name}");
        };
        let (ok, nx) = (ResponseCode::NoError, ResponseCode::NXDomain);
        check("a.org.", answer(ok, Some(20), None), Some((20, false)));
        check("a.org.", answer(ok, Some(300), None), Some((30, false)));
        check("a.org.", answer(ok, Some(0), None), Some((5, false)));
        check("b.org.", answer(nx, None, Some(10)), Some((10, true)));
        check("b.org.", answer(ok, None, Some(900)), Some((30, true)));
        check("x.no.org.", answer(nx, None, Some(10)), None);
        check("c.org.", answer(nx, None, None), None);
        check(
            "c.org.",
            answer(ResponseCode::ServFail, None, None),
            Some((2, true)),
        );
        check("c.org.", answer(ResponseCode::Refused, None, None), None);
    }

    #[tokio::test(start_paused = true)]
    async fn time_counts_down_and_ends() {
        let cache = cache("cache 30", 1 << 20);
        cache.insert(key("a.org."), &answer(ResponseCode::NoError, Some(20), None));
        assert_eq!(cache.get(&key("A.ORG.")).unwrap().ttl, 20);
        tokio::time::advance(Duration::from_secs(12)).await;
        assert_eq!(cache.get(&key("a.org.")).unwrap().ttl, 8);
        let other = Key {
            dnssec: true,
            ..key("a.org.")
        };
        assert!(cache.get(&other).is_none());
        tokio::time::advance(Duration::from_secs(8)).await;
        assert!(cache.get(&key("a.org.")).is_none());
        assert_eq!(cache.len(), [0, 0]);
    }

    #[test]
    fn a_denial_takes_the_place_of_an_answer() {
        let cache = cache("cache", 1 << 20);
        cache.insert(key("a.org."), &answer(ResponseCode::NoError, Some(20), None));
        cache.insert(key("a.org."), &answer(ResponseCode::NXDomain, None, Some(20)));
        assert!(cache.get(&key("a.org.")).unwrap().denies);
        assert_eq!(cache.len(), [0, 1]);
    }

    #[test]
    fn it_is_bounded_and_keeps_what_is_used() {
        let cache = cache("cache", 64 * 1024);
        let positive = answer(ResponseCode::NoError, Some(300), None);
        cache.insert(key("used.org."), &positive);
        for n in 0..10_000 {
            cache.get(&key("used.org."));
            cache.insert(key(&format!("flood-{n}.org.")), &positive);
        }
        assert!(cache.get(&key("used.org.")).is_some());
        assert!(cache.get(&key("flood-0.org.")).is_none() && cache.get(&key("flood-9999.org.")).is_some());
        let shelves = cache.shelves.lock().unwrap();
        assert!(shelves[0].bytes <= 32 * 1024 && shelves[0].entries.len() > 20);
        let sizes: usize = shelves[0]
            .entries
            .iter()
            .map(|(key, entry)| entry.size(key))
            .sum();
        assert_eq!(sizes, shelves[0].bytes);
        assert!(shelves[0].order.len() < 4096);
    }

    #[test]
    fn the_number_is_bounded_as_asked() {
        let cache = cache("cache {\n success 3\n denial 2\n}", 1 << 20);
        for n in 0..10 {
            cache.insert(
                key(&format!("a{n}.org.")),
                &answer(ResponseCode::NoError, Some(300), None),
            );
            cache.insert(
                key(&format!("b{n}.org.")),
                &answer(ResponseCode::NXDomain, None, Some(300)),
            );
        }
        assert_eq!(cache.len(), [3, 2]);
    }
}
