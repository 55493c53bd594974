//! What the fuzz targets do with an input, apart from any fuzzer: `fuzz/` drives them with libFuzzer, and this
//! crate's test replays the kept corpus. A target panics when a property does not hold; nothing in the product links
//! this crate.

mod apply;
mod bodies;
mod cel;
mod credentials;
mod custom;
mod dns;
mod input;
mod patches;
mod request;
mod selectors;

/// One function under test.
pub struct Target {
    /// Also the folder of its corpus.
    pub name: &'static str,
    pub run: fn(&[u8]),
}

/// Adding a target is a function and a line here.
pub static TARGETS: &[Target] = &[
    Target {
        name: "json",
        run: bodies::json,
    },
    Target {
        name: "yaml",
        run: bodies::yaml,
    },
    Target {
        name: "protobuf",
        run: bodies::protobuf,
    },
    Target {
        name: "json_patch",
        run: patches::json_patch,
    },
    Target {
        name: "merge_patch",
        run: patches::merge_patch,
    },
    Target {
        name: "strategic_merge_patch",
        run: patches::strategic_merge_patch,
    },
    Target {
        name: "apply",
        run: apply::apply,
    },
    Target {
        name: "managed_fields",
        run: apply::managed_fields,
    },
    Target {
        name: "label_selector",
        run: selectors::label_selector,
    },
    Target {
        name: "field_selector",
        run: selectors::field_selector,
    },
    Target {
        name: "continue_token",
        run: selectors::continue_token,
    },
    Target {
        name: "quantity",
        run: selectors::quantity,
    },
    Target {
        name: "cel",
        run: cel::expression,
    },
    Target {
        name: "cel_rules",
        run: cel::rules,
    },
    Target {
        name: "jsonpath",
        run: custom::jsonpath,
    },
    Target {
        name: "structural",
        run: custom::structural,
    },
    Target {
        name: "bearer_token",
        run: credentials::bearer_token,
    },
    Target {
        name: "corefile",
        run: dns::corefile,
    },
    Target {
        name: "dns_message",
        run: dns::dns_message,
    },
    Target {
        name: "request",
        run: request::request,
    },
];

/// The target of a name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
