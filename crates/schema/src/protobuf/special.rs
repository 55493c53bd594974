//! The types whose protobuf form is not that of their fields: times, durations, quantities, numbers that
//! may be strings, and raw JSON.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use skiff_meta::duration;

use super::sink::Sink;
use super::wire::{Back, Wire, fields};
use super::{ProtobufError, Result};
use crate::decode::{canonical_quantity, civil, days_from_civil};
use crate::types::Special;

/// Go's zero time, which JSON writes as null and protobuf as an empty message.
const ZERO_TIME: i64 = -62_135_596_800;
/// The first second after the year 9999, which RFC 3339 cannot write.
const END_OF_TIME: i64 = 253_402_300_800;

fn invalid(name: &str, text: &str) -> ProtobufError {
    let shown: String = text.chars().take(64).collect();
    ProtobufError::Value(format!("field {name} has an invalid value: {shown:?}"))
}

pub(super) fn base64(name: &str, text: &str) -> Result<Vec<u8>> {
    STANDARD.decode(text).map_err(|_| invalid(name, text))
}

/// The fields of a value that nobody set.
pub(super) fn zero(out: &mut Back, special: Special) {
    match special {
        Special::Duration | Special::JsonSchemaPropsOrBool => out.field_varint(1, 0),
        Special::Quantity => out.field_bytes(1, b"0"),
        Special::IntOrString => int(out, 0),
        _ => {}
    }
}

/// An `IntOrString` that is a number.
pub(super) fn int(out: &mut Back, value: i64) {
    out.field_bytes(3, b"");
    out.field_varint(2, value as u64);
    out.field_varint(1, 0);
}

/// The fields of a value that JSON writes as a string.
pub(super) fn text(out: &mut Back, special: Special, name: &str, text: &str) -> Result<()> {
    match special {
        Special::Time | Special::MicroTime => {
            let (seconds, nanos) = parse_time(text).ok_or_else(|| invalid(name, text))?;
            if seconds == ZERO_TIME && nanos == 0 {
                return Ok(());
            }
            // COMPAT: a Time has no fraction in any form.
            let micro = special == Special::MicroTime;
            out.field_varint(2, if micro { nanos / 1000 * 1000 } else { 0 } as u64);
            out.field_varint(1, seconds as u64);
        }
        Special::Duration => {
            let nanos = duration::parse(text).map_err(ProtobufError::Value)?;
            out.field_varint(1, nanos as u64);
        }
        Special::Quantity => out.field_bytes(1, text.as_bytes()),
        Special::IntOrString => {
            out.field_bytes(3, text.as_bytes());
            out.field_varint(2, 0);
            out.field_varint(1, 1);
        }
        _ => return Err(invalid(name, text)),
    }
    Ok(())
}

/// Seconds since 1970 and nanoseconds.
fn parse_time(text: &str) -> Option<(i64, i64)> {
    let number = |range: std::ops::Range<usize>| {
        let digits = text.as_bytes().get(range)?;
        digits.iter().try_fold(0i64, |sum, byte| {
            byte.is_ascii_digit().then(|| sum * 10 + i64::from(byte - b'0'))
        })
    };
    let canonical = || {
        if text.len() != 20 || !text.ends_with('Z') {
            return None;
        }
        let days = days_from_civil(number(0..4)?, number(5..7)?, number(8..10)?);
        let of_day = number(11..13)? * 3600 + number(14..16)? * 60 + number(17..19)?;
        Some((days * 86_400 + of_day, 0))
    };
    canonical().or_else(|| {
        let at = skiff_meta::time::parse(text)?;
        let nanos = at.as_nanosecond();
        Some((
            i64::try_from(nanos.div_euclid(1_000_000_000)).ok()?,
            nanos.rem_euclid(1_000_000_000) as i64,
        ))
    })
}

/// Writes a value of one of the types that need no schema. `false`: it is none of them.
pub(super) fn read<S: Sink>(sink: &mut S, special: Special, name: &str, bytes: &[u8]) -> Result<bool> {
    let (mut numbers, mut texts): ([i64; 4], [&[u8]; 4]) = ([0; 4], [&[]; 4]);
    for field in fields(bytes) {
        match field? {
            (number @ 1..=3, Wire::Varint(value)) => numbers[number as usize] = value as i64,
            (number @ 1..=3, Wire::Bytes(value)) => texts[number as usize] = value,
            _ => {}
        }
    }
    match special {
        Special::Time | Special::MicroTime => {
            if bytes.is_empty() || numbers[1] == ZERO_TIME {
                sink.null();
                return Ok(true);
            }
            let micro = special == Special::MicroTime;
            let text = print_time(numbers[1], micro.then_some(numbers[2]))
                .ok_or_else(|| ProtobufError::Value(format!("field {name} is a time out of range")))?;
            sink.plain(std::str::from_utf8(text.as_ref()).unwrap_or_default());
        }
        Special::Duration => {
            sink.string(&duration::format(numbers[1]));
        }
        Special::Quantity => {
            let text = String::from_utf8_lossy(texts[1]);
            if is_canonical(texts[1]) {
                sink.plain(&text);
            } else {
                let text = if text.is_empty() { "0".into() } else { text };
                sink.string(&canonical_quantity(&text).map_err(ProtobufError::Value)?);
            }
        }
        Special::IntOrString if numbers[1] == 0 => sink.integer(i64::from(numbers[2] as i32)),
        Special::IntOrString => sink.string(&String::from_utf8_lossy(texts[3])),
        Special::RawExtension | Special::FieldsV1 | Special::Json => {
            if texts[1].is_empty() {
                sink.null();
            } else {
                sink.json(texts[1])?;
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Quantities that are surely in the form that upstream prints: at most three digits and a suffix.
fn is_canonical(text: &[u8]) -> bool {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    (1..=3).contains(&digits)
        && text[0] != b'0'
        && matches!(
            &text[digits..],
            b"" | b"m" | b"k" | b"M" | b"G" | b"Ki" | b"Mi" | b"Gi" | b"Ti"
        )
}

/// The text of a time, on the stack.
struct TimeText {
    bytes: [u8; 27],
    length: usize,
}

impl AsRef<[u8]> for TimeText {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

fn print_time(seconds: i64, nanos: Option<i64>) -> Option<TimeText> {
    if !(ZERO_TIME..END_OF_TIME).contains(&seconds) || !(0..1_000_000_000).contains(&nanos.unwrap_or(0)) {
        return None;
    }
    let mut text = TimeText {
        bytes: *b"0000-00-00T00:00:00.000000Z",
        length: if nanos.is_some() { 27 } else { 20 },
    };
    let mut put = |at: usize, width: usize, mut value: i64| {
        for place in (at..at + width).rev() {
            text.bytes[place] = b'0' + (value % 10) as u8;
            value /= 10;
        }
    };
    let (year, month, day, hour, minute, second) = civil(seconds);
    put(0, 4, year);
    for (at, value) in [(5, month), (8, day), (11, hour), (14, minute), (17, second)] {
        put(at, 2, value);
    }
    match nanos {
        Some(nanos) => put(20, 6, nanos / 1000),
        None => text.bytes[19] = b'Z',
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_both_ways() {
        for (text, seconds, nanos) in [
            ("1970-01-01T00:00:00Z", 0, None),
            ("2008-01-01T01:01:01Z", 1_199_149_261, None),
            ("9999-12-31T23:59:59Z", END_OF_TIME - 1, None),
            ("1969-12-31T23:59:59.500000Z", -1, Some(500_000_000)),
            ("2024-02-29T12:00:00.000001Z", 1_709_208_000, Some(1_000)),
        ] {
            assert_eq!(parse_time(text), Some((seconds, nanos.unwrap_or(0))), "{text}");
            let printed = print_time(seconds, nanos).expect("in range");
            assert_eq!(std::str::from_utf8(printed.as_ref()), Ok(text));
        }
        assert!(print_time(END_OF_TIME, None).is_none() && print_time(i64::MIN, None).is_none());
        assert!(print_time(0, Some(-1)).is_none());
    }

    #[test]
    fn canonical_quantities_are_left_alone() {
        for text in ["1", "100m", "512Mi", "999k", "1Gi"] {
            assert!(is_canonical(text.as_bytes()), "{text}");
            assert_eq!(canonical_quantity(text).as_deref(), Ok(text));
        }
        for text in ["", "0", "1000m", "1024Mi", "01", "1.5", "-1", "1e3", "Mi"] {
            assert!(!is_canonical(text.as_bytes()), "{text}");
        }
    }
}
