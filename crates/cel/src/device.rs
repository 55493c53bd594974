//! Selectors of devices: expressions over one device of a driver. They are compiled when they are written, and evaluated
//! by the scheduler.

use std::sync::{Arc, LazyLock};

use crate::decl::DeclType;
use crate::env::Env;
use crate::library::semver::Semver;
use crate::program::{Ast, Limits, Program};
use crate::types::Type;
use crate::value::{Map, Value};

/// How long the names of drivers, domains and what they give out can be, and the text of an attribute.
const DRIVER_MAX: i64 = 63;
const DOMAIN_MAX: i64 = 63;
const NAME_MAX: i64 = 32;
const TEXT_MAX: i64 = 64;
/// How many attributes and capacities a device can have.
const ENTRIES_MAX: i64 = 32;
/// The most that a selector may cost.
const COST_LIMIT: u64 = 1_000_000;

/// Domains, and under each the names that it gives out.
fn by_domain(value: Type, size: i64, any_name: bool) -> DeclType {
    let map = |key: i64, value: DeclType| DeclType {
        key: Some(Arc::new(DeclType::simple(Type::String, 2, key))),
        element: Some(Arc::new(value.clone())),
        ..DeclType::simple(Type::map(Type::String, value.cel), 2, ENTRIES_MAX)
    };
    let names = map(NAME_MAX, DeclType::simple(value, 1, size));
    map(DOMAIN_MAX, DeclType { any_name, ..names })
}

static DEVICE: LazyLock<Env> = LazyLock::new(|| {
    let quantity = Type::Struct("kubernetes.Quantity".into());
    let fields = [
        ("driver", DeclType::simple(Type::String, 2, DRIVER_MAX)),
        ("attributes", by_domain(Type::Dyn, TEXT_MAX, true)),
        ("capacity", by_domain(quantity, 0, false)),
        ("allowMultipleAllocations", DeclType::simple(Type::Bool, 4, 1)),
    ];
    let device = DeclType {
        fields: Some(
            fields
                .into_iter()
                .map(|(name, kind)| (name.to_owned(), Arc::new(kind)))
                .collect(),
        ),
        ..DeclType::simple(Type::Struct("kubernetes.DRADevice".into()), 2, 0)
    };
    let device = Arc::new(device);
    Env::new()
        .with_bindings()
        .declared("device", &device)
        .sized_by(&device)
});

/// Why a selector is refused.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    Invalid(String),
    /// It may cost more than a selector may.
    TooComplex,
}

/// Compiles a selector: whether the device will do. An attribute may be of any type, so its own value may too.
pub fn compile(expression: &str) -> Result<(), Refusal> {
    Selector::compile(expression).map(|_| ())
}

/// An attribute of a device.
#[derive(Debug, Clone, Copy)]
pub enum Attribute<'a> {
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Version(&'a str),
}

/// A device as selectors see it. Names without a domain are in the driver's.
#[derive(Debug, Clone, Default)]
pub struct Device<'a> {
    pub driver: &'a str,
    pub attributes: Vec<(&'a str, Attribute<'a>)>,
    pub capacity: Vec<(&'a str, skiff_meta::quantity::Quantity)>,
    pub allow_multiple_allocations: bool,
}

impl<'a> Device<'a> {
    fn value(&self) -> Result<Value<'a>, crate::EvalError> {
        let attributes = self.attributes.iter().map(|(name, attribute)| {
            let value = match attribute {
                Attribute::Bool(value) => Value::Bool(*value),
                Attribute::Int(value) => Value::Int(*value),
                Attribute::Text(text) => Value::string(*text),
                Attribute::Version(text) => {
                    let version = Semver::parse(text).map_err(crate::EvalError::new)?;
                    Value::Semver(Arc::new(version))
                }
            };
            Ok((*name, value))
        });
        let capacity = self
            .capacity
            .iter()
            .map(|(name, amount)| Ok((*name, Value::Quantity(*amount))));
        let mut device = Map::empty();
        device.insert(Value::string("driver"), Value::string(self.driver))?;
        device.insert(Value::string("attributes"), in_domains(self.driver, attributes)?)?;
        device.insert(Value::string("capacity"), in_domains(self.driver, capacity)?)?;
        let shared = Value::Bool(self.allow_multiple_allocations);
        device.insert(Value::string("allowMultipleAllocations"), shared)?;
        Ok(Value::Map(device))
    }
}

fn in_domains<'a>(
    driver: &str,
    named: impl Iterator<Item = Result<(&'a str, Value<'a>), crate::EvalError>>,
) -> Result<Value<'a>, crate::EvalError> {
    let mut domains: std::collections::BTreeMap<String, Map<'a>> = std::collections::BTreeMap::new();
    for entry in named {
        let (name, value) = entry?;
        let (domain, name) = name.split_once('/').unwrap_or((driver, name));
        let domain = domains.entry(domain.to_owned()).or_insert_with(Map::empty);
        domain.insert(Value::string(name), value)?;
    }
    let mut map = Map::empty();
    for (domain, names) in domains {
        map.insert(Value::string(domain), Value::Map(names))?;
    }
    Ok(Value::Map(map))
}

/// A selector that is ready to be asked.
#[derive(Debug)]
pub struct Selector(Program);

impl Selector {
    pub fn compile(expression: &str) -> Result<Self, Refusal> {
        compile_program(expression).map(Self)
    }

    /// Whether the device will do. An error is one of the expression over this device: an attribute that it lacks.
    pub fn matches(&self, device: &Device<'_>) -> Result<bool, String> {
        let value = device.value().map_err(|error| error.to_string())?;
        let variables = |name: &str| (name == "device").then(|| Ok(value.clone()));
        let limits = Limits {
            cost: COST_LIMIT,
            interrupted: None,
        };
        match self.0.evaluate(&variables, &limits).result {
            Ok(Value::Bool(matches)) => Ok(matches),
            Ok(other) => Err(format!(
                "CEL result of type {} could not be converted to bool",
                other.type_name()
            )),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn compile_program(expression: &str) -> Result<Program, Refusal> {
    let ast = Ast::compile(&DEVICE, expression)
        .map_err(|errors| Refusal::Invalid(format!("compilation failed: {errors}")))?;
    let found = ast.output_type();
    if !matches!(found, Type::Bool | Type::Dyn) {
        let found = found.declared_name();
        let problem = format!("must evaluate to bool or the unknown type, not {found}");
        return Err(Refusal::Invalid(problem));
    }
    let program = Program::new(&ast)
        .map_err(|problem| Refusal::Invalid(format!("program instantiation failed: {problem}")))?;
    if ast.estimate(&DEVICE).max > COST_LIMIT {
        return Err(Refusal::TooComplex);
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::{Attribute, Device, Refusal, Selector, compile};

    #[test]
    fn selectors_are_asked_of_devices() {
        let device = Device {
            driver: "d.example.com",
            attributes: vec![
                ("model", Attribute::Text("x")),
                ("other.io/fast", Attribute::Bool(true)),
                ("lanes", Attribute::Int(16)),
                ("firmware", Attribute::Version("1.10.0")),
            ],
            capacity: vec![("memory", skiff_meta::quantity::Quantity::parse("8Gi").unwrap())],
            allow_multiple_allocations: false,
        };
        let check = |expression: &str, expected: Option<bool>| {
            let selector = Selector::compile(expression).unwrap();
            assert_eq!(selector.matches(&device).ok(), expected, "{expression}");
        };
        check("device.driver == 'd.example.com'", Some(true));
        check("device.attributes['d.example.com'].model == 'x'", Some(true));
        check("device.attributes['d.example.com'].lanes > 16", Some(false));
        check("device.attributes['other.io'].fast", Some(true));
        check(
            "device.attributes['d.example.com'].firmware.isGreaterThan(semver('1.9.0'))",
            Some(true),
        );
        check(
            "device.capacity['d.example.com'].memory.compareTo(quantity('10Gi')) >= 0",
            Some(false),
        );
        check("device.allowMultipleAllocations", Some(false));
        check("device.attributes['d.example.com'].nothing == 'x'", None);
    }

    #[test]
    fn selectors_compile() {
        for expression in [
            "device.driver == 'a'",
            "device.attributes['d.example.com'].model == 'x' && device.allowMultipleAllocations",
            "device.attributes['d.example.com'].fast",
            "device.capacity['d.example.com'].memory.compareTo(quantity('1Gi')) >= 0",
            "cel.bind(dra, device.attributes['d.example.com'], dra.one == 1)",
        ] {
            assert_eq!(compile(expression), Ok(()), "{expression}");
        }
        let check = |expression, expected: &str| {
            let expected = Err(Refusal::Invalid(expected.to_owned()));
            assert_eq!(compile(expression), expected, "{expression}");
        };
        check(
            "v",
            "compilation failed: ERROR: <input>:1:1: undeclared reference to 'v' (in container '')\n | v\n | ^",
        );
        check(
            "1 + . (x)",
            "compilation failed: ERROR: <input>:1:7: Syntax error: no viable alternative at input '. ('\n | 1 + . (x)\n | ......^",
        );
        check(
            ".true",
            "compilation failed: ERROR: <input>:1:2: Syntax error: mismatched input 'true' expecting IDENTIFIER\n | .true\n | .^",
        );
        check(
            "device.nothing",
            "compilation failed: ERROR: <input>:1:7: undefined field 'nothing'\n | device.nothing\n | ......^",
        );
        check(
            "device.driver",
            "must evaluate to bool or the unknown type, not string",
        );
    }

    /// What the reference server says of these.
    #[test]
    fn what_may_cost_too_much_is_refused() {
        let check = |expression: &str, fits: bool| {
            let expected = if fits { Ok(()) } else { Err(Refusal::TooComplex) };
            assert_eq!(compile(expression), expected, "{expression}");
        };
        check(
            "device.attributes.all(d, device.attributes[d].all(n, n == 'x'))",
            true,
        );
        check(
            "device.attributes.all(d, device.attributes.all(e, device.attributes.all(f, d == e)))",
            true,
        );
        check(
            "device.attributes.all(d, device.attributes.all(e, device.attributes.all(f, device.attributes.all(g, d == e))))",
            false,
        );
        check(
            "device.attributes.exists(a, device.attributes.exists(b, device.attributes[a].exists(c, device.attributes[b][c].matches('a*b'))))",
            true,
        );
        check(
            "device.attributes.all(d, device.attributes['x'].y.matches('^(a|b)*$') && device.attributes.all(e, device.attributes['x'].z.matches('a.*b')))",
            true,
        );
        check(
            "cel.bind(a, device.attributes['x'], a.all(b, a.all(c, a.all(d, a.all(e, true)))))",
            false,
        );
        check(
            "device.driver.split('.').all(x, device.driver.split('.').all(y, device.driver.split('.').all(z, x+y == z)))",
            false,
        );
    }
}
