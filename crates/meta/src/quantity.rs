//! Quantities: `100m`, `1Gi`, `1e3`. Kept as a whole number of nano-units, printed in canonical form.

use std::fmt;

/// How a quantity was written, which decides how it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    DecimalSi,
    BinarySi,
    DecimalExponent,
}

/// A parsed quantity. Values finer than nano are rounded up, as upstream does.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

const NANO: i128 = 1_000_000_000;
/// Upstream caps what is written in powers of two at 2^63-1 units, and nothing else.
const CAP: i128 = (i64::MAX as i128) * NANO;
/// What else is larger than 10^29 counts as that.
const MOST: i128 = 100_000_000_000_000_000_000_000_000_000 * NANO;
const COMPLAINT: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

impl Quantity {
    pub fn from_units(units: i64) -> Self {
        Self {
            nanos: i128::from(units) * NANO,
            format: Format::DecimalSi,
        }
    }

    pub fn from_millis(millis: i64) -> Self {
        Self {
            nanos: i128::from(millis) * (NANO / 1000),
            format: Format::DecimalSi,
        }
    }

    pub fn from_bytes(bytes: i64) -> Self {
        Self {
            nanos: i128::from(bytes) * NANO,
            format: Format::BinarySi,
        }
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        let complaint = || COMPLAINT.to_owned();
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(complaint());
        }
        let (format, binary_shift, exponent) = match suffix {
            "" => (Format::DecimalSi, 0, 0),
            "n" => (Format::DecimalSi, 0, -9),
            "u" => (Format::DecimalSi, 0, -6),
            "m" => (Format::DecimalSi, 0, -3),
            "k" => (Format::DecimalSi, 0, 3),
            "M" => (Format::DecimalSi, 0, 6),
            "G" => (Format::DecimalSi, 0, 9),
            "T" => (Format::DecimalSi, 0, 12),
            "P" => (Format::DecimalSi, 0, 15),
            "E" => (Format::DecimalSi, 0, 18),
            "Ki" => (Format::BinarySi, 10, 0),
            "Mi" => (Format::BinarySi, 20, 0),
            "Gi" => (Format::BinarySi, 30, 0),
            "Ti" => (Format::BinarySi, 40, 0),
            "Pi" => (Format::BinarySi, 50, 0),
            "Ei" => (Format::BinarySi, 60, 0),
            other => {
                let digits = other.strip_prefix(['e', 'E']).ok_or_else(complaint)?;
                (
                    Format::DecimalExponent,
                    0,
                    digits.parse::<i32>().map_err(|_| complaint())?,
                )
            }
        };
        let nanos = scale(whole, fraction, exponent, binary_shift);
        let nanos = nanos.min(if format == Format::BinarySi { CAP } else { MOST });
        Ok(Self {
            nanos: if negative { -nanos } else { nanos },
            format,
        })
    }

    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }

    pub fn is_zero(&self) -> bool {
        self.nanos == 0
    }

    /// Whole units, rounded up.
    pub fn value(&self) -> i64 {
        i64::try_from(ceil_div(self.nanos, NANO)).unwrap_or(i64::MAX)
    }

    /// Thousandths, rounded up.
    pub fn milli_value(&self) -> i64 {
        i64::try_from(ceil_div(self.nanos, NANO / 1000)).unwrap_or(i64::MAX)
    }

    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let format = if self.is_zero() { other.format } else { self.format };
        Self {
            nanos: self.nanos.saturating_add(other.nanos),
            format,
        }
    }

    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let format = if self.is_zero() { other.format } else { self.format };
        Self {
            nanos: self.nanos.saturating_sub(other.nanos),
            format,
        }
    }

    /// The whole number of units that is not less.
    #[must_use]
    pub fn rounded_up(&self) -> Self {
        Self {
            nanos: ceil_div(self.nanos, NANO).saturating_mul(NANO),
            format: self.format,
        }
    }

    /// True when the value is a whole number of units.
    pub fn is_whole(&self) -> bool {
        self.nanos % NANO == 0
    }
}

fn ceil_div(value: i128, by: i128) -> i128 {
    let quotient = value / by;
    // Upstream rounds away from zero.
    if value % by == 0 {
        quotient
    } else {
        quotient + value.signum()
    }
}

/// `whole.fraction * 10^exponent * 2^shift` in nano-units, rounded up, saturating.
fn scale(whole: &str, fraction: &str, exponent: i32, shift: u32) -> i128 {
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return 0;
    }
    let power = 9_i64 + i64::from(exponent) - fraction.len() as i64;
    // More than 36 significant digits are beyond what an i128 of nano-units holds, or rounded at 10^-9.
    let (kept, dropped) = digits.split_at(digits.len().min(36 - (shift as usize / 4)));
    let power = power + dropped.len() as i64;
    let Ok(mut value) = kept.parse::<i128>() else {
        return i128::MAX;
    };
    if power < 0 {
        let mut inexact = false;
        // The binary factor goes in first, so that `0.5Ki` stays exact.
        value = value.saturating_mul(1 << shift.min(62));
        for _ in 0..(-power).min(60) {
            inexact |= value % 10 != 0;
            value /= 10;
        }
        return value + i128::from(inexact || (value == 0));
    }
    for _ in 0..power.min(60) {
        value = value.saturating_mul(10);
    }
    value.saturating_mul(1 << shift.min(62))
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let magnitude = self.nanos.abs();
        let sign = if self.nanos < 0 { "-" } else { "" };
        // COMPAT: below 1024, and where a fraction would be needed, binary quantities print in decimal.
        if self.format == Format::BinarySi && magnitude >= 1024 * NANO && magnitude % NANO == 0 {
            let (mut units, mut step) = (magnitude / NANO, 0);
            while units % 1024 == 0 && step < 6 {
                units /= 1024;
                step += 1;
            }
            return write!(
                f,
                "{sign}{units}{}",
                ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][step]
            );
        }
        let (mut amount, mut exponent) = (magnitude, -9);
        while amount % 1000 == 0 && (exponent < 18 || self.format == Format::DecimalExponent) {
            amount /= 1000;
            exponent += 3;
        }
        if self.format == Format::DecimalExponent && exponent != 0 {
            return write!(f, "{sign}{amount}e{exponent}");
        }
        let suffix = match exponent {
            -9 => "n",
            -6 => "u",
            -3 => "m",
            0 => "",
            3 => "k",
            6 => "M",
            9 => "G",
            12 => "T",
            15 => "P",
            _ => "E",
        };
        write!(f, "{sign}{amount}{suffix}")
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_forms() {
        for (text, expected) in [
            ("0", "0"),
            ("1000m", "1"),
            ("100m", "100m"),
            ("0.1", "100m"),
            ("1.5", "1500m"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("512", "512"),
            ("0.5Ki", "512"),
            ("1000k", "1M"),
            ("1e3", "1e3"),
            ("12e2", "1200"),
            ("-1", "-1"),
            ("1n", "1n"),
            ("0.1n", "1n"),
            ("100000000000000000000", "100E"),
            ("9999999999999999999", "9999999999999999999"),
            ("12345678901234567890m", "12345678901234567890m"),
            ("1e20", "100e18"),
            ("1e27", "1e27"),
            ("16Ei", "9223372036854775807"),
            ("99999999999999999999Ki", "9223372036854775807"),
        ] {
            assert_eq!(Quantity::parse(text).unwrap().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "a", "1x", "1.2.3", "--1", "1 Gi", "e3", "1e", "."] {
            assert_eq!(Quantity::parse(text).unwrap_err(), COMPLAINT, "{text}");
        }
    }

    #[test]
    fn values_round_up() {
        let quantity = Quantity::parse("1500m").unwrap();
        assert_eq!((quantity.value(), quantity.milli_value()), (2, 1500));
        assert!(Quantity::parse("1Gi").unwrap() > Quantity::parse("1G").unwrap());
        assert_eq!(
            Quantity::parse("1Gi")
                .unwrap()
                .plus(&Quantity::parse("1Gi").unwrap())
                .to_string(),
            "2Gi"
        );
    }
}
