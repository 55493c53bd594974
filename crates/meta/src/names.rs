//! Rules for names, labels and the like. Each returns the complaints, in upstream's words; empty means valid.

pub const DNS1123_LABEL_MAX: usize = 63;
pub const DNS1123_SUBDOMAIN_MAX: usize = 253;
pub const LABEL_VALUE_MAX: usize = 63;

const LABEL_FMT: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const QUALIFIED_FMT: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";

fn max_len(length: usize) -> String {
    format!("must be no more than {length} characters")
}

/// Newer rules count bytes, and say so.
fn max_bytes(length: usize) -> String {
    format!("must be no more than {length} bytes")
}

/// The sentence upstream makes of a rule, its pattern and examples.
pub fn regex_error(rule: &str, pattern: &str, examples: &[&str]) -> String {
    if examples.is_empty() {
        return format!("{rule} (regex used for validation is '{pattern}')");
    }
    // COMPAT: upstream leaves a comma and two blanks between examples.
    let examples: Vec<String> = examples.iter().map(|e| format!("'{e}', ")).collect();
    format!(
        "{rule} (e.g. {}regex used for validation is '{pattern}')",
        examples.join(" or ")
    )
}

fn lower_alphanumeric(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

/// First and last byte satisfy `edge`, those between also `inner`.
fn framed(text: &str, edge: fn(u8) -> bool, inner: fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    match bytes {
        [] => false,
        [first, .., last] => edge(*first) && edge(*last) && bytes.iter().all(|b| edge(*b) || inner(*b)),
        [only] => edge(*only),
    }
}

fn is_label(text: &str) -> bool {
    framed(text, lower_alphanumeric, |b| b == b'-')
}

fn is_subdomain(text: &str) -> bool {
    text.split('.').all(is_label)
}

pub fn dns1123_label(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > DNS1123_LABEL_MAX {
        errors.push(max_len(DNS1123_LABEL_MAX));
    }
    if !is_label(text) {
        if is_subdomain(text) {
            errors.push("must not contain dots".to_owned());
        } else {
            errors.push(regex_error(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character",
                LABEL_FMT,
                &["my-name", "123-abc"],
            ));
        }
    }
    errors
}

pub fn dns1123_subdomain(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > DNS1123_SUBDOMAIN_MAX {
        errors.push(max_len(DNS1123_SUBDOMAIN_MAX));
    }
    if !is_subdomain(text) {
        errors.push(regex_error(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character",
            &format!("{LABEL_FMT}(\\.{LABEL_FMT})*"),
            &["example.com"],
        ));
    }
    errors
}

pub fn dns1035_label(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > DNS1123_LABEL_MAX {
        errors.push(max_len(DNS1123_LABEL_MAX));
    }
    if !is_label(text) || !text.starts_with(|c: char| c.is_ascii_lowercase()) {
        errors.push(regex_error(
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character",
            "[a-z]([-a-z0-9]*[a-z0-9])?",
            &["my-name", "abc-123"],
        ));
    }
    errors
}

pub fn wildcard_dns1123_subdomain(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > DNS1123_SUBDOMAIN_MAX {
        errors.push(max_len(DNS1123_SUBDOMAIN_MAX));
    }
    if !text.strip_prefix("*.").is_some_and(is_subdomain) {
        errors.push(regex_error(
            "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character",
            &format!("\\*\\.{LABEL_FMT}(\\.{LABEL_FMT})*"),
            &["*.example.com"],
        ));
    }
    errors
}

fn qualified_part(part: &str) -> bool {
    framed(
        part,
        |b| b.is_ascii_alphanumeric(),
        |b| matches!(b, b'-' | b'_' | b'.'),
    )
}

const QUALIFIED_RULE: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";

/// A label or annotation key: an optional DNS prefix, a slash, a name.
pub fn qualified_name(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    let parts: Vec<&str> = text.split('/').collect();
    let name = match parts[..] {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                errors.push("prefix part must be non-empty".to_owned());
            } else {
                errors.extend(
                    dns1123_subdomain(prefix)
                        .into_iter()
                        .map(|m| format!("prefix part {m}")),
                );
            }
            name
        }
        _ => {
            let rule = regex_error(
                &format!("a valid label key {QUALIFIED_RULE}"),
                QUALIFIED_FMT,
                &["MyName", "my.name", "123-abc"],
            );
            errors.push(format!(
                "{rule} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            ));
            return errors;
        }
    };
    if name.is_empty() {
        errors.push("name part must be non-empty".to_owned());
    } else if name.len() > 63 {
        errors.push(format!("name part {}", max_bytes(63)));
    }
    if !qualified_part(name) {
        let rule = regex_error(QUALIFIED_RULE, QUALIFIED_FMT, &["MyName", "my.name", "123-abc"]);
        errors.push(format!("name part {rule}"));
    }
    errors
}

pub fn label_value(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > LABEL_VALUE_MAX {
        errors.push(max_bytes(LABEL_VALUE_MAX));
    }
    if !text.is_empty() && !qualified_part(text) {
        errors.push(regex_error(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character",
            &format!("({QUALIFIED_FMT})?"),
            &["MyValue", "my_value", "12345"],
        ));
    }
    errors
}

/// A key of a ConfigMap or Secret.
pub fn config_map_key(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > DNS1123_SUBDOMAIN_MAX {
        errors.push(max_len(DNS1123_SUBDOMAIN_MAX));
    }
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if text.is_empty() || !text.bytes().all(allowed) {
        errors.push(regex_error(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            "[-._a-zA-Z0-9]+",
            &["key.name", "KEY_NAME", "key-name"],
        ));
    }
    match text {
        "." => errors.push("must not be '.'".to_owned()),
        ".." => errors.push("must not be '..'".to_owned()),
        t if t.starts_with("..") => errors.push("must not start with '..'".to_owned()),
        _ => {}
    }
    errors
}

/// The name of a container or service port: an IANA service name.
pub fn port_name(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > 15 {
        errors.push(max_len(15));
    }
    if !text.bytes().all(|b| lower_alphanumeric(b) || b == b'-') || text.is_empty() {
        errors.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !text.bytes().any(|b| b.is_ascii_lowercase()) {
        errors.push("must contain at least one letter (a-z)".to_owned());
    }
    if text.contains("--") {
        errors.push("must not contain consecutive hyphens".to_owned());
    }
    if text.starts_with('-') || text.ends_with('-') {
        errors.push("must not begin or end with a hyphen".to_owned());
    }
    errors
}

pub fn port_number(port: i64) -> Vec<String> {
    if (1..=65535).contains(&port) {
        Vec::new()
    } else {
        vec!["must be between 1 and 65535, inclusive".to_owned()]
    }
}

/// Names that may stand as one segment of a URL path: RBAC objects and other kinds with loose rules.
pub fn path_segment(text: &str, prefix: bool) -> Vec<String> {
    let mut errors = Vec::new();
    if !prefix && (text == "." || text == "..") {
        errors.push(format!("may not be '{text}'"));
    }
    for forbidden in ["/", "%"] {
        if text.contains(forbidden) {
            errors.push(format!("may not contain '{forbidden}'"));
        }
    }
    errors
}

/// The part of a name that `generateName` gives, as upstream masks it: a trailing `-` stands for what follows.
pub fn mask_trailing_dash(text: &str) -> String {
    match text.strip_suffix('-') {
        Some(head) if !head.is_empty() => format!("{head}a"),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_subdomains() {
        assert!(dns1123_label("my-name-1").is_empty());
        assert_eq!(dns1123_label("a.b"), ["must not contain dots"]);
        assert_eq!(
            dns1123_label("A"),
            [
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
            ]
        );
        assert!(dns1123_subdomain("a.b-c.d").is_empty());
        for bad in ["", "a..b", "-a", "a-", "a_b"] {
            assert_eq!(dns1123_subdomain(bad).len(), 1, "{bad}");
        }
        assert_eq!(
            dns1123_label(&"a".repeat(64)),
            ["must be no more than 63 characters"]
        );
        assert!(dns1035_label("1a").len() == 1 && dns1035_label("a1").is_empty());
    }

    #[test]
    fn keys_and_values() {
        for good in ["a", "app.kubernetes.io/name", "A_b.c-1"] {
            assert!(qualified_name(good).is_empty(), "{good}");
        }
        for bad in ["", "/a", "a/", "a/b/c", "-a", "A B"] {
            assert!(!qualified_name(bad).is_empty(), "{bad}");
        }
        assert!(label_value("").is_empty());
        assert!(!label_value("a b").is_empty());
    }
}
