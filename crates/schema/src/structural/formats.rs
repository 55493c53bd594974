//! String formats of OpenAPI schemas, as upstream's registry of formats knows them.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use regex::Regex;

/// The formats of strings, without dashes.
const STRINGS: [&str; 26] = [
    "bsonobjectid",
    "uri",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "cidr",
    "mac",
    "uuid",
    "uuid3",
    "uuid4",
    "uuid5",
    "isbn",
    "isbn10",
    "isbn13",
    "creditcard",
    "ssn",
    "hexcolor",
    "rgbcolor",
    "byte",
    "password",
    "date",
    "duration",
    "datetime",
    "k8sshortname",
    "k8slongname",
];

/// Whether upstream knows the format for this type; what it does not know has no effect.
pub fn recognized(kind: &str, int_or_string: bool, format: &str) -> bool {
    // A schema of two types has none in particular.
    let kind = if int_or_string { "" } else { kind };
    match kind {
        "" | "string" => STRINGS.contains(&format.replace('-', "").as_str()),
        "integer" => matches!(format, "int32" | "int64"),
        "number" => matches!(format, "float" | "double"),
        _ => false,
    }
}

/// The format, or nothing where it has no effect.
pub(super) fn supported(kind: &str, int_or_string: bool, format: &str) -> String {
    if recognized(kind, int_or_string, format) {
        format.to_owned()
    } else {
        String::new()
    }
}

macro_rules! pattern {
    ($text:expr) => {{
        static PATTERN: LazyLock<Regex> = LazyLock::new(|| Regex::new($text).expect("a constant pattern"));
        &*PATTERN
    }};
}

/// Whether a text has the format. Formats that nobody knows let everything pass.
pub fn matches(format: &str, text: &str) -> bool {
    match format.replace('-', "").as_str() {
        "bsonobjectid" => text.len() == 24 && text.bytes().all(|b| b.is_ascii_hexdigit()),
        "uri" => is_uri(text),
        "email" => is_email(text),
        "hostname" => is_hostname(text),
        "ipv4" => is_ipv4(text),
        "ipv6" => text.contains(':') && text.parse::<Ipv6Addr>().is_ok(),
        "cidr" => is_cidr(text),
        "mac" => is_mac(text),
        "uuid" => {
            pattern!(r"(?i)^[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}$").is_match(text)
        }
        "uuid3" => pattern!(r"(?i)^[0-9a-f]{8}-?[0-9a-f]{4}-?3[0-9a-f]{3}-?[0-9a-f]{4}-?[0-9a-f]{12}$")
            .is_match(text),
        "uuid4" => pattern!(r"(?i)^[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}$")
            .is_match(text),
        "uuid5" => pattern!(r"(?i)^[0-9a-f]{8}-?[0-9a-f]{4}-?5[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}$")
            .is_match(text),
        "isbn" => is_isbn(text, 10) || is_isbn(text, 13),
        "isbn10" => is_isbn(text, 10),
        "isbn13" => is_isbn(text, 13),
        "creditcard" => is_credit_card(text),
        "ssn" => text.len() == 11 && pattern!(r"^\d{3}[- ]?\d{2}[- ]?\d{4}$").is_match(text),
        "hexcolor" => pattern!(r"^#?([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$").is_match(text),
        "rgbcolor" => is_rgb(text),
        "byte" => is_base64(text),
        "date" => is_date(text),
        "datetime" => is_date_time(text),
        "duration" => skiff_meta::duration::parse_openapi(text).is_ok(),
        "k8sshortname" => text.len() <= 63 && is_segment(text),
        "k8slongname" => text.len() <= 253 && text.split('.').all(is_segment),
        _ => true,
    }
}

fn is_segment(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    !text.is_empty()
        && text.bytes().all(|b| plain(b) || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_uri(text: &str) -> bool {
    // As Go's ParseRequestURI: an absolute URI or an absolute path.
    if text.is_empty() || text.bytes().any(|b| b < 0x20 || b == 0x7f) {
        return false;
    }
    if text.starts_with('/') || text == "*" {
        return true;
    }
    let Some((scheme, rest)) = text.split_once(':') else {
        return false;
    };
    let mut bytes = scheme.bytes();
    let named = bytes.next().is_some_and(|b| b.is_ascii_alphabetic())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'));
    if !named {
        return false;
    }
    let Some(authority) = rest.strip_prefix("//") else {
        return true;
    };
    let host = authority.split(['/', '?']).next().unwrap_or("");
    !host.contains([' ', '<', '>', '"', '\\', '^', '`', '{', '|', '}'])
}

fn is_email(text: &str) -> bool {
    // `name <address>` counts, as in Go's mail.ParseAddress.
    let address = match text.rsplit_once('<') {
        Some((_, rest)) => match rest.strip_suffix('>') {
            Some(address) => address,
            None => return false,
        },
        None => text.trim(),
    };
    let Some((local, domain)) = address.rsplit_once('@') else {
        return false;
    };
    let atom = |b: u8| b.is_ascii_alphanumeric() || b >= 0x80 || b"!#$%&'*+-/=?^_`{|}~".contains(&b);
    let dotted = |text: &str| {
        !text.is_empty()
            && text
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(atom))
    };
    let quoted = local.len() >= 2 && local.starts_with('"') && local.ends_with('"');
    (dotted(local) || quoted) && (dotted(domain) || (domain.starts_with('[') && domain.ends_with(']')))
}

fn is_hostname(text: &str) -> bool {
    let pattern = pattern!(
        r"^([a-zA-Z0-9\p{S}\p{L}]((-?[a-zA-Z0-9\p{S}\p{L}]{0,62})?)|([a-zA-Z0-9\p{S}\p{L}](([a-zA-Z0-9\-\p{S}\p{L}]{0,61}[a-zA-Z0-9\p{S}\p{L}])?)(\.)){1,}([a-zA-Z\p{L}]){2,63})$"
    );
    text.len() <= 255 && text.split('.').all(|part| part.len() <= 63) && pattern.is_match(text)
}

/// Leading zeros are tolerated, as upstream's sloppy parser does.
fn is_ipv4(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let number =
        |part: &&str| !part.is_empty() && part.len() <= 16 && part.parse::<u64>().is_ok_and(|n| n <= 255);
    (parts.len() == 4 && parts.iter().all(number) && !text.contains(['+', '-']))
        || (text.contains('.') && text.contains(':') && text.parse::<Ipv6Addr>().is_ok())
}

fn is_cidr(text: &str) -> bool {
    let Some((address, bits)) = text.split_once('/') else {
        return false;
    };
    let digits = !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit());
    let Ok(bits) = bits.parse::<u8>() else {
        return false;
    };
    digits
        && ((is_ipv4(address) && !address.contains(':') && bits <= 32)
            || (address.parse::<Ipv6Addr>().is_ok() && bits <= 128)
            || (address.parse::<Ipv4Addr>().is_ok() && bits <= 32))
}

fn is_mac(text: &str) -> bool {
    let hex = |part: &str, length: usize| part.len() == length && part.bytes().all(|b| b.is_ascii_hexdigit());
    for separator in [':', '-'] {
        let parts: Vec<&str> = text.split(separator).collect();
        if matches!(parts.len(), 6 | 8 | 20) && parts.iter().all(|part| hex(part, 2)) {
            return true;
        }
    }
    let parts: Vec<&str> = text.split('.').collect();
    matches!(parts.len(), 3 | 4 | 10) && parts.iter().all(|part| hex(part, 4))
}

fn is_isbn(text: &str, version: usize) -> bool {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|b| !b.is_ascii_whitespace() && *b != b'-')
        .collect();
    if digits.len() != version {
        return false;
    }
    let value = |index: usize| u32::from(digits[index] - b'0');
    if version == 10 {
        let (body, last) = digits.split_at(9);
        if !body.iter().all(u8::is_ascii_digit) || !(last[0].is_ascii_digit() || last[0] == b'X') {
            return false;
        }
        let check = if last[0] == b'X' { 10 } else { value(9) };
        let sum: u32 = (0..9).map(|i| (i as u32 + 1) * value(i)).sum::<u32>() + 10 * check;
        return sum.is_multiple_of(11);
    }
    if !digits.iter().all(u8::is_ascii_digit) {
        return false;
    }
    let sum: u32 = (0..12)
        .map(|i| if i % 2 == 0 { value(i) } else { 3 * value(i) })
        .sum();
    (10 - sum % 10) % 10 == value(12)
}

fn is_credit_card(text: &str) -> bool {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let pattern = pattern!(
        r"^(?:4[0-9]{12}(?:[0-9]{3})?|5[1-5][0-9]{14}|6(?:011|5[0-9][0-9])[0-9]{12}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}|(?:2131|1800|35\d{3})\d{11})$"
    );
    let sum: u32 = digits
        .bytes()
        .rev()
        .enumerate()
        .map(|(place, digit)| {
            let digit = u32::from(digit - b'0');
            match (place % 2 == 1, digit * 2) {
                (false, _) => digit,
                (true, doubled) if doubled >= 10 => doubled % 10 + 1,
                (true, doubled) => doubled,
            }
        })
        .sum();
    pattern.is_match(&digits) && sum.is_multiple_of(10)
}

fn is_rgb(text: &str) -> bool {
    let inner = text.strip_prefix("rgb(").and_then(|rest| rest.strip_suffix(')'));
    inner.is_some_and(|inner| {
        let parts: Vec<&str> = inner.split(',').map(str::trim).collect();
        parts.len() == 3
            && parts.iter().all(|part| {
                part.bytes().all(|b| b.is_ascii_digit())
                    && part.parse::<u8>().is_ok()
                    && (part.len() == 1 || !part.starts_with('0'))
            })
    })
}

fn is_base64(text: &str) -> bool {
    let body = text.trim_end_matches('=');
    let padding = text.len() - body.len();
    text.len().is_multiple_of(4)
        && padding <= 2
        && !text.is_empty()
        && body
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'+' || b == b'/')
}

fn is_date(text: &str) -> bool {
    text.len() == 10 && skiff_meta::time::parse(&format!("{text}T00:00:00Z")).is_some()
}

fn is_date_time(text: &str) -> bool {
    let lower = text.to_lowercase();
    let Some((date, time)) = lower.split_once('t') else {
        return false;
    };
    let pattern = pattern!(r"^([0-9]{2}):([0-9]{2}):([0-9]{2})(.[0-9]+)?(z|([+-][0-9]{2}:[0-9]{2}))$");
    is_date(date)
        && pattern
            .captures(time)
            .is_some_and(|found| &found[1] <= "23" && &found[2] <= "59" && &found[3] <= "59")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats() {
        let check = |format: &str, good: &[&str], bad: &[&str]| {
            for text in good {
                assert!(matches(format, text), "{format} {text}");
            }
            for text in bad {
                assert!(!matches(format, text), "{format} {text}");
            }
        };
        check(
            "date-time",
            &["2014-12-15T19:30:20.000Z", "2014-12-15T19:30:20+01:00"],
            &["2014-12-15", "x", "2014-12-15T25:00:00Z"],
        );
        check("date", &["2014-12-15"], &["2014-13-15", "2014-12-1"]);
        check("ipv4", &["1.2.3.4", "01.2.3.4"], &["1.2.3", "1.2.3.256", "::1"]);
        check("ipv6", &["::1", "fe80::1"], &["1.2.3.4"]);
        check("cidr", &["10.0.0.0/8", "::/0"], &["10.0.0.0", "10.0.0.0/33"]);
        check("mac", &["01:23:45:67:89:ab", "0123.4567.89ab"], &["01:23"]);
        check("uuid", &["7c0f3a1e-8ce5-4c1c-b5c5-3a5b3e3f5f11"], &["7c0f"]);
        check("email", &["a@b.com", "A <a@b>"], &["a", "@b", "a@"]);
        check("hostname", &["a.example.com", "a"], &["-a", "a_b"]);
        check("uri", &["http://a/b", "/path"], &["a b", "a"]);
        check("byte", &["aGVsbG8="], &["a", "hello!=="]);
        check("duration", &["3s", "1h30m", "22 ns", "3 days"], &["x", ""]);
        check("isbn", &["0321751043", "978-0321751041"], &["123"]);
        check("creditcard", &["4012 8888 8888 1881"], &["4012888888881882"]);
        check("hexcolor", &["#FFFFFF", "fff"], &["#ff"]);
        check("rgbcolor", &["rgb(255,0,1)"], &["rgb(256,0,1)"]);
        check("k8s-short-name", &["a-b"], &["a.b", "A"]);
        check("k8s-long-name", &["a-b.c"], &["a..b"]);
    }
}
