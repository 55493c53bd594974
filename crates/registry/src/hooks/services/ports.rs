//! The node ports of a service, and the health check port of one that keeps traffic on its node.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};
use skiff_meta::{Status, field};

use super::node_ports::{PortError, Record};
use super::{Services, Taken, invalid, type_of};
use crate::hooks::Asked;
use crate::object;

/// What a write that asks for node ports found; see [`Record::of`].
pub(super) type FoundRecord = Option<Result<Record, PortError>>;

fn record_of(found: &mut FoundRecord) -> Result<&mut Record, PortError> {
    match found {
        Some(Ok(record)) => Ok(record),
        Some(Err(error)) => Err(error.clone()),
        None => Err(PortError::NoRecord),
    }
}

impl Services {
    pub(super) async fn assign_ports(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        asked: &Asked<'_>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        // What was allocated stays: the record need not be read for that.
        let unchanged = |old: &Value| {
            let ports = object::at(service, &["spec", "ports"]);
            let count = ports.and_then(Value::as_array).map_or(0, Vec::len);
            let complete = !wants_node_ports(service) || listed_ports(service).len() == count;
            type_of(service) == type_of(old)
                && complete
                && ports == object::at(old, &["spec", "ports"])
                && wants_health_port(service) == wants_health_port(old)
        };
        let wants_ports = matches!(type_of(service), "NodePort" | "LoadBalancer");
        if wants_ports && !old.is_some_and(unchanged) {
            taken.record = Some(Record::of(asked.registry, &self.ports).await?);
        }
        if matches!(type_of(service), "NodePort" | "LoadBalancer") {
            let mut ports = object::at(service, &["spec", "ports"])
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default();
            match old {
                None => self.first_ports(service, &mut ports, taken)?,
                Some(old) => self.changed_ports(service, old, &mut ports, taken)?,
            }
            if !ports.is_empty() {
                object::put(service, &["spec", "ports"], Value::Array(ports));
            }
        }
        if wants_health_port(service) && !old.is_some_and(wants_health_port) {
            self.health_check_port(service, taken)?;
        }
        Ok(())
    }

    /// The node ports of a new service: one port number of it has one node port, whatever the protocol.
    fn first_ports(&self, service: &Value, ports: &mut [Value], taken: &mut Taken) -> Result<(), Status> {
        let mut given: HashMap<i64, i64> = HashMap::new();
        let mut asked_for: HashMap<i64, i64> = HashMap::new();
        for port in ports.iter() {
            let node = integer(port, "nodePort");
            if node != 0 {
                asked_for.entry(integer(port, "port")).or_insert(node);
            }
        }
        for (index, port) in ports.iter_mut().enumerate() {
            let (number, asked) = (integer(port, "port"), integer(port, "nodePort"));
            if asked == 0 && !wants_node_ports(service) {
                continue;
            }
            match given.get(&number).copied() {
                Some(node) if asked == 0 => port["nodePort"] = json!(node),
                Some(node) if asked == node => {}
                Some(_) => self.take_port(service, index, asked, taken)?,
                None => {
                    let node = match asked_for.get(&number).copied() {
                        Some(node) => {
                            self.take_port(service, index, node, taken)?;
                            node
                        }
                        None => self.draw_port(taken)?,
                    };
                    port["nodePort"] = json!(node);
                    given.insert(number, node);
                }
            }
        }
        Ok(())
    }

    fn changed_ports(
        &self,
        service: &Value,
        old: &Value,
        ports: &mut [Value],
        taken: &mut Taken,
    ) -> Result<(), Status> {
        let held: HashSet<u16> = listed_ports(old).into_iter().collect();
        let mut seen: HashSet<(String, i64)> = HashSet::new();
        let mut nodes: HashSet<i64> = HashSet::new();
        for (index, port) in ports.iter_mut().enumerate() {
            let mut node = integer(port, "nodePort");
            if node == 0 && !wants_node_ports(service) {
                continue;
            }
            if node == 0 {
                node = self.draw_port(taken)?;
                port["nodePort"] = json!(node);
            } else {
                let known = u16::try_from(node).is_ok_and(|n| held.contains(&n));
                if !known && !nodes.contains(&node) {
                    self.take_port(service, index, node, taken)?;
                }
            }
            let protocol = port.get("protocol").and_then(Value::as_str).unwrap_or("TCP");
            nodes.insert(node);
            if !seen.insert((protocol.to_string(), node)) {
                return Err(Status::failure(
                    500,
                    "",
                    format!("duplicate nodePort: {{{protocol} {node}}}"),
                ));
            }
        }
        Ok(())
    }

    /// Takes the node port that the port at `index` asks for.
    fn take_port(&self, service: &Value, index: usize, port: i64, taken: &mut Taken) -> Result<(), Status> {
        let Err(error) = self.reserve(port, taken) else {
            return Ok(());
        };
        let path = field::Path::new("spec.ports").index(index).child("nodePort");
        invalid(
            service,
            vec![field::Error::invalid(&path, port, error.to_string())],
        )
    }

    fn reserve(&self, port: i64, taken: &mut Taken) -> Result<(), PortError> {
        let number = u16::try_from(port).ok();
        if taken.dry_run {
            // COMPAT: a dry run does not ask whether the port is in the range.
            let Some(number) = number else { return Ok(()) };
            let record = taken.record.as_ref().and_then(|record| record.as_ref().ok());
            if record.is_some_and(|record| record.has(number)) || taken.ports.contains(&number) {
                return Err(PortError::Allocated);
            }
            taken.ports.insert(number);
            return Ok(());
        }
        let number = number.filter(|number| self.ports.contains(*number));
        let number = number.ok_or_else(|| PortError::NotInRange(self.ports.to_string()))?;
        if !record_of(&mut taken.record)?.take(number) {
            return Err(PortError::Allocated);
        }
        taken.hold.port(number);
        taken.ports.insert(number);
        Ok(())
    }

    fn draw_port(&self, taken: &mut Taken) -> Result<i64, Status> {
        let port = self
            .draw(taken)
            .map_err(|error| Status::internal(format_args!("failed to allocate a nodePort: {error}")))?;
        Ok(i64::from(port))
    }

    fn draw(&self, taken: &mut Taken) -> Result<u16, PortError> {
        let port = if taken.dry_run {
            // COMPAT: what a dry run shows is no port of the range.
            taken.ports.last().copied().unwrap_or(32768).saturating_add(1)
        } else {
            let Taken { record, hold, .. } = taken;
            let record = record_of(record)?;
            let free = |port: &u16| !record.has(*port) && hold.port(*port);
            let port = self.ports.candidates().find(free).ok_or(PortError::Full)?;
            record.take(port);
            port
        };
        taken.ports.insert(port);
        Ok(port)
    }

    fn health_check_port(&self, service: &mut Value, taken: &mut Taken) -> Result<(), Status> {
        let asked = object::at(service, &["spec", "healthCheckNodePort"])
            .and_then(Value::as_i64)
            .unwrap_or(0);
        if asked != 0 {
            return self.reserve(asked, taken).map_err(|error| {
                Status::internal(format_args!(
                    "failed to allocate requested HealthCheck NodePort {asked}: {error}"
                ))
            });
        }
        let port = self.draw(taken).map_err(|error| {
            Status::internal(format_args!(
                "failed to allocate a HealthCheck NodePort 0: {error}"
            ))
        })?;
        object::put(service, &["spec", "healthCheckNodePort"], json!(port));
        Ok(())
    }
}

fn integer(port: &Value, name: &str) -> i64 {
    port.get(name).and_then(Value::as_i64).unwrap_or(0)
}

fn port_number(value: Option<&Value>) -> Option<u16> {
    value
        .and_then(Value::as_u64)
        .and_then(|port| u16::try_from(port).ok())
        .filter(|port| *port != 0)
}

pub(super) fn health_port(service: &Value) -> Option<u16> {
    port_number(object::at(service, &["spec", "healthCheckNodePort"]))
}

/// The node ports of the list of ports.
pub(super) fn listed_ports(service: &Value) -> Vec<u16> {
    let ports = object::at(service, &["spec", "ports"]).and_then(Value::as_array);
    ports
        .into_iter()
        .flatten()
        .filter_map(|port| port_number(port.get("nodePort")))
        .collect()
}

/// All node ports that a service holds.
pub(super) fn node_ports(service: &Value) -> Vec<u16> {
    let mut found = listed_ports(service);
    found.extend(health_port(service));
    found.sort_unstable();
    found.dedup();
    found
}

fn wants_node_ports(service: &Value) -> bool {
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
