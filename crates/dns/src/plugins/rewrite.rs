//! The plugin `rewrite` for names: the question is asked under another name, and the answer is told under the first.

use crate::corefile::{Context, CorefileLine};
use hickory_proto::rr::{Name, RData, Record};
use regex::Regex;

#[derive(Debug, Clone)]
enum Match {
    Exact(String),
    Prefix(String),
    Suffix(String),
    Substring(String),
    Regex(Regex),
}

/// How names of an answer are changed back.
#[derive(Debug, Clone)]
enum Change {
    Pattern(Regex, String),
    /// The name itself, and what is below it.
    Remap(String, String),
    Suffix(String, String),
}

/// Where of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Name,
    Value,
}

#[derive(Debug, Clone)]
pub struct Rule {
    matches: Match,
    to: String,
    /// The changes back follow from the question.
    auto: bool,
    /// The next rules are tried as well.
    goes_on: bool,
    answers: Vec<(Part, Change)>,
}

/// A question under another name.
#[derive(Debug)]
pub struct Rewritten {
    pub name: Name,
    changes: Vec<(Part, Change)>,
}

fn dotted(text: &str) -> String {
    let dot = if text.ends_with('.') { "" } else { "." };
    format!("{}{dot}", text.to_lowercase())
}

/// COMPAT: what a name is compared in: lower case, absolute.
fn replace(pattern: &Regex, to: &str, text: &str) -> Option<String> {
    let groups = pattern.captures(text)?;
    let mut replaced = to.to_owned();
    for (number, group) in groups.iter().enumerate() {
        replaced = replaced.replace(&format!("{{{number}}}"), group.map_or("", |group| group.as_str()));
    }
    Some(replaced)
}

impl Change {
    fn apply(&self, text: &str) -> Option<String> {
        match self {
            Change::Pattern(pattern, to) => replace(pattern, to, text),
            Change::Suffix(from, to) => text.strip_suffix(from.as_str()).map(|rest| format!("{rest}{to}")),
            Change::Remap(from, to) if text == from => Some(to.clone()),
            Change::Remap(from, to) => {
                let below = text
                    .strip_suffix(from.as_str())
                    .filter(|rest| rest.ends_with('.'));
                below.map(|rest| format!("{rest}{to}"))
            }
        }
    }

    fn rename(&self, name: &mut Name) {
        let changed = self.apply(&name.to_lowercase().to_ascii());
        if let Some(new) = changed.and_then(|text| Name::from_ascii(dotted(&text)).ok()) {
            *name = new;
        }
    }
}

impl Rule {
    pub(crate) fn parse(line: &CorefileLine, context: &mut Context<'_>) -> Result<Rule, String> {
        // The lines of a block go on where the first ends.
        let mut words = line.args.clone();
        for line in &line.block {
            words.push(line.name.clone());
            words.extend(line.args.iter().cloned());
        }
        let mut words: &[String] = &words;
        let mut goes_on = false;
        if let Some(mode @ ("continue" | "stop")) = words.first().map(|word| word.as_str()) {
            goes_on = mode == "continue";
            words = &words[1..];
        }
        match words.first().map(|word| word.to_lowercase()).as_deref() {
            Some("name") => words = &words[1..],
            Some(field @ ("class" | "type" | "edns0" | "ttl" | "cname" | "rcode")) => {
                return Err(format!("rewrite {field} is not supported, only rewrite name"));
            }
            Some(field) => return Err(format!("invalid rule type {field:?}")),
            None => return Err("no rule type specified for rewrite".to_owned()),
        }
        let (sort, from, to, rest) = match words {
            [from, to] => ("exact".to_owned(), from, to, &[][..]),
            [sort, from, to, rest @ ..] => (sort.to_lowercase(), from, to, rest),
            _ => return Err("too few arguments for a name rule".to_owned()),
        };
        let lower = |text: &String| text.to_lowercase();
        let matches = match sort.as_str() {
            "exact" => Match::Exact(dotted(from)),
            "prefix" => Match::Prefix(lower(from)),
            "suffix" => Match::Suffix(dotted(from)),
            "substring" => Match::Substring(lower(from)),
            "regex" => Match::Regex(context.pattern(from)?),
            sort => {
                return Err(format!(
                    "name rule supports only exact, prefix, suffix, substring, and regex name matching, received: {sort}"
                ));
            }
        };
        let whole = matches!(matches, Match::Exact(_) | Match::Suffix(_));
        let to = if whole { dotted(to) } else { lower(to) };
        let (mut auto, mut answers) = answers(&sort, rest, context)?;
        if auto && answers.iter().any(|(part, _)| *part == Part::Name) {
            return Err(
                "auto name answer rule cannot be combined with explicit name answer rules".to_owned(),
            );
        }
        // COMPAT: an exact rule always changes its answers back; a suffix rule can do so without the question.
        auto |= matches!(matches, Match::Exact(_));
        if let (Match::Suffix(suffix), true) = (&matches, auto) {
            let change = Change::Suffix(to.clone(), suffix.clone());
            answers.splice(0..0, [(Part::Name, change.clone()), (Part::Value, change)]);
            auto = false;
        }
        Ok(Rule {
            matches,
            to,
            auto,
            goes_on,
            answers,
        })
    }

    fn rewrite(&self, name: &str) -> Option<String> {
        match &self.matches {
            Match::Exact(from) => (name == from).then(|| self.to.clone()),
            Match::Prefix(from) => name
                .strip_prefix(from.as_str())
                .map(|rest| format!("{}{rest}", self.to)),
            Match::Suffix(from) => name
                .strip_suffix(from.as_str())
                .map(|rest| format!("{rest}{}", self.to)),
            Match::Substring(from) => name
                .contains(from.as_str())
                .then(|| name.replace(from.as_str(), &self.to)),
            Match::Regex(pattern) => replace(pattern, &self.to, name),
        }
    }
}

fn answers(
    sort: &str,
    mut words: &[String],
    context: &mut Context<'_>,
) -> Result<(bool, Vec<(Part, Change)>), String> {
    let (mut auto, mut found) = (false, Vec::new());
    while let [first, rest @ ..] = words {
        let rest = match first.as_str() {
            "answer" => rest,
            // COMPAT: `answer` need not be repeated.
            "auto" | "name" | "value" if auto || !found.is_empty() => words,
            _ => {
                return Err(format!(
                    "exceeded the number of arguments for a non-answer rule argument for {sort} rule"
                ));
            }
        };
        words = match rest {
            [what, rest @ ..] if what == "auto" => {
                auto = true;
                rest
            }
            [what, from, to, rest @ ..] if what == "name" || what == "value" => {
                let part = if what == "name" { Part::Name } else { Part::Value };
                found.push((part, Change::Pattern(context.pattern(from)?, to.to_lowercase())));
                rest
            }
            [what, ..] => return Err(format!("invalid answer rule {what:?} for {sort} rule")),
            [] => return Err(format!("type missing for answer rule for {sort} rule")),
        };
    }
    Ok((auto, found))
}

/// The question under its other name; `None` if no rule matches, an error if the new name is none.
pub fn apply(rules: &[Rule], name: &Name) -> Result<Option<Rewritten>, String> {
    let asked = name.to_lowercase().to_ascii();
    let mut text = asked.clone();
    let mut changes = Vec::new();
    let mut changed = false;
    for rule in rules {
        let Some(new) = rule.rewrite(&text) else { continue };
        if rule.auto {
            let change = Change::Remap(dotted(&new), text.clone());
            changes.extend([(Part::Name, change.clone()), (Part::Value, change)]);
        }
        changes.extend(rule.answers.iter().cloned());
        (text, changed) = (new, true);
        if !rule.goes_on {
            break;
        }
    }
    if !changed {
        return Ok(None);
    }
    let new = Name::from_ascii(dotted(&text)).map_err(|_| format!("invalid name after rewrite: {text}"))?;
    Ok(Some(Rewritten { name: new, changes }))
}

impl Rewritten {
    /// Tells the records of an answer under the names of the question.
    pub fn revert(&self, records: &mut [Record]) {
        for record in records {
            for (part, change) in self.changes.iter().rev() {
                match (part, &mut record.data) {
                    (Part::Name, _) => change.rename(&mut record.name),
                    (Part::Value, RData::CNAME(name)) => change.rename(&mut name.0),
                    (Part::Value, RData::NS(name)) => change.rename(&mut name.0),
                    (Part::Value, RData::PTR(name)) => change.rename(&mut name.0),
                    (Part::Value, RData::SRV(srv)) => change.rename(&mut srv.target),
                    (Part::Value, RData::MX(mx)) => change.rename(&mut mx.exchange),
                    (Part::Value, RData::SOA(soa)) => change.rename(&mut soa.mname),
                    (Part::Value, RData::NAPTR(naptr)) => change.rename(&mut naptr.replacement),
                    (Part::Value, _) => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corefile::parse;
    use hickory_proto::rr::rdata::CNAME;
    use std::collections::BTreeMap;

    fn rules(lines: &str) -> Result<Vec<Rule>, String> {
        let config = parse(&format!(". {{\n{lines}\n}}"), &BTreeMap::new());
        config
            .map(|config| config.blocks[0].rewrite.clone())
            .map_err(|problem| problem.message)
    }

    /// The question's new name, and an alias from it to `x.` below it told back.
    fn check(lines: &str, asked: &str, expected: Option<(&str, &str, &str)>) {
        let rules = rules(lines).unwrap();
        let rewritten = apply(&rules, &Name::from_ascii(asked).unwrap()).unwrap();
        let found = rewritten.map(|rewritten| {
            let target = Name::from_ascii("x")
                .unwrap()
                .append_domain(&rewritten.name)
                .unwrap();
            let alias = Record::from_rdata(rewritten.name.clone(), 1, RData::CNAME(CNAME(target)));
            let mut records = vec![alias];
            rewritten.revert(&mut records);
            (
                rewritten.name.to_ascii(),
                records[0].name.to_ascii(),
                records[0].data.to_string(),
            )
        });
        let found = found
            .as_ref()
            .map(|(a, b, c)| (a.as_str(), b.as_str(), c.as_str()));
        assert_eq!(found, expected, "{lines}");
    }

    #[test]
    fn names_are_rewritten_and_told_back() {
        check(
            "rewrite name a.org b.org",
            "A.org.",
            Some(("b.org.", "a.org.", "x.a.org.")),
        );
        check("rewrite name a.org b.org", "c.a.org.", None);
        check(
            "rewrite name suffix .a.org .b.org answer auto",
            "c.a.org.",
            Some(("c.b.org.", "c.a.org.", "x.c.a.org.")),
        );
        check(
            "rewrite name suffix .a.org .b.org",
            "c.a.org.",
            Some(("c.b.org.", "c.b.org.", "x.c.b.org.")),
        );
        check(
            "rewrite name prefix dev- prod-",
            "dev-a.org.",
            Some(("prod-a.org.", "prod-a.org.", "x.prod-a.org.")),
        );
        check(
            "rewrite name prefix dev- prod- answer auto",
            "dev-a.org.",
            Some(("prod-a.org.", "dev-a.org.", "x.dev-a.org.")),
        );
        check(
            "rewrite name substring west east",
            "a.west.org.",
            Some(("a.east.org.", "a.east.org.", "x.a.east.org.")),
        );
        check(
            "rewrite name regex (.*)\\.my\\.host {1}.default.svc.cluster.local answer name (.*)\\.default\\.svc\\.cluster\\.local {1}.my.host",
            "web.my.host.",
            Some((
                "web.default.svc.cluster.local.",
                "web.my.host.",
                "x.web.default.svc.cluster.local.",
            )),
        );
        check(
            "rewrite stop {\n name regex (.*)\\.a {1}.b\n answer auto\n}",
            "w.a.",
            Some(("w.b.", "w.a.", "x.w.a.")),
        );
        check(
            "rewrite continue name a.org b.org\nrewrite name b.org c.org",
            "a.org.",
            Some(("c.org.", "a.org.", "x.a.org.")),
        );
        check(
            "rewrite name a.org b.org\nrewrite name b.org c.org",
            "a.org.",
            Some(("b.org.", "a.org.", "x.a.org.")),
        );
    }

    #[test]
    fn a_new_name_must_be_one() {
        let rules = rules("rewrite name regex .* {0}..").unwrap();
        assert!(apply(&rules, &Name::from_ascii("a.org.").unwrap()).is_err());
    }

    #[test]
    fn bad_rules_are_refused() {
        for (line, expected) in [
            ("rewrite", "no rule type"),
            ("rewrite ttl a.org 30", "rewrite ttl is not supported"),
            ("rewrite name a.org", "too few arguments"),
            ("rewrite name fuzzy a b", "supports only exact"),
            ("rewrite name regex ( b", "invalid regex"),
            ("rewrite name exact a b c", "exceeded the number"),
            ("rewrite name exact a b answer", "type missing"),
            (
                "rewrite name exact a b answer auto answer name x y",
                "cannot be combined",
            ),
        ] {
            let message = rules(line).unwrap_err();
            assert!(message.contains(expected), "{line}: {message}");
        }
    }
}
