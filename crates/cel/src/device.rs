//! Selectors of devices: expressions over one device of a driver. They are compiled when they are written; nobody
//! evaluates them here yet.

use std::sync::{Arc, LazyLock};

use crate::decl::DeclType;
use crate::env::Env;
use crate::program::{Ast, Program};
use crate::types::Type;

fn simple(kind: Type) -> DeclType {
    DeclType::simple(kind, 1, 0)
}

/// Domains, and under each the names that it gives out.
fn by_domain(value: &Type) -> DeclType {
    let map = |value: DeclType| DeclType {
        key: Some(Arc::new(simple(Type::String))),
        element: Some(Arc::new(value.clone())),
        ..DeclType::simple(Type::map(Type::String, value.cel), 2, 0)
    };
    map(map(simple(value.clone())))
}

static DEVICE: LazyLock<Env> = LazyLock::new(|| {
    let fields = [
        ("driver", simple(Type::String)),
        ("attributes", by_domain(&Type::Dyn)),
        ("capacity", by_domain(&Type::Struct("kubernetes.Quantity".into()))),
        ("allowMultipleAllocations", simple(Type::Bool)),
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
    Env::new().with_bindings().declared("device", &Arc::new(device))
});

/// Compiles a selector: whether the device will do. An attribute may be of any type, so its own value may too.
pub fn compile(expression: &str) -> Result<(), String> {
    let ast = Ast::compile(&DEVICE, expression).map_err(|errors| format!("compilation failed: {errors}"))?;
    let found = ast.output_type();
    if !matches!(found, Type::Bool | Type::Dyn) {
        let found = found.declared_name();
        return Err(format!("must evaluate to bool or the unknown type, not {found}"));
    }
    Program::new(&ast).map_err(|problem| format!("program instantiation failed: {problem}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::compile;

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
            assert_eq!(compile(expression), Err(expected.to_owned()), "{expression}");
        };
        check(
            "v",
            "compilation failed: ERROR: <input>:1:1: undeclared reference to 'v' (in container '')\n | v\n | ^",
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
}
