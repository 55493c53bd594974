//! The numbers that bound CEL in Kubernetes: cost limits, and sizes that cost estimates rest on. Nothing else.

/// The cost at which one evaluation of one expression is stopped.
pub const PER_CALL_LIMIT: u64 = 1_000_000;
/// The cost that all rules of one custom resource, or of one policy binding, may have together.
pub const RUNTIME_COST_BUDGET: i64 = 10_000_000;
/// The cost that the match conditions of one webhook or policy may have together.
pub const MATCH_CONDITIONS_COST_BUDGET: i64 = 2_500_000;
/// The estimated cost above which a rule is not accepted in a CustomResourceDefinition.
pub const STATIC_COST_LIMIT: u64 = 10_000_000;
/// The estimated cost of all rules of a CustomResourceDefinition's schema.
pub const STATIC_CRD_COST_LIMIT: u64 = 100_000_000;
/// How many iterations pass between two looks at the interrupt.
pub const CHECK_FREQUENCY: u32 = 100;
/// The largest request, which bounds every size that a schema leaves open.
pub const MAX_REQUEST_SIZE: i64 = 3 * 1024 * 1024;
/// The longest message that a `messageExpression` may make.
pub const MAX_MESSAGE_SIZE: usize = 5 * 1024;

/// The longest expression, in code points.
pub const MAX_EXPRESSION_SIZE: usize = 100_000;
/// How deep an expression may nest, as written.
pub const MAX_NESTING: usize = 250;
/// How deep the tree may be after macros are expanded: what keeps every recursive walk inside its stack.
pub const MAX_TREE_DEPTH: usize = 600;
/// The longest list or string that an expression may build. Far above what the cost limits let through in
/// practice; it bounds the few operations whose cost does not grow with their result.
pub const MAX_BUILT_SIZE: usize = 16 * 1024 * 1024;

pub(crate) mod cost {
    pub const STRING_TRAVERSAL: f64 = 0.1;
    pub const REGEX_LENGTH: f64 = 0.25;
    pub const LIST_CREATE: u64 = 10;
    pub const MAP_CREATE: u64 = 30;
    pub const STRUCT_CREATE: u64 = 40;
}
