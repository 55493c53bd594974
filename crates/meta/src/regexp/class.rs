//! Classes and escaped characters of a pattern, read as RE2 reads it and written so that the engine here reads the same: a
//! hyphen after a range or a shorthand stands for itself, two hyphens take nothing away, and shorthands are ASCII.
//! Reads syntax only: which names of scripts and categories there are is the engine's to say.

use std::fmt::Write;

/// The class at the start of `chars`, translated, and how many characters it took.
pub(super) fn read(chars: &[char]) -> Result<(String, usize), String> {
    let mut class = Class {
        chars,
        at: 1,
        out: String::from("["),
    };
    class.eat('^', "^");
    let mut first = true;
    while first || class.peek(0) != Some(']') {
        first = false;
        if !(class.posix()? || class.shorthand()?) {
            class.range()?;
        }
    }
    class.out.push(']');
    Ok((class.out, class.at + 1))
}

/// The escaped characters at the start of `chars`, outside of a class: translated, and how many characters they took.
pub(super) fn escaped(chars: &[char]) -> Result<(String, usize), String> {
    let mut class = Class {
        chars,
        at: 0,
        out: String::from("["),
    };
    match chars.get(1) {
        Some('b') => return Ok(("(?-u:\\b)".to_owned(), 2)),
        Some('C') => return Ok(("(?s:.)".to_owned(), 2)),
        Some(c @ ('A' | 'B' | 'z')) => return Ok((format!("\\{c}"), 2)),
        Some('Q') => {
            let rest = &chars[2..];
            let end = rest.windows(2).position(|pair| pair == ['\\', 'E']);
            let quoted: String = rest[..end.unwrap_or(rest.len())].iter().collect();
            return Ok((regex::escape(&quoted), end.map_or(chars.len(), |end| end + 4)));
        }
        _ => {}
    }
    if !class.shorthand()? {
        let c = class.escape()?;
        class.character_out(c);
    }
    class.out.push(']');
    Ok((class.out, class.at))
}

/// The characters of a shorthand, and whether they are the ones that it leaves out.
fn shorthand(letter: char) -> Option<(&'static str, bool)> {
    let set = match letter.to_ascii_lowercase() {
        'd' => "0-9",
        's' => "\\t\\n\\f\\r ",
        'w' => "0-9A-Za-z_",
        _ => return None,
    };
    Some((set, letter.is_ascii_uppercase()))
}

struct Class<'a> {
    chars: &'a [char],
    at: usize,
    out: String,
}

impl Class<'_> {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn text(&self, from: usize, to: usize) -> String {
        self.chars[from..to.min(self.chars.len())].iter().collect()
    }

    fn eat(&mut self, c: char, written: &str) {
        if self.peek(0) == Some(c) {
            self.at += 1;
            self.out.push_str(written);
        }
    }

    /// `[:alpha:]` and its like.
    fn posix(&mut self) -> Result<bool, String> {
        if (self.peek(0), self.peek(1)) != (Some('['), Some(':')) {
            return Ok(false);
        }
        let inner = &self.chars[self.at + 2..];
        let Some(length) = inner.windows(2).position(|pair| pair == [':', ']']) else {
            return Ok(false);
        };
        let name = self.text(self.at, self.at + length + 4);
        const NAMES: [&str; 14] = [
            "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct",
            "space", "upper", "word", "xdigit",
        ];
        let bare = &name[2..name.len() - 2];
        if !NAMES.contains(&bare.strip_prefix('^').unwrap_or(bare)) {
            return Err(format!("invalid character class range: `{name}`"));
        }
        self.at += length + 4;
        self.out.push_str(&name);
        Ok(true)
    }

    /// `\d` and its like, and `\pL`.
    fn shorthand(&mut self) -> Result<bool, String> {
        let (Some('\\'), Some(letter)) = (self.peek(0), self.peek(1)) else {
            return Ok(false);
        };
        if let Some((set, negated)) = shorthand(letter) {
            self.at += 2;
            match negated {
                true => self.out.push_str(&format!("[^{set}]")),
                false => self.out.push_str(set),
            }
            return Ok(true);
        }
        if !matches!(letter, 'p' | 'P') {
            return Ok(false);
        }
        let length = match self.peek(2) {
            Some('{') => self.chars[self.at..]
                .iter()
                .position(|c| *c == '}')
                .map(|end| end + 1),
            Some(_) => Some(3),
            None => None,
        };
        let Some(length) = length else {
            let rest = self.text(self.at, self.chars.len());
            return Err(format!("invalid character class range: `{rest}`"));
        };
        let name = self.text(self.at, self.at + length);
        self.at += length;
        self.out.push_str(&name);
        Ok(true)
    }

    /// One character, or two with a hyphen between them.
    fn range(&mut self) -> Result<(), String> {
        let start = self.at;
        let low = self.character()?;
        let mut high = low;
        if self.peek(0) == Some('-') && self.peek(1).is_some_and(|next| next != ']') {
            self.at += 1;
            high = self.character()?;
            if high < low {
                let range = self.text(start, self.at);
                return Err(format!("invalid character class range: `{range}`"));
            }
        }
        self.character_out(low);
        if high != low {
            self.out.push('-');
            self.character_out(high);
        }
        Ok(())
    }

    fn character_out(&mut self, c: char) {
        if c.is_ascii_alphanumeric() {
            self.out.push(c);
        } else {
            let _ = write!(self.out, "\\x{{{:X}}}", u32::from(c));
        }
    }

    fn character(&mut self) -> Result<char, String> {
        match self.peek(0) {
            None => Err(format!("missing closing ]: `{}`", self.text(0, self.chars.len()))),
            Some('\\') => self.escape(),
            Some(c) => {
                self.at += 1;
                Ok(c)
            }
        }
    }

    fn escape(&mut self) -> Result<char, String> {
        let start = self.at;
        let Some(c) = self.peek(1) else {
            return Err("trailing backslash at end of expression: ``".to_owned());
        };
        self.at += 2;
        let code = match c {
            '1'..='7' if !self.peek(0).is_some_and(|next| ('0'..='7').contains(&next)) => None,
            '0'..='7' => {
                let mut code = u32::from(c) - u32::from('0');
                for _ in 0..2 {
                    let Some(digit) = self.peek(0).and_then(|next| next.to_digit(8)) else {
                        break;
                    };
                    code = code * 8 + digit;
                    self.at += 1;
                }
                Some(code)
            }
            'x' => self.hexadecimal(),
            'a' => Some(7),
            'f' => Some(12),
            'n' => Some(10),
            'r' => Some(13),
            't' => Some(9),
            'v' => Some(11),
            c if c.is_ascii() && !c.is_ascii_alphanumeric() => Some(u32::from(c)),
            _ => None,
        };
        code.and_then(char::from_u32)
            .ok_or_else(|| format!("invalid escape sequence: `{}`", self.text(start, self.at)))
    }

    /// What follows `\x`: two digits, or any number of them in braces.
    fn hexadecimal(&mut self) -> Option<u32> {
        let digit = |class: &mut Self| {
            let next = class.peek(0)?;
            class.at += 1;
            Some(next)
        };
        let first = digit(self)?;
        if first != '{' {
            let high = first.to_digit(16)?;
            return Some(high * 16 + digit(self)?.to_digit(16)?);
        }
        let mut code = 0u32;
        let mut any = false;
        loop {
            match digit(self)? {
                '}' => return any.then_some(code),
                c => {
                    code = code.checked_mul(16)? + c.to_digit(16)?;
                    if code > u32::from(char::MAX) {
                        return None;
                    }
                    any = true;
                }
            }
        }
    }
}
