//! The form of a Corefile: server blocks of directives, each of which may have a block of lines. No meaning, no I/O.

use super::Problem;

/// One line, and the lines of its block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directive {
    pub line: usize,
    pub name: String,
    pub args: Vec<String>,
    pub block: Vec<Directive>,
}

/// `KEYS {` and what is in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    pub line: usize,
    pub keys: Vec<String>,
    pub directives: Vec<Directive>,
}

#[derive(Debug)]
struct Token {
    line: usize,
    text: String,
    /// A quoted brace is text.
    quoted: bool,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        !self.quoted && self.text == text
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, Problem> {
    let mut tokens: Vec<Token> = Vec::new();
    let mut line = 1;
    let mut rest = text.chars().peekable();
    while let Some(char) = rest.next() {
        match char {
            '\n' => line += 1,
            char if char.is_whitespace() => {}
            '#' => while rest.next_if(|char| *char != '\n').is_some() {},
            '"' => {
                let (began, mut text) = (line, String::new());
                loop {
                    match rest.next() {
                        None => return Err(Problem::new(began, "a quoted text does not end")),
                        Some('"') => break,
                        Some('\\') if rest.peek() == Some(&'"') => {
                            text.extend(rest.next());
                        }
                        Some(char) => {
                            line += usize::from(char == '\n');
                            text.push(char);
                        }
                    }
                }
                tokens.push(Token {
                    line: began,
                    text,
                    quoted: true,
                });
            }
            char => {
                let mut text = String::from(char);
                while let Some(char) = rest.next_if(|char| !char.is_whitespace()) {
                    text.push(char);
                }
                if text.contains("{$") || text.contains("{%") {
                    return Err(Problem::new(line, "environment variables are not supported"));
                }
                tokens.push(Token {
                    line,
                    text,
                    quoted: false,
                });
            }
        }
    }
    Ok(tokens)
}

struct Parser {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    line: usize,
}

impl Parser {
    fn next(&mut self) -> Option<Token> {
        let token = self.tokens.next()?;
        self.line = token.line;
        Some(token)
    }

    /// The next token, if it is on this line.
    fn next_on(&mut self, line: usize) -> Option<Token> {
        self.tokens.next_if(|token| token.line == line)
    }

    fn at_end_of(&mut self, line: usize) -> bool {
        self.tokens.peek().is_none_or(|token| token.line != line)
    }

    /// The lines up to `}`.
    fn lines(&mut self, opened: usize, nested: bool) -> Result<Vec<Directive>, Problem> {
        let mut found = Vec::new();
        loop {
            let Some(first) = self.next() else {
                return Err(Problem::new(opened, "a block is not closed: expected '}'"));
            };
            if first.is("}") {
                return Ok(found);
            }
            if first.is("{") {
                return Err(Problem::new(first.line, "unexpected '{'"));
            }
            found.push(self.directive(first, nested)?);
        }
    }

    fn directive(&mut self, first: Token, nested: bool) -> Result<Directive, Problem> {
        let mut directive = Directive {
            line: first.line,
            name: first.text,
            ..Directive::default()
        };
        while let Some(token) = self.next_on(first.line) {
            if token.is("{") && self.at_end_of(first.line) {
                if nested {
                    return Err(Problem::new(token.line, "unexpected '{'"));
                }
                directive.block = self.lines(token.line, true)?;
                break;
            }
            if token.is("}") {
                return Err(Problem::new(token.line, "'}' must be on a line of its own"));
            }
            directive.args.push(token.text);
        }
        Ok(directive)
    }
}

/// The server blocks of a Corefile.
pub fn blocks(text: &str) -> Result<Vec<Block>, Problem> {
    let mut parser = Parser {
        tokens: tokens(text)?.into_iter().peekable(),
        line: 1,
    };
    let mut blocks = Vec::new();
    while let Some(token) = parser.next() {
        let mut block = Block {
            line: token.line,
            ..Block::default()
        };
        let mut token = token;
        loop {
            if token.is("{") && parser.at_end_of(token.line) {
                break;
            }
            if token.text.starts_with('(') {
                return Err(Problem::new(token.line, "snippets are not supported"));
            }
            if token.is("import") {
                return Err(Problem::new(token.line, "the plugin import is not supported"));
            }
            if token.is("{") || token.is("}") {
                return Err(Problem::new(token.line, format!("unexpected '{}'", token.text)));
            }
            let keys = token.text.split(',').filter(|key| !key.is_empty());
            block.keys.extend(keys.map(str::to_owned));
            token = match parser.next() {
                Some(token) => token,
                None => {
                    return Err(Problem::new(
                        parser.line,
                        "expected '{' after the zones of a server block",
                    ));
                }
            };
        }
        if block.keys.is_empty() {
            return Err(Problem::new(block.line, "a server block needs a zone"));
        }
        block.directives = parser.lines(block.line, false)?;
        blocks.push(block);
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read() {
        let text = "# all\n. :53 {\n  errors # here\n  forward . 1.1.1.1 {\n    max_fails 1\n  }\n}\na.org,b.org {\n  log . \"{remote} \\\"x\\\"\"\n}\n";
        let read = blocks(text).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].keys, [".", ":53"]);
        assert_eq!(read[1].keys, ["a.org", "b.org"]);
        let forward = &read[0].directives[1];
        assert_eq!(
            (forward.name.as_str(), forward.line, forward.args.len()),
            ("forward", 4, 2)
        );
        assert_eq!(
            (forward.block[0].name.as_str(), forward.block[0].line),
            ("max_fails", 5)
        );
        assert_eq!(read[1].directives[0].args[1], "{remote} \"x\"");
        assert_eq!(blocks("  \n# nothing\n").unwrap(), []);
    }

    #[test]
    fn bad_forms_are_refused_with_their_line() {
        for (text, expected) in [
            (
                ". {\n errors\n",
                "Corefile:1: a block is not closed: expected '}'",
            ),
            (
                ".\n",
                "Corefile:1: expected '{' after the zones of a server block",
            ),
            (". {\n log . \"x\n}", "Corefile:2: a quoted text does not end"),
            (". {\n a {\n b {\n}\n}\n}", "Corefile:3: unexpected '{'"),
            ("}\n", "Corefile:1: unexpected '}'"),
            (". {\n a }\n}", "Corefile:2: '}' must be on a line of its own"),
            ("(snip) {\n}", "Corefile:1: snippets are not supported"),
            ("import x\n", "Corefile:1: the plugin import is not supported"),
            (
                ". {\n forward . {$UP}\n}",
                "Corefile:2: environment variables are not supported",
            ),
            ("{\n}\n", "Corefile:1: a server block needs a zone"),
        ] {
            assert_eq!(blocks(text).unwrap_err().to_string(), expected, "{text}");
        }
    }
}
