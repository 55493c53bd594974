//! A JSON reader that says what Go's says when the text is not JSON, and keeps order and duplicates.

use super::node::Node;

/// Upstream stops at 10,000 levels; no real object comes near. What is stored is read again with a limit of 128
/// levels, by us and by many a client, and lists, tables, watch events and managed fields put some levels around it.
pub const MAX_DEPTH: usize = 100;

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Result<T> = std::result::Result<T, String>;

pub fn parse(bytes: &[u8]) -> Result<Node> {
    let mut reader = Reader { bytes, at: 0 };
    let node = reader.value(0)?;
    reader.skip_space();
    match reader.peek() {
        None => Ok(node),
        Some(c) => Err(unexpected(c, "after top-level value")),
    }
}

fn unexpected(c: u8, context: &str) -> String {
    let quoted = match c {
        b'\'' => "\\'".to_string(),
        b'\\' => "\\\\".to_string(),
        0x07 => "\\a".to_string(),
        0x08 => "\\b".to_string(),
        0x0c => "\\f".to_string(),
        b'\n' => "\\n".to_string(),
        b'\r' => "\\r".to_string(),
        b'\t' => "\\t".to_string(),
        0x0b => "\\v".to_string(),
        0x20..=0x7e => (c as char).to_string(),
        0xa1..=0xac | 0xae..=0xff => (c as char).to_string(),
        0x00..=0x7f => format!("\\x{c:02x}"),
        _ => format!("\\u{c:04x}"),
    };
    format!("invalid character '{quoted}' {context}")
}

const END: &str = "unexpected end of JSON input";

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// The next byte that is not space.
    fn next_token(&mut self) -> Result<u8> {
        self.skip_space();
        self.peek().ok_or_else(|| END.to_string())
    }

    fn value(&mut self, depth: usize) -> Result<Node> {
        let c = self.next_token()?;
        match c {
            b'{' | b'[' if depth >= MAX_DEPTH => Err(unexpected(c, "exceeded max depth")),
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Ok(Node::String(self.string()?)),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.literal("true", Node::Bool(true)),
            b'f' => self.literal("false", Node::Bool(false)),
            b'n' => self.literal("null", Node::Null),
            _ => Err(unexpected(c, "looking for beginning of value")),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Node> {
        self.at += 1;
        let mut entries = Vec::new();
        if self.next_token()? == b'}' {
            self.at += 1;
            return Ok(Node::Object(entries));
        }
        loop {
            match self.next_token()? {
                b'"' => {}
                c => return Err(unexpected(c, "looking for beginning of object key string")),
            }
            let key = self.string()?;
            match self.next_token()? {
                b':' => self.at += 1,
                c => return Err(unexpected(c, "after object key")),
            }
            let node = self.value(depth + 1)?;
            entries.push((key, node));
            match self.next_token()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Ok(Node::Object(entries));
                }
                c => return Err(unexpected(c, "after object key:value pair")),
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Node> {
        self.at += 1;
        let mut nodes = Vec::new();
        if self.next_token()? == b']' {
            self.at += 1;
            return Ok(Node::Array(nodes));
        }
        loop {
            nodes.push(self.value(depth + 1)?);
            match self.next_token()? {
                b',' => self.at += 1,
                b']' => {
                    self.at += 1;
                    return Ok(Node::Array(nodes));
                }
                c => return Err(unexpected(c, "after array element")),
            }
        }
    }

    fn literal(&mut self, word: &str, node: Node) -> Result<Node> {
        for expected in word.bytes() {
            match self.peek() {
                Some(c) if c == expected => self.at += 1,
                Some(c) => {
                    return Err(unexpected(
                        c,
                        &format!("in literal {word} (expecting '{}')", expected as char),
                    ));
                }
                None => return Err(END.to_string()),
            }
        }
        Ok(node)
    }

    fn digits(&mut self, context: &str) -> Result<()> {
        match self.peek() {
            Some(b'0'..=b'9') => {}
            Some(c) => return Err(unexpected(c, context)),
            None => return Err(END.to_string()),
        }
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        Ok(())
    }

    fn number(&mut self) -> Result<Node> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits("in numeric literal")?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits("after decimal point in numeric literal")?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits("in exponent of numeric literal")?;
        }
        Ok(Node::Number(
            String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned(),
        ))
    }

    fn string(&mut self) -> Result<String> {
        self.at += 1;
        let start = self.at;
        // Most strings have no escape and are copied in one piece.
        while let Some(c) = self.peek() {
            match c {
                b'"' => {
                    let text = String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned();
                    self.at += 1;
                    return Ok(text);
                }
                b'\\' => break,
                0..=0x1f => return Err(unexpected(c, "in string literal")),
                _ => self.at += 1,
            }
        }
        let mut raw = self.bytes[start..self.at].to_vec();
        loop {
            let c = self.peek().ok_or(END)?;
            self.at += 1;
            match c {
                b'"' => return Ok(String::from_utf8_lossy(&raw).into_owned()),
                b'\\' => {
                    let c = self.peek().ok_or(END)?;
                    self.at += 1;
                    let plain = match c {
                        b'"' | b'\\' | b'/' => c,
                        b'b' => 0x08,
                        b'f' => 0x0c,
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        b'u' => {
                            let c = self.escaped_char()?;
                            raw.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                            continue;
                        }
                        _ => return Err(unexpected(c, "in string escape code")),
                    };
                    raw.push(plain);
                }
                0..=0x1f => return Err(unexpected(c, "in string literal")),
                _ => raw.push(c),
            }
        }
    }

    fn hex4(&mut self) -> Result<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let c = self.peek().ok_or(END)?;
            let Some(digit) = (c as char).to_digit(16) else {
                return Err(unexpected(c, "in \\u hexadecimal character escape"));
            };
            code = code * 16 + digit;
            self.at += 1;
        }
        Ok(code)
    }

    /// The code point of a `\u` escape; half a surrogate pair becomes the replacement character.
    fn escaped_char(&mut self) -> Result<char> {
        let first = self.hex4()?;
        if (0xd800..0xdc00).contains(&first) && self.bytes[self.at..].starts_with(b"\\u") {
            let back = self.at;
            self.at += 2;
            let second = self.hex4()?;
            if (0xdc00..0xe000).contains(&second) {
                let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                return Ok(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            self.at = back;
        }
        Ok(char::from_u32(first).unwrap_or(char::REPLACEMENT_CHARACTER))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        match parse(text.as_bytes()) {
            Ok(node) => assert_eq!(node.into_value().to_string(), expected, "{text}"),
            Err(message) => assert_eq!(message, expected, "{text}"),
        }
    }

    #[test]
    fn reads_and_complains_like_go() {
        check(
            r#" {"a":[1,-2.5e3,"x\u00e9\n",true,null]} "#,
            r#"{"a":[1,-2500.0,"xé\n",true,null]}"#,
        );
        check(r#""\ud83d\ude00 \ud800""#, "\"😀 \u{fffd}\"");
        check("", "unexpected end of JSON input");
        check("{", "unexpected end of JSON input");
        check("x", "invalid character 'x' looking for beginning of value");
        check(
            "{a:1}",
            "invalid character 'a' looking for beginning of object key string",
        );
        check("{\"a\" 1}", "invalid character '1' after object key");
        check("{\"a\":1 2}", "invalid character '2' after object key:value pair");
        check("[1 2]", "invalid character '2' after array element");
        check("[1,]", "invalid character ']' looking for beginning of value");
        check("1 2", "invalid character '2' after top-level value");
        check("01", "invalid character '1' after top-level value");
        check("-x", "invalid character 'x' in numeric literal");
        check(
            "1.x",
            "invalid character 'x' after decimal point in numeric literal",
        );
        check("1ex", "invalid character 'x' in exponent of numeric literal");
        check("trux", "invalid character 'x' in literal true (expecting 'e')");
        check("\"a\nb\"", "invalid character '\\n' in string literal");
        check(r#""\q""#, "invalid character 'q' in string escape code");
        check(
            r#""\u12g4""#,
            "invalid character 'g' in \\u hexadecimal character escape",
        );
        check("'", "invalid character '\\'' looking for beginning of value");
    }

    #[test]
    fn depth_is_bounded() {
        let deep = "[".repeat(100_000);
        check(&deep, "invalid character '[' exceeded max depth");
    }

    #[test]
    fn invalid_utf8_is_replaced() {
        let node = parse(b"\"a\xffb\"").expect("a string");
        assert_eq!(node, Node::String("a\u{fffd}b".into()));
    }
}
