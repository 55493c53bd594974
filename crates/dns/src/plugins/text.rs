//! Resource records in the text form of zone files: `NAME [TTL] [CLASS] TYPE DATA`, of the types that templates use.

use hickory_proto::rr::rdata::{CNAME, MX, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};

/// COMPAT: of a record that names none.
const DEFAULT_TTL: u32 = 3600;

pub(super) fn record(text: &str) -> Result<Record, String> {
    let bad = |what: &str| format!("{what} in the record {text:?}");
    let words = words(text).ok_or_else(|| bad("a quoted text does not end"))?;
    let mut words = words.iter().map(String::as_str);
    let name = words.next().ok_or_else(|| bad("no name"))?;
    let name = absolute(name).ok_or_else(|| bad("bad name"))?;
    let mut ttl = DEFAULT_TTL;
    let kind: RecordType = loop {
        let word = words.next().ok_or_else(|| bad("no type"))?;
        if let Ok(seconds) = word.parse() {
            ttl = seconds;
        } else if !word.eq_ignore_ascii_case("IN") {
            break word.to_uppercase().parse().map_err(|_| bad("unknown type"))?;
        }
    };
    let data: Vec<&str> = words.collect();
    let data = rdata(kind, &data).ok_or_else(|| bad(&format!("bad or unsupported {kind} data")))?;
    Ok(Record::from_rdata(name, ttl, data))
}

fn absolute(text: &str) -> Option<Name> {
    if text == "." {
        return Some(Name::root());
    }
    let mut name = Name::from_ascii(text).ok()?;
    name.set_fqdn(true);
    Some(name)
}

fn rdata(kind: RecordType, data: &[&str]) -> Option<RData> {
    Some(match (kind, data) {
        (RecordType::A, [address]) => RData::A(address.parse::<std::net::Ipv4Addr>().ok()?.into()),
        (RecordType::AAAA, [address]) => RData::AAAA(address.parse::<std::net::Ipv6Addr>().ok()?.into()),
        (RecordType::CNAME, [name]) => RData::CNAME(CNAME(absolute(name)?)),
        (RecordType::NS, [name]) => RData::NS(NS(absolute(name)?)),
        (RecordType::PTR, [name]) => RData::PTR(PTR(absolute(name)?)),
        (RecordType::MX, [preference, name]) => RData::MX(MX::new(preference.parse().ok()?, absolute(name)?)),
        (RecordType::SRV, [priority, weight, port, name]) => RData::SRV(SRV::new(
            priority.parse().ok()?,
            weight.parse().ok()?,
            port.parse().ok()?,
            absolute(name)?,
        )),
        (RecordType::TXT, texts) if !texts.is_empty() && texts.iter().all(|text| text.len() < 256) => {
            RData::TXT(TXT::new(texts.iter().map(|text| (*text).to_owned()).collect()))
        }
        (RecordType::SOA, data) => {
            // Numbers may be in parentheses, over several lines.
            let data: Vec<&&str> = data.iter().filter(|word| !matches!(**word, "(" | ")")).collect();
            let [mname, rname, serial, refresh, retry, expire, minimum] = data[..] else {
                return None;
            };
            RData::SOA(SOA::new(
                absolute(mname)?,
                absolute(rname)?,
                serial.trim_matches('(').parse().ok()?,
                refresh.parse().ok()?,
                retry.parse().ok()?,
                expire.parse().ok()?,
                minimum.trim_matches(')').parse().ok()?,
            ))
        }
        _ => return None,
    })
}

/// Words, of which quoted ones may hold spaces.
fn words(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len())),
        };
        words.push(word.to_owned());
        rest = after.trim_start();
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read() {
        for (text, expected) in [
            ("a.org. 60 IN A 192.0.2.1", "a.org. 60 A 192.0.2.1"),
            ("a.org IN 60 AAAA fd00::1", "a.org. 60 AAAA fd00::1"),
            ("a.org. CNAME b.org", "a.org. 3600 CNAME b.org."),
            ("a.org. IN SRV 1 2 3 b.org.", "a.org. 3600 SRV 1 2 3 b.org."),
            ("a.org. IN MX 10 b.org.", "a.org. 3600 MX 10 b.org."),
            ("a.org. 5 IN TXT \"one two\" three", "a.org. 5 TXT one twothree"),
            (
                ". 60 IN SOA ns.a. root.a. (1 2 3 4 5)",
                ". 60 SOA ns.a. root.a. 1 2 3 4 5",
            ),
        ] {
            let found = record(text).unwrap();
            let told = format!(
                "{} {} {} {}",
                found.name,
                found.ttl,
                found.record_type(),
                found.data
            );
            assert_eq!(told, expected, "{text}");
        }
        for text in [
            "",
            "a.org.",
            "a.org. 60 IN",
            "a.org. A x",
            "a.org. NOPE x",
            "a.org. TXT \"x",
            "a..b A 1.2.3.4",
        ] {
            assert!(record(text).is_err(), "{text}");
        }
    }
}
