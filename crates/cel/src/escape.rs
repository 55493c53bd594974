//! Property names as CEL identifiers: `a.b` is written `a__dot__b`, reserved words are wrapped in `__`.

use std::borrow::Cow;

/// Words that the language keeps for itself.
pub const RESERVED: &[&str] = &[
    "true",
    "false",
    "null",
    "in",
    "as",
    "break",
    "const",
    "continue",
    "else",
    "for",
    "function",
    "if",
    "import",
    "let",
    "loop",
    "package",
    "namespace",
    "return",
    "var",
    "void",
    "while",
];

/// The identifier for a property, or `None` where no identifier can stand for it.
pub fn escape(name: &str) -> Option<Cow<'_, str>> {
    let first = name.bytes().next()?;
    if first.is_ascii_digit() {
        return None;
    }
    if RESERVED.contains(&name) {
        return Some(Cow::Owned(format!("__{name}__")));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.chars().all(plain) && !name.contains("__") {
        return Some(Cow::Borrowed(name));
    }
    let mut escaped = String::with_capacity(name.len() + 16);
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        if let Some(tail) = rest.strip_prefix("__") {
            escaped.push_str("__underscores__");
            rest = tail;
            continue;
        }
        match c {
            '.' => escaped.push_str("__dot__"),
            '-' => escaped.push_str("__dash__"),
            '/' => escaped.push_str("__slash__"),
            c if plain(c) => escaped.push(c),
            _ => return None,
        }
        rest = &rest[c.len_utf8()..];
    }
    Some(Cow::Owned(escaped))
}

/// The property that an identifier stands for, or `None` for an escape that does not exist.
pub fn unescape(identifier: &str) -> Option<Cow<'_, str>> {
    if !identifier.contains("__") {
        return Some(Cow::Borrowed(identifier));
    }
    let mut name = String::with_capacity(identifier.len());
    let mut rest = identifier;
    while let Some(start) = rest.find("__") {
        let after = &rest[start + 2..];
        // An escape is two underscores, at least one other character, two underscores.
        let word_length = after.find('_').unwrap_or(after.len());
        let word = &after[..word_length];
        if word.is_empty() || !after[word_length..].starts_with("__") {
            name.push_str(&rest[..=start]);
            rest = &rest[start + 1..];
            continue;
        }
        name.push_str(&rest[..start]);
        match word {
            "underscores" => name.push_str("__"),
            "dot" => name.push('.'),
            "dash" => name.push('-'),
            "slash" => name.push('/'),
            reserved if RESERVED.contains(&reserved) && word.len() + 4 == identifier.len() => {
                name.push_str(word)
            }
            _ => return None,
        }
        rest = &after[word_length + 2..];
    }
    name.push_str(rest);
    Some(Cow::Owned(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        let check = |name: &str, escaped: &str| {
            assert_eq!(escape(name).as_deref(), Some(escaped), "{name}");
            assert_eq!(unescape(escaped).as_deref(), Some(name), "{escaped}");
        };
        check("a", "a");
        check("a_b", "a_b");
        check("a__b", "a__underscores__b");
        check("a.b-c/d", "a__dot__b__dash__c__slash__d");
        check("namespace", "__namespace__");
        check("namespaces", "namespaces");
        check("_", "_");
        check("___", "__underscores___");
        check("-a", "__dash__a");
    }

    #[test]
    fn some_names_have_no_identifier() {
        for name in ["", "1a", "a b", "ä", "a$"] {
            assert_eq!(escape(name), None, "{name}");
        }
        for identifier in ["a__nothing__b", "a__true__"] {
            assert_eq!(unescape(identifier), None, "{identifier}");
        }
    }
}
