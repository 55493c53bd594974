//! Where the encoder reads from: a parsed value, or JSON bytes by way of a tape, which is one flat list of
//! the document's nodes that borrow its text. Both are read from their end, because that is how messages
//! are written.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::{MAX_DEPTH, ProtobufError, Result};

pub(super) enum View<'a, N: Node<'a>> {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    String(Cow<'a, str>),
    /// The last comes first, also of an object.
    Array(N::Items),
    Object(N::Entries),
}

pub(super) trait Node<'a>: Copy {
    type Items: Iterator<Item = Self>;
    type Entries: Iterator<Item = (Cow<'a, str>, Self)>;

    fn view(self) -> View<'a, Self>;

    /// The node as JSON text.
    fn json(self) -> Cow<'a, [u8]>;

    /// The fields of a manager as JSON text, in upstream's order where the node has none of its own.
    fn fields(self) -> Cow<'a, [u8]> {
        self.json()
    }
}

impl<'a> Node<'a> for &'a Value {
    type Items = std::iter::Rev<std::slice::Iter<'a, Value>>;
    type Entries = ValueEntries<'a>;

    fn view(self) -> View<'a, Self> {
        match self {
            Value::Null => View::Null,
            Value::Bool(value) => View::Bool(*value),
            Value::Number(number) => match number.as_i64() {
                Some(value) => View::Integer(value),
                None => View::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => View::String(Cow::Borrowed(text)),
            Value::Array(values) => View::Array(values.iter().rev()),
            Value::Object(map) => View::Object(ValueEntries(map.iter())),
        }
    }

    fn json(self) -> Cow<'a, [u8]> {
        Cow::Owned(self.to_string().into_bytes())
    }

    fn fields(self) -> Cow<'a, [u8]> {
        let mut out = Vec::with_capacity(256);
        match crate::apply::write_fields(&mut out, self) {
            Ok(()) => Cow::Owned(out),
            Err(_) => self.json(),
        }
    }
}

pub(super) struct ValueEntries<'a>(<&'a Map<String, Value> as IntoIterator>::IntoIter);

impl<'a> Iterator for ValueEntries<'a> {
    type Item = (Cow<'a, str>, &'a Value);

    fn next(&mut self) -> Option<Self::Item> {
        let (key, value) = self.0.next_back()?;
        Some((Cow::Borrowed(key.as_str()), value))
    }
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

#[derive(Clone, Copy)]
struct Mark {
    kind: Kind,
    /// Whether the text, or the key, has escapes.
    escaped: bool,
    key_escaped: bool,
    /// Without the quotes of a string.
    start: u32,
    end: u32,
    key_start: u32,
    key_end: u32,
    /// The sibling before, and the last child.
    before: u32,
    last: u32,
}

pub(super) struct Tape<'a> {
    text: &'a str,
    marks: Vec<Mark>,
}

impl<'a> Tape<'a> {
    pub fn parse(json: &'a [u8]) -> Result<Tape<'a>> {
        let text = std::str::from_utf8(json).map_err(|_| bad(0))?;
        if json.len() >= NONE as usize {
            return Err(bad(0));
        }
        let mut parser = Parser {
            bytes: json,
            at: 0,
            marks: Vec::with_capacity(json.len() / 16 + 8),
        };
        parser.value(0)?;
        parser.space();
        if parser.at != json.len() {
            return Err(bad(parser.at));
        }
        Ok(Tape {
            text,
            marks: parser.marks,
        })
    }

    pub fn root(&'a self) -> TapeNode<'a> {
        TapeNode { tape: self, index: 0 }
    }

    fn string(&self, start: u32, end: u32, escaped: bool) -> Cow<'a, str> {
        let text = &self.text[start as usize..end as usize];
        if !escaped {
            return Cow::Borrowed(text);
        }
        // With its quotes it is JSON again. Half a surrogate pair becomes what Go makes of it.
        let quoted = &self.text[start as usize - 1..end as usize + 1];
        Cow::Owned(serde_json::from_str(quoted).unwrap_or_else(|_| text.replace('\\', "\u{fffd}")))
    }
}

fn bad(at: usize) -> ProtobufError {
    ProtobufError::Value(format!("not JSON at byte {at}"))
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
    marks: Vec<Mark>,
}

impl Parser<'_> {
    fn space(&mut self) {
        while matches!(self.bytes.get(self.at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn next(&mut self) -> Option<u8> {
        self.space();
        self.bytes.get(self.at).copied()
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        if self.next() != Some(byte) {
            return Err(bad(self.at));
        }
        self.at += 1;
        Ok(())
    }

    /// Reads a string from behind its first quote; where it ends, and whether it has escapes.
    fn string(&mut self) -> Result<(u32, u32, bool)> {
        let (start, mut escaped) = (self.at, false);
        loop {
            match self.bytes.get(self.at) {
                Some(b'"') => break,
                Some(b'\\') => {
                    escaped = true;
                    self.at += 2;
                }
                Some(_) => self.at += 1,
                None => return Err(bad(self.at)),
            }
        }
        let end = self.at;
        self.at += 1;
        Ok((start as u32, end as u32, escaped))
    }

    fn word(&mut self, word: &str, kind: Kind) -> Result<Mark> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err(bad(self.at));
        }
        let start = self.at;
        self.at += word.len();
        Ok(mark(kind, start, self.at))
    }

    /// Reads a value and returns its place.
    fn value(&mut self, depth: usize) -> Result<u32> {
        if depth > 2 * MAX_DEPTH {
            return Err(ProtobufError::TooDeep);
        }
        let index = self.marks.len() as u32;
        let found = match self.next() {
            Some(b'"') => {
                self.at += 1;
                let (start, end, escaped) = self.string()?;
                Mark {
                    escaped,
                    ..mark(Kind::String, start as usize, end as usize)
                }
            }
            Some(b'n') => self.word("null", Kind::Null)?,
            Some(b't') => self.word("true", Kind::Bool)?,
            Some(b'f') => self.word("false", Kind::Bool)?,
            Some(open @ (b'{' | b'[')) => return self.container(open == b'{', depth),
            Some(b'-' | b'0'..=b'9') => {
                let start = self.at;
                while let Some(b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9') = self.bytes.get(self.at) {
                    self.at += 1;
                }
                mark(Kind::Number, start, self.at)
            }
            _ => return Err(bad(self.at)),
        };
        self.marks.push(found);
        Ok(index)
    }

    fn container(&mut self, object: bool, depth: usize) -> Result<u32> {
        let index = self.marks.len();
        let (kind, close) = if object {
            (Kind::Object, b'}')
        } else {
            (Kind::Array, b']')
        };
        self.marks.push(mark(kind, self.at, self.at));
        self.at += 1;
        let mut before = NONE;
        if self.next() == Some(close) {
            self.at += 1;
        } else {
            loop {
                let mut key = (0, 0, false);
                if object {
                    self.expect(b'"')?;
                    key = self.string()?;
                    self.expect(b':')?;
                }
                let child = self.value(depth + 1)?;
                let found = &mut self.marks[child as usize];
                (found.key_start, found.key_end, found.key_escaped) = key;
                found.before = before;
                before = child;
                match self.next() {
                    Some(b',') => self.at += 1,
                    Some(byte) if byte == close => {
                        self.at += 1;
                        break;
                    }
                    _ => return Err(bad(self.at)),
                }
            }
        }
        self.marks[index].last = before;
        self.marks[index].end = self.at as u32;
        Ok(index as u32)
    }
}

fn mark(kind: Kind, start: usize, end: usize) -> Mark {
    Mark {
        kind,
        escaped: false,
        key_escaped: false,
        start: start as u32,
        end: end as u32,
        key_start: 0,
        key_end: 0,
        before: NONE,
        last: NONE,
    }
}

/// One node of a tape.
#[derive(Clone, Copy)]
pub(super) struct TapeNode<'a> {
    tape: &'a Tape<'a>,
    index: u32,
}

impl<'a> TapeNode<'a> {
    fn mark(self) -> &'a Mark {
        &self.tape.marks[self.index as usize]
    }

    fn text(self) -> &'a str {
        let mark = self.mark();
        &self.tape.text[mark.start as usize..mark.end as usize]
    }
}

impl<'a> Node<'a> for TapeNode<'a> {
    type Items = Items<'a>;
    type Entries = Entries<'a>;

    fn view(self) -> View<'a, Self> {
        let mark = self.mark();
        match mark.kind {
            Kind::Null => View::Null,
            Kind::Bool => View::Bool(self.text() == "true"),
            Kind::Number => match self.text().parse() {
                Ok(value) => View::Integer(value),
                Err(_) => View::Float(self.text().parse().unwrap_or(f64::NAN)),
            },
            Kind::String => View::String(self.tape.string(mark.start, mark.end, mark.escaped)),
            Kind::Array => View::Array(Items {
                tape: self.tape,
                index: mark.last,
            }),
            Kind::Object => View::Object(Entries(Items {
                tape: self.tape,
                index: mark.last,
            })),
        }
    }

    fn json(self) -> Cow<'a, [u8]> {
        let mark = self.mark();
        let quote = u32::from(mark.kind == Kind::String);
        let (start, end) = ((mark.start - quote) as usize, (mark.end + quote) as usize);
        Cow::Borrowed(&self.tape.text.as_bytes()[start..end])
    }
}

pub(super) struct Items<'a> {
    tape: &'a Tape<'a>,
    index: u32,
}

impl<'a> Iterator for Items<'a> {
    type Item = TapeNode<'a>;

    fn next(&mut self) -> Option<TapeNode<'a>> {
        if self.index == NONE {
            return None;
        }
        let place = TapeNode {
            tape: self.tape,
            index: self.index,
        };
        self.index = place.mark().before;
        Some(place)
    }
}

pub(super) struct Entries<'a>(Items<'a>);

impl<'a> Iterator for Entries<'a> {
    type Item = (Cow<'a, str>, TapeNode<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let place = self.0.next()?;
        let mark = place.mark();
        Some((
            place.tape.string(mark.key_start, mark.key_end, mark.key_escaped),
            place,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(place: TapeNode<'_>) -> Value {
        match place.view() {
            View::Null => Value::Null,
            View::Bool(value) => value.into(),
            View::Integer(value) => value.into(),
            View::Float(value) => value.into(),
            View::String(text) => text.into_owned().into(),
            View::Array(items) => {
                let mut values: Vec<Value> = items.map(value).collect();
                values.reverse();
                Value::Array(values)
            }
            View::Object(entries) => entries
                .map(|(key, place)| (key.into_owned(), value(place)))
                .collect(),
        }
    }

    #[test]
    fn a_tape_reads_as_the_document() {
        for text in [
            "null",
            "[]",
            " { } ",
            "-1.5e3",
            "[1, [2,3], {}, \"\"]",
            r#"{"a":{"b\"":[true,false,null]},"é":"\u00e9\n","z":-7}"#,
        ] {
            let expected: Value = serde_json::from_str(text).expect("JSON");
            let tape = Tape::parse(text.as_bytes()).expect("parses");
            assert_eq!(value(tape.root()), expected, "{text}");
            let json: Value = serde_json::from_slice(&tape.root().json()).expect("JSON");
            assert_eq!(json, expected, "{text}");
        }
        for text in [
            "",
            "[",
            "{\"a\"}",
            "[1,]",
            "\"a",
            "\"\\",
            "tru",
            "1 2",
            "{\"a\":1,}",
        ] {
            assert!(Tape::parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(Tape::parse("[".repeat(100_000).as_bytes()).is_err());
    }
}
