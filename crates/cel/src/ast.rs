//! The tree of an expression. Operators are calls of functions such as `_+_`, macros are expanded. Positions live
//! beside the tree, by node number.

use std::sync::Arc;

pub(crate) type Id = u32;

#[derive(Debug, Clone)]
pub(crate) struct Expr {
    pub id: Id,
    /// Levels below and including this node; bounded, so that walks may recurse.
    pub depth: u16,
    /// Levels as written, which have a bound of their own.
    pub nesting: u16,
    pub kind: Kind,
}

#[derive(Debug, Clone)]
pub(crate) enum Kind {
    Literal(Literal),
    Ident(Arc<str>),
    Select {
        operand: Box<Expr>,
        field: Arc<str>,
        /// `has(operand.field)`
        test_only: bool,
    },
    Call {
        function: Arc<str>,
        target: Option<Box<Expr>>,
        args: Vec<Expr>,
    },
    List {
        elements: Vec<Expr>,
        /// Positions written `?e`, in order.
        optional: Vec<usize>,
    },
    Map(Vec<Entry>),
    /// `a.b.C{field: value}`; the key of an entry is the field's name.
    Struct {
        name: Arc<str>,
        fields: Vec<Entry>,
    },
    Comprehension(Box<Comprehension>),
    /// What a mistake left behind.
    Broken,
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub key: Expr,
    pub value: Expr,
    pub optional: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Comprehension {
    pub range: Expr,
    pub var: Arc<str>,
    pub var2: Option<Arc<str>>,
    pub accu: Arc<str>,
    pub init: Expr,
    pub condition: Expr,
    pub step: Expr,
    pub result: Expr,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Literal {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Arc<str>),
    Bytes(Arc<[u8]>),
}

/// The accumulator of macros; no source text can spell it.
pub(crate) const ACCUMULATOR: &str = "@result";
/// The iteration variable of macros that only bind.
pub(crate) const UNUSED: &str = "#unused";

impl Expr {
    /// The dotted name that the expression spells, if it is nothing but one.
    pub fn qualified_name(&self) -> Option<String> {
        match &self.kind {
            Kind::Ident(name) => Some(name.to_string()),
            Kind::Select {
                operand,
                field,
                test_only: false,
            } => {
                let mut name = operand.qualified_name()?;
                name.push('.');
                name.push_str(field);
                Some(name)
            }
            _ => None,
        }
    }

    pub fn children<'e>(&'e self, visit: &mut dyn FnMut(&'e Expr)) {
        match &self.kind {
            Kind::Literal(_) | Kind::Ident(_) | Kind::Broken => {}
            Kind::Struct { fields, .. } => fields.iter().for_each(|field| visit(&field.value)),
            Kind::Select { operand, .. } => visit(operand),
            Kind::Call { target, args, .. } => {
                target.iter().for_each(|target| visit(target));
                args.iter().for_each(visit);
            }
            Kind::List { elements, .. } => elements.iter().for_each(visit),
            Kind::Map(entries) => {
                for entry in entries {
                    visit(&entry.key);
                    visit(&entry.value);
                }
            }
            Kind::Comprehension(fold) => {
                for part in [&fold.range, &fold.init, &fold.condition, &fold.step, &fold.result] {
                    visit(part);
                }
            }
        }
    }
}
