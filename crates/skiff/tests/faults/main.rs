//! Faults over many machines, which are namespaces of this host: servers and members of etcd that are killed, hang, are cut
//! off both ways or one way, lose packets or have a slow disk, while clients write and read registers over all servers; and
//! nodes that are cut off or gone.
//!
//! `make faults` runs all of them, each for SECONDS, ROUNDS times. Without these settings it is a short selection.

mod agent;
mod house;
mod nodes;
mod table;

use anyhow::{Context, Result};
use house::House;
use skiff_testkit::{Random, eventually};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use table::{FAULTS, Fault};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(90);
/// Writes that must be acknowledged before, during and after a fault.
const WRITES: usize = 40;

/// Two houses at once would be too much for a small machine.
static ALONE: Mutex<()> = Mutex::new(());

fn setting(name: &str) -> Result<Option<u64>> {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => Ok(Some(text.parse().with_context(|| name.to_owned())?)),
        _ => Ok(None),
    }
}

/// Whether all faults are to be run.
fn is_long() -> Result<bool> {
    Ok(setting("SKIFF_FAULTS_SECONDS")?.is_some())
}

#[test]
fn registers_stay_linearizable() -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let hold = Duration::from_secs(setting("SKIFF_FAULTS_SECONDS")?.unwrap_or(2));
    let rounds = setting("SKIFF_FAULTS_ROUNDS")?.unwrap_or(1);
    let seed = match setting("SKIFF_SEED")? {
        Some(seed) => seed,
        None => std::time::UNIX_EPOCH.elapsed()?.as_nanos() as u64 % 1_000_000,
    };
    let only = std::env::var("SKIFF_FAULT").unwrap_or_default();
    let is_long = is_long()? || !only.is_empty();
    println!("each fault for {hold:?}, SKIFF_SEED={seed}");
    let house = House::new(is_long)?;
    let mut random = Random(seed);
    for round in 0..rounds {
        for (number, fault) in FAULTS.iter().enumerate() {
            if (fault.is_short || is_long) && fault.name.contains(&only) {
                let id = format!("{round}-{number}");
                run(&house, fault, &id, hold, &mut random).with_context(|| fault.name)?;
            }
        }
    }
    Ok(())
}

fn run(house: &House, fault: &Fault, id: &str, hold: Duration, random: &mut Random) -> Result<()> {
    let began = Instant::now();
    let victim = fault.victim.choose(house, random)?;
    let load = house.registers(id, random.below(u64::MAX))?;
    load.go_on(WRITES)?;
    let injured = (fault.inject)(house, victim)?;
    let during = load.acknowledged();
    if fault.writes_go_on {
        load.go_on(WRITES)?;
    }
    std::thread::sleep(hold);
    let during = load.acknowledged() - during;
    (fault.heal)(house, victim)?;
    drop(injured);
    load.go_on(WRITES)?;
    // All servers take part again before anything else happens.
    eventually("all servers serve", PATIENCE, || house.all_serve())?;
    let report = load.finish()?;
    println!(
        "{:5.1} s  {}, machine {}: {during} writes during the fault; {report}",
        began.elapsed().as_secs_f64(),
        fault.name,
        house.servers[victim].host_name(),
    );
    Ok(())
}
