//! Durations as Go prints them: `1.5s`, `2m30s`, `340ms`. Messages to users carry them.

use std::time::Duration;

/// Reads `1m30s`, `500ms`, `1.5h`, and `0`.
pub fn parse_go_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time like 90s or 1m30s");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    if rest.is_empty() {
        return Err(wrong());
    }
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(wrong)?;
        let number: f64 = rest[..digits].parse().map_err(|_| wrong())?;
        rest = &rest[digits..];
        let letters = rest
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(rest.len());
        let seconds = match &rest[..letters] {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(wrong()),
        };
        let more = Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())?;
        total = total.checked_add(more).ok_or_else(wrong)?;
        rest = &rest[letters..];
    }
    Ok(total)
}

pub fn go_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    if nanos < 1_000_000_000 {
        let (unit, name) = match nanos {
            n if n < 1_000 => return format!("{n}ns"),
            n if n < 1_000_000 => (1_000, "µs"),
            _ => (1_000_000, "ms"),
        };
        return format!("{}{name}", decimal(nanos, unit));
    }
    let seconds = nanos / 1_000_000_000;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let rest = decimal(nanos % 60_000_000_000, 1_000_000_000);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, m) => format!("{m}m{rest}s"),
        (h, m) => format!("{h}h{m}m{rest}s"),
    }
}

fn decimal(value: u128, unit: u128) -> String {
    let fraction = value % unit;
    if fraction == 0 {
        return (value / unit).to_string();
    }
    let width = unit.to_string().len() - 1;
    let digits = format!("{fraction:0width$}");
    format!("{}.{}", value / unit, digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_style() {
        let check =
            |micros: u64, expected: &str| assert_eq!(go_duration(Duration::from_micros(micros)), expected);
        check(0, "0s");
        check(340_000, "340ms");
        check(1_500, "1.5ms");
        check(10_000_000, "10s");
        check(1_234_000, "1.234s");
        check(160_000_000, "2m40s");
        check(300_000_000, "5m0s");
        check(3_600_000_000, "1h0m0s");
    }
}
