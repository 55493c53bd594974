//! Tokens to a tree: operators, selections and calls. What can stand alone is in `primary.rs`. Macros are expanded on
//! the way (`macros.rs`); names are not looked up.

mod primary;

use std::sync::Arc;

use crate::ast::{Expr, Id, Kind, Literal};
use crate::lexer::{Spanned, Token, lex, visible};
use crate::limits::{MAX_EXPRESSION_SIZE, MAX_NESTING, MAX_TREE_DEPTH};
use crate::source::{Mistake, Source};

/// A parsed expression with the position of each node.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub root: Expr,
    pub positions: Vec<u32>,
}

/// `bindings` allows `cel.bind`.
pub(crate) fn parse(source: &Source, bindings: bool) -> Result<Parsed, Vec<Mistake>> {
    let size = source.chars.len();
    if size > MAX_EXPRESSION_SIZE {
        return Err(vec![Mistake {
            offset: None,
            message: format!(
                "expression code point size exceeds limit: size: {size}, limit {MAX_EXPRESSION_SIZE}"
            ),
        }]);
    }
    let mut mistakes = Vec::new();
    let tokens = lex(source, &mut mistakes);
    let mut parser = Parser {
        source,
        tokens,
        at: 0,
        nesting: 0,
        open: 0,
        positions: Vec::new(),
        mistakes,
        bindings,
    };
    let parsed = parser.start();
    match parsed {
        Ok(root) if parser.mistakes.is_empty() => Ok(Parsed {
            root,
            positions: parser.positions,
        }),
        _ => Err(parser.mistakes),
    }
}

/// The parser has reported what is wrong and cannot go on.
pub(crate) struct Stop;

pub(crate) struct Parser<'s> {
    /// Whether `cel.bind` is a macro here.
    pub bindings: bool,
    source: &'s Source,
    tokens: Vec<Spanned>,
    at: usize,
    nesting: usize,
    /// Brackets that are open.
    open: usize,
    positions: Vec<u32>,
    pub mistakes: Vec<Mistake>,
}

/// What can begin an expression, as the messages list it.
const STARTS: &str = "{'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, \
                      STRING, BYTES, IDENTIFIER}";
/// What can begin the arguments of a call.
const ARGUMENTS: &str = "{'[', '{', '(', ')', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, \
                         STRING, BYTES, IDENTIFIER}";

/// Binary operators: how tightly they bind, and the function they call.
fn binary(symbol: &str) -> Option<(u8, &'static str)> {
    Some(match symbol {
        "||" => (1, "_||_"),
        "&&" => (2, "_&&_"),
        "==" => (3, "_==_"),
        "!=" => (3, "_!=_"),
        "<" => (3, "_<_"),
        "<=" => (3, "_<=_"),
        ">" => (3, "_>_"),
        ">=" => (3, "_>=_"),
        "in" => (3, "@in"),
        "+" => (4, "_+_"),
        "-" => (4, "_-_"),
        "*" => (5, "_*_"),
        "/" => (5, "_/_"),
        "%" => (5, "_%_"),
        _ => return None,
    })
}

type Parse<T> = Result<T, Stop>;

impl Parser<'_> {
    fn start(&mut self) -> Parse<Expr> {
        let root = self.expr()?;
        if self.here().token != Token::End {
            return Err(self.unexpected("<EOF>", true));
        }
        Ok(root)
    }

    fn here(&self) -> &Spanned {
        &self.tokens[self.at]
    }

    fn symbol(&self) -> Option<&'static str> {
        match &self.here().token {
            Token::Symbol(symbol) => Some(symbol),
            _ => None,
        }
    }

    fn is(&self, symbol: &str) -> bool {
        self.symbol() == Some(symbol)
    }

    fn text(&self, token: &Spanned) -> String {
        if token.token == Token::End {
            return "<EOF>".to_owned();
        }
        let chars = &self.source.chars[token.start as usize..token.end as usize];
        visible(&chars.iter().collect::<String>())
    }

    /// Steps over the token and returns where it was.
    fn bump(&mut self) -> u32 {
        let start = self.here().start;
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        start
    }

    fn take(&mut self, symbol: &str) -> Option<u32> {
        self.is(symbol).then(|| self.bump())
    }

    /// Steps over a symbol that must be here. The words are those of the tool that made the reference parser: a
    /// token too many before the right one, the right one missing, or something else altogether.
    fn expect(&mut self, symbol: &'static str) -> Parse<u32> {
        if let Some(position) = self.take(symbol) {
            return Ok(position);
        }
        let here = self.here().clone();
        let text = self.text(&here);
        let next = self.tokens.get(self.at + 1).map(|next| &next.token);
        let verdict = if next == Some(&Token::Symbol(symbol)) {
            format!("extraneous input '{text}' expecting '{symbol}'")
        } else if here.token == Token::End && self.open == 1 && symbol != ":" {
            format!("missing '{symbol}' at '{text}'")
        } else {
            format!("mismatched input '{text}' expecting '{symbol}'")
        };
        self.report(here.start, format!("Syntax error: {verdict}"));
        Err(Stop)
    }

    /// The end of a list or map after an element, where a comma could stand too.
    fn expect_end(&mut self, symbol: &'static str) -> Parse<u32> {
        match self.take(symbol) {
            Some(position) => Ok(position),
            None => Err(self.unexpected(&format!("{{'{symbol}', ','}}"), false)),
        }
    }

    fn report(&mut self, offset: u32, message: impl Into<String>) {
        self.mistakes.push(Mistake {
            offset: Some(offset),
            message: message.into(),
        });
    }

    fn unexpected(&mut self, expecting: &str, could_be_dropped: bool) -> Stop {
        let token = self.here().clone();
        let text = self.text(&token);
        // COMPAT: one stray token before something acceptable is called extraneous, anything else mismatched.
        let next_ends = self
            .tokens
            .get(self.at + 1)
            .is_some_and(|next| next.token == Token::End);
        let verdict = if could_be_dropped && next_ends {
            "extraneous"
        } else {
            "mismatched"
        };
        self.report(
            token.start,
            format!("Syntax error: {verdict} input '{text}' expecting {expecting}"),
        );
        Stop
    }

    /// A token where an expression should begin. COMPAT: if the one after it could begin an expression, only this
    /// one is too much.
    fn unexpected_before(&mut self, expecting: &str) -> Stop {
        let verdict = match self.tokens.get(self.at + 1).map(|next| &next.token) {
            Some(Token::Ident(_) | Token::Literal(_)) => "extraneous",
            Some(Token::Symbol("(" | "[" | "{" | "true" | "false" | "null" | "-" | "!" | ".")) => {
                "extraneous"
            }
            Some(Token::Symbol(")")) if expecting == ARGUMENTS => "extraneous",
            _ => "mismatched",
        };
        let here = self.here().clone();
        let text = self.text(&here);
        self.report(
            here.start,
            format!("Syntax error: {verdict} input '{text}' expecting {expecting}"),
        );
        Stop
    }

    pub fn next_id(&mut self, position: u32) -> Id {
        self.positions.push(position);
        self.positions.len() as Id - 1
    }

    /// How many nodes there are.
    pub fn count(&self) -> usize {
        self.positions.len()
    }

    pub fn position(&self, id: Id) -> u32 {
        self.positions[id as usize]
    }

    /// Makes a node; `written` is one for the kinds whose nesting is limited as written.
    pub fn node(&mut self, position: u32, kind: Kind) -> Parse<Expr> {
        let id = self.next_id(position);
        self.node_with(id, kind, 0)
    }

    pub fn node_with(&mut self, id: Id, kind: Kind, written: u16) -> Parse<Expr> {
        let mut expr = Expr {
            id,
            depth: 0,
            nesting: 0,
            kind,
        };
        let (mut depth, mut nesting) = (0, 0);
        expr.children(&mut |child| {
            depth = depth.max(child.depth);
            nesting = nesting.max(child.nesting);
        });
        expr.depth = depth + 1;
        expr.nesting = nesting + written;
        if usize::from(expr.nesting) > MAX_NESTING || usize::from(expr.depth) > MAX_TREE_DEPTH {
            self.mistakes.push(Mistake {
                offset: None,
                message: "max recursion depth exceeded".to_owned(),
            });
            return Err(Stop);
        }
        Ok(expr)
    }

    fn expr(&mut self) -> Parse<Expr> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            self.mistakes.push(Mistake {
                offset: None,
                message: format!("expression recursion limit exceeded: {MAX_NESTING}"),
            });
            return Err(Stop);
        }
        let condition = self.operators(1)?;
        let parsed = match self.take("?") {
            None => condition,
            Some(position) => {
                let id = self.next_id(position);
                let accepted = self.operators(1)?;
                self.expect(":")?;
                let rejected = self.expr()?;
                self.call(id, "_?_:_", vec![condition, accepted, rejected], 1)?
            }
        };
        self.nesting -= 1;
        Ok(parsed)
    }

    pub fn call(&mut self, id: Id, function: &str, args: Vec<Expr>, written: u16) -> Parse<Expr> {
        let kind = Kind::Call {
            function: function.into(),
            target: None,
            args,
        };
        self.node_with(id, kind, written)
    }

    /// Binary operators that bind at least as tightly as `least`.
    fn operators(&mut self, least: u8) -> Parse<Expr> {
        let mut left = self.unary()?;
        while let Some((strength, function)) = self.symbol().and_then(binary) {
            if strength < least {
                break;
            }
            if strength <= 2 {
                left = self.logic(left, strength, function)?;
                continue;
            }
            let position = self.bump();
            let id = self.next_id(position);
            let right = self.operators(strength + 1)?;
            left = self.call(id, function, vec![left, right], 1)?;
        }
        Ok(left)
    }

    /// A chain of `&&` or of `||`, as a balanced tree: long chains are common and must not nest deeply.
    fn logic(&mut self, first: Expr, strength: u8, function: &'static str) -> Parse<Expr> {
        let mut terms = vec![first];
        let mut ids = Vec::new();
        while self.symbol().and_then(binary) == Some((strength, function)) {
            let position = self.bump();
            terms.push(self.operators(strength + 1)?);
            ids.push(self.next_id(position));
        }
        self.balance(function, &ids, &mut terms.into_iter())
    }

    fn balance(
        &mut self,
        function: &'static str,
        ids: &[Id],
        terms: &mut dyn Iterator<Item = Expr>,
    ) -> Parse<Expr> {
        let Some(id) = ids.get(ids.len() / 2) else {
            return terms.next().ok_or(Stop);
        };
        let middle = ids.len() / 2;
        let left = self.balance(function, &ids[..middle], terms)?;
        let right = self.balance(function, &ids[middle + 1..], terms)?;
        self.call(*id, function, vec![left, right], 0)
    }

    fn unary(&mut self) -> Parse<Expr> {
        let (symbol, function) = match self.symbol() {
            Some("!") => ("!", "!_"),
            Some("-") if !self.number_follows() => ("-", "-_"),
            _ => return self.member(),
        };
        let position = self.here().start;
        let mut count = 0;
        while self.is(symbol) {
            self.bump();
            count += 1;
        }
        if count % 2 == 0 {
            return self.member();
        }
        let id = self.next_id(position);
        let operand = self.member()?;
        self.call(id, function, vec![operand], 0)
    }

    fn number_follows(&self) -> bool {
        matches!(
            self.tokens.get(self.at + 1).map(|next| &next.token),
            Some(
                Token::Literal(Literal::Int(_) | Literal::Double(_))
                    | Token::BadNumber("int-min" | "int" | "double")
            )
        )
    }

    fn member(&mut self) -> Parse<Expr> {
        let mut operand = self.primary()?;
        loop {
            if let Some(dot) = self.take(".") {
                operand = self.selection(operand, dot)?;
            } else if let Some(open) = self.take("[") {
                let id = self.next_id(open);
                let optional = self.take("?").is_some();
                self.open += 1;
                let index = self.expr()?;
                self.expect("]")?;
                self.open -= 1;
                let function = if optional { "_[?_]" } else { "_[_]" };
                operand = self.call(id, function, vec![operand, index], 1)?;
            } else {
                return Ok(operand);
            }
        }
    }

    fn selection(&mut self, operand: Expr, dot: u32) -> Parse<Expr> {
        let optional = self.take("?").is_some();
        let name = self.here().clone();
        let field = match &name.token {
            Token::Ident(field) => field.clone(),
            Token::Escaped => {
                self.report(name.start, "unsupported syntax: '`'");
                "".into()
            }
            Token::Symbol(word @ ("true" | "false" | "null")) => {
                self.report(
                    name.start,
                    format!("Syntax error: mismatched input '{word}' expecting IDENTIFIER"),
                );
                return Err(Stop);
            }
            _ if name.token == Token::End || optional => {
                let what = if optional {
                    "{IDENTIFIER, ESC_IDENTIFIER}"
                } else {
                    "{'?', IDENTIFIER, ESC_IDENTIFIER}"
                };
                let text = self.text(&name);
                if name.token == Token::End && !optional {
                    self.report(
                        name.start,
                        format!("Syntax error: no viable alternative at input '.{}'", ""),
                    );
                } else {
                    self.report(
                        name.start,
                        format!("Syntax error: mismatched input '{text}' expecting {what}"),
                    );
                }
                return Err(Stop);
            }
            _ => {
                let text = self.text(&name);
                self.report(
                    name.start,
                    format!("Syntax error: no viable alternative at input '.{text}'"),
                );
                return Err(Stop);
            }
        };
        self.bump();
        if optional {
            let name = self.node(name.start, Kind::Literal(Literal::String(field)))?;
            let id = self.next_id(dot);
            return self.call(id, "_?._", vec![operand, name], 1);
        }
        if let Some(open) = self.take("(") {
            let id = self.next_id(open);
            let args = self.arguments()?;
            return self.member_call(id, field, operand, args);
        }
        let kind = Kind::Select {
            operand: Box::new(operand),
            field,
            test_only: false,
        };
        let id = self.next_id(dot);
        self.node_with(id, kind, 1)
    }

    fn member_call(&mut self, id: Id, function: Arc<str>, target: Expr, args: Vec<Expr>) -> Parse<Expr> {
        match self.expand_member(id, &function, target, args)? {
            Ok(expanded) => Ok(expanded),
            Err((target, args)) => {
                let kind = Kind::Call {
                    function,
                    target: Some(Box::new(target)),
                    args,
                };
                self.node_with(id, kind, 1)
            }
        }
    }

    /// Arguments up to the closing parenthesis.
    fn arguments(&mut self) -> Parse<Vec<Expr>> {
        let mut args = Vec::new();
        if self.take(")").is_some() {
            return Ok(args);
        }
        if self.is(",") || self.here().token == Token::End {
            return Err(self.unexpected_before(ARGUMENTS));
        }
        self.open += 1;
        loop {
            args.push(self.expr()?);
            if self.take(",").is_none() {
                self.expect(")")?;
                self.open -= 1;
                return Ok(args);
            }
        }
    }
}
