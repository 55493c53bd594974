//! Rules before they are accepted: they must compile, and their estimated cost must stay within bounds.

use serde_json::Value as Json;
use skiff_meta::field::{Error, ErrorType, Path};

use super::compile::{CompiledRule, compile};
use super::field_path::valid_field_path;
use crate::limits::{STATIC_COST_LIMIT, STATIC_CRD_COST_LIMIT};
use crate::schema::{Rule, Schema};

/// Reasons that a rule may give, as messages list them.
const REASONS: &[&str] = &[
    "FieldValueDuplicate",
    "FieldValueForbidden",
    "FieldValueInvalid",
    "FieldValueRequired",
];
const KEY: &str = "x-kubernetes-validations";

/// Checks the rules of a CustomResourceDefinition's schema. `path` is that of the schema, such as
/// `spec.versions[0].schema.openAPIV3Schema`. To be called when the schema is otherwise valid.
/// `suppress_rule_cost` does not hold the cost of single rules against them: upstream does so where a stored
/// definition has rules that are too expensive already.
pub fn check_rules(schema: &Schema, path: &Path, suppress_rule_cost: bool) -> Vec<Error> {
    let mut checker = Checker {
        suppress_rule_cost,
        total: Total::default(),
    };
    let place = SchemaPosition {
        path: path.clone(),
        is_root: true,
        cardinality: Some(1),
        uncorrelatable: None,
        evaluated: true,
    };
    let Findings { mut schema, cel } = checker.node(schema, &place);
    schema.extend(cel);
    if checker.total.sum > STATIC_CRD_COST_LIMIT {
        for (path, _) in &checker.total.most_expensive {
            let detail =
                "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema";
            schema.push(Error::forbidden(path, detail));
        }
        let what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
        schema.push(Error::forbidden(
            path,
            too_expensive(what, checker.total.sum, STATIC_CRD_COST_LIMIT),
        ));
    }
    schema
}

/// Findings about how rules are written, and about what they say. The former come first and suppress the latter.
#[derive(Default)]
struct Findings {
    schema: Vec<Error>,
    cel: Vec<Error>,
}

impl Findings {
    fn append(&mut self, other: Self) {
        self.schema.extend(other.schema);
        self.cel.extend(other.cel);
    }
}

/// Where in the schema a node is.
#[derive(Clone)]
struct SchemaPosition {
    path: Path,
    is_root: bool,
    /// How often values of this node can occur; `None` where nothing limits it.
    cardinality: Option<u64>,
    /// The path above which elements cannot be found again in the old object.
    uncorrelatable: Option<Path>,
    /// False inside `allOf` and the like, where rules are only looked at.
    evaluated: bool,
}

/// The cost of all rules, and which contribute most.
#[derive(Default)]
struct Total {
    sum: u64,
    most_expensive: Vec<(Path, u64)>,
}

impl Total {
    fn add(&mut self, path: Path, cost: u64) {
        self.sum = self.sum.saturating_add(cost);
        if cost < STATIC_CRD_COST_LIMIT / 100 {
            return;
        }
        self.most_expensive.push((path, cost));
        self.most_expensive
            .sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
        self.most_expensive.truncate(4);
    }
}

struct Checker {
    suppress_rule_cost: bool,
    total: Total,
}

impl Checker {
    fn node(&mut self, schema: &Schema, place: &SchemaPosition) -> Findings {
        let mut findings = Findings::default();
        let below = |path: Path| SchemaPosition {
            path,
            is_root: false,
            cardinality: elements(schema)
                .zip(place.cardinality)
                .map(|(elements, cardinality)| cardinality.saturating_mul(elements)),
            ..place.clone()
        };
        if let Some(values) = schema.additional_schema() {
            findings.append(self.node(values, &below(place.path.child("additionalProperties"))));
        }
        for (name, property) in schema.properties.iter().flatten() {
            let mut place = below(place.path.child("properties").key(name));
            if !matches!(schema.map_type.as_deref(), None | Some("granular" | "atomic")) {
                place.forbid_old_self(schema_path(&place, name));
            }
            findings.append(self.node(property, &place));
        }
        for (index, part) in schema.all_of.iter().enumerate() {
            let mut place = below(place.path.child("allOf").index(index));
            place.evaluated = false;
            findings.append(self.node(part, &place));
        }
        if let Some(items) = &schema.items {
            let mut inside = below(place.path.child("items"));
            if schema.list_type.as_deref() != Some("map") {
                inside.forbid_old_self(place.path.clone());
            }
            findings.append(self.node(items, &inside));
        }
        if schema.rules.is_empty() {
            return findings;
        }
        for (index, rule) in schema.rules.iter().enumerate() {
            written(
                rule,
                schema,
                &place.path.child(KEY).index(index),
                &mut findings.schema,
            );
        }
        if findings.schema.is_empty() && place.evaluated {
            self.meaning(schema, place, &mut findings.cel);
        }
        findings
    }

    /// What the rules say and cost.
    fn meaning(&mut self, schema: &Schema, place: &SchemaPosition, errors: &mut Vec<Error>) {
        let path = place.path.child(KEY);
        let is_resource_root = place.is_root || schema.embedded_resource;
        let Some(compiled) = compile(&schema.rules, schema, is_resource_root) else {
            let detail = "internal error: failed to construct type information for x-kubernetes-validations rules: \
                          unable to convert structural schema to CEL declarations";
            errors.push(Error::internal(&path, detail));
            return;
        };
        let cardinality = place.cardinality.unwrap_or(compiled.max_cardinality);
        for (index, rule) in compiled.rules.iter().enumerate() {
            self.rule(
                rule,
                &path.index(index),
                cardinality,
                place.uncorrelatable.as_ref(),
                errors,
            );
        }
    }

    fn rule(
        &mut self,
        compiled: &CompiledRule,
        path: &Path,
        cardinality: u64,
        uncorrelatable: Option<&Path>,
        errors: &mut Vec<Error>,
    ) {
        let rule_path = path.child("rule");
        let cost = compiled.max_cost.saturating_mul(cardinality);
        if !self.suppress_rule_cost && cost > STATIC_COST_LIMIT {
            let detail = too_expensive("estimated rule cost", cost, STATIC_COST_LIMIT);
            errors.push(Error::forbidden(&rule_path, detail));
        }
        self.total.add(rule_path.clone(), cost);
        if let Err(problem) = &compiled.program {
            errors.push(refused(&rule_path, &compiled.rule, problem));
        }
        let message_path = path.child("messageExpression");
        match &compiled.message {
            Err(problem) => errors.push(refused(&message_path, &compiled.rule, problem)),
            Ok(Some(_)) => {
                let cost = compiled.message_max_cost;
                if !self.suppress_rule_cost && cost > STATIC_COST_LIMIT {
                    let detail = too_expensive("estimated messageExpression cost", cost, STATIC_COST_LIMIT);
                    errors.push(Error::forbidden(&message_path, detail));
                }
                self.total.add(message_path, cost);
            }
            Ok(None) => {}
        }
        if compiled.uses_old_self {
            if let Some(within) = uncorrelatable {
                let detail = format!(
                    "oldSelf cannot be used on the uncorrelatable portion of the schema within {within}"
                );
                errors.push(Error::invalid(&rule_path, compiled.rule.rule.as_str(), detail));
            }
        } else if let Some(optional) = compiled.rule.optional_old_self {
            let detail = "may not be set if oldSelf is not used in rule";
            errors.push(Error::invalid(&path.child("optionalOldSelf"), optional, detail));
        }
    }
}

impl SchemaPosition {
    /// The highest such path is the one to name.
    fn forbid_old_self(&mut self, path: Path) {
        self.uncorrelatable.get_or_insert(path);
    }
}

/// The path of the object that a property belongs to.
fn schema_path(place: &SchemaPosition, property: &str) -> Path {
    let text = place.path.as_str();
    let suffix = format!(".properties[{property}]");
    Path::new(text.strip_suffix(suffix.as_str()).unwrap_or(text))
}

/// How a rule is written, whatever it says.
fn written(rule: &Rule, schema: &Schema, path: &Path, errors: &mut Vec<Error>) {
    let has_line_break = |text: &str| text.contains(['\n', '\r']);
    let (trimmed, message) = (rule.rule.trim(), rule.message.trim());
    if trimmed.is_empty() {
        errors.push(Error::required(&path.child("rule"), "rule is not specified"));
    } else if !rule.message.is_empty() && message.is_empty() {
        let detail = "must be non-empty if specified";
        errors.push(Error::invalid(
            &path.child("message"),
            rule.message.as_str(),
            detail,
        ));
    } else if has_line_break(message) {
        let detail = "must not contain line breaks";
        errors.push(Error::invalid(
            &path.child("message"),
            rule.message.as_str(),
            detail,
        ));
    } else if has_line_break(trimmed) && message.is_empty() {
        let detail = "message must be specified if rule contains line breaks";
        errors.push(Error::required(&path.child("message"), detail));
    }
    if !rule.message_expression.is_empty() && rule.message_expression.trim().is_empty() {
        let detail = "messageExpression must be non-empty if specified";
        errors.push(Error::required(&path.child("messageExpression"), detail));
    }
    if let Some(reason) = &rule.reason
        && !REASONS.contains(&reason.as_str())
    {
        errors.push(Error::not_supported(
            &path.child("reason"),
            reason.as_str(),
            REASONS,
        ));
    }
    let field_path = path.child("fieldPath");
    let mut refuse =
        |detail: &str| errors.push(Error::invalid(&field_path, rule.field_path.as_str(), detail));
    if rule.field_path.is_empty() {
        return;
    }
    if rule.field_path.trim().is_empty() {
        refuse("must be non-empty if specified");
    }
    if has_line_break(&rule.field_path) {
        refuse("must not contain line breaks");
    }
    if valid_field_path(&rule.field_path, schema).is_err() {
        refuse("must be a valid path");
    }
}

/// By how much a node multiplies the values of its children; `None` where nothing limits it.
fn elements(schema: &Schema) -> Option<u64> {
    let limit = |most: Option<i64>| most.map(|most| most.max(0) as u64);
    match schema.kind.as_str() {
        "object" if schema.additional_properties.is_some() => limit(schema.max_properties),
        "array" => limit(schema.max_items),
        _ => Some(1),
    }
}

fn too_expensive(what: &str, cost: u64, limit: u64) -> String {
    let exceeds = cost as f64 / limit as f64;
    let factor = if exceeds > 100.0 {
        "more than 100x".to_owned()
    } else if exceeds < 1.5 {
        format!("{exceeds:.6}x")
    } else {
        format!("{exceeds:.1}x")
    };
    format!(
        "{what} exceeds budget by factor of {factor} (try simplifying the rule, or adding maxItems, maxProperties, and \
         maxLength where arrays, maps, and strings are declared)"
    )
}

/// COMPAT: upstream shows the whole rule in its internal form, as Go writes JSON. A JSON value would not keep the
/// order of its fields, so the form is put together here.
fn refused(path: &Path, rule: &Rule, problem: &str) -> Error {
    let text = |text: &str| {
        let quoted = Json::from(text).to_string();
        quoted
            .replace('<', "\\u003c")
            .replace('>', "\\u003e")
            .replace('&', "\\u0026")
            .replace('\u{2028}', "\\u2028")
            .replace('\u{2029}', "\\u2029")
    };
    let reason = rule.reason.as_deref().map_or("null".to_owned(), text);
    let optional = rule
        .optional_old_self
        .map_or("null".to_owned(), |optional| optional.to_string());
    let form = format!(
        "{{\"Rule\":{},\"Message\":{},\"MessageExpression\":{},\"Reason\":{reason},\"FieldPath\":{},\
         \"OptionalOldSelf\":{optional}}}",
        text(&rule.rule),
        text(&rule.message),
        text(&rule.message_expression),
        text(&rule.field_path),
    );
    Error {
        kind: ErrorType::Invalid,
        path: path.to_string(),
        value: None,
        shown: None,
        detail: format!("{form}: {problem}"),
    }
}
