//! Text to tokens. Knows literals and their escapes, not the grammar.

use std::sync::Arc;

use crate::ast::Literal;
use crate::source::{Mistake, Source};

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Token {
    Ident(Arc<str>),
    /// A name in backticks, which Kubernetes does not allow.
    Escaped,
    /// A number, unsigned as written; strings and bytes.
    Literal(Literal),
    /// A number too large for its type; the word says which.
    BadNumber(&'static str),
    /// A string whose escapes are wrong.
    BadString(&'static str),
    /// Operators, punctuation, `in`, `true`, `false` and `null`.
    Symbol(&'static str),
    End,
}

#[derive(Debug, Clone)]
pub(crate) struct Spanned {
    pub token: Token,
    pub start: u32,
    pub end: u32,
}

const SYMBOLS: &[&str] = &[
    "==", "!=", "<=", ">=", "&&", "||", "<", ">", "[", "]", "{", "}", "(", ")", ".", ",", "-", "!", "?", ":",
    "+", "*", "/", "%",
];

pub(crate) fn lex(source: &Source, mistakes: &mut Vec<Mistake>) -> Vec<Spanned> {
    let mut lexer = Lexer {
        chars: &source.chars,
        at: 0,
    };
    let mut tokens = Vec::new();
    loop {
        lexer.skip_blank();
        let start = lexer.at;
        let found = match lexer.peek(0) {
            None => Ok(Token::End),
            Some(_) => lexer.token(),
        };
        match found {
            Ok(token) => {
                let done = token == Token::End;
                tokens.push(Spanned {
                    token,
                    start: start as u32,
                    end: lexer.at as u32,
                });
                if done {
                    return tokens;
                }
            }
            Err(()) => {
                // The character that fits no token is part of what was not recognised.
                lexer.at = (lexer.at + 1).clamp(start + 1, source.chars.len());
                let text: String = source.chars[start..lexer.at].iter().collect();
                mistakes.push(Mistake {
                    offset: Some(start as u32),
                    message: format!("Syntax error: token recognition error at: '{text}'"),
                });
            }
        }
    }
}

/// Line ends and tabs as the messages spell them.
pub(crate) fn visible(text: &str) -> String {
    text.replace('\t', "\\t")
        .replace('\n', "\\n")
        .replace('\r', "\\r")
}

struct Lexer<'s> {
    chars: &'s [char],
    at: usize,
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn skip_blank(&mut self) {
        while let Some(c) = self.peek(0) {
            if matches!(c, ' ' | '\t' | '\r' | '\n' | '\u{c}') {
                self.at += 1;
            } else if c == '/' && self.peek(1) == Some('/') {
                while self.peek(0).is_some_and(|c| c != '\n') {
                    self.at += 1;
                }
            } else {
                return;
            }
        }
    }

    fn take_while(&mut self, accept: impl Fn(char) -> bool) {
        while self.peek(0).is_some_and(&accept) {
            self.at += 1;
        }
    }

    fn token(&mut self) -> Result<Token, ()> {
        let c = self.peek(0).ok_or(())?;
        let digit_follows = self.peek(1).is_some_and(|c| c.is_ascii_digit());
        match c {
            '0'..='9' => return Ok(self.number()),
            '.' if digit_follows => return Ok(self.number()),
            '"' | '\'' => return self.string(false, false),
            '`' => {
                self.at += 1;
                let start = self.at;
                self.take_while(|c| c.is_ascii_alphanumeric() || "_.-/ ".contains(c));
                if self.peek(0) != Some('`') || self.at == start {
                    return Err(());
                }
                self.at += 1;
                return Ok(Token::Escaped);
            }
            _ => {}
        }
        if c.is_ascii_alphabetic() || c == '_' {
            let start = self.at;
            if let Some((prefix, bytes, raw)) = self.string_prefix() {
                self.at += prefix;
                if let Ok(token) = self.string(bytes, raw) {
                    return Ok(token);
                }
                // Not a string after all: the prefix is a name, and the quote is on its own.
                self.at = start;
            }
            self.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
            let word: String = self.chars[start..self.at].iter().collect();
            return Ok(match word.as_str() {
                "in" => Token::Symbol("in"),
                "true" => Token::Symbol("true"),
                "false" => Token::Symbol("false"),
                "null" => Token::Symbol("null"),
                _ => Token::Ident(word.into()),
            });
        }
        for symbol in SYMBOLS {
            // Two-character symbols come first in the list.
            if symbol.chars().enumerate().all(|(i, c)| self.peek(i) == Some(c)) {
                self.at += symbol.len();
                return Ok(Token::Symbol(symbol));
            }
        }
        // Half of a symbol: the character after it is what does not fit.
        self.at += usize::from(matches!(c, '=' | '&' | '|'));
        Err(())
    }

    /// How many letters stand before a quote, and what they say: `r"…"`, `b'…'`, `br"…"`.
    fn string_prefix(&self) -> Option<(usize, bool, bool)> {
        let is = |ahead, letter: char| self.peek(ahead).is_some_and(|c| c.eq_ignore_ascii_case(&letter));
        let quote = |ahead| matches!(self.peek(ahead), Some('"' | '\''));
        if is(0, 'b') && is(1, 'r') && quote(2) {
            Some((2, true, true))
        } else if is(0, 'b') && quote(1) {
            Some((1, true, false))
        } else if is(0, 'r') && quote(1) {
            Some((1, false, true))
        } else {
            None
        }
    }

    fn number(&mut self) -> Token {
        let start = self.at;
        if self.peek(0) == Some('0')
            && self.peek(1) == Some('x')
            && self.peek(2).is_some_and(|c| c.is_ascii_hexdigit())
        {
            self.at += 2;
            let digits = self.at;
            self.take_while(|c| c.is_ascii_hexdigit());
            let text: String = self.chars[digits..self.at].iter().collect();
            return self.integer(u64::from_str_radix(&text, 16).ok());
        }
        let digit = |c: char| c.is_ascii_digit();
        self.take_while(digit);
        let mut double = false;
        if self.peek(0) == Some('.') && self.peek(1).is_some_and(digit) {
            self.at += 1;
            self.take_while(digit);
            double = true;
        }
        if matches!(self.peek(0), Some('e' | 'E')) {
            let sign = usize::from(matches!(self.peek(1), Some('+' | '-')));
            if self.peek(1 + sign).is_some_and(digit) {
                self.at += 1 + sign;
                self.take_while(digit);
                double = true;
            }
        }
        let text: String = self.chars[start..self.at].iter().collect();
        if double {
            return match text.parse::<f64>() {
                Ok(value) if value.is_finite() => Token::Literal(Literal::Double(value)),
                _ => Token::BadNumber("double"),
            };
        }
        self.integer(text.parse().ok())
    }

    /// An integer, signed unless a `u` follows. The sign is the parser's business, so one more than the largest
    /// signed number is let through as itself, unsigned.
    fn integer(&mut self, value: Option<u64>) -> Token {
        if matches!(self.peek(0), Some('u' | 'U')) {
            self.at += 1;
            return value.map_or(Token::BadNumber("uint"), |value| {
                Token::Literal(Literal::Uint(value))
            });
        }
        match value.map(i64::try_from) {
            Some(Ok(value)) => Token::Literal(Literal::Int(value)),
            Some(Err(_)) if value == Some(1 << 63) => Token::BadNumber("int-min"),
            _ => Token::BadNumber("int"),
        }
    }

    fn string(&mut self, bytes: bool, raw: bool) -> Result<Token, ()> {
        let quote = self.peek(0).ok_or(())?;
        let triple = self.peek(1) == Some(quote) && self.peek(2) == Some(quote);
        let closes = |lexer: &Self| {
            lexer.peek(0) == Some(quote)
                && (!triple || (lexer.peek(1) == Some(quote) && lexer.peek(2) == Some(quote)))
        };
        self.at += if triple { 3 } else { 1 };
        let mut body = Vec::new();
        while !closes(self) {
            match self.peek(0) {
                None => return Err(()),
                Some('\n' | '\r') if !triple => return Err(()),
                Some('\\') if !raw => {
                    let Some(length) = self.escape_length() else {
                        self.at += self.bad_escape();
                        return Err(());
                    };
                    body.extend_from_slice(&self.chars[self.at..self.at + length]);
                    self.at += length;
                }
                Some('\r') => {
                    // Every line end is one line feed.
                    self.at += if self.peek(1) == Some('\n') { 2 } else { 1 };
                    body.push('\n');
                }
                Some(c) => {
                    body.push(c);
                    self.at += 1;
                }
            }
        }
        self.at += if triple { 3 } else { 1 };
        let decoded = if raw {
            Ok(plain(&body))
        } else {
            decode(&body, bytes)
        };
        Ok(match decoded {
            Err(problem) => Token::BadString(problem),
            Ok(decoded) if bytes => Token::Literal(Literal::Bytes(decoded.into())),
            Ok(decoded) => match String::from_utf8(decoded) {
                Ok(text) => Token::Literal(Literal::String(text.into())),
                Err(_) => Token::BadString("unable to unescape string"),
            },
        })
    }

    /// Where the escape sequence here goes wrong, from its backslash.
    fn bad_escape(&self) -> usize {
        let digits = |count: usize, radix: u32| {
            let good =
                (2..2 + count).take_while(|ahead| self.peek(*ahead).is_some_and(|c| c.is_digit(radix)));
            2 + good.count()
        };
        match self.peek(1) {
            Some('x' | 'X') => digits(2, 16),
            Some('u') => digits(4, 16),
            Some('U') => digits(8, 16),
            Some('0'..='3') => digits(2, 8),
            _ => 1,
        }
    }

    /// The length of the escape sequence here, if it is one.
    fn escape_length(&self) -> Option<usize> {
        let hex = |count: usize| {
            let all = (2..2 + count).all(|ahead| self.peek(ahead).is_some_and(|c| c.is_ascii_hexdigit()));
            all.then_some(2 + count)
        };
        match self.peek(1)? {
            'a' | 'b' | 'f' | 'n' | 'r' | 't' | 'v' | '"' | '\'' | '\\' | '?' | '`' => Some(2),
            'x' | 'X' => hex(2),
            'u' => hex(4),
            'U' => hex(8),
            '0'..='3' => (2..4)
                .all(|ahead| self.peek(ahead).is_some_and(|c| ('0'..='7').contains(&c)))
                .then_some(4),
            _ => None,
        }
    }
}

fn plain(body: &[char]) -> Vec<u8> {
    body.iter().collect::<String>().into_bytes()
}

fn decode(body: &[char], bytes: bool) -> Result<Vec<u8>, &'static str> {
    let mut decoded = Vec::with_capacity(body.len());
    let mut buffer = [0; 4];
    let mut at = 0;
    while let Some(&c) = body.get(at) {
        if c != '\\' {
            decoded.extend_from_slice(c.encode_utf8(&mut buffer).as_bytes());
            at += 1;
            continue;
        }
        let digits = |count: usize, radix: u32, skip: usize| -> u32 {
            let digits = &body[at + skip..at + skip + count];
            digits.iter().fold(0, |value, c| {
                value.wrapping_mul(radix) + c.to_digit(radix).unwrap_or(0)
            })
        };
        let (code, length) = match body[at + 1] {
            'a' => (7, 2),
            'b' => (8, 2),
            'f' => (12, 2),
            'n' => (10, 2),
            'r' => (13, 2),
            't' => (9, 2),
            'v' => (11, 2),
            'x' | 'X' => (digits(2, 16, 2), 4),
            'u' if !bytes => (digits(4, 16, 2), 6),
            'U' if !bytes => (digits(8, 16, 2), 10),
            'u' | 'U' => return Err("unable to unescape string"),
            '0'..='3' => (digits(3, 8, 1), 4),
            other => (other as u32, 2),
        };
        let is_byte = bytes && length == 4;
        if is_byte {
            decoded.push(code as u8);
        } else {
            let c = char::from_u32(code).ok_or("invalid unicode code point")?;
            decoded.extend_from_slice(c.encode_utf8(&mut buffer).as_bytes());
        }
        at += length;
    }
    Ok(decoded)
}
