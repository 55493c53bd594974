//! Timestamps as Kubernetes writes them. The clock is the caller's: this crate never reads one.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// `metav1.Time`: seconds, UTC.
pub fn format_seconds(at: Timestamp) -> String {
    at.to_zoned(TimeZone::UTC)
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string()
}

/// `metav1.MicroTime`: always six digits.
pub fn format_micros(at: Timestamp) -> String {
    at.to_zoned(TimeZone::UTC)
        .strftime("%Y-%m-%dT%H:%M:%S.%6fZ")
        .to_string()
}

/// Any RFC 3339 time. The library reads more: signed years, other separators, hours alone as an offset.
pub fn parse(text: &str) -> Option<Timestamp> {
    let bytes = text.as_bytes();
    let zone = matches!(bytes, [.., b'Z'] | [.., b'+' | b'-', _, _, b':', _, _]);
    if !zone || bytes.get(10) != Some(&b'T') {
        return None;
    }
    text.parse().ok()
}

/// An age as `kubectl get` prints it: `45s`, `3m10s`, `5h2m`, `2d3h`, `400d`, `2y10d`.
pub fn human_duration(seconds: i64) -> String {
    match seconds {
        s if s < -1 => "<invalid>".to_owned(),
        s if s < 0 => "0s".to_owned(),
        s if s < 120 => format!("{s}s"),
        s if s < 600 => two(s / 60, "m", s % 60, "s"),
        s if s < 180 * 60 => format!("{}m", s / 60),
        s if s < 8 * 3600 => two(s / 3600, "h", s / 60 % 60, "m"),
        s if s < 48 * 3600 => format!("{}h", s / 3600),
        s if s < 8 * 86_400 => two(s / 86_400, "d", s / 3600 % 24, "h"),
        s if s < 2 * 365 * 86_400 => format!("{}d", s / 86_400),
        s if s < 8 * 365 * 86_400 => two(s / (365 * 86_400), "y", s / 86_400 % 365, "d"),
        s => format!("{}y", s / (365 * 86_400)),
    }
}

fn two(major: i64, major_unit: &str, minor: i64, minor_unit: &str) -> String {
    if minor == 0 {
        format!("{major}{major_unit}")
    } else {
        format!("{major}{major_unit}{minor}{minor_unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_print_as_upstream() {
        let at = parse("2026-11-15T22:10:34.5+02:00").unwrap();
        assert_eq!(format_seconds(at), "2026-11-15T20:10:34Z");
        assert_eq!(format_micros(at), "2026-11-15T20:10:34.500000Z");
        for other in [
            "-002024-01-02T03:04:05Z",
            "2024-01-02T03:04:05-00",
            "2024-01-02 03:04:05Z",
            "2024-01-02T03:04:05",
            "2024-01-02",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn ages() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (190, "3m10s"),
            (601, "10m"),
            (18_120, "5h2m"),
            (183_600, "2d3h"),
        ] {
            assert_eq!(human_duration(seconds), text);
        }
    }
}
