//! Rules of probes and life cycle hooks.

use serde_json::Value;
use skiff_meta::names;

use super::container::Pod;
use crate::errors::Errors;
use crate::node::Node;

const HANDLERS: [&str; 5] = ["exec", "httpGet", "tcpSocket", "grpc", "sleep"];

pub(super) fn lifecycle(container: &Node, pod: &Pod, errors: &mut Errors) {
    let lifecycle = container.field("lifecycle");
    for name in ["postStart", "preStop"] {
        let at = lifecycle.field(name);
        if at.is_set() {
            handler(&at, pod, errors);
        }
    }
    let signal = lifecycle.field("stopSignal");
    if signal.is_set() {
        match pod.spec.field("os.name").str() {
            "" => errors.forbidden(&signal, "may not be set for containers with empty `spec.os.name`"),
            "windows" => errors.one_of(&signal, &["SIGKILL", "SIGTERM"]),
            _ => {
                if !signal.str().starts_with("SIG") {
                    errors.not_supported(
                        &signal,
                        &[
                            "SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2",
                        ],
                    );
                }
            }
        }
    }
}

pub(super) fn probes(container: &Node, pod: &Pod, errors: &mut Errors) {
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let probe = container.field(name);
        if !probe.is_set() {
            continue;
        }
        handler(&probe, pod, errors);
        for field in [
            "initialDelaySeconds",
            "timeoutSeconds",
            "periodSeconds",
            "successThreshold",
            "failureThreshold",
        ] {
            errors.non_negative(&probe.field(field));
        }
        let grace = probe.field("terminationGracePeriodSeconds");
        if grace.int().is_some_and(|n| n <= 0) {
            errors.invalid(&grace, "must be greater than 0");
        }
        if name == "readinessProbe" {
            if grace.is_set() {
                errors.invalid(&grace, "must not be set for readinessProbes");
            }
        } else {
            let success = probe.field("successThreshold");
            if success.int().unwrap_or(0) != 1 {
                errors.invalid_value(&success, success.int().unwrap_or(0), "must be 1");
            }
        }
    }
}

fn handler(at: &Node, pod: &Pod, errors: &mut Errors) {
    let mut found = false;
    for name in HANDLERS {
        let action = at.field(name);
        if !action.is_set() {
            continue;
        }
        if found {
            errors.forbidden(&action, "may not specify more than 1 handler type");
            continue;
        }
        found = true;
        match name {
            "exec" => drop(errors.require(&action.field("command"))),
            "httpGet" => {
                errors.require(&action.field("path"));
                port(&action.field("port"), errors);
                errors.one_of(&action.field("scheme"), &["HTTP", "HTTPS"]);
                let headers = action.field("httpHeaders");
                for header in headers.items() {
                    let name = header.field("name");
                    if name.is_empty() || !name.str().bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                    {
                        let rule = "a valid HTTP header must consist of alphanumeric characters or '-'";
                        let detail = names::regex_error(rule, "[-A-Za-z0-9]+", &["X-Header-Name"]);
                        errors.invalid_value(&headers, name.str(), detail);
                    }
                }
            }
            "sleep" => {
                let seconds = action.field("seconds").int().unwrap_or(0);
                if let Some(grace) = pod.grace_period()
                    && (seconds < 0 || seconds > grace)
                {
                    let detail =
                        format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
                    errors.invalid_value(&action, seconds, detail);
                }
            }
            _ => port(&action.field("port"), errors),
        }
    }
    if !found {
        errors.required(at, "must specify a handler type");
    }
}

/// A port by number or by name.
pub fn port(port: &Node, errors: &mut Errors) {
    match port.value {
        Value::String(name) => errors.rule(port, names::port_name(name)),
        _ => {
            let number = port.int().unwrap_or(0);
            for complaint in names::port_number(number) {
                errors.invalid_value(port, number, complaint);
            }
        }
    }
}
