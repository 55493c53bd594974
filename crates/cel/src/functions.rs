//! The functions that expressions may call: names, overloads and types. What they do is in `library/`.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use crate::types::{OPTIONAL, Type};

/// One signature of a function.
#[derive(Debug)]
pub struct Overload {
    pub id: &'static str,
    pub member: bool,
    pub parameters: Vec<Type>,
    pub result: Type,
    /// The type parameters that occur, in order of appearance.
    pub type_parameters: Vec<Arc<str>>,
}

#[derive(Debug, Default)]
pub struct Function {
    pub overloads: Vec<Overload>,
}

/// Every function of the environment, by name. The operators have names such as `_+_`.
pub static FUNCTIONS: LazyLock<HashMap<&'static str, Function>> =
    LazyLock::new(|| parse_table(include_str!("../data/functions.txt")));

fn parse_table(table: &'static str) -> HashMap<&'static str, Function> {
    let mut functions: HashMap<&'static str, Function> = HashMap::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.splitn(4, ' ');
        let (Some(name), Some(id), Some(style), Some(signature)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let mut reader = TypeReader {
            rest: signature,
            seen: Vec::new(),
        };
        let parameters = reader.parameters();
        let result = reader.read();
        functions.entry(name).or_default().overloads.push(Overload {
            id,
            member: style == ".",
            parameters,
            result,
            type_parameters: reader.seen,
        });
    }
    functions
}

/// Reads types as the table writes them: `map(string, list(<A>))`.
struct TypeReader {
    rest: &'static str,
    seen: Vec<Arc<str>>,
}

impl TypeReader {
    fn skip(&mut self, expected: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(expected) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn parameters(&mut self) -> Vec<Type> {
        let mut types = Vec::new();
        if !self.skip('(') {
            return types;
        }
        while !self.skip(')') && !self.rest.is_empty() {
            types.push(self.read());
            self.skip(',');
        }
        types
    }

    fn read(&mut self) -> Type {
        self.rest = self.rest.trim_start();
        let end = self
            .rest
            .find(|c: char| "(), ".contains(c))
            .unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        if let Some(parameter) = name.strip_prefix('<').and_then(|name| name.strip_suffix('>')) {
            let parameter: Arc<str> = parameter.into();
            if !self.seen.contains(&parameter) {
                self.seen.push(parameter.clone());
            }
            return Type::Param(parameter);
        }
        let mut parameters = if self.rest.starts_with('(') {
            self.parameters()
        } else {
            Vec::new()
        };
        let mut next = || {
            if parameters.is_empty() {
                Type::Dyn
            } else {
                parameters.remove(0)
            }
        };
        match name {
            "dyn" => Type::Dyn,
            "bool" => Type::Bool,
            "int" => Type::Int,
            "uint" => Type::Uint,
            "double" => Type::Double,
            "string" => Type::String,
            "bytes" => Type::Bytes,
            "duration" => Type::Duration,
            "timestamp" => Type::Timestamp,
            "list" => Type::list(next()),
            "map" => Type::map(next(), next()),
            "type" => Type::type_of(next()),
            OPTIONAL => Type::optional(next()),
            opaque if opaque.starts_with("net.") => Type::Opaque(opaque.into(), Arc::from([])),
            object => Type::Struct(object.into()),
        }
    }
}

/// The names of types that expressions can use as values.
pub(crate) const TYPE_NAMES: &[&str] = &[
    "bool",
    "bytes",
    "double",
    "google.protobuf.Duration",
    "google.protobuf.Timestamp",
    "int",
    "list",
    "map",
    "null_type",
    "string",
    "type",
    "uint",
    OPTIONAL,
    "net.IP",
    "net.CIDR",
];

/// Types that can be named in an expression: `type(x) == int`.
pub fn type_named(name: &str) -> Option<Type> {
    let parameter = |name: &str| Type::Param(name.into());
    Some(match name {
        "bool" => Type::Bool,
        "bytes" => Type::Bytes,
        "double" => Type::Double,
        "google.protobuf.Duration" => Type::Duration,
        "google.protobuf.Timestamp" => Type::Timestamp,
        "int" => Type::Int,
        "list" => Type::list(parameter("A")),
        "map" => Type::map(parameter("A"), parameter("B")),
        "null_type" => Type::Null,
        "string" => Type::String,
        "type" => Type::Type(None),
        "uint" => Type::Uint,
        OPTIONAL => Type::optional(parameter("V")),
        "net.IP" | "net.CIDR" => Type::Opaque(name.into(), Arc::from([])),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_reads() {
        let check = |name: &str, id: &str, expected: &str| {
            let overload = FUNCTIONS[name]
                .overloads
                .iter()
                .find(|overload| overload.id == id)
                .expect("overload");
            let parameters: Vec<String> = overload.parameters.iter().map(ToString::to_string).collect();
            assert_eq!(
                format!("({}) {}", parameters.join(", "), overload.result),
                expected
            );
        };
        check("_[_]", "index_map", "(map(A, B), A) B");
        check("type", "type", "(A) type(A)");
        check(
            "getQuery",
            "url_get_query",
            "(kubernetes.URL) map(string, list(string))",
        );
        check("optional.none", "optional_none", "() optional_type(V)");
        check(
            "validate",
            "format-validate",
            "(kubernetes.NamedFormat, string) optional_type(list(string))",
        );
        assert!(FUNCTIONS.len() > 140, "{}", FUNCTIONS.len());
    }
}
