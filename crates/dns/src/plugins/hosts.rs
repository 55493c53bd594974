//! The plugin `hosts`: names and addresses in the form of /etc/hosts, from lines of the Corefile and from a key of its
//! ConfigMap.

use crate::corefile::{Context, CorefileLine, zones};
use crate::names::{Fall, absolute, longest, reverse_address};
use crate::zone::address_data;
use hickory_proto::rr::rdata::PTR;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use std::collections::HashMap;
use std::net::IpAddr;

#[derive(Debug, Clone, Default)]
pub struct Hosts {
    zones: Vec<Name>,
    addresses: HashMap<Name, Vec<IpAddr>>,
    names: HashMap<IpAddr, Vec<Name>>,
    ttl: u32,
    fall: Fall,
}

/// What the plugin says to a question.
#[derive(Debug, PartialEq)]
pub enum Found {
    /// It is the next plugin's.
    Next,
    /// Nothing, which is an error: hosts have no SOA that a denial could carry.
    Failure,
    Records(Vec<Record>),
}

impl Hosts {
    pub(crate) fn parse(line: &CorefileLine, context: &mut Context<'_>) -> Result<Hosts, String> {
        let (file, args) = match line.args.split_first() {
            Some((path, rest)) => (Some(context.file(path)?.to_owned()), rest),
            None => (None, &[][..]),
        };
        let mut found = Hosts {
            zones: context.zones_or_own(args)?,
            ttl: 3600,
            ..Hosts::default()
        };
        let (mut text, mut reverse) = (file.unwrap_or_default(), true);
        for line in &line.block {
            match (line.name.as_str(), line.args.as_slice()) {
                ("fallthrough", []) => found.fall = Fall(vec![Name::root()]),
                ("fallthrough", args) => found.fall = Fall(zones(args)?),
                ("no_reverse", []) => reverse = false,
                ("ttl", [ttl]) => {
                    let ttl = ttl.parse::<u16>().ok().filter(|ttl| *ttl > 0);
                    found.ttl = ttl.ok_or("ttl provided is invalid")?.into();
                }
                // The ConfigMap is followed anyway.
                ("reload", [_]) => {}
                (address, names) if address.parse::<IpAddr>().is_ok() && !names.is_empty() => {
                    text.push_str(&format!("\n{address} {}", names.join(" ")));
                }
                (name, _) => return Err(format!("unknown property '{name}'")),
            }
        }
        found.read(&text, reverse);
        Ok(found)
    }

    /// Lines that are no entries are passed over, as the resolvers of machines do.
    fn read(&mut self, text: &str, reverse: bool) {
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            let address = words
                .next()
                .and_then(|word| word.split('%').next()?.parse::<IpAddr>().ok());
            let Some(address) = address else { continue };
            for name in words.filter_map(absolute) {
                if longest(&self.zones, &name).is_none() {
                    continue;
                }
                self.addresses.entry(name.clone()).or_default().push(address);
                if reverse {
                    self.names.entry(address).or_default().push(name);
                }
            }
        }
    }

    pub fn answer(&self, name: &Name, kind: RecordType) -> Found {
        let lower = name.to_lowercase();
        let record = |data| Record::from_rdata(name.clone(), self.ttl, data);
        if kind == RecordType::PTR {
            let names = reverse_address(&lower).and_then(|address| self.names.get(&address));
            return match names {
                Some(names) => {
                    let data = names.iter().map(|name| RData::PTR(PTR(name.clone())));
                    Found::Records(data.map(record).collect())
                }
                None => Found::Next,
            };
        }
        if longest(&self.zones, &lower).is_none() {
            return Found::Next;
        }
        match self.addresses.get(&lower) {
            Some(addresses) => {
                let wanted = addresses.iter().filter(|address| match kind {
                    RecordType::A => address.is_ipv4(),
                    RecordType::AAAA => address.is_ipv6(),
                    _ => false,
                });
                Found::Records(wanted.map(|address| record(address_data(*address))).collect())
            }
            None if self.fall.through(&lower) => Found::Next,
            None => Found::Failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corefile::parse;
    use std::collections::BTreeMap;

    fn ask(hosts: &Hosts, name: &str, kind: RecordType) -> String {
        match hosts.answer(&Name::from_ascii(name).unwrap(), kind) {
            Found::Next => "next".to_owned(),
            Found::Failure => "failure".to_owned(),
            Found::Records(records) => {
                let data: Vec<String> = records.iter().map(|r| format!("{}/{}", r.data, r.ttl)).collect();
                data.join(" ")
            }
        }
    }

    #[test]
    fn entries_are_found() {
        let corefile = ". {\n hosts /etc/coredns/list example.org in-addr.arpa {\n 192.0.2.1 a.example.org A2.example.org\n fd00::1 a.example.org\n ttl 60\n fallthrough b.example.org\n }\n}";
        let files = BTreeMap::from([(
            "list".to_owned(),
            "# x\n192.0.2.9 file.example.org other.org # y\nbad\n".to_owned(),
        )]);
        let config = parse(corefile, &files).unwrap();
        let hosts = config.blocks[0].hosts.as_ref().unwrap();
        for (name, kind, expected) in [
            ("a.example.org.", RecordType::A, "192.0.2.1/60"),
            ("A.Example.org.", RecordType::AAAA, "fd00::1/60"),
            ("a2.example.org.", RecordType::AAAA, ""),
            ("a.example.org.", RecordType::MX, ""),
            ("file.example.org.", RecordType::A, "192.0.2.9/60"),
            ("other.org.", RecordType::A, "next"),
            ("none.example.org.", RecordType::A, "failure"),
            ("none.b.example.org.", RecordType::A, "next"),
            (
                "1.2.0.192.in-addr.arpa.",
                RecordType::PTR,
                "a.example.org./60 a2.example.org./60",
            ),
            ("9.9.9.9.in-addr.arpa.", RecordType::PTR, "next"),
        ] {
            assert_eq!(ask(hosts, name, kind), expected, "{name} {kind}");
        }
    }

    #[test]
    fn files_of_the_node_are_not_read() {
        let refused = parse(". {\n hosts /etc/hosts\n}", &BTreeMap::new()).unwrap_err();
        assert!(
            refused.message.contains("files of the node are not read"),
            "{refused}"
        );
    }
}
