//! Messages as bytes: what a forwarded answer says, without decoding its records, and how it is told to who asked. No I/O.
//!
//! Answers of resolvers pass through here and are not decoded, so that types of records that nobody here knows arrive
//! as they were sent.

use hickory_proto::op::Message;
use std::ops::Range;

const HEADER: usize = 12;
const OPT: u16 = 41;
const SOA: u16 = 6;
const A: u16 = 1;
const AAAA: u16 = 28;
const IS_RESPONSE: u8 = 0x80;
const TRUNCATED: u8 = 0x02;
const RECURSION_DESIRED: u8 = 0x01;
const AUTHENTIC: u8 = 0x20;
const CHECKING_DISABLED: u8 = 0x10;
/// A name has this many labels at most, and a message far fewer pointers than this.
const MAX_LABELS: usize = 128;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Where the name that begins at `at` ends.
fn after_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    for _ in 0..MAX_LABELS {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            length @ 1..=63 => at += 1 + usize::from(length),
            192.. => return bytes.get(at + 1).map(|_| at + 2),
            _ => return None,
        }
    }
    None
}

/// The question of a message, if it has just one.
pub fn question(message: &[u8]) -> Option<&[u8]> {
    if u16_at(message, 4)? != 1 {
        return None;
    }
    let end = after_name(message, HEADER)? + 4;
    message.get(HEADER..end)
}

/// Whether `answer` is one to `question`: by its id and by the question it repeats.
pub fn answers(asked: &[u8], answer: &[u8]) -> bool {
    let (Some(expected), Some(repeated)) = (question(asked), question(answer)) else {
        return false;
    };
    answer.get(..2) == asked.get(..2)
        && answer.get(2).is_some_and(|flags| flags & IS_RESPONSE != 0)
        && repeated.eq_ignore_ascii_case(expected)
}

/// An answer of a resolver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forwarded {
    /// Without the OPT record.
    bytes: Box<[u8]>,
    /// Where the times to live are.
    ttls: Box<[u16]>,
    /// Where the addresses are, if all that the answer has belong to one name and are of one family.
    addresses: Box<[u16]>,
    /// The length of one address.
    address_length: u8,
    pub code: u8,
    pub truncated: bool,
    /// Whether there are answers at all.
    pub answered: bool,
    /// How long it may be kept by its records; `None` if nothing says so.
    pub ttl: Option<u32>,
    /// A denial with the SOA that RFC 2308 asks for.
    pub denies: bool,
}

impl Forwarded {
    /// Reads an answer; `None` if it is malformed.
    pub fn read(message: &[u8]) -> Option<Forwarded> {
        let question_end = HEADER + question(message)?.len();
        let counts = [u16_at(message, 6)?, u16_at(message, 8)?, u16_at(message, 10)?];
        let flags = [*message.get(2)?, *message.get(3)?];
        let mut at = question_end;
        let mut ttls = Vec::new();
        let mut addresses: Vec<(u16, u16, &[u8])> = Vec::new();
        let mut opt: Option<Range<usize>> = None;
        let mut ttl: Option<u32> = None;
        let mut has_soa = false;
        for (section, count) in counts.iter().enumerate() {
            for _ in 0..*count {
                let begin = at;
                let fixed = after_name(message, at)?;
                let kind = u16_at(message, fixed)?;
                let own_ttl = u32_at(message, fixed + 4)?;
                let length = usize::from(u16_at(message, fixed + 8)?);
                let data = fixed + 10;
                at = data + length;
                message.get(data..at)?;
                if kind == OPT {
                    opt = Some(begin..at);
                    continue;
                }
                ttls.push(u16::try_from(fixed + 4).ok()?);
                let mut kept = own_ttl;
                if section == 0 && ((kind == A && length == 4) || (kind == AAAA && length == 16)) {
                    addresses.push((kind, u16::try_from(data).ok()?, &message[begin..fixed]));
                }
                if section == 1 && kind == SOA && length >= 20 {
                    has_soa = true;
                    kept = kept.min(u32_at(message, at - 4)?);
                }
                ttl = Some(ttl.map_or(kept, |ttl| ttl.min(kept)));
            }
        }
        let code = flags[1] & 0x0f;
        let mut bytes = match opt {
            None => message[..at].to_vec(),
            Some(opt) if opt.end == at => {
                let mut bytes = message[..opt.start].to_vec();
                bytes[10..12].copy_from_slice(&(counts[2] - 1).to_be_bytes());
                bytes
            }
            // An OPT between other records: cutting it out would break pointers behind it.
            Some(_) => {
                let mut decoded = Message::from_vec(message).ok()?;
                decoded.edns = None;
                let encoded = decoded.to_vec().ok()?;
                return (u16_at(&encoded, 10)? < counts[2]).then(|| Forwarded::read(&encoded))?;
            }
        };
        bytes[..2].fill(0);
        let one_set = addresses
            .windows(2)
            .all(|pair| pair[0].0 == pair[1].0 && pair[0].2 == pair[1].2);
        let address_length = if addresses.first().is_some_and(|first| first.0 == A) {
            4
        } else {
            16
        };
        if !one_set {
            addresses.clear();
        }
        Some(Forwarded {
            bytes: bytes.into(),
            ttls: ttls.into(),
            addresses: addresses.iter().map(|(_, at, _)| *at).collect(),
            address_length,
            code,
            truncated: flags[0] & TRUNCATED != 0,
            answered: counts[0] > 0,
            ttl,
            denies: has_soa && counts[0] == 0 && matches!(code, 0 | 3),
        })
    }

    /// The bytes that it takes in memory.
    pub fn size(&self) -> usize {
        self.bytes.len() + 2 * (self.ttls.len() + self.addresses.len()) + size_of::<Forwarded>()
    }

    /// The answer to `asked`: with its id, its spelling of the name, its flags, all times to live set to `ttl` if that is
    /// given, and addresses moved on by `turn`. `None` if it answers another question.
    pub fn told(&self, asked: &[u8], ttl: Option<u32>, turn: usize, dnssec: bool) -> Option<Vec<u8>> {
        let mut out = self.bytes.to_vec();
        let expected = question(asked)?;
        let own = out.get_mut(HEADER..HEADER + expected.len())?;
        if !own.eq_ignore_ascii_case(expected) {
            return None;
        }
        own.copy_from_slice(expected);
        out[..2].copy_from_slice(asked.get(..2)?);
        let flags = asked.get(2..4)?;
        out[2] = out[2] & !RECURSION_DESIRED | flags[0] & RECURSION_DESIRED;
        out[3] = out[3] & !CHECKING_DISABLED | flags[1] & CHECKING_DISABLED;
        if !dnssec && flags[1] & AUTHENTIC == 0 {
            out[3] &= !AUTHENTIC;
        }
        if let Some(ttl) = ttl {
            for at in &self.ttls {
                let at = usize::from(*at);
                out[at..at + 4].copy_from_slice(&ttl.to_be_bytes());
            }
        }
        let count = self.addresses.len();
        if count > 1 && !turn.is_multiple_of(count) {
            let length = usize::from(self.address_length);
            for (nth, to) in self.addresses.iter().enumerate() {
                let from = usize::from(self.addresses[(nth + turn) % count]);
                out[usize::from(*to)..][..length].copy_from_slice(&self.bytes[from..from + length]);
            }
        }
        Some(out)
    }

    /// As a message whose records can be changed.
    pub fn decode(&self) -> Option<Message> {
        Message::from_vec(&self.bytes).ok()
    }
}

/// Adds the OPT record of a server that takes `payload` bytes.
pub fn add_opt(message: &mut Vec<u8>, payload: u16, dnssec: bool) {
    let Some(count) = u16_at(message, 10) else { return };
    message[10..12].copy_from_slice(&(count + 1).to_be_bytes());
    message.push(0);
    message.extend(OPT.to_be_bytes());
    message.extend(payload.to_be_bytes());
    message.extend([0, 0, if dnssec { 0x80 } else { 0 }, 0, 0, 0]);
}

/// Header and question alone, with the flag that says that the rest did not fit.
pub fn cut(mut message: Vec<u8>) -> Option<Vec<u8>> {
    let end = HEADER + question(&message)?.len();
    message.truncate(end);
    message[2] |= TRUNCATED;
    message[6..12].fill(0);
    Some(message)
}

/// The message in at most `limit` bytes. What is only there to help goes first; then as many answers are left as
/// fit, and the rest is said to be missing: a client that cannot ask again by TCP has some of them at least.
pub fn fit(mut message: Message, limit: usize) -> Option<Vec<u8>> {
    let encoded = message.to_vec().ok()?;
    if encoded.len() <= limit {
        return Some(encoded);
    }
    message.additionals.clear();
    let encoded = message.to_vec().ok()?;
    if encoded.len() <= limit {
        return Some(encoded);
    }
    message.metadata.truncation = true;
    message.authorities.clear();
    let all = std::mem::take(&mut message.answers);
    let (mut fits, mut too_many) = (0, all.len() + 1);
    while too_many - fits > 1 {
        let middle = fits.midpoint(too_many);
        message.answers = all[..middle].to_vec();
        if message.to_vec().ok()?.len() <= limit {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    message.answers = all[..fits].to_vec();
    message.to_vec().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::op::{Edns, MessageType, OpCode, Query, ResponseCode};
    use hickory_proto::rr::rdata::{CNAME, SOA as SoaData};
    use hickory_proto::rr::{Name, RData, Record, RecordType};

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn message(kind: MessageType, asked: &str) -> Message {
        let mut message = Message::new(7, kind, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(name(asked), RecordType::A));
        message
    }

    fn addresses(count: u8, edns: bool) -> Message {
        let mut answer = message(MessageType::Response, "a.org.");
        answer.add_answer(Record::from_rdata(
            name("a.org."),
            300,
            RData::CNAME(CNAME(name("b.org."))),
        ));
        for n in 0..count {
            let data = RData::A(std::net::Ipv4Addr::new(192, 0, 2, n).into());
            answer.add_answer(Record::from_rdata(name("b.org."), 100 + u32::from(n), data));
        }
        answer.edns = edns.then(Edns::new);
        answer
    }

    #[test]
    fn an_answer_is_told_with_the_askers_id_spelling_and_time() {
        let forwarded = Forwarded::read(&addresses(3, true).to_vec().unwrap()).unwrap();
        assert_eq!(
            (forwarded.ttl, forwarded.answered, forwarded.denies),
            (Some(100), true, false)
        );
        let mut asked = message(MessageType::Query, "A.Org.");
        asked.metadata.id = 99;
        let asked = asked.to_vec().unwrap();
        let read = |turn| {
            let told = forwarded.told(&asked, Some(20), turn, false).unwrap();
            Message::from_vec(&told).unwrap()
        };
        let told = read(0);
        assert_eq!((told.metadata.id, told.edns.is_none()), (99, true));
        assert!(told.queries[0].name().eq_case(&name("A.Org.")));
        assert!(told.answers.iter().all(|r| r.ttl == 20));
        let data = |m: &Message| {
            m.answers
                .iter()
                .map(|r| r.data.to_string().to_lowercase())
                .collect::<Vec<_>>()
        };
        assert_eq!(data(&told), ["b.org.", "192.0.2.0", "192.0.2.1", "192.0.2.2"]);
        assert_eq!(data(&read(1)), ["b.org.", "192.0.2.1", "192.0.2.2", "192.0.2.0"]);
        let other = message(MessageType::Query, "c.org.").to_vec().unwrap();
        assert_eq!(forwarded.told(&other, None, 0, false), None);
    }

    #[test]
    fn denials_are_kept_as_long_as_the_soa_says() {
        let mut answer = message(MessageType::Response, "a.org.");
        answer.metadata.response_code = ResponseCode::NXDomain;
        let soa = SoaData::new(name("ns.org."), name("root.org."), 1, 2, 3, 4, 60);
        answer.add_authority(Record::from_rdata(name("org."), 900, RData::SOA(soa)));
        let read = Forwarded::read(&answer.to_vec().unwrap()).unwrap();
        assert_eq!((read.ttl, read.denies, read.code), (Some(60), true, 3));
        answer.authorities.clear();
        let read = Forwarded::read(&answer.to_vec().unwrap()).unwrap();
        assert_eq!((read.ttl, read.denies), (None, false));
    }

    #[test]
    fn an_opt_record_is_taken_out_and_added() {
        for (edns, kept) in [(true, 0), (false, 0)] {
            let mut bytes = addresses(1, edns).to_vec().unwrap();
            let read = Forwarded::read(&bytes).unwrap();
            assert_eq!(read.decode().unwrap().edns.is_some(), kept == 1);
            bytes = read
                .told(
                    &message(MessageType::Query, "a.org.").to_vec().unwrap(),
                    None,
                    0,
                    false,
                )
                .unwrap();
            add_opt(&mut bytes, 1232, true);
            let told = Message::from_vec(&bytes).unwrap().edns.unwrap();
            assert!(told.flags().dnssec_ok && told.max_payload() == 1232);
        }
        // In the middle.
        let mut bytes = addresses(1, true).to_vec().unwrap();
        bytes[11] = 2;
        bytes.extend(b"\0\0\x10\0\x01\0\0\0\x05\0\x02\x01x");
        let read = Forwarded::read(&bytes).unwrap().decode().unwrap();
        assert_eq!((read.edns.is_none(), read.additionals.len()), (true, 1));
    }

    #[test]
    fn forged_answers_are_told_apart() {
        let question = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0\x01a\x03com\0\0\x01\0\x01".to_vec();
        let check = |change: fn(&mut Vec<u8>), expected: bool| {
            let mut answer = question.clone();
            answer[2] |= 0x80;
            change(&mut answer);
            assert_eq!(answers(&question, &answer), expected, "{answer:?}");
        };
        check(|_| {}, true);
        check(|answer| answer[13] = b'A', true);
        check(|answer| answer.extend([1, 2, 3]), true);
        check(|answer| answer[0] = 0, false);
        check(|answer| answer[2] = 0, false);
        check(|answer| answer[13] = b'b', false);
        check(|answer| answer.truncate(20), false);
        check(Vec::clear, false);
        assert!(!answers(&question[..14], &question), "a question that is cut");
    }

    #[test]
    fn malformed_answers_are_none() {
        let good = addresses(2, true).to_vec().unwrap();
        for end in 0..good.len() {
            assert_eq!(Forwarded::read(&good[..end]), None, "{end}");
        }
        assert!(Forwarded::read(&good).is_some());
    }

    #[test]
    fn a_long_answer_is_cut_to_what_fits() {
        let whole = addresses(100, false);
        for limit in [12, 40, 60, 512, 1232] {
            let cut = fit(whole.clone(), limit).unwrap();
            let read = Message::from_vec(&cut).unwrap();
            assert!(
                cut.len() <= limit.max(40) && read.metadata.truncation,
                "{limit}: {}",
                cut.len()
            );
        }
        assert_eq!(fit(whole.clone(), 65535).unwrap(), whole.to_vec().unwrap());
        let bare = Message::from_vec(&cut(whole.to_vec().unwrap()).unwrap()).unwrap();
        assert!(bare.metadata.truncation && bare.answers.is_empty());
    }
}
