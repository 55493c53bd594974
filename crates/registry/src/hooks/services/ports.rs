//! The node ports of a service, and the health check port of one that keeps traffic on its node.

use serde_json::{Value, json};
use skiff_meta::{Status, field};

use super::{Services, Taken, invalid, type_of};
use crate::object;

impl Services {
    pub(super) fn assign_ports(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        let held = old.map(node_ports).unwrap_or_default();
        let wants = wants_node_ports(service);
        let may_have = matches!(type_of(service), "NodePort" | "LoadBalancer");
        let ports = object::at(service, &["spec", "ports"])
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let mut ports_now = ports.clone();
        // The same node port may serve one port number over several protocols.
        let mut used: Vec<(u16, String)> = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let protocol = port
                .get("protocol")
                .and_then(Value::as_str)
                .unwrap_or("TCP")
                .to_string();
            let asked = port
                .get("nodePort")
                .and_then(Value::as_u64)
                .and_then(|port| u16::try_from(port).ok())
                .unwrap_or(0);
            if !may_have {
                if old.is_some_and(|old| matches!(type_of(old), "NodePort" | "LoadBalancer"))
                    && held.contains(&asked)
                {
                    remove(&mut ports_now[index], "nodePort");
                }
                continue;
            }
            if asked != 0 {
                let shared = used
                    .iter()
                    .any(|(port, other)| *port == asked && *other != protocol);
                if !held.contains(&asked) && !shared {
                    if let Err(error) = self.shared.ports.allocate(asked) {
                        let path = field::Path::new("spec.ports").index(index).child("nodePort");
                        return invalid(
                            service,
                            vec![field::Error::invalid(&path, asked, error.to_string())],
                        );
                    }
                    taken.ports.push(asked);
                }
                used.push((asked, protocol));
            } else if wants {
                let number = port.get("port").and_then(Value::as_u64);
                let twin = ports_now[..index].iter().find_map(|other| {
                    let same = other.get("port").and_then(Value::as_u64) == number
                        && other.get("protocol").and_then(Value::as_str).unwrap_or("TCP") != protocol;
                    same.then(|| other.get("nodePort").and_then(Value::as_u64))
                        .flatten()
                });
                let given = match twin.and_then(|port| u16::try_from(port).ok()) {
                    Some(port) => port,
                    None => {
                        let port = self.shared.ports.allocate_next().map_err(|error| {
                            Status::internal(format_args!("failed to allocate a nodePort: {error}"))
                        })?;
                        taken.ports.push(port);
                        port
                    }
                };
                ports_now[index]["nodePort"] = json!(given);
                used.push((given, protocol));
            }
        }
        if ports_now != ports {
            object::put(service, &["spec", "ports"], Value::Array(ports_now));
        }
        self.health_check_port(service, old, taken)
    }

    pub(super) fn health_check_port(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        let asked = health_port(service);
        if !wants_health_port(service) {
            if old.is_some_and(|old| asked.is_some() && health_port(old) == asked)
                && let Some(spec) = service.get_mut("spec")
            {
                remove(spec, "healthCheckNodePort");
            }
            return Ok(());
        }
        let port = match asked {
            Some(port) if old.and_then(health_port) == Some(port) => return Ok(()),
            Some(port) => {
                self.shared.ports.allocate(port).map_err(|error| {
                    Status::internal(format_args!(
                        "failed to allocate requested HealthCheck NodePort {port}: {error}"
                    ))
                })?;
                port
            }
            None => self.shared.ports.allocate_next().map_err(|error| {
                Status::internal(format_args!(
                    "failed to allocate a HealthCheck NodePort 0: {error}"
                ))
            })?,
        };
        taken.ports.push(port);
        object::put(service, &["spec", "healthCheckNodePort"], json!(port));
        Ok(())
    }
}

pub(super) fn port_number(value: Option<&Value>) -> Option<u16> {
    value
        .and_then(Value::as_u64)
        .and_then(|port| u16::try_from(port).ok())
        .filter(|port| *port != 0)
}

pub(super) fn health_port(service: &Value) -> Option<u16> {
    port_number(object::at(service, &["spec", "healthCheckNodePort"]))
}

pub(super) fn node_ports(service: &Value) -> Vec<u16> {
    let ports = object::at(service, &["spec", "ports"]).and_then(Value::as_array);
    let mut found: Vec<u16> = ports
        .into_iter()
        .flatten()
        .filter_map(|port| port_number(port.get("nodePort")))
        .collect();
    found.extend(health_port(service));
    found.sort_unstable();
    found.dedup();
    found
}

pub(super) fn wants_node_ports(service: &Value) -> bool {
    let off = object::at(service, &["spec", "allocateLoadBalancerNodePorts"]) == Some(&Value::Bool(false));
    match type_of(service) {
        "NodePort" => true,
        "LoadBalancer" => !off,
        _ => false,
    }
}

pub(super) fn wants_health_port(service: &Value) -> bool {
    type_of(service) == "LoadBalancer"
        && object::at_str(service, &["spec", "externalTrafficPolicy"]) == "Local"
}

pub(super) fn remove(value: &mut Value, field: &str) {
    if let Some(map) = value.as_object_mut() {
        map.remove(field);
    }
}
