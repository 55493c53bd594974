//! The plugin `template`: answers made from the question. Of Go's templates it has fields, `index` and trimming; the rest
//! (pipelines, conditions, functions) is refused when the Corefile is read.

use super::text;
use crate::corefile::{Context, CorefileLine, zones};
use crate::names::{Fall, longest};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};
use regex::Regex;
use std::net::IpAddr;

/// The longest record that a template may make.
const MAX_TEXT: usize = 4096;

#[derive(Debug, Clone)]
enum Piece {
    Text(String),
    Name,
    Zone,
    Class,
    Type,
    Remote,
    Regex,
    Match(usize),
    Group(String),
}

#[derive(Debug, Clone)]
pub struct Template {
    class: Option<DNSClass>,
    kind: Option<RecordType>,
    zones: Vec<Name>,
    matches: Vec<Regex>,
    answers: Vec<Vec<Piece>>,
    additionals: Vec<Vec<Piece>>,
    authorities: Vec<Vec<Piece>>,
    code: ResponseCode,
    fall: Fall,
}

/// What a template makes of a question.
#[derive(Debug, Default)]
pub struct Made {
    pub code: ResponseCode,
    pub answers: Vec<Record>,
    pub additionals: Vec<Record>,
    pub authorities: Vec<Record>,
}

#[derive(Debug)]
pub enum Found {
    /// It is the next plugin's.
    Next,
    Failure(String),
    Made(Made),
}

/// What templates know of a question.
pub struct Asked<'q> {
    pub name: &'q Name,
    pub kind: RecordType,
    pub class: DNSClass,
    pub remote: IpAddr,
}

fn pieces(text: &str) -> Result<Vec<Piece>, String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{") {
        let (inside, after) = after.split_once("}}").ok_or("a template has {{ without }}")?;
        let trims_before = inside.starts_with("- ");
        found.push(Piece::Text(
            if trims_before { before.trim_end() } else { before }.to_owned(),
        ));
        rest = match inside.strip_suffix(" -") {
            Some(_) => after.trim_start(),
            None => after,
        };
        let inside = inside.strip_prefix("- ").unwrap_or(inside);
        let inside = inside.strip_suffix(" -").unwrap_or(inside);
        found.push(piece(inside.trim())?);
    }
    if rest.contains("}}") {
        return Err("a template has }} without {{".to_owned());
    }
    found.push(Piece::Text(rest.to_owned()));
    Ok(found)
}

fn piece(expression: &str) -> Result<Piece, String> {
    let refused = || format!("the template expression {{{{{expression}}}}} is not supported");
    let words: Vec<&str> = expression.split_whitespace().collect();
    Ok(match words[..] {
        [".Name" | ".Question.Name"] => Piece::Name,
        [".Zone"] => Piece::Zone,
        [".Class"] => Piece::Class,
        [".Type"] => Piece::Type,
        [".Remote"] => Piece::Remote,
        [".Regex"] => Piece::Regex,
        ["index", ".Match", number] => Piece::Match(number.parse().map_err(|_| refused())?),
        ["index", ".Group", name] => {
            let name = name.strip_prefix('"').and_then(|name| name.strip_suffix('"'));
            Piece::Group(name.ok_or_else(refused)?.to_owned())
        }
        [field] => Piece::Group(field.strip_prefix(".Group.").ok_or_else(refused)?.to_owned()),
        _ => return Err(refused()),
    })
}

impl Template {
    pub(crate) fn parse(line: &CorefileLine, context: &mut Context<'_>) -> Result<Template, String> {
        let [class, kind, rest @ ..] = line.args.as_slice() else {
            return Err("wrong argument count or unexpected line ending".to_owned());
        };
        let class: DNSClass = class
            .parse()
            .map_err(|_| format!("invalid query class {class}"))?;
        let kind: RecordType = kind.parse().map_err(|_| format!("invalid RR class {kind}"))?;
        let mut found = Template {
            class: Some(class).filter(|class| *class != DNSClass::ANY),
            kind: Some(kind).filter(|kind| *kind != RecordType::ANY),
            zones: context.zones_or_own(rest)?,
            matches: Vec::new(),
            answers: Vec::new(),
            additionals: Vec::new(),
            authorities: Vec::new(),
            code: ResponseCode::NoError,
            fall: Fall::default(),
        };
        for line in &line.block {
            let texts = || {
                line.args
                    .iter()
                    .map(|text| pieces(text))
                    .collect::<Result<Vec<_>, _>>()
            };
            match (line.name.as_str(), line.args.as_slice()) {
                ("match", [_, ..]) => {
                    for pattern in &line.args {
                        found.matches.push(context.pattern(pattern)?);
                    }
                }
                ("answer", [_, ..]) => found.answers.extend(texts()?),
                ("additional", [_, ..]) => found.additionals.extend(texts()?),
                ("authority", [_, ..]) => found.authorities.extend(texts()?),
                ("rcode", [code]) => {
                    found.code = match code.as_str() {
                        "NOERROR" => ResponseCode::NoError,
                        "NXDOMAIN" => ResponseCode::NXDomain,
                        "SERVFAIL" => ResponseCode::ServFail,
                        "REFUSED" => ResponseCode::Refused,
                        "NOTIMP" => ResponseCode::NotImp,
                        "FORMERR" => ResponseCode::FormErr,
                        code => return Err(format!("unknown rcode {code}")),
                    }
                }
                ("fallthrough", []) => found.fall = Fall(vec![Name::root()]),
                ("fallthrough", args) => found.fall = Fall(zones(args)?),
                (name, _) => {
                    return Err(format!(
                        "property '{name}' is not supported, or its arguments are wrong"
                    ));
                }
            }
        }
        Ok(found)
    }

    fn answer(&self, asked: &Asked<'_>, lower: &Name, text: &str) -> Found {
        let Some(zone) = longest(&self.zones, lower) else {
            return Found::Next;
        };
        let other_class = self
            .class
            .is_some_and(|class| class != asked.class && asked.class != DNSClass::ANY);
        let other_kind = self
            .kind
            .is_some_and(|kind| kind != asked.kind && asked.kind != RecordType::ANY);
        if other_class || other_kind {
            return Found::Next;
        }
        let pattern = self.matches.iter().find(|pattern| pattern.is_match(text));
        if pattern.is_none() && !self.matches.is_empty() {
            return match self.fall.through(lower) {
                true => Found::Next,
                false => Found::Failure("no match of a template without fallthrough".to_owned()),
            };
        }
        if self.code == ResponseCode::ServFail {
            return Found::Failure("a template says SERVFAIL".to_owned());
        }
        let groups = pattern.and_then(|pattern| pattern.captures(text));
        let fill = |piece: &Piece| -> String {
            let group = |found: Option<regex::Match<'_>>| found.map_or("", |found| found.as_str()).to_owned();
            match piece {
                Piece::Text(text) => text.clone(),
                Piece::Name => text.to_owned(),
                Piece::Zone => zone.to_ascii(),
                Piece::Class => self.class.unwrap_or(asked.class).to_string(),
                Piece::Type => self.kind.unwrap_or(asked.kind).to_string(),
                Piece::Remote => asked.remote.to_string(),
                Piece::Regex => pattern.map_or(".*", |pattern| pattern.as_str()).to_owned(),
                // Without a pattern, `.*` has matched the whole name.
                Piece::Match(0) if pattern.is_none() => text.to_owned(),
                Piece::Match(number) => group(groups.as_ref().and_then(|groups| groups.get(*number))),
                Piece::Group(name) => match name.parse::<usize>() {
                    Ok(number) => group(groups.as_ref().and_then(|groups| groups.get(number))),
                    Err(_) => group(groups.as_ref().and_then(|groups| groups.name(name))),
                },
            }
        };
        let make = |templates: &[Vec<Piece>]| -> Result<Vec<Record>, String> {
            let record = |pieces: &Vec<Piece>| {
                let text: String = pieces.iter().map(fill).collect();
                match text.len() > MAX_TEXT {
                    true => Err("a template makes too long a record".to_owned()),
                    false => text::record(&text),
                }
            };
            templates.iter().map(record).collect()
        };
        let made = || -> Result<Made, String> {
            Ok(Made {
                code: self.code,
                answers: make(&self.answers)?,
                additionals: make(&self.additionals)?,
                authorities: make(&self.authorities)?,
            })
        };
        match made() {
            Ok(made) => Found::Made(made),
            Err(message) => Found::Failure(message),
        }
    }
}

/// The first template that has something to say.
pub fn answer(templates: &[Template], asked: &Asked<'_>) -> Found {
    if templates.is_empty() {
        return Found::Next;
    }
    let lower = asked.name.to_lowercase();
    let text = lower.to_ascii();
    let answers = templates
        .iter()
        .map(|template| template.answer(asked, &lower, &text));
    answers
        .into_iter()
        .find(|found| !matches!(found, Found::Next))
        .unwrap_or(Found::Next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corefile::parse;
    use std::collections::BTreeMap;

    fn templates(lines: &str) -> Result<Vec<Template>, String> {
        let config = parse(&format!(". {{\n{lines}\n}}"), &BTreeMap::new());
        config
            .map(|config| config.blocks[0].templates.clone())
            .map_err(|problem| problem.message)
    }

    fn check(lines: &str, name: &str, kind: RecordType, expected: &str) {
        let name = Name::from_ascii(name).unwrap();
        let asked = Asked {
            name: &name,
            kind,
            class: DNSClass::IN,
            remote: IpAddr::from([10, 0, 0, 9]),
        };
        let found = match answer(&templates(lines).unwrap(), &asked) {
            Found::Next => "next".to_owned(),
            Found::Failure(message) => message,
            Found::Made(made) => {
                let records = made
                    .answers
                    .iter()
                    .chain(&made.authorities)
                    .chain(&made.additionals);
                let told = records.map(|r| format!(" {} {}", r.name, r.data));
                format!("{:?}{}", made.code, told.collect::<String>())
            }
        };
        assert_eq!(found, expected, "{name} {kind}");
    }

    #[test]
    fn answers_are_made_from_questions() {
        use RecordType::{A, AAAA, TXT};
        let by_address = "template IN A example.org {\n match ^ip-(?P<a>[0-9]+)-(?P<b>[0-9]+)[.]example[.]org[.]$\n answer \"{{ .Name }} 60 IN A 10.0.{{ .Group.a }}.{{ index .Match 2 }}\"\n fallthrough\n}";
        check(
            by_address,
            "IP-1-2.example.org.",
            A,
            "NoError ip-1-2.example.org. 10.0.1.2",
        );
        check(by_address, "ip-1-2.example.org.", AAAA, "next");
        check(by_address, "ip-x.example.org.", A, "next");
        check(by_address, "ip-1-2.example.com.", A, "next");
        let strict = by_address.replace(" fallthrough\n", "");
        check(
            &strict,
            "ip-x.example.org.",
            A,
            "no match of a template without fallthrough",
        );
        check(
            &strict,
            "ip-1-999.example.org.",
            A,
            "bad or unsupported A data in the record \"ip-1-999.example.org. 60 IN A 10.0.1.999\"",
        );
        let denial = "template ANY ANY invalid {\n rcode NXDOMAIN\n authority \"{{ .Zone }} 60 IN SOA ns.{{ .Zone }} root.{{ .Zone }} (1 60 60 60 60)\"\n}";
        check(
            denial,
            "a.invalid.",
            AAAA,
            "NXDomain invalid. ns.invalid. root.invalid. 1 60 60 60 60",
        );
        let nothing = "template IN AAAA .";
        check(nothing, "a.org.", AAAA, "NoError");
        check(nothing, "a.org.", A, "next");
        let who =
            "template IN TXT {\n answer \"{{- .Name -}} 0 IN TXT {{ .Remote }}/{{ .Type }}/{{ .Class }}\"\n}";
        check(
            &who.replace("-}} 0", "}} 0"),
            "a.org.",
            TXT,
            "NoError a.org. 10.0.0.9/TXT/IN",
        );
        check(
            "template IN A {\n rcode SERVFAIL\n}",
            "a.org.",
            A,
            "a template says SERVFAIL",
        );
    }

    #[test]
    fn what_go_has_more_is_refused() {
        for (line, expected) in [
            (
                "answer \"{{ if .Name }}x{{ end }}\"",
                "{{if .Name}} is not supported",
            ),
            ("answer \"{{ parseInt .Group.x 16 8 }}\"", "is not supported"),
            ("answer \"{{ .Name\"", "without }}"),
            ("answer \"x }}\"", "without {{"),
            ("ederror 15", "property 'ederror'"),
            ("rcode NOPE", "unknown rcode"),
        ] {
            let message = templates(&format!("template IN A {{\n{line}\n}}")).unwrap_err();
            assert!(message.contains(expected), "{line}: {message}");
        }
        assert!(templates("template IN").is_err() && templates("template XX A").is_err());
    }
}
