//! Rules of pods that say for which operating system they are, and of the options that only Windows has.

use skiff_meta::names;

use crate::errors::Errors;
use crate::node::Node;

const NOT_FOR_WINDOWS: &str = "cannot be set for a windows pod";
const GMSA_SPEC_MAX_KIB: usize = 64;
const DOMAIN_END: usize = 256;
const USER_MAX: usize = 104;

/// The options of a security context.
pub fn options(context: &Node, errors: &mut Errors) {
    let options = context.field("windowsOptions");
    let name = options.field("gmsaCredentialSpecName");
    if name.is_set() {
        errors.rule(&name, names::dns1123_subdomain(name.str()));
    }
    let spec = options.field("gmsaCredentialSpec");
    if spec.is_set() && spec.str().is_empty() {
        errors.invalid(&spec, "gmsaCredentialSpec cannot be an empty string");
    } else if spec.len() > GMSA_SPEC_MAX_KIB * 1024 {
        let detail = format!("gmsaCredentialSpec size must be under {GMSA_SPEC_MAX_KIB} KiB");
        errors.invalid(&spec, detail);
    }
    let user = options.field("runAsUserName");
    if user.is_set() {
        user_name(&user, errors);
    }
}

fn user_name(at: &Node, errors: &mut Errors) {
    let mut say = |detail: &str| errors.invalid(at, format!("runAsUserName{detail}"));
    let text = at.str();
    if text.is_empty() {
        return say(" cannot be an empty string");
    }
    if text.chars().any(|c| c.is_ascii_control()) {
        return say(" cannot contain control characters");
    }
    let parts: Vec<&str> = text.split('\\').collect();
    let (domain, user) = match parts[..] {
        [user] => (None, user),
        [domain, user] => (Some(domain), user),
        _ => return say(" cannot contain more than one backslash"),
    };
    if let Some(domain) = domain {
        if domain.len() >= DOMAIN_END {
            say(&format!("'s Domain length must be under {DOMAIN_END} characters"));
        }
        let net_bios = !domain.is_empty()
            && !domain.starts_with('.')
            && domain.chars().count() <= 15
            && !domain.contains(|c| r#"/:*?"<>|"#.contains(c));
        if !net_bios && !is_dns_name(domain) {
            say("'s Domain doesn't match the NetBios nor the DNS format");
        }
    }
    if user.is_empty() {
        say("'s User cannot be empty");
    } else if user.len() > USER_MAX {
        say(&format!(
            "'s User length must not be longer than {USER_MAX} characters"
        ));
    }
    if !user.is_empty() && user.chars().all(|c| c == '.' || c == ' ') {
        say("'s User cannot contain only periods or spaces");
    }
    if user.contains(|c| r#""/\:;|=,+*?<>@[]"#.contains(c)) {
        say(r#"'s User cannot contain the following characters: "/\:;|=,+*?<>@[]"#);
    }
}

/// Letters of both cases, digits and dashes between dots.
fn is_dns_name(text: &str) -> bool {
    text.split('.').all(|label| {
        label.starts_with(|c: char| c.is_ascii_alphanumeric())
            && label.ends_with(|c: char| c.is_ascii_alphanumeric())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    })
}

fn each_container(spec: &Node, mut each: impl FnMut(&Node)) {
    for name in ["initContainers", "containers", "ephemeralContainers"] {
        let containers = spec.field(name);
        for container in containers.items() {
            each(&container);
        }
    }
}

/// Containers that run on the host itself: all or none, and on its network.
pub fn host_process(spec: &Node, errors: &mut Errors) {
    const PATH: &str = "securityContext.windowsOptions.hostProcess";
    let pod = spec.field(PATH).value.as_bool();
    let (mut all, mut on_host) = (0, 0);
    each_container(spec, |container| {
        all += 1;
        let at = container.field(PATH);
        let own = at.value.as_bool();
        if let (Some(pod), Some(own)) = (pod, own)
            && pod != own
        {
            errors.invalid(
                &at,
                format!("pod hostProcess value must be identical if both are specified, was {pod}"),
            );
        }
        if own.or(pod) == Some(true) {
            on_host += 1;
        }
    });
    if on_host == 0 {
        return;
    }
    if on_host != all {
        errors.invalid_value(
            spec,
            "",
            "If pod contains any hostProcess containers then all containers must be HostProcess containers",
        );
    }
    let network = spec.field("hostNetwork");
    if !network.bool() {
        errors.invalid_value(
            &network,
            false,
            "hostNetwork must be true if pod contains any hostProcess containers",
        );
    }
}

/// What a pod may not ask of the operating system it names.
pub fn operating_system(spec: &Node, errors: &mut Errors) {
    let os = spec.field("os");
    if !os.is_set() {
        return;
    }
    let name = os.field("name");
    match name.str() {
        "" => errors.required(&name, ""),
        "linux" => linux(spec, errors),
        "windows" => windows(spec, errors),
        _ => errors.not_supported(&os.with(name.value), &["linux", "windows"]),
    }
}

fn linux(spec: &Node, errors: &mut Errors) {
    let mut check = |context: &Node| {
        let options = context.field("windowsOptions");
        if options.is_set() {
            errors.forbidden(&options, "windows options cannot be set for a linux pod");
        }
    };
    check(&spec.field("securityContext"));
    each_container(spec, |container| check(&container.field("securityContext")));
}

fn windows(spec: &Node, errors: &mut Errors) {
    let context = spec.field("securityContext");
    let mut refuse = |at: Node, set: bool| {
        if set {
            errors.forbidden(&at, NOT_FOR_WINDOWS);
        }
    };
    let set = |at: Node| at.is_set();
    for name in ["appArmorProfile", "seLinuxOptions"] {
        refuse(context.field(name), set(context.field(name)));
    }
    refuse(spec.field("hostUsers"), set(spec.field("hostUsers")));
    for name in ["hostPID", "hostIPC"] {
        refuse(spec.field(name), spec.field(name).bool());
    }
    for name in ["seccompProfile", "fsGroup", "fsGroupChangePolicy"] {
        refuse(context.field(name), set(context.field(name)));
    }
    refuse(context.field("sysctls"), !context.field("sysctls").is_empty());
    refuse(
        spec.field("shareProcessNamespace"),
        set(spec.field("shareProcessNamespace")),
    );
    for name in [
        "runAsUser",
        "runAsGroup",
        "supplementalGroups",
        "supplementalGroupsPolicy",
        "seLinuxChangePolicy",
    ] {
        refuse(context.field(name), set(context.field(name)));
    }
    each_container(spec, |container| {
        let context = container.field("securityContext");
        for name in [
            "appArmorProfile",
            "seLinuxOptions",
            "seccompProfile",
            "capabilities",
            "readOnlyRootFilesystem",
            "privileged",
            "allowPrivilegeEscalation",
            "procMount",
            "runAsUser",
            "runAsGroup",
        ] {
            refuse(context.field(name), set(context.field(name)));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(spec: Value, expected: &[&str]) {
        let mut errors = Errors::new();
        let root = json!({ "spec": spec });
        let root = Node::root(&root);
        let spec = root.field("spec");
        options(&spec.field("securityContext"), &mut errors);
        host_process(&spec, &mut errors);
        operating_system(&spec, &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn options_belong_to_their_system() {
        check(
            json!({"os": {"name": "linux"}, "containers": [{"securityContext": {"windowsOptions": {}}}]}),
            &[
                "spec.containers[0].securityContext.windowsOptions: Forbidden: windows options cannot be set for a linux pod",
            ],
        );
        check(
            json!({"os": {"name": "windows"}, "hostPID": true, "containers": [{"securityContext": {"runAsUser": 0}}]}),
            &[
                "spec.hostPID: Forbidden: cannot be set for a windows pod",
                "spec.containers[0].securityContext.runAsUser: Forbidden: cannot be set for a windows pod",
            ],
        );
        check(
            json!({"securityContext": {"windowsOptions": {"hostProcess": true}}, "containers": [{}]}),
            &[
                "spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers",
            ],
        );
    }

    #[test]
    fn names_of_users() {
        let check = |name: &str, expected: &[&str]| {
            let expected: Vec<String> = expected
                .iter()
                .map(|e| format!("spec.securityContext.windowsOptions.runAsUserName: Invalid value: {}: runAsUserName{e}", Value::from(name)))
                .collect();
            let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
            self::check(
                json!({"securityContext": {"windowsOptions": {"runAsUserName": name}}}),
                &expected,
            );
        };
        check("ContainerUser", &[]);
        check("NT AUTHORITY\\SYSTEM", &[]);
        check("a\\b\\c", &[" cannot contain more than one backslash"]);
        check(
            "a.b/c",
            &["'s User cannot contain the following characters: \"/\\:;|=,+*?<>@[]"],
        );
        check("..", &["'s User cannot contain only periods or spaces"]);
    }
}
