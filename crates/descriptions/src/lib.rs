//! Upstream's descriptions of types, fields and table columns, as `kubectl explain` shows them. They are taken
//! from k8s-openapi by the build script; none stands in this repository but the phrases of table columns that
//! are part of the wire. No I/O.

use std::collections::HashMap;
use std::io::Read as _;
use std::sync::LazyLock;

static COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptions.deflate"));
static COLUMNS: &str = include_str!(concat!(env!("OUT_DIR"), "/columns.txt"));

const UNIT: char = '\x1f';
const RECORD: char = '\x1e';

/// The columns of a kind that upstream has no table for.
const ANY_KIND: &str = "*";

/// All descriptions. They take a megabyte: load them, make a document, drop them.
pub struct Descriptions {
    text: String,
    /// Where each line starts; the lines are sorted by type and field.
    lines: Vec<u32>,
}

impl Descriptions {
    pub fn load() -> Descriptions {
        let mut text = String::new();
        flate2::read::DeflateDecoder::new(COMPRESSED)
            .read_to_string(&mut text)
            .expect("the build script compressed it");
        let mut lines = vec![0];
        lines.extend(text.match_indices(RECORD).map(|(at, _)| at as u32 + 1));
        lines.pop();
        Descriptions { text, lines }
    }

    /// The description of a type by its OpenAPI name, such as `io.k8s.api.core.v1.Pod`.
    pub fn of_type(&self, name: &str) -> Option<String> {
        self.find(name, "").map(str::to_string).or_else(|| {
            let short = name.rsplit('.').next()?;
            if short == "Patch" {
                return Some(
                    "Patch is the body of a PATCH request; its media type says how it is meant.".into(),
                );
            }
            // k8s-openapi has one type for all lists.
            let kind = short.strip_suffix("List")?;
            Some(format!("{kind}List is a list of {kind} objects."))
        })
    }

    pub fn of_field(&self, name: &str, field: &str) -> Option<&str> {
        self.find(name, field).or_else(|| match field {
            _ if !name.ends_with("List") => None,
            "apiVersion" | "kind" => self.find("io.k8s.api.core.v1.Pod", field),
            "metadata" => Some("The list's own metadata."),
            "items" => Some("The objects of the list."),
            _ => None,
        })
    }

    fn find(&self, name: &str, field: &str) -> Option<&str> {
        let at = self
            .lines
            .binary_search_by(|start| {
                let (found, _) = parts(&self.text[*start as usize..]);
                found.cmp(&(name, field))
            })
            .ok()?;
        Some(parts(&self.text[self.lines[at] as usize..]).1)
    }
}

/// A line's key and its text.
fn parts(line: &str) -> ((&str, &str), &str) {
    let line = line.split(RECORD).next().unwrap_or_default();
    let mut parts = line.splitn(3, UNIT);
    let mut next = || parts.next().unwrap_or_default();
    ((next(), next()), next())
}

/// What a column of the Table of a kind says of itself.
pub fn column(kind: &str, column: &str) -> &'static str {
    static TABLE: LazyLock<HashMap<(&str, &str), &str>> =
        LazyLock::new(|| COLUMNS.split_terminator(RECORD).map(parts).collect());
    let found = TABLE.get(&(kind, column));
    found
        .or_else(|| TABLE.get(&(ANY_KIND, column)))
        .copied()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_fields_and_columns_have_words() {
        let all = Descriptions::load();
        let pod = "io.k8s.api.core.v1.Pod";
        assert!(
            all.of_type(pod)
                .unwrap()
                .starts_with("Pod is a collection of containers")
        );
        assert!(all.of_field(pod, "spec").unwrap().contains("desired behavior"));
        assert!(
            all.of_field("io.k8s.api.core.v1.PodList", "kind")
                .unwrap()
                .contains("REST resource")
        );
        assert_eq!(all.of_field(pod, "colour"), None);
        assert_eq!(all.of_type("io.k8s.api.core.v1.Nothing"), None);
        assert_eq!(
            column("Pod", "Status"),
            "The aggregate status of the containers in this pod."
        );
        assert!(column("Role", "Created At").contains("\n\nPopulated by the system."));
        assert_eq!(column("Pod", "Colour"), "");
    }
}
