//! Cron schedules of five fields, `@hourly` and its like, and `@every 1h30m`: what is wrong with one, and when it is due.
//!
//! Reads no clock and no time zone database: the caller gives both.

use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use skiff_meta::duration;

const MONTHS: [&str; 12] = [
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];
const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

/// Marks a field that was given as `*`. Days of the month and of the week are combined by "or" unless one is `*`.
const STAR: u64 = 1 << 63;

/// A schedule that names no day within this many years is never due.
const MAX_YEARS: i16 = 5;

struct Bounds {
    min: u64,
    max: u64,
    names: &'static [&'static str],
}

const fn bounds(min: u64, max: u64, names: &'static [&'static str]) -> Bounds {
    Bounds { min, max, names }
}

const FIELDS: [Bounds; 5] = [
    bounds(0, 59, &[]),
    bounds(0, 23, &[]),
    bounds(1, 31, &[]),
    bounds(1, 12, &MONTHS),
    bounds(0, 6, &DAYS),
];

/// When something is due again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The time zone of a `TZ=` or `CRON_TZ=` in front. New CronJobs may not have one; old ones may.
    pub zone: Option<String>,
    times: Times,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Times {
    /// One set of bits per field: minute, hour, day of the month, month, day of the week.
    Fields([u64; 5]),
    /// A fixed number of seconds apart.
    Every(i64),
}

impl Schedule {
    /// The schedule, or upstream's complaint.
    pub fn parse(text: &str) -> Result<Schedule, String> {
        if text.is_empty() {
            return Err("empty spec string".to_owned());
        }
        let (zone, spec) = match text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) {
            Some(rest) => {
                let (zone, spec) = rest.split_once(' ').ok_or(
                    // COMPAT: upstream's parser panics here, and this is what upstream says of it.
                    "invalid schedule format: runtime error: slice bounds out of range [:-1]",
                )?;
                (Some(zone.to_owned()), spec.trim())
            }
            None => (None, text),
        };
        let times = match spec.strip_prefix('@') {
            Some(descriptor) => descriptor_times(descriptor)?,
            None => Times::Fields(fields(spec)?),
        };
        Ok(Schedule { zone, times })
    }

    /// The first time after `after`, if there is one within five years.
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match &self.times {
            Times::Every(seconds) => whole_seconds(after)?
                .checked_add(SignedDuration::from_secs(*seconds))
                .ok(),
            Times::Fields(bits) => next(bits, after, zone),
        }
    }

    /// The last time after `after` that is not later than `until`. The work does not grow with the number of times
    /// in between.
    pub fn latest(&self, after: Timestamp, until: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match &self.times {
            Times::Every(seconds) => {
                let start = whole_seconds(after)?;
                let count = until.duration_since(start).as_secs() / seconds;
                let last = SignedDuration::from_secs(count.checked_mul(*seconds)?);
                (count > 0).then(|| start.checked_add(last).ok())?
            }
            Times::Fields(bits) => {
                let due = |at: Timestamp| next(bits, at, zone).filter(|next| *next <= until);
                let mut latest = due(after)?;
                // `next` never goes back when `at` grows: search for the last second from which something is due.
                let (mut low, mut high) = (latest.as_second(), until.as_second());
                while low < high {
                    let middle = low + (high - low + 1) / 2;
                    match Timestamp::from_second(middle).ok().and_then(&due) {
                        Some(later) => {
                            latest = later;
                            low = middle.max(later.as_second());
                        }
                        None => high = middle - 1,
                    }
                }
                Some(latest)
            }
        }
    }
}

fn whole_seconds(at: Timestamp) -> Option<Timestamp> {
    let nanos = at.as_nanosecond().rem_euclid(1_000_000_000);
    at.checked_sub(SignedDuration::from_nanos(i64::try_from(nanos).ok()?))
        .ok()
}

/// Walks from field to field, the largest first. Hours and minutes are added as elapsed time: an hour that the clocks
/// skip is never due, and one that they repeat is due twice.
fn next(bits: &[u64; 5], after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
    let [minutes, hours, days, months, weekdays] = *bits;
    let has = |set: u64, value: i8| set & (1 << value) != 0;
    let mut at = whole_seconds(after)?
        .checked_add(SignedDuration::from_secs(1))
        .ok()?;
    let last_year = zone.to_datetime(at).year().checked_add(MAX_YEARS)?;
    loop {
        let local = zone.to_datetime(at);
        if local.year() > last_year {
            return None;
        }
        let date = local.date();
        let day = has(days, date.day());
        let weekday = has(weekdays, date.weekday().to_sunday_zero_offset());
        let day_matches = if days & STAR != 0 || weekdays & STAR != 0 {
            day && weekday
        } else {
            day || weekday
        };
        let (minute, second) = (i64::from(local.minute()), i64::from(local.second()));
        let midnight = |date| {
            zone.to_timestamp(DateTime::from_parts(date, Time::midnight()))
                .ok()
        };
        let skipped = if !has(months, date.month()) {
            midnight(date.last_of_month().tomorrow().ok()?)?
        } else if !day_matches {
            midnight(date.tomorrow().ok()?)?
        } else {
            let seconds = if !has(hours, local.hour()) {
                3600 - 60 * minute - second
            } else if !has(minutes, local.minute()) || second != 0 {
                60 - second
            } else {
                return Some(at);
            };
            at.checked_add(SignedDuration::from_secs(seconds)).ok()?
        };
        // Where the clocks go back over midnight, the day's first midnight may lie behind.
        at = if skipped > at {
            skipped
        } else {
            at.checked_add(SignedDuration::from_hours(1)).ok()?
        };
    }
}

fn descriptor_times(descriptor: &str) -> Result<Times, String> {
    let spec = match descriptor {
        "yearly" | "annually" => "0 0 1 1 *",
        "monthly" => "0 0 1 * *",
        "weekly" => "0 0 * * 0",
        "daily" | "midnight" => "0 0 * * *",
        "hourly" => "0 * * * *",
        _ => {
            let Some(every) = descriptor.strip_prefix("every ") else {
                return Err(format!("unrecognized descriptor: @{descriptor}"));
            };
            let nanos = duration::parse(every)
                .map_err(|why| format!("failed to parse duration @{descriptor}: {why}"))?;
            return Ok(Times::Every((nanos / 1_000_000_000).max(1)));
        }
    };
    Ok(Times::Fields(fields(spec)?))
}

fn fields(spec: &str) -> Result<[u64; 5], String> {
    let words: Vec<&str> = spec.split_whitespace().collect();
    if words.len() != FIELDS.len() {
        return Err(format!(
            "expected exactly 5 fields, found {}: [{}]",
            words.len(),
            words.join(" ")
        ));
    }
    let mut sets = [0; 5];
    for ((set, word), bounds) in sets.iter_mut().zip(words).zip(&FIELDS) {
        for expression in word.split(',').filter(|expression| !expression.is_empty()) {
            *set |= range(expression, bounds)?;
        }
    }
    Ok(sets)
}

fn number_or_name(text: &str, bounds: &Bounds) -> Result<u64, String> {
    match bounds
        .names
        .iter()
        .position(|name| name.eq_ignore_ascii_case(text))
    {
        Some(position) => Ok(position as u64 + bounds.min),
        None => number(text),
    }
}

fn number(text: &str) -> Result<u64, String> {
    match text.parse::<i64>() {
        Ok(number) => {
            u64::try_from(number).map_err(|_| format!("negative number ({number}) not allowed: {text}"))
        }
        Err(error) => {
            use std::num::IntErrorKind::{NegOverflow, PosOverflow};
            let why = match error.kind() {
                PosOverflow | NegOverflow => "value out of range",
                _ => "invalid syntax",
            };
            let quoted = duration::quote(text);
            Err(format!(
                "failed to parse int from {text}: strconv.Atoi: parsing {quoted}: {why}"
            ))
        }
    }
}

/// The bits of `N`, `N-M` or `*`, each with an optional `/step`.
fn range(expression: &str, bounds: &Bounds) -> Result<u64, String> {
    let (span, step) = match expression.split('/').collect::<Vec<_>>()[..] {
        [span] => (span, None),
        [span, step] => (span, Some(step)),
        _ => return Err(format!("too many slashes: {expression}")),
    };
    let limits: Vec<&str> = span.split('-').collect();
    let (start, mut end, mut star) = match limits[..] {
        ["*" | "?", ..] => (bounds.min, bounds.max, STAR),
        [one] => {
            let number = number_or_name(one, bounds)?;
            (number, number, 0)
        }
        [from, to] => (number_or_name(from, bounds)?, number_or_name(to, bounds)?, 0),
        _ => return Err(format!("too many hyphens: {expression}")),
    };
    let step = match step {
        Some(step) => {
            let step = number(step)?;
            if limits.len() == 1 {
                end = bounds.max;
            }
            if step > 1 {
                star = 0;
            }
            step
        }
        None => 1,
    };
    let (min, max) = (bounds.min, bounds.max);
    if start < min {
        return Err(format!(
            "beginning of range ({start}) below minimum ({min}): {expression}"
        ));
    }
    if end > max {
        return Err(format!(
            "end of range ({end}) above maximum ({max}): {expression}"
        ));
    }
    if start > end {
        return Err(format!(
            "beginning of range ({start}) beyond end of range ({end}): {expression}"
        ));
    }
    if step == 0 {
        return Err(format!("step of range should be a positive number: {expression}"));
    }
    let mut bits = star;
    let mut value = start;
    while value <= end {
        bits |= 1 << value;
        value = value.saturating_add(step);
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints() {
        for good in [
            "* * * * *",
            "*/5 0-6 1,15 jan-mar mon",
            "@daily",
            "@every 1h",
            "? * * * ?",
            "0,,1 * * * *",
        ] {
            assert!(Schedule::parse(good).is_ok(), "{good}");
        }
        for (bad, why) in [
            ("", "empty spec string"),
            ("x", "expected exactly 5 fields, found 1: [x]"),
            ("60 * * * *", "end of range (60) above maximum (59): 60"),
            ("* * 0 * *", "beginning of range (0) below minimum (1): 0"),
            (
                "5-1 * * * *",
                "beginning of range (5) beyond end of range (1): 5-1",
            ),
            ("*/0 * * * *", "step of range should be a positive number: */0"),
            ("1/2/3 * * * *", "too many slashes: 1/2/3"),
            ("1-2-3 * * * *", "too many hyphens: 1-2-3"),
            (
                "a * * * *",
                "failed to parse int from a: strconv.Atoi: parsing \"a\": invalid syntax",
            ),
            ("@x", "unrecognized descriptor: @x"),
            (
                "@every x",
                "failed to parse duration @every x: time: invalid duration \"x\"",
            ),
            (
                "TZ=0",
                "invalid schedule format: runtime error: slice bounds out of range [:-1]",
            ),
        ] {
            assert_eq!(Schedule::parse(bad), Err(why.to_owned()), "{bad}");
        }
    }

    fn zone(name: &str) -> TimeZone {
        match name {
            "UTC" => TimeZone::UTC,
            // Central European and New York time as POSIX rules, so that no database is needed.
            "Berlin" => TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap(),
            _ => TimeZone::posix("EST5EDT,M3.2.0,M11.1.0").unwrap(),
        }
    }

    #[test]
    fn the_next_time() {
        let check = |spec: &str, zone_name: &str, after: &str, expected: &str| {
            let next = Schedule::parse(spec)
                .unwrap()
                .next(after.parse().unwrap(), &zone(zone_name));
            let shown = next.map_or("never".to_owned(), |next| next.to_string());
            assert_eq!(shown, expected, "{spec} {zone_name} {after}");
        };
        check("* * * * *", "UTC", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z");
        check(
            "* * * * *",
            "UTC",
            "2026-01-01T00:00:59.9Z",
            "2026-01-01T00:01:00Z",
        );
        check(
            "*/15 * * * *",
            "UTC",
            "2026-01-01T00:45:00Z",
            "2026-01-01T01:00:00Z",
        );
        check(
            "5/20 * * * *",
            "UTC",
            "2026-01-01T00:25:00Z",
            "2026-01-01T00:45:00Z",
        );
        check(
            "0 9-17/4 * * mon-fri",
            "UTC",
            "2026-01-02T17:00:00Z",
            "2026-01-05T09:00:00Z",
        );
        check(
            "30 6 1 */3 *",
            "UTC",
            "2026-01-02T00:00:00Z",
            "2026-04-01T06:30:00Z",
        );
        // Both days given: either one will do. One of them `*`: both must hold.
        check(
            "0 0 13 * fri",
            "UTC",
            "2026-01-10T00:00:00Z",
            "2026-01-13T00:00:00Z",
        );
        check(
            "0 0 */2 * fri",
            "UTC",
            "2026-01-01T00:00:00Z",
            "2026-01-02T00:00:00Z",
        );
        check(
            "0 0 * * fri",
            "UTC",
            "2026-01-10T00:00:00Z",
            "2026-01-16T00:00:00Z",
        );
        check(
            "0 0 29 2 *",
            "UTC",
            "2026-01-01T00:00:00Z",
            "2028-02-29T00:00:00Z",
        );
        check("0 0 31 2 *", "UTC", "2026-01-01T00:00:00Z", "never");
        check(", * * * *", "UTC", "2026-01-01T00:00:00Z", "never");
        check("@yearly", "UTC", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z");
        check("@weekly", "UTC", "2026-01-01T00:00:00Z", "2026-01-04T00:00:00Z");
        check("@hourly", "UTC", "2026-01-01T00:00:01Z", "2026-01-01T01:00:00Z");
        check(
            "@every 90s",
            "UTC",
            "2026-01-01T00:00:00.5Z",
            "2026-01-01T00:01:30Z",
        );
        check(
            "@every 1ms",
            "UTC",
            "2026-01-01T00:00:00Z",
            "2026-01-01T00:00:01Z",
        );
        check(
            "0 9 * * *",
            "Berlin",
            "2026-01-01T00:00:00Z",
            "2026-01-01T08:00:00Z",
        );
        check(
            "0 9 * * *",
            "Berlin",
            "2026-07-01T00:00:00Z",
            "2026-07-01T07:00:00Z",
        );
        check(
            "0 9 * * *",
            "New York",
            "2026-07-01T00:00:00Z",
            "2026-07-01T13:00:00Z",
        );
        // 02:30 does not exist on the day the clocks go forward, and comes twice when they go back.
        check(
            "30 2 * * *",
            "Berlin",
            "2026-03-28T12:00:00Z",
            "2026-03-30T00:30:00Z",
        );
        check(
            "30 2 * * *",
            "Berlin",
            "2026-10-24T12:00:00Z",
            "2026-10-25T00:30:00Z",
        );
        check(
            "30 2 * * *",
            "Berlin",
            "2026-10-25T00:30:00Z",
            "2026-10-25T01:30:00Z",
        );
        check(
            "30 2 * * *",
            "Berlin",
            "2026-10-25T01:30:00Z",
            "2026-10-26T01:30:00Z",
        );
    }

    /// The search finds what stepping through all times finds.
    #[test]
    fn the_latest_time() {
        let check = |spec: &str, zone_name: &str, after: &str, until: &str| {
            let (schedule, zone) = (Schedule::parse(spec).unwrap(), zone(zone_name));
            let (after, until): (Timestamp, Timestamp) = (after.parse().unwrap(), until.parse().unwrap());
            let mut stepped = None;
            let mut at = schedule.next(after, &zone);
            while let Some(next) = at.filter(|next| *next <= until) {
                stepped = Some(next);
                at = schedule.next(next, &zone);
            }
            assert_eq!(
                schedule.latest(after, until, &zone),
                stepped,
                "{spec} {zone_name} {until}"
            );
        };
        for until in [
            "2026-10-24T22:59:30Z",
            "2026-10-25T00:30:00Z",
            "2026-10-25T01:29:59Z",
            "2026-10-25T01:30:00Z",
            "2026-10-26T00:00:00.5Z",
            "2026-11-30T00:00:00Z",
        ] {
            for spec in [
                "30 2 * * *",
                "*/7 1-5 * * *",
                "0 0 25 * sun",
                "0 0 1 1 *",
                "@every 61s",
                "@hourly",
            ] {
                check(spec, "Berlin", "2026-10-23T10:00:30.25Z", until);
                check(spec, "UTC", "2026-10-24T22:59:00Z", until);
            }
        }
    }

    #[test]
    fn a_year_of_seconds_is_not_stepped_through() {
        let (after, until) = ("1926-01-01T00:00:00Z", "2026-01-01T00:00:00Z");
        let (after, until): (Timestamp, Timestamp) = (after.parse().unwrap(), until.parse().unwrap());
        let started = std::time::Instant::now();
        for spec in ["@every 1s", "* * * * *", "* * * 1-6 *"] {
            assert!(
                Schedule::parse(spec)
                    .unwrap()
                    .latest(after, until, &TimeZone::UTC)
                    .is_some()
            );
        }
        assert!(started.elapsed().as_secs() < 2);
    }
}
