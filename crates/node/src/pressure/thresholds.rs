//! When the node is short of something: thresholds as upstream's flags write them, and what is known of how long they have
//! been met. Pure.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use skiff_meta::quantity::Quantity;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Signal {
    Memory,
    /// What pods may have together.
    AllocatableMemory,
    NodeFs,
    NodeFsInodes,
    ImageFs,
    ImageFsInodes,
    Pids,
}

/// What the node says when it is short of it. In upstream's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Condition {
    Memory,
    Disk,
    Pid,
}

impl Signal {
    const ALL: [(&'static str, Signal); 7] = [
        ("memory.available", Signal::Memory),
        ("allocatableMemory.available", Signal::AllocatableMemory),
        ("nodefs.available", Signal::NodeFs),
        ("nodefs.inodesFree", Signal::NodeFsInodes),
        ("imagefs.available", Signal::ImageFs),
        ("imagefs.inodesFree", Signal::ImageFsInodes),
        ("pid.available", Signal::Pids),
    ];

    pub fn as_str(self) -> &'static str {
        let named = Self::ALL.iter().find(|(_, signal)| *signal == self);
        named.map_or("", |(name, _)| name)
    }

    pub fn condition(self) -> Condition {
        match self {
            Signal::Memory | Signal::AllocatableMemory => Condition::Memory,
            Signal::Pids => Condition::Pid,
            _ => Condition::Disk,
        }
    }

    /// The name of the resource in events.
    pub fn resource(self) -> &'static str {
        match self {
            Signal::Memory | Signal::AllocatableMemory => "memory",
            Signal::NodeFs | Signal::ImageFs => "ephemeral-storage",
            Signal::NodeFsInodes | Signal::ImageFsInodes => "inodes",
            Signal::Pids => "pids",
        }
    }
}

impl Condition {
    pub fn name(self) -> &'static str {
        match self {
            Condition::Memory => "MemoryPressure",
            Condition::Disk => "DiskPressure",
            Condition::Pid => "PIDPressure",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Amount {
    Exact(Quantity),
    /// Of what there is at most.
    Share(f64),
}

impl Amount {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent
                .parse()
                .map_err(|_| format!("{text:?} is not a percentage"))?;
            if !(0.0..=100.0).contains(&percent) {
                return Err(format!("{text:?} is not between 0% and 100%"));
            }
            return Ok(Amount::Share(percent / 100.0));
        }
        let exact =
            Quantity::parse(text).map_err(|_| format!("{text:?} is neither an amount nor a percentage"))?;
        if exact.is_negative() {
            return Err(format!("{text:?} is negative"));
        }
        Ok(Amount::Exact(exact))
    }

    /// In units of what is measured.
    pub fn of(&self, capacity: i64) -> i64 {
        match self {
            Amount::Exact(quantity) => quantity.value(),
            Amount::Share(share) => (capacity as f64 * share) as i64,
        }
    }

    /// COMPAT: upstream takes "0%" and "100%" as off.
    fn is_off(&self) -> bool {
        matches!(self, Amount::Share(share) if *share == 0.0 || *share == 1.0)
    }
}

/// As flags write it.
impl std::fmt::Display for Amount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Amount::Exact(quantity) => write!(f, "{quantity}"),
            Amount::Share(share) => write!(f, "{}%", share * 100.0),
        }
    }
}

/// Less than this is too little.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    pub signal: Signal,
    pub amount: Amount,
    /// How long it must last; `None` for one that is acted on at once.
    pub grace: Option<Duration>,
    /// How much more than the amount there must be before it is over.
    pub reclaim: Option<Amount>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Thresholds {
    pub list: Vec<Threshold>,
    /// A condition stays for this long after its cause.
    pub transition: Duration,
    /// The most that a pod gets to end when a threshold with a grace period is met.
    pub max_pod_grace: i64,
}

impl Default for Thresholds {
    /// Upstream's, but for the disk: there it is 10 and 15 percent, of which a large disk has much left. As k3s.
    fn default() -> Self {
        let share = |signal, share| Threshold {
            signal,
            amount: Amount::Share(share),
            grace: None,
            reclaim: None,
        };
        Thresholds {
            list: vec![
                Threshold {
                    amount: Amount::Exact(Quantity::from_bytes(100 << 20)),
                    ..share(Signal::Memory, 0.0)
                },
                share(Signal::NodeFs, 0.05),
                share(Signal::NodeFsInodes, 0.05),
                share(Signal::ImageFs, 0.05),
                share(Signal::ImageFsInodes, 0.05),
            ],
            transition: Duration::from_secs(300),
            max_pod_grace: 0,
        }
    }
}

/// Upstream's flags, as written; `None` for those that are not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThresholdFlags {
    pub hard: Option<String>,
    pub soft: Option<String>,
    pub soft_grace: Option<String>,
    pub minimum_reclaim: Option<String>,
    pub transition: Option<String>,
    /// In seconds.
    pub max_pod_grace: i64,
}

impl Thresholds {
    pub fn parse(flags: &ThresholdFlags) -> Result<Self, String> {
        let mut all = Thresholds::default();
        if let Some(hard) = &flags.hard {
            all.list = thresholds("--eviction-hard", hard)?;
        }
        let graces = pairs("--eviction-soft-grace-period", flags.soft_grace.as_deref(), '=')?;
        let mut soft = match &flags.soft {
            Some(soft) => thresholds("--eviction-soft", soft)?,
            None => Vec::new(),
        };
        for (signal, _) in &graces {
            if !soft.iter().any(|one| one.signal == *signal) {
                return Err(
                    "--eviction-soft-grace-period: there is no such threshold in --eviction-soft".to_owned(),
                );
            }
        }
        for threshold in &mut soft {
            let grace = graces.iter().find(|(signal, _)| *signal == threshold.signal);
            let (_, grace) = grace
                .ok_or("--eviction-soft: each threshold needs an entry in --eviction-soft-grace-period")?;
            threshold.grace =
                Some(duration(grace).map_err(|why| format!("--eviction-soft-grace-period: {why}"))?);
        }
        all.list.extend(soft);
        for (signal, amount) in pairs(
            "--eviction-minimum-reclaim",
            flags.minimum_reclaim.as_deref(),
            '=',
        )? {
            let amount = Amount::parse(amount).map_err(|why| format!("--eviction-minimum-reclaim: {why}"))?;
            for threshold in all.list.iter_mut().filter(|one| one.signal == signal) {
                threshold.reclaim = Some(amount.clone());
            }
        }
        all.list.retain(|threshold| !threshold.amount.is_off());
        if let Some(transition) = &flags.transition {
            all.transition = duration(transition)
                .map_err(|why| format!("--eviction-pressure-transition-period: {why}"))?;
        }
        all.max_pod_grace = flags.max_pod_grace;
        Ok(all)
    }

    /// With the threshold of what pods have together: as much as the node must have left, as upstream adds it.
    pub fn with_allocatable(&self) -> Self {
        let mut all = self.clone();
        let is_given = all.list.iter().any(|one| one.signal == Signal::AllocatableMemory);
        let hard = |one: &&Threshold| one.signal == Signal::Memory && one.grace.is_none();
        if let Some(memory) = self.list.iter().find(hard).filter(|_| !is_given) {
            all.list.push(Threshold {
                signal: Signal::AllocatableMemory,
                ..memory.clone()
            });
        }
        all
    }

    /// What is kept back from pods, so that they do not run into a threshold that is acted on at once.
    pub fn kept_back(&self, signal: Signal, capacity: i64) -> i64 {
        let mut hard = self.list.iter().filter(|one| one.grace.is_none());
        hard.find(|one| one.signal == signal)
            .map_or(0, |one| one.amount.of(capacity).clamp(0, capacity))
    }
}

/// `signal<amount,…`.
fn thresholds(flag: &str, text: &str) -> Result<Vec<Threshold>, String> {
    let mut found: Vec<Threshold> = Vec::new();
    for (signal, amount) in pairs(flag, Some(text), '<')? {
        found.push(Threshold {
            signal,
            amount: Amount::parse(amount).map_err(|why| format!("{flag}: {why}"))?,
            grace: None,
            reclaim: None,
        });
    }
    Ok(found)
}

fn pairs<'a>(flag: &str, text: Option<&'a str>, between: char) -> Result<Vec<(Signal, &'a str)>, String> {
    let mut found: Vec<(Signal, &str)> = Vec::new();
    for part in text
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (name, value) = part
            .split_once(between)
            .ok_or_else(|| format!("{flag}: {part:?} must look like memory.available{between}100Mi"))?;
        let signal = Signal::ALL.iter().find(|(known, _)| *known == name.trim());
        let (_, signal) = signal.ok_or_else(|| format!("{flag}: there is no signal {name:?}"))?;
        if found.iter().any(|(other, _)| other == signal) {
            return Err(format!("{flag}: {name} stands twice"));
        }
        found.push((*signal, value.trim()));
    }
    Ok(found)
}

/// `90s`, `1m30s`, `1h`.
fn duration(text: &str) -> Result<Duration, String> {
    let complaint = || format!("{text:?} is not a time like 90s or 1m30s");
    let (mut seconds, mut number) = (0u64, String::new());
    for character in text.chars() {
        if character.is_ascii_digit() {
            number.push(character);
            continue;
        }
        let unit = match character {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            _ => return Err(complaint()),
        };
        let count: u64 = number.parse().map_err(|_| complaint())?;
        seconds = count
            .checked_mul(unit)
            .and_then(|more| seconds.checked_add(more))
            .ok_or_else(complaint)?;
        number.clear();
    }
    match number.is_empty() && !text.is_empty() {
        true => Ok(Duration::from_secs(seconds)),
        false => Err(complaint()),
    }
}

/// What there is of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    pub available: i64,
    pub capacity: i64,
}

pub type Observations = HashMap<Signal, Observation>;

/// What is remembered from one look to the next.
#[derive(Debug, Default)]
pub struct History {
    /// Thresholds that are met, with the moment they first were. By their place in the list.
    met_since: HashMap<usize, Instant>,
    /// Conditions, with the moment they were last seen.
    seen_at: HashMap<Condition, Instant>,
}

impl History {
    /// Takes a look: the thresholds to act on, those of memory first.
    pub fn look(&mut self, all: &Thresholds, observed: &Observations, now: Instant) -> Vec<Threshold> {
        let mut since = HashMap::new();
        for (place, threshold) in all.list.iter().enumerate() {
            let Some(observation) = observed.get(&threshold.signal) else {
                continue;
            };
            let mut wanted = threshold.amount.of(observation.capacity);
            if self.met_since.contains_key(&place)
                && let Some(reclaim) = &threshold.reclaim
            {
                wanted = wanted.saturating_add(reclaim.of(observation.capacity));
            }
            if observation.available < wanted {
                let first = self.met_since.get(&place).copied().unwrap_or(now);
                since.insert(place, first);
                self.seen_at.insert(threshold.signal.condition(), now);
            }
        }
        self.seen_at
            .retain(|_, at| now.saturating_duration_since(*at) < all.transition || *at == now);
        let mut due: Vec<usize> = since
            .iter()
            .filter(|(place, first)| {
                let grace = all.list[**place].grace.unwrap_or_default();
                now.saturating_duration_since(**first) >= grace
            })
            .map(|(place, _)| *place)
            .collect();
        due.sort_by_key(|place| (all.list[*place].signal, *place));
        self.met_since = since;
        due.into_iter().map(|place| all.list[place].clone()).collect()
    }

    /// What the node is short of, or was a short while ago.
    pub fn conditions(&self) -> Vec<Condition> {
        let mut conditions: Vec<Condition> = self.seen_at.keys().copied().collect();
        conditions.sort_unstable();
        conditions
    }
}

/// As upstream prints amounts of bytes: `100Mi`, `1536Ki`, or the number itself.
pub struct Bytes(pub i64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Quantity::from_bytes(self.0), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(hard: &str, soft: &str, grace: &str) -> ThresholdFlags {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        ThresholdFlags {
            hard: given(hard),
            soft: given(soft),
            soft_grace: given(grace),
            ..ThresholdFlags::default()
        }
    }

    #[test]
    fn flags_are_read_as_upstream_writes_them() {
        assert_eq!(
            Thresholds::parse(&ThresholdFlags::default()).unwrap(),
            Thresholds::default()
        );
        let longer = ThresholdFlags {
            transition: Some("1h".to_owned()),
            ..ThresholdFlags::default()
        };
        assert_eq!(
            Thresholds::parse(&longer).unwrap().transition,
            Duration::from_secs(3600)
        );
        let all = Thresholds::parse(&flags(
            "memory.available<1Gi, nodefs.available<0%",
            "imagefs.available<20%",
            "imagefs.available=1m30s",
        ))
        .unwrap();
        assert_eq!(all.list.len(), 2, "0% is off");
        assert_eq!(all.list[0].amount.of(0), 1 << 30);
        assert_eq!(
            (all.list[1].grace, all.list[1].amount.of(1000)),
            (Some(Duration::from_secs(90)), 200)
        );
        assert_eq!(all.kept_back(Signal::Memory, 4 << 30), 1 << 30);
        assert_eq!(
            all.kept_back(Signal::ImageFs, 1000),
            0,
            "nothing for one with a grace period"
        );
        for (hard, soft, grace, expected) in [
            ("memory<1Gi", "", "", "there is no signal \"memory\""),
            ("memory.available", "", "", "must look like"),
            ("memory.available<x", "", "", "neither an amount nor a percentage"),
            ("memory.available<-1", "", "", "is negative"),
            ("memory.available<101%", "", "", "is not between"),
            (
                "memory.available<1Gi,memory.available<2Gi",
                "",
                "",
                "stands twice",
            ),
            ("", "memory.available<1Gi", "", "needs an entry"),
            ("", "", "memory.available=1m", "there is no such threshold"),
            ("", "memory.available<1Gi", "memory.available=1x", "is not a time"),
            ("", "memory.available<1Gi", "memory.available=5", "is not a time"),
        ] {
            let why = Thresholds::parse(&flags(hard, soft, grace)).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn pods_have_a_threshold_of_their_own() {
        let signals = |text: &str| -> Vec<(Signal, i64)> {
            let all = Thresholds::parse(&flags(text, "", ""))
                .unwrap()
                .with_allocatable();
            all.list
                .iter()
                .map(|one| (one.signal, one.amount.of(1000)))
                .collect()
        };
        let (memory, allocatable) = (Signal::Memory, Signal::AllocatableMemory);
        assert_eq!(
            signals("memory.available<10%"),
            [(memory, 100), (allocatable, 100)]
        );
        assert_eq!(
            signals("memory.available<10%,allocatableMemory.available<20%"),
            [(memory, 100), (allocatable, 200)]
        );
        assert_eq!(signals("pid.available<10"), [(Signal::Pids, 10)]);
        let soft = Thresholds::parse(&flags(
            "pid.available<1",
            "memory.available<1",
            "memory.available=1s",
        ));
        assert_eq!(soft.unwrap().with_allocatable().list.len(), 2);
    }

    #[test]
    fn thresholds_are_acted_on_when_their_time_has_come() {
        let mut all = Thresholds::parse(&flags(
            "nodefs.available<10%",
            "memory.available<200",
            "memory.available=1m",
        ))
        .unwrap();
        all.list[0].reclaim = Some(Amount::Exact(Quantity::from_units(50)));
        let mut history = History::default();
        let start = Instant::now();
        let mut look = |after: u64, memory: i64, disk: i64| {
            let observed = HashMap::from([
                (
                    Signal::Memory,
                    Observation {
                        available: memory,
                        capacity: 1000,
                    },
                ),
                (
                    Signal::NodeFs,
                    Observation {
                        available: disk,
                        capacity: 1000,
                    },
                ),
            ]);
            let due = history.look(&all, &observed, start + Duration::from_secs(after));
            let due: Vec<Signal> = due.into_iter().map(|one| one.signal).collect();
            let names: Vec<&str> = history.conditions().into_iter().map(Condition::name).collect();
            (due, names)
        };
        assert_eq!(look(0, 200, 100), (vec![], vec![]));
        assert_eq!(look(10, 199, 100), (vec![], vec!["MemoryPressure"]));
        assert_eq!(
            look(60, 199, 99),
            (vec![Signal::NodeFs], vec!["MemoryPressure", "DiskPressure"])
        );
        // A minute has passed; of the disk 50 more than the threshold are wanted.
        assert_eq!(
            look(70, 199, 149),
            (
                vec![Signal::Memory, Signal::NodeFs],
                vec!["MemoryPressure", "DiskPressure"]
            )
        );
        assert_eq!(
            look(80, 200, 150),
            (vec![], vec!["MemoryPressure", "DiskPressure"])
        );
        assert_eq!(
            look(200, 199, 100),
            (vec![], vec!["MemoryPressure", "DiskPressure"])
        );
        assert_eq!(
            look(369, 200, 100),
            (vec![], vec!["MemoryPressure", "DiskPressure"])
        );
        assert_eq!(look(370, 200, 100), (vec![], vec!["MemoryPressure"]));
        assert_eq!(look(500, 200, 100), (vec![], vec![]));
    }
}
