//! Durations as Go writes and reads them: `-1h30m`, `1.5s`, `0`. Whole nanoseconds in 64 bits; the complaints are Go's.

/// One past the largest duration: only a negative one gets this far.
const LIMIT: u64 = 1 << 63;

const UNITS: &[(&str, u64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// The nanoseconds of a duration.
pub fn parse(text: &str) -> Result<i64, String> {
    let invalid = || format!("time: invalid duration {}", quote(text));
    let negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let (digits, after) = leading_digits(rest);
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => leading_digits(after),
            None => ("", after),
        };
        if digits.is_empty() && fraction.is_empty() {
            return Err(invalid());
        }
        let whole = whole(digits).ok_or_else(invalid)?;
        let end = after
            .find(|c: char| c == '.' || c.is_ascii_digit())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        if unit.is_empty() {
            return Err(format!("time: missing unit in duration {}", quote(text)));
        }
        let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(format!(
                "time: unknown unit {} in duration {}",
                quote(unit),
                quote(text)
            ));
        };
        total = whole
            .checked_mul(*scale)
            .and_then(|nanos| nanos.checked_add(part(fraction, *scale)))
            .filter(|nanos| *nanos <= LIMIT)
            .and_then(|nanos| total.checked_add(nanos))
            .filter(|total| *total <= LIMIT)
            .ok_or_else(invalid)?;
        rest = after;
    }
    match (negative, i64::try_from(total)) {
        (false, Ok(nanos)) => Ok(nanos),
        (true, Ok(nanos)) => Ok(-nanos),
        (true, Err(_)) => Ok(i64::MIN),
        (false, Err(_)) => Err(invalid()),
    }
}

/// Where a unit's words end the list, all that begins with the last one counts too: `days`, `seconds`.
const WORDS: &[(&[&str], i64)] = &[
    (&["ns", "nano"], 1),
    (&["us", "\u{b5}s", "micro"], 1_000),
    (&["ms", "milli"], 1_000_000),
    (&["s", "sec"], 1_000_000_000),
    (&["m", "min"], 60_000_000_000),
    (&["h", "hr", "hour"], 3_600_000_000_000),
    (&["d", "day"], 86_400_000_000_000),
    (&["w", "wk", "week"], 604_800_000_000_000),
];

/// The `duration` format of OpenAPI: as Go writes it, or a text with words such as `3 days` in it.
pub fn parse_openapi(text: &str) -> Result<i64, String> {
    if let Ok(nanos) = parse(text) {
        return Ok(nanos);
    }
    let (mut total, mut found, mut rest) = (0_i64, false, text);
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (digits, after) = leading_digits(&rest[start..]);
        let after = after.trim_start_matches(['\t', '\n', '\x0c', '\r', ' ']);
        let end = after
            .find(|c: char| !c.is_ascii_alphabetic() && c != '\u{b5}')
            .unwrap_or(after.len());
        let (word, after) = after.split_at(end);
        rest = after;
        if word.is_empty() {
            continue;
        }
        let number: i64 = digits.parse().map_err(|_| {
            let digits = crate::field::quote(digits);
            format!("strconv.Atoi: parsing {digits}: value out of range")
        })?;
        let word = word.to_ascii_lowercase();
        let unit = WORDS.iter().find(|(words, _)| {
            words.contains(&word.as_str()) || words.last().is_some_and(|last| word.starts_with(last))
        });
        if let Some((_, unit)) = unit {
            found = true;
            total = total.wrapping_add(number.wrapping_mul(*unit));
        }
    }
    if found {
        Ok(total)
    } else {
        Err(format!("unable to parse {text} as duration"))
    }
}

fn leading_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

fn whole(digits: &str) -> Option<u64> {
    if digits.is_empty() {
        return Some(0);
    }
    digits.parse().ok().filter(|whole| *whole <= LIMIT)
}

/// The nanoseconds of the digits after the point. Those that 63 bits do not hold count for nothing.
fn part(digits: &str, unit: u64) -> u64 {
    let (mut value, mut scale) = (0_u64, 1_f64);
    for digit in digits.bytes() {
        match value
            .checked_mul(10)
            .and_then(|value| value.checked_add(u64::from(digit - b'0')))
        {
            Some(next) if next <= LIMIT => value = next,
            _ => break,
        }
        scale *= 10.0;
    }
    (value as f64 * (unit as f64 / scale)) as u64
}

/// As Go prints it: `1h30m0s`, `1.5s`, `300ms`.
pub fn format(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    let body = match nanos.unsigned_abs() {
        0 => "0s".to_owned(),
        n if n < 1_000 => format!("{n}ns"),
        n if n < 1_000_000 => decimal(n, 1_000, "\u{b5}s"),
        n if n < 1_000_000_000 => decimal(n, 1_000_000, "ms"),
        n => {
            let minutes = n / 60_000_000_000;
            let seconds = decimal(n % 60_000_000_000, 1_000_000_000, "s");
            match (minutes / 60, minutes % 60) {
                (0, 0) => seconds,
                (0, minutes) => format!("{minutes}m{seconds}"),
                (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
            }
        }
    };
    format!("{sign}{body}")
}

fn decimal(value: u64, unit: u64, name: &str) -> String {
    let digits = unit.ilog10() as usize;
    let fraction = format!("{:0digits$}", value % unit);
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{}{point}{fraction}{name}", value / unit)
}

/// The quotes of Go's package `time`: all that is not plain ASCII is shown byte by byte.
pub fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend(['\\', char::from(byte)]),
            b' '..=0x7f => quoted.push(char::from(byte)),
            _ => quoted.push_str(&format!("\\x{byte:02x}")),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let check = |text: &str, expected: Result<i64, &str>| {
            assert_eq!(parse(text), expected.map_err(str::to_owned), "{text}");
        };
        check("0", Ok(0));
        check("-0", Ok(0));
        check("+5s", Ok(5_000_000_000));
        check("-1h30m", Ok(-5_400_000_000_000));
        check("1.5s", Ok(1_500_000_000));
        check(".5s", Ok(500_000_000));
        check("5.s", Ok(5_000_000_000));
        check("1\u{b5}s2\u{3bc}s3us", Ok(6_000));
        check("0.3333333333333333333h", Ok(1_200_000_000_000));
        check("9007199254.740993ms", Ok(9_007_199_254_740_993));
        check("9223372036854775807ns", Ok(i64::MAX));
        check("9223372036854775.807us", Ok(i64::MAX));
        check("-9223372036854775808ns", Ok(i64::MIN));
        check(
            "9223372036854775808ns",
            Err("time: invalid duration \"9223372036854775808ns\""),
        );
        check("3000000h", Err("time: invalid duration \"3000000h\""));
        check("", Err("time: invalid duration \"\""));
        check("-", Err("time: invalid duration \"-\""));
        check("--1s", Err("time: invalid duration \"--1s\""));
        check(".s", Err("time: invalid duration \".s\""));
        check("x", Err("time: invalid duration \"x\""));
        check("5", Err("time: missing unit in duration \"5\""));
        check("1.2.3s", Err("time: missing unit in duration \"1.2.3s\""));
        check("1d", Err("time: unknown unit \"d\" in duration \"1d\""));
        check(
            "1\u{e9}",
            Err("time: unknown unit \"\\xc3\\xa9\" in duration \"1\\xc3\\xa9\""),
        );
    }

    #[test]
    fn the_format_knows_words() {
        let check = |text: &str, expected: Result<i64, &str>| {
            assert_eq!(parse_openapi(text), expected.map_err(str::to_owned), "{text}");
        };
        check("90s", Ok(90_000_000_000));
        check("3 days", Ok(259_200_000_000_000));
        check("1 Hour 2 mins", Ok(3_720_000_000_000));
        check("in 3.5 d!", Ok(432_000_000_000_000));
        check("2 hr 5 hrs", Ok(7_200_000_000_000));
        check("5 hrs", Err("unable to parse 5 hrs as duration"));
        check("3", Err("unable to parse 3 as duration"));
        check("", Err("unable to parse  as duration"));
        check(
            "9223372036854775808 s",
            Err("strconv.Atoi: parsing \"9223372036854775808\": value out of range"),
        );
    }

    #[test]
    fn durations_are_written_as_go_writes_them() {
        for (nanos, text) in [
            (0, "0s"),
            (1, "1ns"),
            (1_100, "1.1\u{b5}s"),
            (300_000_000, "300ms"),
            (1_500_000_000, "1.5s"),
            (5_400_000_000_000, "1h30m0s"),
            (-90_000_000_000, "-1m30s"),
            (i64::MIN, "-2562047h47m16.854775808s"),
        ] {
            assert_eq!(format(nanos), text);
        }
    }
}
