//! From the claims of a token to a user: by names of claims, or by expressions in CEL; and the rules that both must keep.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value, json};
use skiff_cel::{Ast, DeclType, Env, Limits, Program, Schema, Type};

use crate::UserInfo;

/// The `user` of validation rules.
static USER: LazyLock<Schema> = LazyLock::new(|| {
    let text = json!({"type": "string"});
    let texts = json!({"type": "array", "items": text});
    Schema::parse(&json!({"type": "object", "properties": {
        "username": text, "uid": text, "groups": texts,
        "extra": {"type": "object", "additionalProperties": texts},
    }}))
});

static USER_ENV: LazyLock<Env> = LazyLock::new(|| {
    let user = DeclType::of(&USER, false, "kubernetes.UserInfo");
    Env::new().declared(
        "user",
        &Arc::new(user.expect("an object is something that CEL can see")),
    )
});

static CLAIMS_ENV: LazyLock<Env> =
    LazyLock::new(|| Env::new().variable("claims", Type::map(Type::String, Type::Dyn)));

pub struct Expression {
    source: String,
    program: Program,
}

impl Expression {
    /// Over `claims`.
    pub fn of_claims(source: &str) -> Result<Expression, String> {
        Expression::compile(&CLAIMS_ENV, source)
    }

    /// Over `user`: whether it may be.
    pub fn of_user(source: &str) -> Result<Expression, String> {
        let compiled = Expression::compile(&USER_ENV, source)?;
        match compiled.program.output_type() {
            Type::Bool => Ok(compiled),
            found => Err(format!("must evaluate to bool but got {}", found.declared_name())),
        }
    }

    fn compile(env: &Env, source: &str) -> Result<Expression, String> {
        let ast = Ast::compile(env, source).map_err(|errors| format!("compilation failed: {errors}"))?;
        let program = Program::new(&ast).map_err(|why| format!("program instantiation failed: {why}"))?;
        Ok(Expression {
            source: source.to_owned(),
            program,
        })
    }

    fn evaluate<'a>(
        &'a self,
        name: &str,
        value: &skiff_cel::Value<'a>,
    ) -> Result<skiff_cel::Value<'a>, String> {
        let variables = |asked: &str| (asked == name).then(|| Ok(value.clone()));
        let result = self.program.evaluate(&variables, &Limits::default()).result;
        result.map_err(|error| format!("expression '{}' resulted in error: {error}", self.source))
    }

    fn text(&self, claims: &Value) -> Result<Option<String>, String> {
        let value = self.evaluate("claims", &skiff_cel::Value::plain(claims))?;
        Ok(value.as_str().map(str::to_owned))
    }

    /// A text, or several; none is told by an empty one.
    fn texts(&self, claims: &Value) -> Result<Vec<String>, String> {
        let value = self.evaluate("claims", &skiff_cel::Value::plain(claims))?;
        let bad = || "expression must return a string or a list of strings".to_owned();
        let list = match value.to_json().map_err(|_| bad())? {
            Value::Null => return Ok(Vec::new()),
            Value::String(one) => vec![one],
            Value::Array(several) => several
                .into_iter()
                .map(|one| match one {
                    Value::String(text) => Ok(text),
                    _ => Err(bad()),
                })
                .collect::<Result<_, _>>()?,
            _ => return Err(bad()),
        };
        Ok(list.into_iter().filter(|text| !text.is_empty()).collect())
    }

    fn holds(&self, name: &str, value: &skiff_cel::Value<'_>, message: &str) -> Result<(), String> {
        // The value borrows for as long as the program, which is longer than this call.
        let variables = |asked: &str| (asked == name).then(|| Ok(value.clone()));
        let result = self.program.evaluate(&variables, &Limits::default()).result;
        match result {
            Ok(skiff_cel::Value::Bool(true)) => Ok(()),
            Ok(skiff_cel::Value::Bool(false)) => Err(format!(
                "validation expression '{}' failed: {message}",
                self.source
            )),
            Ok(_) => Err("validation expression must return a boolean".to_owned()),
            Err(error) => Err(format!("expression '{}' resulted in error: {error}", self.source)),
        }
    }
}

/// Where a part of the user comes from.
#[derive(Default)]
pub enum Source {
    #[default]
    Nowhere,
    Claim {
        name: String,
        prefix: String,
    },
    Expression(Expression),
}

/// What must hold, and what is said if it does not.
pub struct Rule {
    pub expression: Expression,
    pub message: String,
}

#[derive(Default)]
pub struct Mapper {
    pub username: Source,
    pub groups: Source,
    pub uid: Source,
    pub extra: Vec<(String, Expression)>,
    /// Claims that must have these values.
    pub required: BTreeMap<String, String>,
    pub of_claims: Vec<Rule>,
    pub of_user: Vec<Rule>,
}

/// COMPAT: what Go says of a value of another type.
fn not_a(kind: &str, value: &Value) -> String {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    format!("json: cannot unmarshal {found} into Go value of type {kind}")
}

fn claim(claims: &Map<String, Value>, name: &str) -> Result<String, String> {
    match claims.get(name) {
        None => Err("claim not present".to_owned()),
        Some(Value::String(text)) => Ok(text.clone()),
        // COMPAT: null is no text, and none is missed.
        Some(Value::Null) => Ok(String::new()),
        Some(other) => Err(not_a("string", other)),
    }
}

/// All numbers as CEL sees those of claims.
fn with_doubles(value: &Value) -> Value {
    match value {
        Value::Number(number) => number.as_f64().map_or(Value::Null, Value::from),
        Value::Array(list) => list.iter().map(with_doubles).collect(),
        Value::Object(entries) => {
            let entries = entries
                .iter()
                .map(|(key, value)| (key.clone(), with_doubles(value)));
            Value::Object(entries.collect())
        }
        other => other.clone(),
    }
}

impl Mapper {
    /// The user of verified claims.
    pub fn user(&self, claims: &Map<String, Value>) -> Result<UserInfo, String> {
        let seen = if self.evaluates() {
            with_doubles(&Value::Object(claims.clone()))
        } else {
            Value::Null
        };
        let username = self.username(claims, &seen)?;
        let groups = self.groups(claims, &seen)?;
        let uid = match &self.uid {
            Source::Nowhere => String::new(),
            Source::Claim { name, .. } => {
                claim(claims, name).map_err(|why| format!("parse uid claim {name:?}: {why}"))?
            }
            Source::Expression(expression) => {
                let failed = |why: String| format!("error evaluating uid claim expression: {why}");
                let found = expression.text(&seen).map_err(failed)?;
                found.ok_or_else(|| failed("uid claim expression must return a string".to_owned()))?
            }
        };
        let mut extra = BTreeMap::new();
        if let Some(Value::String(id)) = claims.get("jti") {
            let key = "authentication.kubernetes.io/credential-id";
            extra.insert(key.to_owned(), vec![format!("JTI={id}")]);
        }
        for (key, expression) in &self.extra {
            let values = expression.texts(&seen).map_err(|why| {
                format!(
                    "error evaluating extra claim expression: {}: {why}",
                    expression.source
                )
            })?;
            if !values.is_empty() {
                extra.insert(key.clone(), values);
            }
        }
        for (name, wanted) in &self.required {
            if !claims.contains_key(name) {
                return Err(format!("required claim {name} not present in ID token"));
            }
            let found = claim(claims, name).map_err(|why| format!("parse claim {name}: {why}"))?;
            if found != *wanted {
                return Err(format!(
                    "required claim {name} value does not match. Got = {found}, want = {wanted}"
                ));
            }
        }
        let value = skiff_cel::Value::plain(&seen);
        for rule in &self.of_claims {
            let held = rule.expression.holds("claims", &value, &rule.message);
            held.map_err(|why| format!("error evaluating claim validation expression: {why}"))?;
        }
        let shown = json!({"username": username, "uid": uid, "groups": groups, "extra": extra});
        for rule in &self.of_user {
            let value = skiff_cel::Value::from_json(&shown, &USER).map_err(|error| error.to_string())?;
            let held = rule.expression.holds("user", &value, &rule.message);
            held.map_err(|why| format!("error evaluating user info validation rule: {why}"))?;
        }
        let mut user = UserInfo::new(username, groups);
        (user.uid, user.extra) = (uid, extra);
        Ok(user)
    }

    fn evaluates(&self) -> bool {
        let sources = [&self.username, &self.groups, &self.uid];
        sources
            .iter()
            .any(|source| matches!(source, Source::Expression(_)))
            || !self.extra.is_empty()
            || !self.of_claims.is_empty()
    }

    fn username(&self, claims: &Map<String, Value>, seen: &Value) -> Result<String, String> {
        let (name, prefix) = match &self.username {
            Source::Nowhere => return Err("no username is configured".to_owned()),
            Source::Claim { name, prefix } => (name, prefix),
            Source::Expression(expression) => {
                let failed = |why: String| format!("error evaluating username claim expression: {why}");
                let found = expression.text(seen).map_err(failed)?;
                let found = found
                    .ok_or_else(|| failed("username claim expression must return a string".to_owned()))?;
                if found.is_empty() {
                    return Err("empty username via CEL expression is not allowed".to_owned());
                }
                return Ok(found);
            }
        };
        let found = claim(claims, name).map_err(|why| format!("parse username claims {name:?}: {why}"))?;
        if name == "email" {
            match claims.get("email_verified") {
                None | Some(Value::Bool(true)) => {}
                Some(Value::Bool(false)) | Some(Value::Null) => return Err("email not verified".to_owned()),
                Some(other) => {
                    return Err(format!("parse 'email_verified' claim: {}", not_a("bool", other)));
                }
            }
        }
        Ok(format!("{prefix}{found}"))
    }

    fn groups(&self, claims: &Map<String, Value>, seen: &Value) -> Result<Vec<String>, String> {
        match &self.groups {
            Source::Nowhere => Ok(Vec::new()),
            Source::Claim { name, prefix } => {
                let bad = |value: &Value| format!("parse groups claim {name:?}: {}", not_a("string", value));
                let found = match claims.get(name) {
                    None | Some(Value::Null) => return Ok(Vec::new()),
                    Some(Value::String(one)) => vec![one.as_str()],
                    Some(whole @ Value::Array(several)) => several
                        .iter()
                        .map(|one| one.as_str().ok_or_else(|| bad(whole)))
                        .collect::<Result<_, _>>()?,
                    Some(other) => return Err(bad(other)),
                };
                Ok(found
                    .into_iter()
                    .map(|group| format!("{prefix}{group}"))
                    .collect())
            }
            Source::Expression(expression) => expression
                .texts(seen)
                .map_err(|why| format!("error evaluating group claim expression: {why}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, prefix: &str) -> Source {
        let (name, prefix) = (name.to_owned(), prefix.to_owned());
        Source::Claim { name, prefix }
    }

    fn expression(source: &str) -> Source {
        Source::Expression(Expression::of_claims(source).unwrap())
    }

    fn check(mapper: &Mapper, claims: Value, expected: Result<(&str, &[&str]), &str>) {
        let found = mapper.user(claims.as_object().unwrap());
        match (found, expected) {
            (Ok(user), Ok((name, groups))) => {
                assert_eq!(user.name, name, "{claims}");
                assert_eq!(&user.groups[..user.groups.len() - 1], groups, "{claims}");
            }
            (Err(found), Err(expected)) => assert_eq!(found, expected, "{claims}"),
            (found, expected) => panic!("{claims}: {found:?}, {expected:?}"),
        }
    }

    #[test]
    fn claims_by_name() {
        let mut mapper = Mapper {
            username: named("email", "oidc:"),
            groups: named("roles", "g:"),
            ..Mapper::default()
        };
        check(
            &mapper,
            json!({"email": "a@x", "roles": ["r", "s"]}),
            Ok(("oidc:a@x", &["g:r", "g:s"])),
        );
        check(
            &mapper,
            json!({"email": "a@x", "roles": "r"}),
            Ok(("oidc:a@x", &["g:r"])),
        );
        check(
            &mapper,
            json!({"email": "a@x", "email_verified": true}),
            Ok(("oidc:a@x", &[])),
        );
        check(
            &mapper,
            json!({"email": "a@x", "email_verified": false}),
            Err("email not verified"),
        );
        check(
            &mapper,
            json!({"email": "a@x", "email_verified": "true"}),
            Err("parse 'email_verified' claim: json: cannot unmarshal string into Go value of type bool"),
        );
        check(
            &mapper,
            json!({}),
            Err("parse username claims \"email\": claim not present"),
        );
        check(
            &mapper,
            json!({"email": 1}),
            Err(
                "parse username claims \"email\": json: cannot unmarshal number into Go value of type string",
            ),
        );
        check(
            &mapper,
            json!({"email": "a@x", "roles": 1}),
            Err("parse groups claim \"roles\": json: cannot unmarshal number into Go value of type string"),
        );
        mapper.required.insert("hd".to_owned(), "x".to_owned());
        check(
            &mapper,
            json!({"email": "a@x"}),
            Err("required claim hd not present in ID token"),
        );
        check(
            &mapper,
            json!({"email": "a@x", "hd": "y"}),
            Err("required claim hd value does not match. Got = y, want = x"),
        );
        check(&mapper, json!({"email": "a@x", "hd": "x"}), Ok(("oidc:a@x", &[])));
    }

    #[test]
    fn claims_by_expression() {
        let rule = |expression: Expression| Rule {
            expression,
            message: "mind the gap".to_owned(),
        };
        let mapper = Mapper {
            username: expression("claims.name + '@' + claims.realm.id"),
            groups: expression("claims.?roles.orValue('')"),
            uid: expression("claims.sub"),
            extra: vec![
                (
                    "example.com/age".to_owned(),
                    Expression::of_claims("string(claims.age)").unwrap(),
                ),
                ("example.com/no".to_owned(), Expression::of_claims("''").unwrap()),
            ],
            of_claims: vec![rule(Expression::of_claims("claims.age > 17.0").unwrap())],
            of_user: vec![rule(
                Expression::of_user("!user.username.startsWith('system:')").unwrap(),
            )],
            ..Mapper::default()
        };
        let good = json!({"name": "jane", "realm": {"id": "x"}, "sub": "7", "age": 18, "roles": ["a", "", "b"], "jti": "j"});
        check(&mapper, good.clone(), Ok(("jane@x", &["a", "b"])));
        let user = mapper.user(good.as_object().unwrap()).unwrap();
        assert_eq!(
            (user.uid.as_str(), &user.extra["example.com/age"]),
            ("7", &vec!["18".to_owned()])
        );
        assert_eq!(
            user.extra["authentication.kubernetes.io/credential-id"],
            ["JTI=j"]
        );
        assert!(!user.extra.contains_key("example.com/no"));
        let with = |changes: Value| {
            let mut claims = good.clone();
            for (key, value) in changes.as_object().unwrap() {
                claims[key] = value.clone();
            }
            claims
        };
        check(
            &mapper,
            with(json!({"age": 17})),
            Err(
                "error evaluating claim validation expression: validation expression 'claims.age > 17.0' failed: mind the gap",
            ),
        );
        check(
            &mapper,
            with(json!({"name": "system:jane"})),
            Err(
                "error evaluating user info validation rule: validation expression '!user.username.startsWith('system:')' failed: mind the gap",
            ),
        );
        check(
            &mapper,
            with(json!({"roles": [1]})),
            Err(
                "error evaluating group claim expression: expression must return a string or a list of strings",
            ),
        );
        assert!(Expression::of_user("user.username").is_err());
        assert!(Expression::of_claims("nobody").is_err());
    }
}
