//! What an operand can be: literals, names, calls, lists, maps, and expressions in parentheses.

use std::sync::Arc;

use super::{Parse, Parser, STARTS, Stop};
use crate::ast::{Entry, Expr, Kind, Literal};
use crate::escape::RESERVED;
use crate::lexer::{Token, visible};

impl Parser<'_> {
    pub(super) fn primary(&mut self) -> Parse<Expr> {
        let here = self.here().clone();
        match &here.token {
            Token::Literal(literal) => {
                self.bump();
                self.node(here.start, Kind::Literal(literal.clone()))
            }
            Token::BadNumber(kind) => {
                self.bump();
                let kind = if *kind == "int-min" { "int" } else { kind };
                self.report(here.start, format!("invalid {kind} literal"));
                self.node(here.start, Kind::Broken)
            }
            Token::BadString(problem) => {
                self.bump();
                self.report(here.start, *problem);
                self.node(here.start, Kind::Broken)
            }
            Token::Ident(_) => self.name(),
            Token::Symbol(symbol) => self.punctuated(symbol, here.start),
            Token::Escaped | Token::End => Err(self.unexpected(STARTS, false)),
        }
    }

    fn punctuated(&mut self, symbol: &'static str, start: u32) -> Parse<Expr> {
        match symbol {
            "true" | "false" => {
                self.bump();
                self.node(start, Kind::Literal(Literal::Bool(symbol == "true")))
            }
            "null" => {
                self.bump();
                self.node(start, Kind::Literal(Literal::Null))
            }
            "-" => self.negative(start),
            "(" => {
                self.bump();
                self.open += 1;
                let inner = self.expr()?;
                self.expect(")")?;
                self.open -= 1;
                Ok(inner)
            }
            "[" => self.list(),
            "{" => self.map(),
            "." if matches!(
                self.tokens.get(self.at + 1).map(|next| &next.token),
                Some(Token::Ident(_))
            ) =>
            {
                self.name()
            }
            "." => Err(self.nameless_dot(start)),
            _ => Err(self.unexpected_before(STARTS)),
        }
    }

    /// A dot at the beginning stands before a name.
    fn nameless_dot(&mut self, start: u32) -> Stop {
        self.bump();
        let next = self.here().clone();
        let problem = match &next.token {
            Token::Symbol(word @ ("true" | "false" | "null")) => {
                format!("mismatched input '{word}' expecting IDENTIFIER")
            }
            _ => {
                let seen = &self.source.chars[start as usize..next.end as usize];
                let seen = visible(&seen.iter().collect::<String>());
                format!("no viable alternative at input '{seen}'")
            }
        };
        self.report(next.start, format!("Syntax error: {problem}"));
        Stop
    }

    /// A number with its sign.
    fn negative(&mut self, start: u32) -> Parse<Expr> {
        self.bump();
        let number = self.here().token.clone();
        let literal = match number {
            Token::Literal(Literal::Int(value)) => Literal::Int(-value),
            Token::Literal(Literal::Double(value)) => Literal::Double(-value),
            Token::BadNumber("int-min") => Literal::Int(i64::MIN),
            Token::BadNumber(kind) => {
                self.bump();
                self.report(start, format!("invalid {kind} literal"));
                return self.node(start, Kind::Broken);
            }
            _ => return Err(self.unexpected(STARTS, false)),
        };
        self.bump();
        self.node(start, Kind::Literal(literal))
    }

    fn name(&mut self) -> Parse<Expr> {
        let start = self.here().start;
        let leading_dot = self.take(".").is_some();
        let Token::Ident(word) = self.here().token.clone() else {
            return Err(self.unexpected("IDENTIFIER", false));
        };
        if let Some(message) = self.message_name(leading_dot) {
            return self.message(message);
        }
        let position = self.bump();
        let reserved = RESERVED.contains(&&*word);
        if reserved {
            self.report(start, format!("reserved identifier: {word}"));
        }
        let word: Arc<str> = if leading_dot {
            format!(".{word}").into()
        } else {
            word
        };
        if let Some(open) = self.take("(") {
            let id = self.next_id(open);
            let args = self.arguments()?;
            if reserved {
                return self.node(start, Kind::Broken);
            }
            if &*word == "has" && args.len() == 1 {
                return self.expand_has(id, args);
            }
            return self.call(id, &word, args, 0);
        }
        if reserved {
            return self.node(start, Kind::Broken);
        }
        self.node(position, Kind::Ident(word))
    }

    /// The name of a message being made here, `a.b.C{`, if that is what follows. Steps over it only then.
    fn message_name(&mut self, leading_dot: bool) -> Option<String> {
        let mut name = if leading_dot {
            ".".to_owned()
        } else {
            String::new()
        };
        let mut at = self.at;
        loop {
            let Token::Ident(word) = &self.tokens.get(at)?.token else {
                return None;
            };
            name.push_str(word);
            match &self.tokens.get(at + 1)?.token {
                Token::Symbol(".") => name.push('.'),
                Token::Symbol("{") => {
                    self.at = at + 1;
                    return Some(name);
                }
                _ => return None,
            }
            at += 2;
        }
    }

    /// Reads `{field: value, …}`. What stands for a field in messages is its colon.
    fn message(&mut self, name: String) -> Parse<Expr> {
        let open = self.bump();
        let id = self.next_id(open);
        let mut fields = Vec::new();
        while self.take("}").is_none() {
            let optional = self.take("?").is_some();
            if !matches!(self.here().token, Token::Ident(_) | Token::Escaped) {
                return Err(self.unexpected("{'}', '?', ',', IDENTIFIER, ESC_IDENTIFIER}", false));
            }
            let here = self.here().clone();
            let name: Arc<str> = self.text(&here).trim_matches('`').into();
            self.bump();
            let colon = self.expect(":")?;
            let key = self.node(colon, Kind::Literal(Literal::String(name)))?;
            let value = self.expr()?;
            fields.push(Entry { key, value, optional });
            if self.take(",").is_none() {
                self.expect("}")?;
                break;
            }
        }
        let name = name.into();
        self.node_with(id, Kind::Struct { name, fields }, 0)
    }

    fn list(&mut self) -> Parse<Expr> {
        let open = self.bump();
        self.open += 1;
        let id = self.next_id(open);
        let (mut elements, mut optional) = (Vec::new(), Vec::new());
        while self.take("]").is_none() {
            if elements.is_empty() && self.take(",").is_some() {
                self.expect("]")?;
                break;
            }
            if self.take("?").is_some() {
                optional.push(elements.len());
            }
            elements.push(self.expr()?);
            if self.take(",").is_none() {
                self.expect_end("]")?;
                break;
            }
            if self.here().token == Token::End || self.is(",") {
                self.expect("]")?;
            }
        }
        self.open -= 1;
        self.node_with(id, Kind::List { elements, optional }, 0)
    }

    fn map(&mut self) -> Parse<Expr> {
        let open = self.bump();
        self.open += 1;
        let id = self.next_id(open);
        let mut entries = Vec::new();
        while self.take("}").is_none() {
            if entries.is_empty() && self.take(",").is_some() {
                self.expect("}")?;
                break;
            }
            let optional = self.take("?").is_some();
            let key = self.expr()?;
            self.expect(":")?;
            let value = self.expr()?;
            entries.push(Entry { key, value, optional });
            if self.take(",").is_none() {
                self.expect_end("}")?;
                break;
            }
        }
        self.open -= 1;
        self.node_with(id, Kind::Map(entries), 0)
    }
}
