//! The types with an encoding of their own: what they accept, how they complain, and their canonical
//! form.

use base64::Engine as _;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use serde_json::Value;
use skiff_meta::duration;
use skiff_meta::quantity::Quantity;

use super::node::Node;

const RFC3339: &str = "2006-01-02T15:04:05Z07:00";
const RFC3339_MICRO: &str = "2006-01-02T15:04:05.000000Z07:00";

/// Go does not mind bits after the end.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// Go's word for a JSON value in its decoding errors.
pub(super) fn go_value(node: &Node) -> &'static str {
    match node {
        Node::Null => "null",
        Node::Bool(_) => "bool",
        Node::Number(_) => "number",
        Node::String(_) => "string",
        Node::Array(_) => "array",
        Node::Object(_) => "object",
    }
}

/// A JSON value that a special type cannot read.
pub(super) struct Mismatch {
    pub found: String,
    pub go_type: &'static str,
}

/// These types decode a string first.
pub(super) fn text(node: &Node) -> Result<&str, Mismatch> {
    match node {
        Node::String(text) => Ok(text),
        other => Err(Mismatch {
            found: go_value(other).to_string(),
            go_type: "string",
        }),
    }
}

pub(super) fn time(text: &str, micro: bool) -> Result<Value, String> {
    let layout = if micro { RFC3339_MICRO } else { RFC3339 };
    let (date_time, rest) = parse_date_time(text, layout)?;
    let (nanos, rest) = if micro {
        // Exactly six digits, no more and no less.
        match rest.as_bytes() {
            [b'.' | b',', digits @ ..] if digits.len() >= 6 && digits[..6].iter().all(u8::is_ascii_digit) => {
                (
                    rest[1..7].parse::<u32>().ok().map(|micros| micros * 1000),
                    &rest[7..],
                )
            }
            _ => return Err(complaint(text, layout, rest, ".000000", "")),
        }
    } else {
        fraction(rest)
    };
    let offset = match rest.as_bytes() {
        [b'Z'] => 0,
        [sign @ (b'+' | b'-'), h1, h2, b':', m1, m2]
            if [h1, h2, m1, m2].iter().all(|b| b.is_ascii_digit()) =>
        {
            let number = |a: &u8, b: &u8| i64::from(a - b'0') * 10 + i64::from(b - b'0');
            let (hours, minutes) = (number(h1, h2), number(m1, m2));
            if hours > 24 || minutes > 60 {
                return Err(complaint(
                    text,
                    layout,
                    "",
                    "",
                    ": time zone offset hour out of range",
                ));
            }
            let seconds = hours * 3600 + minutes * 60;
            if *sign == b'-' { -seconds } else { seconds }
        }
        [b'Z', ..] => {
            return Err(complaint(
                text,
                layout,
                "",
                "",
                &format!(": extra text: {}", duration::quote(&rest[1..])),
            ));
        }
        _ => return Err(complaint(text, layout, rest, "Z07:00", "")),
    };
    let seconds = date_time - offset;
    let (year, month, day, hour, minute, second) = civil(seconds);
    // COMPAT: the zero time of Go is written as null.
    if seconds == -62_135_596_800 && nanos.unwrap_or(0) == 0 {
        return Ok(Value::Null);
    }
    let head = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    Ok(Value::String(if micro {
        format!("{head}.{:06}Z", nanos.unwrap_or(0) / 1000)
    } else {
        format!("{head}Z")
    }))
}

fn complaint(text: &str, layout: &str, rest: &str, element: &str, message: &str) -> String {
    if message.is_empty() {
        let [text, layout, rest, element] = [text, layout, rest, element].map(duration::quote);
        format!("parsing time {text} as {layout}: cannot parse {rest} as {element}")
    } else {
        format!("parsing time {}{message}", duration::quote(text))
    }
}

/// Seconds since 1970 of the part before the fraction, and the rest of the text.
fn parse_date_time<'a>(text: &'a str, layout: &str) -> Result<(i64, &'a str), String> {
    let mut rest = text;
    let mut numbers = [0_i64; 6];
    let elements = [
        ("2006", 4, "-"),
        ("01", 2, "-"),
        ("02", 2, "T"),
        ("15", 2, ":"),
        ("04", 2, ":"),
        ("05", 2, ""),
    ];
    for (index, (element, width, separator)) in elements.into_iter().enumerate() {
        let digits = rest
            .get(..width)
            .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
        let Some(digits) = digits else {
            return Err(complaint(text, layout, rest, element, ""));
        };
        numbers[index] = digits.parse().unwrap_or(0);
        rest = &rest[width..];
        let range = match index {
            1 => (1..=12, "month"),
            3 => (0..=23, "hour"),
            4 => (0..=59, "minute"),
            5 => (0..=59, "second"),
            _ => (i64::MIN..=i64::MAX, ""),
        };
        if !range.0.contains(&numbers[index]) {
            return Err(complaint(
                text,
                layout,
                "",
                "",
                &format!(": {} out of range", range.1),
            ));
        }
        rest = match rest.strip_prefix(separator) {
            Some(rest) => rest,
            None => return Err(complaint(text, layout, rest, separator, "")),
        };
    }
    let [year, month, day, hour, minute, second] = numbers;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    if day < 1 || day > days {
        return Err(complaint(text, layout, "", "", ": day out of range"));
    }
    Ok((
        days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second,
        rest,
    ))
}

fn fraction(rest: &str) -> (Option<u32>, &str) {
    let Some(digits) = rest.strip_prefix(['.', ',']) else {
        return (None, rest);
    };
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    if end == 0 {
        return (None, rest);
    }
    let padded = format!("{:0<9}", &digits[..end.min(9)]);
    (padded.parse().ok(), &digits[end..])
}

/// Days since 1970-01-01 in the proleptic Gregorian calendar.
pub(crate) fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

pub(crate) fn civil(seconds: i64) -> (i64, i64, i64, i64, i64, i64) {
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day, of_day / 3600, of_day / 60 % 60, of_day % 60)
}

pub(super) fn quantity(node: &Node) -> Result<Value, String> {
    let text = match node {
        Node::String(text) | Node::Number(text) => text.trim(),
        Node::Bool(true) => "true",
        Node::Bool(false) => "false",
        Node::Array(_) => "[",
        _ => "{",
    };
    canonical_quantity(text).map(Value::String)
}

/// The form in which upstream prints a quantity.
pub fn canonical_quantity(text: &str) -> Result<String, String> {
    let parsed = Quantity::parse(text).map_err(|message| quantity_complaint(text).unwrap_or(message))?;
    // COMPAT: upstream keeps the text when a quick look says that it is canonical already, which is
    // not always so: `1.500` stays as it is.
    let unsigned = text.trim_start_matches(['+', '-']);
    let end = unsigned
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = whole.trim_start_matches('0');
    let whole = if whole.is_empty() { "0" } else { whole };
    let digits = whole.len() + fraction.len();
    let binary = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
        .iter()
        .position(|s| *s == suffix);
    if let Some(step) = binary {
        let exponent = (step as i32 + 1) * 10;
        let precision = 15 - whole.len() as i32 - (exponent as f32 * 3.0 / 10.0) as i32 - 1;
        let odd = whole.parse::<i64>().is_ok_and(|value| value & 0x07 != 0);
        if fraction.is_empty() && precision >= 0 && odd {
            return Ok(text.to_string());
        }
        return Ok(parsed.to_string());
    }
    let exponent = match suffix {
        "" => 0,
        "n" => -9,
        "u" => -6,
        "m" => -3,
        "k" => 3,
        "M" => 6,
        "G" => 9,
        "T" => 12,
        "P" => 15,
        "E" => 18,
        other => other[1..].parse::<i64>().unwrap_or(1),
    };
    let scale = exponent - fraction.len() as i64;
    let shifted = format!("{whole}{fraction}");
    let reuse = digits <= 18
        && scale >= -9
        && scale % 3 == 0
        && !shifted.ends_with("000")
        && !shifted.starts_with('0')
        && text != "0";
    Ok(if reuse {
        text.to_string()
    } else {
        parsed.to_string()
    })
}

/// The complaint about a suffix made of the right letters in the wrong order.
fn quantity_complaint(text: &str) -> Option<String> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let number = unsigned.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let digits = &unsigned[..unsigned.len() - number.len()];
    let tail = number.trim_start_matches(|c: char| "eEinumkKMGTP".contains(c));
    let tail = tail.strip_prefix(['-', '+']).unwrap_or(tail);
    let well_formed = !digits.is_empty() && tail.bytes().all(|b| b.is_ascii_digit());
    well_formed.then(|| {
        if digits.matches('.').count() > 1 || digits == "." {
            "unable to parse numeric part of quantity".to_string()
        } else {
            "unable to parse quantity's suffix".to_string()
        }
    })
}

pub(super) fn int_or_string(node: Node) -> Result<Value, Mismatch> {
    let mismatch = |found: String| {
        Err(Mismatch {
            found,
            go_type: "int32",
        })
    };
    match node {
        Node::String(text) => Ok(Value::String(text)),
        Node::Number(text) => match text.parse::<i32>() {
            Ok(n) => Ok(n.into()),
            Err(_) => mismatch(format!("number {text}")),
        },
        other => mismatch(go_value(&other).to_string()),
    }
}

/// Go's durations: checks the text and prints it as Go would.
pub(super) fn duration(text: &str) -> Result<Value, String> {
    duration::parse(text).map(|nanos| Value::String(duration::format(nanos)))
}

/// Base64 as Go's standard decoder takes it: line breaks are ignored, all else must be right.
pub(super) fn bytes(text: String) -> Result<Value, String> {
    let breaks = |c: char| matches!(c, '\r' | '\n');
    let compact: Option<String> = text
        .contains(breaks)
        .then(|| text.chars().filter(|c| !breaks(*c)).collect());
    let plain = compact.as_deref().unwrap_or(&text);
    if STANDARD.decode(plain).is_ok() {
        return Ok(Value::String(compact.unwrap_or(text)));
    }
    match LENIENT.decode(plain) {
        Ok(decoded) => Ok(bytes_of(&decoded)),
        Err(_) => {
            let at = corrupt_at(text.as_bytes());
            Err(format!("illegal base64 data at input byte {at}"))
        }
    }
}

/// Where Go's decoder gives up on a text that is not base64.
fn corrupt_at(text: &[u8]) -> usize {
    let mut in_group = 0;
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b'\r' | b'\n' => {}
            b'=' => return after_padding(text, at, in_group),
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'+' | b'/' => in_group = (in_group + 1) % 4,
            _ => return at,
        }
    }
    // The start of the group that is not complete.
    text.len() - in_group
}

/// The same from the first padding on, which stands behind so many letters of its group.
fn after_padding(text: &[u8], at: usize, in_group: usize) -> usize {
    let next = |from: usize| {
        let breaks = text[from..]
            .iter()
            .take_while(|byte| matches!(byte, b'\r' | b'\n'));
        from + breaks.count()
    };
    match in_group {
        2 => {
            let second = next(at + 1);
            match text.get(second) {
                Some(b'=') => next(second + 1),
                Some(_) => second - 1,
                None => text.len(),
            }
        }
        3 => next(at + 1),
        _ => at,
    }
}

/// Go also takes an array of small numbers for bytes.
pub(super) fn bytes_of(numbers: &[u8]) -> Value {
    Value::String(STANDARD.encode(numbers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let check = |text: &str, micro, expected: &str| match time(text, micro) {
            Ok(value) => assert_eq!(value.to_string(), expected),
            Err(message) => assert_eq!(message, expected),
        };
        check("2024-02-29T23:30:00+01:00", false, "\"2024-02-29T22:30:00Z\"");
        check(
            "2024-01-01T00:00:00.123456789Z",
            false,
            "\"2024-01-01T00:00:00Z\"",
        );
        check(
            "2024-01-01T00:00:00.123456Z",
            true,
            "\"2024-01-01T00:00:00.123456Z\"",
        );
        check("0001-01-01T00:00:00Z", false, "null");
        check(
            "x",
            false,
            r#"parsing time "x" as "2006-01-02T15:04:05Z07:00": cannot parse "x" as "2006""#,
        );
        check(
            "2024-13-01T00:00:00Z",
            false,
            r#"parsing time "2024-13-01T00:00:00Z": month out of range"#,
        );
        check(
            "2023-02-29T00:00:00Z",
            false,
            r#"parsing time "2023-02-29T00:00:00Z": day out of range"#,
        );
        check(
            "2024-01-01",
            false,
            r#"parsing time "2024-01-01" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "T""#,
        );
        check(
            "2024-01-01T00:00:00Z",
            true,
            r#"parsing time "2024-01-01T00:00:00Z" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "Z" as ".000000""#,
        );
    }

    #[test]
    fn quantities() {
        let check = |text: &str, expected: &str| match canonical_quantity(text) {
            Ok(value) => assert_eq!(value, expected, "{text}"),
            Err(message) => assert_eq!(message, expected, "{text}"),
        };
        check("1000m", "1");
        check("100m", "100m");
        check("0.5", "500m");
        check("1.500", "1.500");
        check("1024Mi", "1Gi");
        check("100Mi", "100Mi");
        check("1.5Gi", "1536Mi");
        check("1000", "1k");
        check("100e3", "100e3");
        check("5Kim", "unable to parse quantity's suffix");
        check(
            "x",
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        );
    }

    #[test]
    fn durations_and_bytes() {
        assert_eq!(super::duration("90m").expect("parses"), "1h30m0s");
        assert_eq!(
            super::duration("5").expect_err("no unit"),
            "time: missing unit in duration \"5\""
        );
        assert_eq!(bytes("Zm9v\nYmE=".into()).expect("decodes"), "Zm9vYmE=");
        // As Go's encoding/base64 says it.
        for (text, at) in [
            ("Zm9v!", 4),
            ("Zg==x", 4),
            ("Zm8=x", 4),
            ("Zg=x", 2),
            ("Zm9vZg==Zg==", 8),
            ("Zg===", 4),
            ("Z===", 1),
            ("=", 0),
            ("Zg=", 3),
            ("Zm8", 0),
            ("Zm9vZ", 4),
            ("Zg==\nx", 5),
        ] {
            let said = format!("illegal base64 data at input byte {at}");
            assert_eq!(bytes(text.into()).expect_err("bad"), said, "{text:?}");
        }
    }
}
