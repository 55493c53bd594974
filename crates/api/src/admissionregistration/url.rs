//! What Go says of an address that it cannot read as a URL. Only that: what may be in the address of a webhook is said
//! elsewhere.

use skiff_meta::field;

/// The first problem, in Go's words. `rest` is what follows the scheme, without query and fragment.
pub(super) fn problem(whole: &str, rest: &str, fragment: &str) -> Option<String> {
    if whole.bytes().any(|b| b < 0x20 || b == 0x7f) {
        return Some("net/url: invalid control character in URL".to_owned());
    }
    let (authority, path) = match rest.strip_prefix("//") {
        Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
        None => ("", rest),
    };
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    bad_host(host)
        .or_else(|| bad_escape(user))
        .or_else(|| bad_escape(path))
        .or_else(|| bad_escape(fragment))
}

fn bad_host(host: &str) -> Option<String> {
    let (name, port) = match (host.starts_with('['), host.rfind(']')) {
        (true, None) => return Some("missing ']' in host".to_owned()),
        (true, Some(end)) => host.split_at(end + 1),
        (false, _) => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let digits = port.strip_prefix(':').unwrap_or(port);
    if !digits.bytes().all(|b| b.is_ascii_digit()) || (port.len() == digits.len() && !port.is_empty()) {
        return Some(format!("invalid port {} after host", field::quote(port)));
    }
    if let Some(at) = name.find('%')
        && !name[at..].starts_with("%25")
    {
        let escape: String = name[at..].chars().take(3).collect();
        return Some(format!("invalid URL escape {}", field::quote(&escape)));
    }
    let odd = |c: char| c.is_ascii() && !c.is_ascii_alphanumeric() && !"-_.~!$&'()*+,;=:[]<>\"%".contains(c);
    let character = name.chars().find(|c| odd(*c))?;
    Some(format!(
        "invalid character {} in host name",
        field::quote(&character.to_string())
    ))
}

/// A percent sign that no two hexadecimal digits follow.
fn bad_escape(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut from = 0;
    while let Some(at) = text[from..].find('%').map(|at| from + at) {
        let hexadecimal = |place: usize| bytes.get(place).is_some_and(u8::is_ascii_hexdigit);
        if !hexadecimal(at + 1) || !hexadecimal(at + 2) {
            let escape: String = text[at..].chars().take(3).collect();
            return Some(format!("invalid URL escape {}", field::quote(&escape)));
        }
        from = at + 3;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_are_gos() {
        let check = |rest: &str, expected: Option<&str>| {
            let found = problem(&format!("https:{rest}"), rest, "");
            assert_eq!(found.as_deref(), expected, "{rest}");
        };
        check("//x:9a/", Some("invalid port \":9a\" after host"));
        check("//a:b:c/", Some("invalid port \":b:c\" after host"));
        check("//[::1]x/", Some("invalid port \"x\" after host"));
        check("//[::1", Some("missing ']' in host"));
        check("//x y/", Some("invalid character \" \" in host name"));
        check("//x/%4", Some("invalid URL escape \"%4\""));
        check("//x/a%2/b", Some("invalid URL escape \"%2/\""));
        check("//x%41/", Some("invalid URL escape \"%41\""));
        check("//u%zz@x/", Some("invalid URL escape \"%zz\""));
        check("//x\u{1}/", Some("net/url: invalid control character in URL"));
        for fine in [
            "//x:",
            "//x:80/a%20b",
            "//[fe80::1%25en0]/",
            "//<x>/",
            "//[::1]:443",
            "",
        ] {
            check(fine, None);
        }
        assert_eq!(
            problem("https://x/#%zz", "//x/", "%zz").as_deref(),
            Some("invalid URL escape \"%zz\"")
        );
    }
}
