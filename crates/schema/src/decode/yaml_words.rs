//! Mistakes in YAML, in the words of the reader that upstream uses. What is wrong was found elsewhere.

use super::node::Node;

/// A node as Go's `%#v` writes it.
pub fn go_syntax(node: &Node) -> String {
    match node {
        Node::Null => "interface {}(nil)".to_owned(),
        Node::Bool(b) => b.to_string(),
        Node::Number(text) => text.clone(),
        Node::String(text) => super::go_quote(text),
        Node::Array(nodes) => {
            let all: Vec<String> = nodes.iter().map(go_syntax).collect();
            format!("[]interface {{}}{{{}}}", all.join(", "))
        }
        Node::Object(entries) => {
            let all: Vec<String> = entries
                .iter()
                .map(|(key, node)| format!("{}:{}", super::go_quote(key), go_syntax(node)))
                .collect();
            format!("map[interface {{}}]interface {{}}{{{}}}", all.join(", "))
        }
    }
}

/// What the reader that upstream uses says of a mistake that this one found in a line. Its scanner counts lines from
/// one and its parser from zero, and neither names the first.
pub fn words(text: &str, line: usize, info: &str) -> String {
    let at = |line: usize, what: &str| match line {
        0 => format!("yaml: {what}"),
        line => format!("yaml: line {line}: {what}"),
    };
    let scanned = |what: &str| at(if line > 1 { line } else { 0 }, what);
    let parsed = |what: &str| at(line.saturating_sub(1), what);
    let lines = text.lines().count();
    if text
        .chars()
        .any(|c| (c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\u{85}')) || c == '\u{feff}')
    {
        return "yaml: control characters are not allowed".to_owned();
    }
    if let Some(bracket) = info.strip_prefix("unclosed bracket '") {
        let what = match (text.trim_end().chars().next_back(), bracket.chars().next()) {
            (Some('{' | '[' | ',' | ':'), _) => "did not find expected node content",
            (_, Some('[')) => "did not find expected ',' or ']'",
            _ => "did not find expected ',' or '}'",
        };
        return at(lines, what);
    }
    if let Some(name) = unknown_anchor(text, line).filter(|_| info.contains("unknown anchor")) {
        return format!("yaml: unknown anchor '{name}' referenced");
    }
    match info {
        "unclosed quote" => at(
            if lines > 1 { lines } else { 0 },
            "found unexpected end of stream",
        ),
        _ if info.starts_with("unexpected character: ") || info.starts_with("tabs disallowed") => {
            scanned("found character that cannot start any token")
        }
        _ if info.contains("surrogate") => scanned("found invalid Unicode character escape code"),
        _ if info.ends_with("did not find expected key") || info == "misplaced bracket" => {
            parsed("did not find expected key")
        }
        _ if info.contains("did not find expected '-' indicator") => {
            parsed("did not find expected '-' indicator")
        }
        _ if info.contains("in flow mapping") || info.starts_with("invalid trailing content after") => {
            parsed("did not find expected ',' or '}'")
        }
        "unexpected EOF while parsing an implicit flow mapping" => {
            parsed("did not find expected node content")
        }
        _ => at(line, info),
    }
}

/// The first alias in a line.
fn unknown_anchor(text: &str, line: usize) -> Option<&str> {
    let line = text.lines().nth(line.checked_sub(1)?)?;
    let name = line.split('*').nth(1)?;
    let end = name
        .find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-')
        .unwrap_or(name.len());
    Some(&name[..end])
}
