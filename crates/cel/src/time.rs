//! Times and durations as CEL and Go know them: RFC 3339 with its offset kept, durations such as `1h30m`.

use std::fmt;

use jiff::tz::TimeZone;

use crate::error::EvalError;

const NANOS: i128 = 1_000_000_000;
/// 0001-01-01T00:00:00Z and 9999-12-31T23:59:59Z.
const MIN_SECONDS: i64 = -62_135_596_800;
const MAX_SECONDS: i64 = 253_402_300_799;

/// A point in time, with the offset it was written in.
#[derive(Debug, Clone, Copy)]
pub struct Timestamp {
    seconds: i64,
    nanos: u32,
    offset: i32,
}

impl Timestamp {
    pub(crate) fn from_seconds(seconds: i64) -> Result<Self, EvalError> {
        Self::new(seconds, 0, 0)
    }

    fn new(seconds: i64, nanos: u32, offset: i32) -> Result<Self, EvalError> {
        if !(MIN_SECONDS..=MAX_SECONDS).contains(&seconds) {
            return Err(EvalError::new("timestamp overflow"));
        }
        Ok(Self {
            seconds,
            nanos,
            offset,
        })
    }

    /// Nanoseconds since 1970.
    pub(crate) fn instant(&self) -> i128 {
        i128::from(self.seconds) * NANOS + i128::from(self.nanos)
    }

    pub(crate) fn seconds(&self) -> i64 {
        self.seconds
    }

    pub(crate) fn same_instant(&self, other: &Self) -> bool {
        self.instant() == other.instant()
    }

    /// True for the first moment of the year 1.
    pub(crate) fn is_zero(&self) -> bool {
        self.seconds == MIN_SECONDS && self.nanos == 0
    }

    /// RFC 3339.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        parse_rfc3339(text).ok_or_else(|| {
            format!(
                "parsing time {} as \"2006-01-02T15:04:05Z07:00\": cannot parse {} as \"2006\"",
                skiff_meta::field::quote(text),
                skiff_meta::field::quote(text)
            )
        })
    }

    /// What the `date-time` format takes: RFC 3339, also without a zone or with a colonless one.
    pub(crate) fn parse_lenient(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self {
                seconds: 0,
                nanos: 0,
                offset: 0,
            });
        }
        parse_rfc3339(text)
            .or_else(|| parse_rfc3339(&format!("{text}Z")))
            .ok_or_else(|| {
                let quoted = skiff_meta::field::quote(text);
                format!("parsing time {quoted} as \"2006-01-02T15:04:05\": cannot parse {quoted} as \"2006\"")
            })
    }

    /// `2006-01-02`.
    pub(crate) fn parse_date(text: &str) -> Result<Self, String> {
        let whole = format!("{text}T00:00:00Z");
        match parse_rfc3339(&whole) {
            Some(at) if text.len() == 10 => Ok(at),
            _ => Err(format!(
                "parsing time {0} as \"2006-01-02\": cannot parse {0} as \"2006\"",
                skiff_meta::field::quote(text)
            )),
        }
    }

    pub(crate) fn plus(&self, nanos: i64) -> Result<Self, EvalError> {
        let moved = self.instant() + i128::from(nanos);
        let seconds =
            i64::try_from(moved.div_euclid(NANOS)).map_err(|_| EvalError::new("timestamp overflow"))?;
        Self::new(seconds, moved.rem_euclid(NANOS) as u32, self.offset)
    }

    /// The duration from another time to this.
    pub(crate) fn since(&self, other: &Self) -> Result<i64, EvalError> {
        i64::try_from(self.instant() - other.instant()).map_err(|_| EvalError::new("integer overflow"))
    }

    /// The civil time in a zone: a name, or an offset such as `-02:30`.
    pub(crate) fn civil(&self, zone: Option<&str>) -> Result<Civil, EvalError> {
        let offset = match zone {
            None | Some("" | "UTC") => 0,
            Some(zone) => match zone.find(':') {
                None => {
                    let unknown = || EvalError::new(format!("unknown time zone {zone}"));
                    let named = TimeZone::get(zone).map_err(|_| unknown())?;
                    let (first, last) = (jiff::Timestamp::MIN.as_second(), jiff::Timestamp::MAX.as_second());
                    let at = jiff::Timestamp::from_second(self.seconds.clamp(first, last))
                        .map_err(|_| unknown())?;
                    i64::from(named.to_offset(at).seconds())
                }
                Some(colon) => {
                    let number = |text: &str| {
                        text.parse::<i64>().map_err(|_| {
                            let quoted = skiff_meta::field::quote(text);
                            EvalError::new(format!("strconv.Atoi: parsing {quoted}: invalid syntax"))
                        })
                    };
                    let (hours, minutes) = (number(&zone[..colon])?, number(&zone[colon + 1..])?);
                    let minutes = if zone.starts_with('-') { -minutes } else { minutes };
                    let whole = hours
                        .saturating_mul(60)
                        .saturating_add(minutes)
                        .saturating_mul(60);
                    whole.clamp(-MAX_SECONDS, MAX_SECONDS)
                }
            },
        };
        Ok(Civil::at(self.seconds + offset, self.nanos))
    }
}

/// A date and time of day in the Gregorian calendar, also before it was introduced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Civil {
    pub year: i64,
    pub month: i64,
    pub day: i64,
    pub day_of_year: i64,
    /// From Sunday.
    pub weekday: i64,
    pub hour: i64,
    pub minute: i64,
    pub second: i64,
    pub nanos: u32,
}

const DAY: i64 = 86_400;
/// Days of four hundred years, after which the calendar repeats.
const ERA: i64 = 146_097;

impl Civil {
    fn at(seconds: i64, nanos: u32) -> Self {
        let (days, rest) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
        // Years are counted from March, so that the leap day is the last.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(ERA), shifted.rem_euclid(ERA));
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * from_march + 2) / 153;
        let month = if shifted_month < 10 {
            shifted_month + 3
        } else {
            shifted_month - 9
        };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Self {
            year,
            month,
            day: from_march - (153 * shifted_month + 2) / 5 + 1,
            day_of_year: days - days_before(year, 1, 1),
            weekday: (days + 4).rem_euclid(7),
            hour: rest / 3_600,
            minute: rest / 60 % 60,
            second: rest % 60,
            nanos,
        }
    }
}

/// Days from 1970 to a date.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let shifted_month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    era * ERA + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

fn days_of(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn parse_rfc3339(text: &str) -> Option<Timestamp> {
    let bytes = text.as_bytes();
    let digits = |from: usize, count: usize| -> Option<u32> {
        let part = bytes.get(from..from + count)?;
        part.iter().all(u8::is_ascii_digit).then_some(())?;
        text[from..from + count].parse().ok()
    };
    let at = |index: usize, wanted: u8| (bytes.get(index) == Some(&wanted)).then_some(());
    let (year, month, day) = (digits(0, 4)?, digits(5, 2)?, digits(8, 2)?);
    at(4, b'-')?;
    at(7, b'-')?;
    if !matches!(bytes.get(10), Some(b'T')) {
        return None;
    }
    let (hour, minute, second) = (digits(11, 2)?, digits(14, 2)?, digits(17, 2)?);
    at(13, b':')?;
    at(16, b':')?;
    let mut next = 19;
    let mut nanos = 0u32;
    if matches!(bytes.get(next), Some(b'.' | b',')) {
        let start = next + 1;
        next = start;
        while bytes.get(next).is_some_and(u8::is_ascii_digit) {
            next += 1;
        }
        if next == start {
            return None;
        }
        let kept = &text[start..next.min(start + 9)];
        nanos = format!("{kept:0<9}").parse().ok()?;
    }
    let offset = match bytes.get(next)? {
        b'Z' if next + 1 == bytes.len() => 0,
        sign @ (b'+' | b'-') => {
            let (hours, minutes) = (digits(next + 1, 2)?, digits(next + 4, 2)?);
            at(next + 3, b':')?;
            if next + 6 != bytes.len() || hours > 24 || minutes >= 60 {
                return None;
            }
            let seconds = (hours * 60 + minutes) as i32 * 60;
            if *sign == b'-' { -seconds } else { seconds }
        }
        _ => return None,
    };
    let (year, month, day) = (i64::from(year), i64::from(month), i64::from(day));
    let valid = (1..=12).contains(&month) && (1..=days_of(year, month)).contains(&day);
    if !valid || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let utc = days_before(year, month, day) * DAY + i64::from((hour * 60 + minute) * 60 + second);
    Timestamp::new(utc - i64::from(offset), nanos, offset).ok()
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let civil = Civil::at(self.seconds + i64::from(self.offset), self.nanos);
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}",
            civil.year, civil.month, civil.day, civil.hour, civil.minute, civil.second
        )?;
        if self.nanos > 0 {
            let fraction = format!("{:09}", self.nanos);
            write!(f, ".{}", fraction.trim_end_matches('0'))?;
        }
        if self.offset == 0 {
            return f.write_str("Z");
        }
        let sign = if self.offset < 0 { '-' } else { '+' };
        let minutes = self.offset.abs() / 60;
        write!(f, "{sign}{:02}:{:02}", minutes / 60, minutes % 60)
    }
}

/// `string(duration)`: seconds, with as few digits as tell it apart as a double.
pub(crate) fn format_seconds(nanos: i64) -> String {
    let (whole, rest) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
    format!("{}s", whole as f64 + rest as f64 / 1e9)
}
