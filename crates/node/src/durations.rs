//! Durations as Go prints them: `1.5s`, `2m30s`, `340ms`. Messages to users carry them.

use std::time::Duration;

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
