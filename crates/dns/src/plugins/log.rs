//! The plugin `log`: one line for each question, in CoreDNS' formats.

use crate::corefile::{Context, CorefileLine, zones};
use crate::names::longest;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const COMMON: &str = "{remote}:{port} - {>id} \"{type} {class} {name} {proto} {size} {>do} {>bufsize}\" {rcode} {>rflags} {rsize} {duration}";
const COMBINED: &str = "{remote}:{port} - {>id} \"{type} {class} {name} {proto} {size} {>do} {>bufsize} {>opcode}\" {rcode} {>rflags} {rsize} {duration}";
const PLACEHOLDERS: [&str; 17] = [
    "{remote}",
    "{port}",
    "{local}",
    "{type}",
    "{class}",
    "{name}",
    "{proto}",
    "{size}",
    "{duration}",
    "{rcode}",
    "{rsize}",
    "{>rflags}",
    "{>bufsize}",
    "{>do}",
    "{>id}",
    "{>opcode}",
    "{/log/type}",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    All,
    Success,
    Denial,
    Error,
}

#[derive(Debug, Clone)]
pub struct LogRule {
    zones: Vec<Name>,
    format: String,
    classes: Vec<Class>,
}

/// What a line tells of. `answer` is empty for a question that got none.
pub struct Logged<'a> {
    pub question: &'a [u8],
    pub answer: &'a [u8],
    pub name: &'a Name,
    pub kind: &'a str,
    pub class: &'a str,
    pub code: ResponseCode,
    pub answered: bool,
    pub over_tcp: bool,
    pub dnssec: bool,
    pub payload: u16,
    pub peer: SocketAddr,
    pub local: Option<IpAddr>,
    pub took: Duration,
}

impl LogRule {
    pub(crate) fn parse(line: &CorefileLine, context: &mut Context<'_>) -> Result<LogRule, String> {
        let mut args = line.args.as_slice();
        let mut format = COMMON.to_owned();
        if let Some((last, rest)) = args.split_last()
            && last.contains('{')
        {
            format = last.replace("{common}", COMMON).replace("{combined}", COMBINED);
            args = rest;
        }
        let names = match args {
            [] => context.zones.to_vec(),
            args => zones(args)?,
        };
        let mut rest = format.as_str();
        while let Some(start) = rest.find('{') {
            let end = rest[start..].find('}').map_or(rest.len(), |end| start + end + 1);
            let placeholder = &rest[start..end];
            if !PLACEHOLDERS.contains(&placeholder) && placeholder != "{/log/class}" {
                return Err(format!("the placeholder {placeholder} is not supported"));
            }
            rest = &rest[end..];
        }
        let mut classes = Vec::new();
        for line in &line.block {
            if line.name != "class" || line.args.is_empty() {
                return Err(format!("unknown property '{}'", line.name));
            }
            for class in &line.args {
                classes.push(match class.as_str() {
                    "all" => Class::All,
                    "success" => Class::Success,
                    "denial" => Class::Denial,
                    "error" => Class::Error,
                    class => return Err(format!("invalid Class: {class}")),
                });
            }
        }
        Ok(LogRule {
            zones: names,
            format,
            classes,
        })
    }

    /// The line of a question, if this rule is about it.
    pub fn line(&self, told: &Logged<'_>) -> Option<String> {
        longest(&self.zones, &told.name.to_lowercase())?;
        let class = told.class();
        let wanted = self.classes.is_empty() || self.classes.iter().any(|c| *c == Class::All || *c == class);
        wanted.then(|| told.format(&self.format))
    }
}

impl Logged<'_> {
    fn class(&self) -> Class {
        match self.code {
            ResponseCode::NoError if self.answered => Class::Success,
            ResponseCode::NoError | ResponseCode::NXDomain => Class::Denial,
            _ => Class::Error,
        }
    }

    fn format(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 64);
        let mut rest = format;
        while let Some((before, after)) = rest.split_once('{') {
            out.push_str(before);
            let (placeholder, after) = after.split_once('}').unwrap_or((after, ""));
            self.fill(&mut out, placeholder);
            rest = after;
        }
        out.push_str(rest);
        out
    }

    fn fill(&self, out: &mut String, placeholder: &str) {
        let address = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => v4.to_string(),
            IpAddr::V6(v6) => format!("[{v6}]"),
        };
        // Writing to a string does not fail.
        let _ = match placeholder {
            "remote" => write!(out, "{}", address(self.peer.ip())),
            "port" => write!(out, "{}", self.peer.port()),
            "local" => write!(out, "{}", self.local.map(address).unwrap_or_default()),
            "type" => write!(out, "{}", self.kind),
            "class" => write!(out, "{}", self.class),
            "name" => write!(out, "{}", self.name.to_lowercase()),
            "proto" => write!(out, "{}", if self.over_tcp { "tcp" } else { "udp" }),
            "size" => write!(out, "{}", self.question.len()),
            "duration" => write!(out, "{}s", self.took.as_secs_f64()),
            "rcode" => write!(out, "{}", code_name(self.code)),
            "rsize" => write!(out, "{}", self.answer.len()),
            ">rflags" => write!(out, "{}", flags(self.answer)),
            ">bufsize" => write!(out, "{}", self.payload),
            ">do" => write!(out, "{}", self.dnssec),
            ">id" => write!(
                out,
                "{}",
                self.question
                    .first_chunk()
                    .map_or(0, |id| u16::from_be_bytes(*id))
            ),
            ">opcode" => write!(out, "{}", self.question.get(2).map_or(0, |flags| flags >> 3 & 15)),
            "/log/class" => write!(
                out,
                "{}",
                match self.class() {
                    Class::Success => "success",
                    Class::Denial => "denial",
                    _ => "error",
                }
            ),
            "/log/type" => write!(
                out,
                "{}",
                match (self.class(), self.code) {
                    (Class::Denial, ResponseCode::NoError) => "NODATA",
                    _ => code_name(self.code),
                }
            ),
            _ => Ok(()),
        };
    }
}

/// The names of response codes that metrics and logs show.
pub fn code_name(code: ResponseCode) -> &'static str {
    match code {
        ResponseCode::NoError => "NOERROR",
        ResponseCode::FormErr => "FORMERR",
        ResponseCode::ServFail => "SERVFAIL",
        ResponseCode::NXDomain => "NXDOMAIN",
        ResponseCode::NotImp => "NOTIMP",
        ResponseCode::Refused => "REFUSED",
        _ => "other",
    }
}

fn flags(answer: &[u8]) -> String {
    let [high, low] = answer.get(2..4).and_then(|b| b.try_into().ok()).unwrap_or([0, 0]);
    let all = [
        (high & 0x80, "qr"),
        (high & 0x04, "aa"),
        (high & 0x02, "tc"),
        (high & 0x01, "rd"),
        (low & 0x80, "ra"),
        (low & 0x20, "ad"),
        (low & 0x10, "cd"),
    ];
    let set: Vec<&str> = all
        .iter()
        .filter(|(bit, _)| *bit != 0)
        .map(|(_, name)| *name)
        .collect();
    set.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corefile::parse;
    use std::collections::BTreeMap;

    fn line(rule: &str, name: &str, code: ResponseCode, answered: bool) -> Option<String> {
        let config = parse(&format!(". {{\n{rule}\n}}"), &BTreeMap::new()).unwrap();
        config.blocks[0].log[0].line(&Logged {
            question: &[0, 7, 1, 0],
            answer: &[0, 7, 0x85, 0x80],
            name: &Name::from_ascii(name).unwrap(),
            kind: "A",
            class: "IN",
            code,
            answered,
            over_tcp: false,
            dnssec: false,
            payload: 1232,
            peer: "[fd00::1]:99".parse().unwrap(),
            local: None,
            took: Duration::from_millis(2),
        })
    }

    #[test]
    fn lines_have_the_common_format() {
        assert_eq!(
            line("log", "Example.org.", ResponseCode::NoError, true).unwrap(),
            "[fd00::1]:99 - 7 \"A IN example.org. udp 4 false 1232\" NOERROR qr,aa,rd,ra 4 0.002s"
        );
        assert_eq!(
            line("log example.org", "example.com.", ResponseCode::NoError, true),
            None
        );
        let denials = "log . \"{name} {/log/class} {/log/type}\" {\n class denial\n}";
        assert_eq!(line(denials, "a.b.", ResponseCode::NoError, true), None);
        assert_eq!(
            line(denials, "a.b.", ResponseCode::NoError, false).unwrap(),
            "a.b. denial NODATA"
        );
        assert_eq!(
            line(denials, "a.b.", ResponseCode::NXDomain, false).unwrap(),
            "a.b. denial NXDOMAIN"
        );
        assert_eq!(line(denials, "a.b.", ResponseCode::ServFail, false), None);
    }

    #[test]
    fn unknown_placeholders_are_refused() {
        let refused = parse(". {\n log . \"{nope}\"\n}", &BTreeMap::new()).unwrap_err();
        assert!(refused.message.contains("{nope}"), "{refused}");
    }
}
