//! YAML to the same tree as JSON, with the scalar rules of the YAML reader that upstream uses (YAML 1.1
//! words such as `yes`, leading-zero octals). Only the first document counts. Aliases are bounded.

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Parser, ScalarStyle, Span, StrInput};

use super::node::Node;
use super::yaml_words::{go_syntax, words};

/// Nodes that one body may have copied, by anchors and aliases. Upstream stops by a ratio of the same order.
const MAX_COPIED_NODES: usize = 400_000;
/// And bytes of text in them: a long string is one node.
const MAX_COPIED_BYTES: usize = 16 << 20;
/// Complaints about one body, each of a line.
const MAX_DUPLICATES: usize = 1000;

struct Reader<'a> {
    text: &'a str,
    parser: Parser<'a, StrInput<'a>>,
    /// Absent where no alias can refer to an anchor.
    anchors: Option<HashMap<usize, Node>>,
    copied: Weight,
    duplicates: Vec<String>,
}

pub struct Yaml {
    pub node: Node,
    /// What upstream's strict reader says about keys set twice, if any were.
    pub duplicates: Option<String>,
}

pub fn parse(bytes: &[u8]) -> Result<Yaml, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "yaml: invalid leading UTF-8 octet".to_string())?;
    if let Some(version) = text.strip_prefix("%YAML")
        && version.split_whitespace().next() != Some("1.1")
    {
        return Err("yaml: found incompatible YAML document".to_string());
    }
    let mut reader = Reader {
        text,
        parser: Parser::new_from_str(text),
        anchors: text.contains('*').then(HashMap::new),
        copied: Weight::default(),
        duplicates: Vec::new(),
    };
    let node = loop {
        match reader.next()? {
            Some((Event::StreamStart | Event::DocumentStart(..), _)) => {}
            None | Some((Event::StreamEnd | Event::DocumentEnd, _)) => break Node::Null,
            Some((event, span)) => break reader.node(event, span, 0)?,
        }
    };
    let duplicates = (!reader.duplicates.is_empty())
        .then(|| format!("yaml: unmarshal errors:\n  {}", reader.duplicates.join("\n  ")));
    Ok(Yaml {
        node: sort_keys(node),
        duplicates,
    })
}

/// Upstream goes through a Go map, so keys come out sorted, and the last of a duplicate wins.
fn sort_keys(node: Node) -> Node {
    match node {
        Node::Array(nodes) => Node::Array(nodes.into_iter().map(sort_keys).collect()),
        Node::Object(entries) => {
            let sorted: std::collections::BTreeMap<String, Node> = entries
                .into_iter()
                .map(|(key, node)| (key, sort_keys(node)))
                .collect();
            Node::Object(sorted.into_iter().collect())
        }
        other => other,
    }
}

/// What a node takes in memory, roughly.
#[derive(Clone, Copy, Default)]
struct Weight {
    nodes: usize,
    bytes: usize,
}

impl Weight {
    fn add(&mut self, node: &Node) {
        self.nodes += 1;
        match node {
            Node::Array(nodes) => nodes.iter().for_each(|node| self.add(node)),
            Node::Object(entries) => entries.iter().for_each(|(key, node)| {
                self.bytes += key.len();
                self.add(node);
            }),
            Node::String(text) | Node::Number(text) => self.bytes += text.len(),
            Node::Null | Node::Bool(_) => {}
        }
    }
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<Option<(Event<'a>, Span)>, String> {
        loop {
            match self.parser.next() {
                None => return Ok(None),
                Some(Err(error)) => {
                    return Err(words(self.text, error.marker().line(), &error.info()));
                }
                Some(Ok((Event::Comment(..) | Event::Anchor(..), _))) => {}
                Some(Ok(event)) => return Ok(Some(event)),
            }
        }
    }

    fn required(&mut self) -> Result<(Event<'a>, Span), String> {
        self.next()?
            .ok_or_else(|| "yaml: unexpected end of input".to_string())
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, String> {
        if depth > super::json::MAX_DEPTH {
            return Err("yaml: exceeded max depth".to_string());
        }
        let (node, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let known = tag
                    .as_ref()
                    .and_then(|tag| tag.suffix_in_namespace("tag:yaml.org,2002:"));
                match (&tag, known) {
                    // Whatever has a tag of its own is a text.
                    (Some(_), None) => (Node::String(text.to_string()), anchor),
                    (_, known) => (scalar(&text, style, known.as_deref())?, anchor),
                }
            }
            Event::SequenceStart(_, anchor, _) => {
                let mut nodes = Vec::new();
                loop {
                    match self.required()? {
                        (Event::SequenceEnd, _) => break,
                        (event, span) => nodes.push(self.node(event, span, depth + 1)?),
                    }
                }
                (Node::Array(nodes), anchor)
            }
            Event::MappingStart(_, anchor, _) => (self.mapping(depth)?, anchor),
            Event::Alias(id) => {
                let known = self.anchors.as_ref().and_then(|anchors| anchors.get(&id));
                let node = known.ok_or("yaml: anchor value contains itself")?;
                return copy(node, &mut self.copied);
            }
            _ => {
                return Err(format!(
                    "yaml: line {}: did not find expected node content",
                    span.start.line()
                ));
            }
        };
        if anchor != 0
            && let Some(anchors) = &mut self.anchors
        {
            // Anchors inside anchors are copied again and again, so they count too.
            anchors.insert(anchor, copy(&node, &mut self.copied)?);
        }
        Ok(node)
    }

    fn mapping(&mut self, depth: usize) -> Result<Node, String> {
        let mut entries: Vec<(String, Node)> = Vec::new();
        let mut merged = Merged::default();
        let mut seen = HashSet::new();
        loop {
            let (event, span) = self.required()?;
            let merge_key = match &event {
                Event::MappingEnd => break,
                Event::Scalar(text, ScalarStyle::Plain, _, _) => text == "<<",
                _ => false,
            };
            let key = self.node(event, span, depth + 1)?;
            let (event, value_span) = self.required()?;
            let value = self.node(event, value_span, depth + 1)?;
            if merge_key {
                merged.add(value)?;
                continue;
            }
            let key = match key {
                Node::String(text) | Node::Number(text) => text,
                Node::Bool(b) => b.to_string(),
                Node::Null => {
                    return Err(format!(
                        "unsupported map key of type: %!s(<nil>), key: <nil>, value: {}",
                        go_syntax(&value)
                    ));
                }
                other => return Err(format!("yaml: invalid map key: {}", go_syntax(&other))),
            };
            if !seen.insert(key.clone()) && self.duplicates.len() < MAX_DUPLICATES {
                self.duplicates.push(format!(
                    "line {}: key {key:?} already set in map",
                    span.start.line()
                ));
            }
            entries.push((key, value));
        }
        // Own keys win over merged ones, so they come last.
        let mut all = merged.entries;
        all.retain(|(key, _)| !seen.contains(key));
        all.append(&mut entries);
        Ok(Node::Object(all))
    }
}

/// A copy, if there may be another one.
fn copy(node: &Node, copied: &mut Weight) -> Result<Node, String> {
    copied.add(node);
    if copied.nodes > MAX_COPIED_NODES || copied.bytes > MAX_COPIED_BYTES {
        return Err("yaml: document contains excessive aliasing".to_string());
    }
    Ok(node.clone())
}

/// What `<<` brings into a mapping.
#[derive(Default)]
struct Merged {
    entries: Vec<(String, Node)>,
    keys: HashSet<String>,
}

impl Merged {
    fn add(&mut self, value: Node) -> Result<(), String> {
        let wrong = || "yaml: map merge requires map or sequence of maps as the value".to_string();
        match value {
            Node::Object(entries) => {
                for (key, node) in entries {
                    // The first of several merged maps wins.
                    if self.keys.insert(key.clone()) {
                        self.entries.push((key, node));
                    }
                }
                Ok(())
            }
            Node::Array(nodes) => nodes.into_iter().try_for_each(|node| match node {
                Node::Object(_) => self.add(node),
                _ => Err(wrong()),
            }),
            _ => Err(wrong()),
        }
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&str>) -> Result<Node, String> {
    match tag {
        Some("str") => return Ok(Node::String(text.to_string())),
        Some("binary") => {
            use base64::Engine as _;
            let compact: String = text.split_whitespace().collect();
            let bytes = base64::engine::general_purpose::STANDARD
                .decode(compact)
                .map_err(|_| "yaml: !!binary value contains invalid base64 data".to_string())?;
            return Ok(Node::String(String::from_utf8_lossy(&bytes).into_owned()));
        }
        Some(_) => return resolve(text),
        None => {}
    }
    if style == ScalarStyle::Plain {
        resolve(text)
    } else {
        Ok(Node::String(text.to_string()))
    }
}

/// What a plain scalar means.
fn resolve(text: &str) -> Result<Node, String> {
    Ok(match text {
        "" | "~" | "null" | "Null" | "NULL" => Node::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => Node::Bool(true),
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            Node::Bool(false)
        }
        ".nan" | ".NaN" | ".NAN" => return Err("json: unsupported value: NaN".to_string()),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => {
            return Err("json: unsupported value: +Inf".to_string());
        }
        "-.inf" | "-.Inf" | "-.INF" => return Err("json: unsupported value: -Inf".to_string()),
        _ => match number(text) {
            Some(text) => Node::Number(text),
            None => Node::String(text.to_string()),
        },
    })
}

/// The JSON text of a YAML number, or `None` when it is a word.
fn number(text: &str) -> Option<String> {
    if !matches!(text.as_bytes().first()?, b'+' | b'-' | b'.' | b'0'..=b'9') {
        return None;
    }
    let plain = text.replace('_', "");
    let (negative, digits) = match plain.as_bytes().first()? {
        b'-' => (true, &plain[1..]),
        b'+' => (false, &plain[1..]),
        _ => (false, plain.as_str()),
    };
    let radix = |digits: &str| match digits.get(..2) {
        Some("0x" | "0X") => (16, 2),
        Some("0b" | "0B") => (2, 2),
        Some("0o" | "0O") => (8, 2),
        _ if digits.len() > 1 && digits.starts_with('0') => (8, 1),
        _ => (10, 0),
    };
    let (base, skip) = radix(digits);
    let all_digits = digits.as_bytes().get(skip).is_some_and(u8::is_ascii_alphanumeric);
    if all_digits && let Ok(n) = u64::from_str_radix(&digits[skip..], base) {
        if !negative {
            return Some(n.to_string());
        }
        if n <= 1 << 63 {
            return Some(if n == 0 { "0".into() } else { format!("-{n}") });
        }
    }
    // A float in decimal: digits with at most one point, and an exponent.
    let (mantissa, exponent) = match digits.find(['e', 'E']) {
        Some(at) => (&digits[..at], Some(&digits[at + 1..])),
        None => (digits, None),
    };
    let points = mantissa.bytes().filter(|b| *b == b'.').count();
    let numbers = mantissa.bytes().filter(u8::is_ascii_digit).count();
    if numbers == 0 || points > 1 || numbers + points != mantissa.len() {
        return None;
    }
    if let Some(exponent) = exponent {
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        if exponent.is_empty() || !exponent.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
    }
    let value: f64 = plain.parse().ok()?;
    value.is_finite().then(|| super::go_float(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        match parse(text.as_bytes()) {
            Ok(yaml) => assert_eq!(yaml.node.into_value().to_string(), expected, "{text}"),
            Err(message) => assert_eq!(message, expected, "{text}"),
        }
    }

    #[test]
    fn scalars_resolve_as_upstreams_reader_does() {
        check(
            "a: yes\nb: 'yes'\nc: 010\nd: 1_000\ne: 1.0\nf: 0x1f\ng: ~\nh: 1e3",
            r#"{"a":true,"b":"yes","c":8,"d":1000,"e":1,"f":31,"g":null,"h":1000}"#,
        );
        check(
            "a: 2024-01-01T00:00:00Z\nb: 1.2.3\nc: 100m\nd: !!str 5\ne: 09\nf: -5\n1: x\ntrue: y",
            r#"{"1":"x","a":"2024-01-01T00:00:00Z","b":"1.2.3","c":"100m","d":"5","e":9,"f":-5,"true":true}"#,
        );
        check("", "null");
        check("---\na: 1\n---\nb: 2\n", r#"{"a":1}"#);
    }

    #[test]
    fn anchors_and_merges() {
        check(
            "a: &x {b: 1, c: 2}\nd: *x\ne: {<<: *x, b: 3}",
            r#"{"a":{"b":1,"c":2},"d":{"b":1,"c":2},"e":{"b":3,"c":2}}"#,
        );
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for level in 1..12 {
            let last = format!("*a{}", level - 1);
            bomb.push_str(&format!("a{level}: &a{level} [{}]\n", vec![last; 10].join(",")));
        }
        check(&bomb, "yaml: document contains excessive aliasing");
        let long = format!("a: &a {}\nb: [{}]", "x".repeat(1 << 20), vec!["*a"; 20].join(","));
        check(&long, "yaml: document contains excessive aliasing");
        let nested: String = (0..80).map(|at| format!("[&a{at} ")).collect();
        let wide = vec!["x"; 6000].join(",");
        let nested = format!("{nested}[{wide}]{}", "]".repeat(80)) + " # *a";
        check(&nested, "yaml: document contains excessive aliasing");
    }

    #[test]
    fn large_merges_take_no_time() {
        let keys: String = (0..60_000).map(|at| format!("k{at}: 1, ")).collect();
        let merged = parse(format!("a: {{<<: {{{keys}}}, k1: 2}}").as_bytes()).expect("parses");
        let value = merged.node.into_value();
        assert_eq!(value["a"].as_object().map(serde_json::Map::len), Some(60_000));
        assert_eq!(value["a"]["k1"], 2);
    }

    #[test]
    fn mistakes_are_told_in_the_words_of_upstreams_reader() {
        check("{", "yaml: line 1: did not find expected node content");
        check("a: 1\nb: {a: b", "yaml: line 2: did not find expected ',' or '}'");
        check("a: 1\nb: [a", "yaml: line 2: did not find expected ',' or ']'");
        check("a: 1\nb: \"x", "yaml: line 2: found unexpected end of stream");
        check(
            "a: 1\nb: @x",
            "yaml: line 2: found character that cannot start any token",
        );
        check(
            "a: 1\nb:\n\tc: d",
            "yaml: line 3: found character that cannot start any token",
        );
        check("a: 1\nb: {a: b}}", "yaml: line 1: did not find expected key");
        check(
            "a: 1\nb:\n  c: d\n e: f",
            "yaml: line 3: did not find expected key",
        );
        check("a: 1\nb: {,}", "yaml: line 1: did not find expected node content");
        check("a: *nope", "yaml: unknown anchor 'nope' referenced");
        check("a: \u{1}", "yaml: control characters are not allowed");
        check("%YAML 1.2\n---\na: 1", "yaml: found incompatible YAML document");
        check("{[a]: b}", "yaml: invalid map key: []interface {}{\"a\"}");
        check(
            "{null: b}",
            "unsupported map key of type: %!s(<nil>), key: <nil>, value: \"b\"",
        );
    }

    #[test]
    fn tags() {
        check(
            "a: !!binary QQ==\nb: !foo 1\nc: !!str 1",
            r#"{"a":"A","b":"1","c":"1"}"#,
        );
    }

    #[test]
    fn duplicates_are_told_and_the_last_wins() {
        let yaml = parse(b"a: 1\nb: 2\na: 3\n").expect("parses");
        assert_eq!(yaml.node.into_value().to_string(), r#"{"a":3,"b":2}"#);
        assert_eq!(
            yaml.duplicates.as_deref(),
            Some("yaml: unmarshal errors:\n  line 3: key \"a\" already set in map")
        );
    }
}
