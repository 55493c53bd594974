//! Shows a part of an object as upstream's messages do: as the JSON of its internal Go type, that is with Go's names,
//! in the order of the declaration and with the empty fields. The layouts are facts (`data/internal.txt`); a type
//! there is `s` string, `i` number, `b` boolean, `y` bytes, `t` time, `q` quantity, `n` number or string,
//! `d` duration, `R` any JSON, `@name` a struct, with `*` pointer, `[]` list or `{}` map in front.
//! Read only when there is something to complain about.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::{Map, Value, json};
use skiff_meta::field;

use crate::unified;

const TABLE: &str = include_str!("../data/internal.txt");

/// The lines of each type.
static TYPES: LazyLock<HashMap<&'static str, &'static str>> = LazyLock::new(|| {
    TABLE
        .split("\nT ")
        .skip(1)
        .map(|block| block.split_once('\n').unwrap_or((block, "")))
        .collect()
});

/// A type, as the table writes it.
type Type = &'static str;

struct Field {
    /// `None` for the fields of an embedded type.
    shown: Option<&'static str>,
    /// The name in the API; `None` where an embedded type has no object of its own there.
    name: Option<&'static str>,
    kind: Type,
    omit_empty: bool,
}

fn fields(name: &str) -> impl Iterator<Item = Field> {
    let dash = |text: &'static str| (text != "-").then_some(text);
    TYPES
        .get(name)
        .copied()
        .unwrap_or("")
        .lines()
        .filter_map(move |line| {
            let mut words = line.split_whitespace();
            Some(Field {
                shown: dash(words.next()?),
                name: dash(words.next()?),
                kind: words.next()?,
                omit_empty: words.next().is_some(),
            })
        })
}

/// Gives the errors of a kind the text of their values where that is more than a plain value.
pub fn show_values(group: &str, kind: &str, errors: &mut [field::Error]) {
    for error in errors {
        // A rule that shows nothing at all has its reasons.
        let plain = match &error.value {
            Some(Value::Object(_)) => false,
            Some(Value::Array(items)) => items.iter().all(|item| !item.is_object()),
            _ => true,
        };
        if plain || error.shown.is_some() {
            continue;
        }
        // COMPAT: some of upstream's paths are without their `spec`.
        let place = type_at(group, kind, &error.path)
            .or_else(|| type_at(group, kind, &format!("spec.{}", error.path)));
        let (Some(value), Some(place)) = (&error.value, place) else {
            continue;
        };
        let place = match value {
            // COMPAT: some complaints about a list show one of its elements, or what holds the list.
            Value::Object(map) if place.starts_with("[]") => {
                let element = &place[2..];
                let known = |kind: Type| {
                    let name = kind.trim_start_matches('*').strip_prefix('@');
                    name.is_some_and(|name| map.keys().any(|key| has_field(name, key)))
                };
                let holder = error.path.rsplit_once('.').map_or("", |(holder, _)| holder);
                match type_at(group, kind, holder) {
                    Some(holder) if !known(element) && known(holder) => holder,
                    _ => element,
                }
            }
            Value::Object(_) if !place.contains(['@', '{', 'R']) => {
                let holder = error.path.rsplit_once('.').map_or("", |(holder, _)| holder);
                type_at(group, kind, holder).unwrap_or(place)
            }
            _ => place,
        };
        error.shown = Some(text(place, value, false));
    }
}

/// Whether upstream takes two values of a type for equal: an empty list or map equals an absent one, but `Some(empty)`
/// differs from `None`, as `*T` pointing at a zero value differs from nil.
pub fn equal(name: &str, a: &Value, b: &Value) -> bool {
    match TYPES.get_key_value(name) {
        Some((name, _)) => equal_structures(name, a, b),
        None => crate::node::same(a, b),
    }
}

fn equal_structures(name: &'static str, a: &Value, b: &Value) -> bool {
    let (a, b) = (internal_form(name, a), internal_form(name, b));
    let (mut left, mut right) = (Vec::new(), Vec::new());
    flatten(name, &a, false, &mut left);
    flatten(name, &b, false, &mut right);
    left.len() == right.len()
        && left
            .iter()
            .zip(&right)
            .all(|((_, kind, a), (_, _, b))| equal_values(kind, a, b))
}

fn equal_values(kind: Type, a: &Value, b: &Value) -> bool {
    if a == b {
        return true;
    }
    if let Some(inner) = kind.strip_prefix('*') {
        return a.is_null() == b.is_null() && equal_values(inner, a, b);
    }
    if let Some(inner) = kind.strip_prefix("[]") {
        let list = |value: &'_ Value| value.as_array().map_or(0, Vec::len);
        return list(a) == list(b) && (0..list(a)).all(|i| equal_values(inner, &a[i], &b[i]));
    }
    if let Some(inner) = kind.strip_prefix("{}") {
        let size = |value: &Value| value.as_object().map_or(0, Map::len);
        return size(a) == size(b)
            && a.as_object()
                .into_iter()
                .flatten()
                .all(|(key, a)| b.get(key).is_some_and(|b| equal_values(inner, a, b)));
    }
    if let Some(name) = kind.strip_prefix('@') {
        return equal_structures(name, a, b);
    }
    empty(a) && empty(b)
}

/// What changed between two values of a type, as upstream shows it below some messages.
pub fn difference(name: &str, old: &Value, new: &Value) -> String {
    let Some((name, _)) = TYPES.get_key_value(name) else {
        return String::new();
    };
    let show = |value: &Value| {
        let mut out = Text {
            out: String::new(),
            depth: Some(0),
        };
        out.structure(name, value);
        out.out
    };
    unified::diff(&show(old), &show(new))
}

/// The same of lists of a type.
pub fn difference_of_lists(name: &str, old: &[Value], new: &[Value]) -> String {
    let Some((name, _)) = TYPES.get_key_value(name) else {
        return String::new();
    };
    let show = |values: &[Value]| {
        let mut out = Text {
            out: String::new(),
            depth: Some(0),
        };
        out.elements('[', ']', values.iter(), |out, value| out.structure(name, value));
        out.out
    };
    unified::diff(&show(old), &show(new))
}

fn text(kind: Type, value: &Value, indented: bool) -> String {
    let mut out = Text {
        out: String::new(),
        depth: indented.then_some(0),
    };
    out.value(kind, value);
    out.out
}

fn package(group: &str) -> &str {
    match group {
        "" | "events.k8s.io" => "core",
        other => other.split('.').next().unwrap_or(other),
    }
}

/// The type of the field at a path of a kind.
fn type_at(group: &str, kind: &str, path: &str) -> Option<Type> {
    let root = format!("{}.{kind}", package(group));
    let (root, _) = TYPES.get_key_value(root.as_str())?;
    let mut current: Option<Type> = None;
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(bracket) = rest.strip_prefix('[') {
            // Keys of maps may hold anything, also dots and brackets.
            let (_, after) = bracket.split_once(']')?;
            let inner = current?.trim_start_matches('*');
            current = Some(inner.strip_prefix("[]").or_else(|| inner.strip_prefix("{}"))?);
            rest = after.strip_prefix('.').unwrap_or(after);
            continue;
        }
        let end = rest.find(['.', '[']).unwrap_or(rest.len());
        let owner = match current {
            None => root,
            Some(kind) => kind.trim_start_matches('*').strip_prefix('@')?,
        };
        current = Some(field_type(owner, &rest[..end])?);
        rest = rest[end..].strip_prefix('.').unwrap_or(&rest[end..]);
    }
    current
}

fn has_field(owner: &str, name: &str) -> bool {
    fields(owner).any(|field| field.name == Some(name) || field.shown == Some(name))
}

fn field_type(owner: &str, name: &str) -> Option<Type> {
    fields(owner).find_map(|field| match (field.shown, field.name) {
        (None, None) => field_type(field.kind.strip_prefix('@')?, name),
        (_, Some(own)) if own == name => Some(field.kind),
        _ => None,
    })
}

/// JSON as Go writes it: compact, or indented by one blank a level.
struct Text {
    out: String,
    depth: Option<usize>,
}

impl Text {
    fn value(&mut self, kind: Type, value: &Value) {
        if let Some(inner) = kind.strip_prefix('*') {
            if value.is_null() {
                return self.out.push_str("null");
            }
            return self.value(inner, value);
        }
        if let Some(inner) = kind.strip_prefix("[]") {
            return match value {
                Value::Array(items) => {
                    self.elements('[', ']', items.iter(), |out, item| out.value(inner, item))
                }
                _ => self.out.push_str("null"),
            };
        }
        if let Some(inner) = kind.strip_prefix("{}") {
            return match value {
                Value::Object(map) => self.elements('{', '}', map.iter(), |out, (key, value)| {
                    out.key(key);
                    out.value(inner, value);
                }),
                _ => self.out.push_str("null"),
            };
        }
        if let Some(name) = kind.strip_prefix('@') {
            return self.structure(name, value);
        }
        match (kind, value) {
            ("q", Value::Number(number)) => self.string(&number.to_string()),
            ("s", Value::Null) => self.out.push_str("\"\""),
            ("i" | "n", Value::Null) => self.out.push('0'),
            ("b", Value::Null) => self.out.push_str("false"),
            ("q", Value::Null) => self.out.push_str("\"0\""),
            ("d", Value::Null) => self.out.push_str("\"0s\""),
            _ => self.plain(value),
        }
    }

    fn structure(&mut self, name: &'static str, value: &Value) {
        let value = internal_form(name, value);
        let mut shown = Vec::new();
        flatten(name, &value, true, &mut shown);
        self.elements('{', '}', shown.into_iter(), |out, (name, kind, value)| {
            out.key(name);
            out.value(kind, value);
        });
    }

    /// A value without a type: its own order.
    fn plain(&mut self, value: &Value) {
        match value {
            Value::Array(items) => self.elements('[', ']', items.iter(), Text::plain),
            Value::Object(map) => self.elements('{', '}', map.iter(), |out, (key, value)| {
                out.key(key);
                out.plain(value);
            }),
            Value::String(text) => self.string(text),
            other => self.out.push_str(&other.to_string()),
        }
    }

    fn elements<T>(
        &mut self,
        open: char,
        close: char,
        items: impl Iterator<Item = T>,
        each: impl Fn(&mut Self, T),
    ) {
        self.out.push(open);
        let mut empty = true;
        for item in items {
            if !empty {
                self.out.push(',');
            }
            empty = false;
            if let Some(depth) = &mut self.depth {
                *depth += 1;
            }
            self.line();
            each(self, item);
            if let Some(depth) = &mut self.depth {
                *depth -= 1;
            }
        }
        if !empty {
            self.line();
        }
        self.out.push(close);
    }

    fn line(&mut self) {
        if let Some(depth) = self.depth {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', depth));
        }
    }

    fn key(&mut self, key: &str) {
        self.string(key);
        self.out.push_str(if self.depth.is_some() { ": " } else { ":" });
    }

    fn string(&mut self, text: &str) {
        // COMPAT: Go escapes what HTML could misread.
        let json = Value::from(text).to_string();
        for c in json.chars() {
            match c {
                '<' => self.out.push_str("\\u003c"),
                '>' => self.out.push_str("\\u003e"),
                '&' => self.out.push_str("\\u0026"),
                '\u{2028}' => self.out.push_str("\\u2028"),
                '\u{2029}' => self.out.push_str("\\u2029"),
                c => self.out.push(c),
            }
        }
    }
}

fn internal_form<'v>(name: &str, value: &'v Value) -> Cow<'v, Value> {
    match name {
        "core.PodSpec" => Cow::Owned(internal_pod_spec(value)),
        "apiextensions.CustomResourceDefinitionVersion" => {
            let mut value = value.clone();
            // COMPAT: in what all versions could share, nothing is not an empty list.
            for name in ["additionalPrinterColumns", "selectableFields"] {
                if value[name].as_array().is_some_and(Vec::is_empty) {
                    value[name] = Value::Null;
                }
            }
            Cow::Owned(value)
        }
        "apiextensions.JSONSchemaPropsOrArray" => Cow::Owned(match value {
            Value::Array(_) => json!({"jSONSchemas": value}),
            _ => json!({"schema": value}),
        }),
        "apiextensions.JSONSchemaPropsOrBool" => Cow::Owned(match value {
            Value::Bool(_) => json!({"allows": value}),
            _ => json!({"allows": true, "schema": value}),
        }),
        "apiextensions.JSONSchemaPropsOrStringArray" => Cow::Owned(match value {
            Value::Array(_) => json!({"property": value}),
            _ => json!({"schema": value}),
        }),
        _ => Cow::Borrowed(value),
    }
}

/// The fields of a struct with those of the types it embeds. A value may use the names of the API or Go's.
fn flatten<'v>(name: &str, value: &'v Value, omit: bool, out: &mut Vec<(&'static str, Type, &'v Value)>) {
    for field in fields(name) {
        let own = |name: Option<&str>| name.map_or(value, |name| at_name(value, name));
        let Some(shown) = field.shown else {
            if let Some(embedded) = field.kind.strip_prefix('@') {
                flatten(embedded, own(field.name), omit, out);
            }
            continue;
        };
        let mut found = at_name(value, field.name.unwrap_or(shown));
        if found.is_null() {
            found = at_name(value, shown);
        }
        if !(omit && field.omit_empty && empty(found)) {
            out.push((shown, field.kind, found));
        }
    }
}

fn at_name<'v>(value: &'v Value, name: &str) -> &'v Value {
    value.get(name).unwrap_or(&Value::Null)
}

fn empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_i64() == Some(0),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) => false,
    }
}

/// The internal pod keeps what it shares with its host in its security context.
fn internal_pod_spec(spec: &Value) -> Value {
    let mut spec = spec.as_object().cloned().unwrap_or_default();
    let mut context = match spec.remove("securityContext") {
        Some(Value::Object(context)) => context,
        _ => Map::new(),
    };
    for name in [
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "shareProcessNamespace",
        "hostUsers",
    ] {
        if let Some(value) = spec.remove(name) {
            context.insert(name.to_owned(), value);
        }
    }
    spec.insert("securityContext".to_owned(), Value::Object(context));
    Value::Object(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_shown_as_their_go_types() {
        let check = |group, kind, path: &str, value: Value, expected: &str| {
            let place = type_at(group, kind, path).expect(path);
            assert_eq!(text(place, &value, false), expected, "{path}");
        };
        check(
            "",
            "Service",
            "spec.ports[2]",
            json!({"port": 80, "protocol": "TCP"}),
            r#"{"Name":"","Protocol":"TCP","AppProtocol":null,"Port":80,"TargetPort":0,"NodePort":0}"#,
        );
        check(
            "events.k8s.io",
            "Event",
            "source",
            json!({"component": "<a>"}),
            r#"{"Component":"\u003ca\u003e","Host":""}"#,
        );
        check(
            "apps",
            "Deployment",
            "spec.selector",
            json!({"matchLabels": {"b": "1", "a": "2"}}),
            r#"{"matchLabels":{"a":"2","b":"1"}}"#,
        );
        check(
            "",
            "Pod",
            "spec.volumes[0].hostPath",
            json!({"path": "/x"}),
            r#"{"Path":"/x","Type":null}"#,
        );
        check(
            "",
            "Pod",
            "spec.containers[0].livenessProbe.httpGet.port",
            json!(1),
            "1",
        );
    }

    #[test]
    fn a_pod_shares_its_host_through_the_security_context() {
        let shown = text(
            "@core.PodSpec",
            &json!({"hostNetwork": true, "nodeName": "n"}),
            false,
        );
        assert!(
            shown.contains(r#""SecurityContext":{"HostNetwork":true,"HostPID":false,"#),
            "{shown}"
        );
        assert!(shown.starts_with(r#"{"Volumes":null,"#), "{shown}");
    }

    #[test]
    fn differences_have_three_lines_around_them() {
        assert_eq!(
            difference(
                "core.ServicePort",
                &json!({"port": 80, "name": "a"}),
                &json!({"port": 81, "name": "a"})
            ),
            "@@ -2,7 +2,7 @@\n  \"Name\": \"a\",\n  \"Protocol\": \"\",\n  \"AppProtocol\": null,\n- \"Port\": 80,\n+ \"Port\": 81,\n  \"TargetPort\": 0,\n  \"NodePort\": 0\n }\n"
        );
    }

    #[test]
    fn every_stored_kind_has_a_layout() {
        for resource in crate::facts::resources().iter().filter(|r| r.storage.is_some()) {
            let name = format!("{}.{}", package(resource.group), resource.kind);
            assert!(TYPES.contains_key(name.as_str()), "{name}");
        }
        for (name, lines) in TYPES.iter() {
            for line in lines.lines() {
                let kind = line.split_whitespace().nth(2).expect(line);
                let inner = kind.trim_start_matches(['*', '[', ']', '{', '}']);
                assert!(
                    inner
                        .strip_prefix('@')
                        .map_or(inner.len() == 1, |t| TYPES.contains_key(t)),
                    "{name}: {line}"
                );
            }
        }
    }
}
