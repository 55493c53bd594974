//! The conditions in CEL under which a webhook is asked at all, over the spec of a SubjectAccessReview.

use std::sync::{Arc, LazyLock};

use serde_json::{Value, json};
use skiff_cel::{DeclType, Env, Limits, Program, Schema, Type};

/// The most conditions of one webhook.
pub const MOST: usize = 64;

static SPEC: LazyLock<Schema> = LazyLock::new(|| {
    let text = json!({"type": "string"});
    let texts = json!({"type": "array", "items": text});
    let object = |fields: Value| json!({"type": "object", "properties": fields});
    let requirements =
        json!({"type": "array", "items": object(json!({"key": text, "operator": text, "values": texts}))});
    let selector = object(json!({"rawSelector": text, "requirements": requirements}));
    Schema::parse(&object(json!({
        "user": text, "uid": text, "groups": texts,
        "extra": {"type": "object", "additionalProperties": texts},
        "resourceAttributes": object(json!({
            "namespace": text, "verb": text, "group": text, "version": text, "resource": text, "subresource": text,
            "name": text, "fieldSelector": selector, "labelSelector": selector,
        })),
        "nonResourceAttributes": object(json!({"path": text, "verb": text})),
    })))
});

static ENV: LazyLock<Env> = LazyLock::new(|| {
    let spec = DeclType::of(&SPEC, false, "kubernetes.SubjectAccessReviewSpec");
    Env::new().declared(
        "request",
        &Arc::new(spec.expect("an object is something that CEL can see")),
    )
});

pub struct Conditions(Vec<(String, Program)>);

impl Conditions {
    /// Compiles expressions; what is wrong is told by its place in the list.
    pub fn compile(expressions: &[String]) -> Result<Conditions, (usize, String)> {
        let mut compiled: Vec<(String, Program)> = Vec::new();
        for (at, expression) in expressions.iter().enumerate() {
            if expression.trim().is_empty() {
                return Err((at, "Required value".to_owned()));
            }
            let invalid = |why: String| {
                let shown = skiff_meta::field::quote(expression);
                (at, format!("Invalid value: {shown}: {why}"))
            };
            if compiled.iter().any(|(other, _)| other == expression) {
                let shown = skiff_meta::field::quote(expression);
                return Err((at, format!("Duplicate value: {shown}")));
            }
            let program = Program::compile(&ENV, expression)
                .map_err(|errors| invalid(format!("compilation failed: {errors}")))?;
            if *program.output_type() != Type::Bool {
                let found = program.output_type().declared_name();
                return Err(invalid(format!("must evaluate to bool but got {found}")));
            }
            compiled.push((expression.clone(), program));
        }
        Ok(Conditions(compiled))
    }

    /// Whether all are true. One that is false counts more than one that fails.
    pub fn hold(&self, spec: &Value) -> Result<bool, String> {
        if self.0.is_empty() {
            return Ok(true);
        }
        let value = skiff_cel::Value::from_json(spec, &SPEC).map_err(|error| error.to_string())?;
        let mut errors = Vec::new();
        for (expression, program) in &self.0 {
            let variables = |name: &str| (name == "request").then(|| Ok(value.clone()));
            match program.evaluate(&variables, &Limits::default()).result {
                Ok(skiff_cel::Value::Bool(false)) => return Ok(false),
                Ok(_) => {}
                Err(error) => errors.push(format!(
                    "cel evaluation error: expression '{expression}' resulted in error: {error}"
                )),
            }
        }
        match errors.as_slice() {
            [] => Ok(true),
            [one] => Err(one.clone()),
            several => Err(format!("[{}]", several.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_choose() {
        let spec = json!({"user": "jane", "uid": "", "groups": ["devs"], "extra": {"k": ["v"]},
            "resourceAttributes": {"namespace": "kube-system", "verb": "list", "group": "", "version": "v1",
                "resource": "pods", "subresource": "", "name": "",
                "labelSelector": {"requirements": [{"key": "a", "operator": "In", "values": ["b"]}]}}});
        let check = |expressions: &[&str], expected: Result<bool, &str>| {
            let expressions: Vec<String> = expressions.iter().map(|text| (*text).to_owned()).collect();
            let found = Conditions::compile(&expressions)
                .map_err(|(_, why)| why)
                .unwrap()
                .hold(&spec);
            assert_eq!(found, expected.map_err(str::to_owned), "{expressions:?}");
        };
        check(&[], Ok(true));
        check(
            &["has(request.resourceAttributes)", "request.user == 'jane'"],
            Ok(true),
        );
        check(&["!('system:masters' in request.groups)"], Ok(true));
        check(
            &["request.resourceAttributes.namespace == 'kube-system'"],
            Ok(true),
        );
        check(
            &["request.resourceAttributes.labelSelector.requirements.exists(r, r.key == 'a')"],
            Ok(true),
        );
        check(&["'v' in request.extra['k']"], Ok(true));
        check(&["has(request.nonResourceAttributes)"], Ok(false));
        let failing = "request.nonResourceAttributes.path == '/x'";
        check(
            &[failing],
            Err(
                "cel evaluation error: expression 'request.nonResourceAttributes.path == '/x'' resulted in error: no such key: nonResourceAttributes",
            ),
        );
        check(&[failing, "request.user == 'carl'"], Ok(false));
    }

    #[test]
    fn what_does_not_compile_is_told() {
        let check = |expression: &str, expected: &str| {
            let (_, why) = Conditions::compile(&[expression.to_owned()])
                .map(|_| ())
                .unwrap_err();
            assert!(why.contains(expected), "{why}");
        };
        check("", "Required value");
        check("request.user", "must evaluate to bool but got string");
        check("request.nobody == ''", "undefined field 'nobody'");
        check("object == 1", "undeclared reference to 'object'");
    }
}
