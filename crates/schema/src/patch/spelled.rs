//! Numbers of a patch as the client wrote them. Upstream's library keeps the text of what it does not open, so its
//! complaints quote `1.50` and twenty digits as they came; a JSON value of ours has forgotten them.

use crate::decode::{Node, go_float, number};

/// More of them are quoted as we write them.
const MOST: usize = 16;

/// Pairs of how we write a number, and how it was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spelled(Vec<(String, String)>);

impl Spelled {
    pub fn of(node: &Node) -> Spelled {
        let mut spelled = Spelled::default();
        spelled.collect(node);
        spelled
    }

    fn collect(&mut self, node: &Node) {
        match node {
            Node::Number(text) => {
                let Some(value) = number(text) else { return };
                let ours = value.to_string();
                if ours == *text || self.0.len() >= MOST {
                    return;
                }
                let go = value.as_f64().map_or_else(|| ours.clone(), go_float);
                if go != ours {
                    self.0.push((go, text.clone()));
                }
                self.0.push((ours, text.clone()));
            }
            Node::Array(nodes) => nodes.iter().for_each(|node| self.collect(node)),
            Node::Object(entries) => entries.iter().for_each(|(_, node)| self.collect(node)),
            _ => {}
        }
    }

    /// The text of a document with the numbers as they were written.
    pub fn in_document(&self, mut text: String) -> String {
        for (ours, theirs) in &self.0 {
            let place = text.match_indices(ours.as_str()).find(|(at, _)| {
                let before = text[..*at].chars().next_back();
                let after = text[at + ours.len()..].chars().next();
                matches!(before, Some(':' | ',' | '[')) && matches!(after, Some(',' | ']' | '}'))
            });
            if let Some((at, _)) = place {
                text.replace_range(at..at + ours.len(), theirs);
            }
        }
        text
    }

    /// The same for a complaint about one of them.
    pub fn in_error(&self, text: &str) -> String {
        let told = |number: &str| format!("cannot unmarshal number {number} into ");
        let found = self.0.iter().find(|(ours, _)| text.contains(&told(ours)));
        match found {
            Some((ours, theirs)) => text.replacen(&told(ours), &told(theirs), 1),
            None => text.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_quoted_as_they_came() {
        let check = |patch: &str, document: &str, expected: &str| {
            let node = crate::decode::parse_json(patch.as_bytes()).expect("JSON");
            let spelled = Spelled::of(&node);
            assert_eq!(spelled.in_document(document.to_owned()), expected, "{patch}");
        };
        check(r#"{"a":7}"#, r#"{"a":7}"#, r#"{"a":7}"#);
        check(
            r#"{"a":1.50}"#,
            r#"{"b":"1.5","a":1.5}"#,
            r#"{"b":"1.5","a":1.50}"#,
        );
        let large = r#"{"a":99999999999999999999}"#;
        check(large, r#"{"a":100000000000000000000}"#, large);
        let spelled = Spelled::of(&crate::decode::parse_json(large.as_bytes()).expect("JSON"));
        assert_eq!(
            spelled.in_error("json: cannot unmarshal number 1e+20 into Go struct field A.b of type int32"),
            "json: cannot unmarshal number 99999999999999999999 into Go struct field A.b of type int32"
        );
    }
}
