//! The text form of a type table, as `cargo xtask facts` writes it.
//!
//! ```text
//! P apps/v1 io.k8s.api.apps.v1               a package: its name inside the table, its OpenAPI prefix
//! T Deployment gvk=apps/v1                   a type; also: hidden, atomic, unions=JSON
//!  spec @apps/v1.DeploymentSpec 2 o          a field: JSON name, shape, protobuf number, facts
//! ```
//! A shape is `@package.Type`, `[]shape`, `{}shape`, a letter of a scalar or special type, each with Go's
//! own name where it has one (`s:v1.PodPhase`, `[v1.Verbs]s`, `{v1.ResourceName,v1.ResourceList}Q`), `*`
//! before a pointer and `~` before a list that protobuf wraps. A number `VolumeSource=2/1` is number 1
//! inside the inlined struct `VolumeSource`, which is number 2; inlining may nest. Facts: `r` required, `o` omitempty,
//! `z` omitzero, `la` `ls` `lm=keys` list types, `ma` `mg` map types, `ps=` patch strategy, `pk=` merge
//! key, `d=` published default (last, to the end of the line).

use super::{
    Builder, Embed, Field, List, ListType, Map, MapType, Name, Scalar, Schema, Shape, Special, Type, TypeId,
};

#[derive(Debug, thiserror::Error)]
#[error("type table line {line}: {reason}")]
pub struct TableError {
    pub line: usize,
    pub reason: String,
}

#[derive(Default)]
struct Parser {
    builder: Builder,
    packages: std::collections::HashMap<&'static str, &'static str>,
    package: (&'static str, &'static str),
    current: Option<TypeId>,
    fields: Vec<Field>,
}

pub(super) fn parse(text: &'static str) -> Result<Schema, TableError> {
    let mut parser = Parser::default();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("P ") {
            let (short, prefix) = rest.split_once(' ').unwrap_or((rest, ""));
            parser.packages.insert(short, prefix);
        }
    }
    for (index, line) in text.lines().enumerate() {
        parser.line(line).map_err(|reason| TableError {
            line: index + 1,
            reason,
        })?;
    }
    parser.end_type();
    Ok(parser.builder.finish())
}

impl Parser {
    fn line(&mut self, line: &'static str) -> Result<(), String> {
        if let Some(rest) = line.strip_prefix(' ') {
            let field = self.field(rest)?;
            self.fields.push(field);
        } else if let Some(rest) = line.strip_prefix("T ") {
            self.end_type();
            self.begin_type(rest)?;
        } else if let Some(rest) = line.strip_prefix("P ") {
            let (short, prefix) = rest.split_once(' ').ok_or("a package without a prefix")?;
            self.package = (short.rsplit('/').next().unwrap_or(short), prefix);
        } else if !line.starts_with('#') {
            return Err("an unknown line".into());
        }
        Ok(())
    }

    fn begin_type(&mut self, text: &'static str) -> Result<(), String> {
        let (text, unions) = match text.split_once(" unions=") {
            Some((text, unions)) => (text, Some(Name::Borrowed(unions))),
            None => (text, None),
        };
        let mut words = text.split(' ');
        let name = words.next().unwrap_or_default();
        let id = self.builder.declare(format!("{}.{name}", self.package.1));
        let mut definition = Type {
            package: Name::Borrowed(self.package.0),
            unions,
            ..Type::default()
        };
        for word in words {
            match word {
                "hidden" => definition.hidden = true,
                "atomic" => definition.atomic = true,
                _ => {
                    let list = word
                        .strip_prefix("gvk=")
                        .ok_or_else(|| format!("what is {word}"))?;
                    definition.group_versions = list
                        .split(',')
                        .map(|gv| gv.rsplit_once('/').unwrap_or(("", gv)))
                        .map(|(group, version)| (Name::Borrowed(group), Name::Borrowed(version)))
                        .collect();
                }
            }
        }
        self.builder.define(id, definition);
        self.current = Some(id);
        Ok(())
    }

    fn end_type(&mut self) {
        if let Some(id) = self.current.take() {
            self.builder.fields(id, std::mem::take(&mut self.fields));
        }
    }

    fn field(&mut self, text: &'static str) -> Result<Field, String> {
        let (text, default) = match text.split_once(" d=") {
            Some((text, default)) => (text, Some(default)),
            None => (text, None),
        };
        let mut words = text.split(' ');
        let name = words.next().ok_or("a field without a name")?;
        let shape = words.next().ok_or("a field without a shape")?;
        let (pointer, shape) = match shape.strip_prefix('*') {
            Some(rest) => (true, rest),
            None => (false, shape),
        };
        let mut field = Field::new(name, self.shape(shape)?);
        field.pointer = pointer;
        let number = words.next().ok_or("a field without a number")?;
        let digits = |text: &str| text.parse::<u32>().map_err(|_| format!("not a number: {text}"));
        match number.split_once('=') {
            Some((go_name, numbers)) => {
                let (outer, inner) = numbers.rsplit_once('/').ok_or("an embed without two numbers")?;
                field.number = digits(inner)?;
                let numbers = outer.split('/').map(digits).collect::<Result<_, _>>()?;
                field.rare_mut().embed = Some(Embed {
                    go_name: go_name.into(),
                    numbers,
                });
            }
            None => field.number = digits(number)?,
        }
        for word in words {
            match word.split_once('=').unwrap_or((word, "")) {
                ("r", _) => field.required = true,
                ("o", _) => field.omitempty = true,
                ("z", _) => field.omitzero = true,
                ("la", _) => field.list_type = ListType::Atomic,
                ("ls", _) => field.list_type = ListType::Set,
                ("lm", keys) => {
                    field.list_type = ListType::Map;
                    field.rare_mut().list_map_keys = keys.split(',').map(Name::Borrowed).collect();
                }
                ("ma", _) => field.map_type = MapType::Atomic,
                ("mg", _) => field.map_type = MapType::Granular,
                ("ps", strategies) => {
                    for strategy in strategies.split(',') {
                        match strategy {
                            "merge" => field.patch_merge = true,
                            "replace" => field.patch_replace = true,
                            "retainKeys" => field.patch_retain_keys = true,
                            other => return Err(format!("patch strategy {other}")),
                        }
                    }
                }
                ("pk", key) => field.rare_mut().merge_key = Some(key.into()),
                (other, _) => return Err(format!("what is {other}")),
            }
        }
        if let Some(default) = default {
            field.rare_mut().default = Some(default.into());
        }
        Ok(field)
    }

    fn shape(&mut self, text: &'static str) -> Result<Shape, String> {
        let named = |name: &'static str| (!name.is_empty()).then_some(Name::Borrowed(name));
        let (wrapped, text) = match text.strip_prefix('~') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if let Some(rest) = text.strip_prefix('@') {
            let (package, name) = rest.split_once('.').ok_or("a reference without a package")?;
            let prefix = self
                .packages
                .get(package)
                .ok_or_else(|| format!("no package {package}"))?;
            return Ok(Shape::Struct(self.builder.declare(format!("{prefix}.{name}"))));
        }
        if let Some(rest) = text.strip_prefix('[') {
            let (go_name, of) = rest.split_once(']').ok_or("an open list")?;
            let list = List {
                of: self.shape(of)?,
                go_name: named(go_name),
                wrapped,
            };
            return Ok(Shape::List(Box::new(list)));
        }
        if let Some(rest) = text.strip_prefix('{') {
            let (names, of) = rest.split_once('}').ok_or("an open map")?;
            let (key, go_name) = names.split_once(',').unwrap_or((names, ""));
            let map = Map {
                of: self.shape(of)?,
                key: named(key),
                go_name: named(go_name),
            };
            return Ok(Shape::Map(Box::new(map)));
        }
        let (letter, go_name) = text.split_once(':').unwrap_or((text, ""));
        let scalar = |scalar| Ok(Shape::Scalar(scalar, named(go_name)));
        let special = |special| Ok(Shape::Special(special));
        match letter {
            "s" => scalar(Scalar::String),
            "b" => scalar(Scalar::Bool),
            "i" => scalar(Scalar::Int32),
            "l" => scalar(Scalar::Int64),
            "n" => scalar(Scalar::Int),
            "d" => scalar(Scalar::Float64),
            "y" => scalar(Scalar::Bytes),
            "A" => special(Special::Any),
            "T" => special(Special::Time),
            "M" => special(Special::MicroTime),
            "D" => special(Special::Duration),
            "Q" => special(Special::Quantity),
            "I" => special(Special::IntOrString),
            "R" => special(Special::RawExtension),
            "V" => special(Special::FieldsV1),
            "J" => special(Special::Json),
            "P" => special(Special::JsonSchemaPropsOrArray),
            "W" => special(Special::JsonSchemaPropsOrBool),
            "X" => special(Special::JsonSchemaPropsOrStringArray),
            other => Err(format!("shape {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "# words\nP apps/v1 io.k8s.api.apps.v1\nP core/v1 io.k8s.api.core.v1\n\
        T A gvk=apps/v1,v1 atomic\n spec *@core/v1.B 2 r o lm=a,b ps=merge,retainKeys pk=a d={\"x\": 1}\n\
\x20x ~[v1.Verbs]s V=2/1\n";

    #[test]
    fn a_table_reads_back() {
        let schema = parse(TABLE).expect("parses");
        let id = schema.by_gvk("apps", "v1", "A").expect("known");
        assert_eq!(schema.by_gvk("", "v1", "A"), Some(id));
        let a = schema.get(id);
        assert!(a.atomic);
        assert_eq!(a.go_type(), "v1.A");
        let spec = a.field("spec").expect("has it");
        assert!(
            spec.pointer && spec.required && spec.omitempty && spec.patch_merge && spec.patch_retain_keys
        );
        assert_eq!(spec.list_map_keys(), ["a", "b"]);
        assert_eq!(
            (spec.merge_key(), spec.default()),
            (Some("a"), Some("{\"x\": 1}"))
        );
        let x = a.field("x").expect("has it");
        assert_eq!((x.number, x.embed().map(|e| e.numbers[0])), (1, Some(2)));
        assert_eq!(schema.go_type(&x.shape), "v1.Verbs");
    }
}
