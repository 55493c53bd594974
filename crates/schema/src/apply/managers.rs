//! `metadata.managedFields`, decoded and encoded.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::set::Set;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    Apply,
    Update,
}

impl Operation {
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Apply => "Apply",
            Operation::Update => "Update",
        }
    }
}

/// What tells managers apart. The version of an applier does not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManagerId {
    pub name: String,
    pub operation: Operation,
    /// Empty for appliers.
    pub api_version: String,
    pub subresource: String,
}

impl ManagerId {
    pub fn new(name: &str, operation: Operation, api_version: &str, subresource: &str) -> ManagerId {
        ManagerId {
            name: if name.is_empty() { "unknown" } else { name }.to_string(),
            operation,
            api_version: match operation {
                Operation::Apply => String::new(),
                Operation::Update => api_version.to_string(),
            },
            subresource: subresource.to_string(),
        }
    }
}

/// As conflicts name a manager.
impl fmt::Display for ManagerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::decode::go_quote(&self.name))?;
        if !self.subresource.is_empty() {
            write!(
                f,
                " with subresource {}",
                crate::decode::go_quote(&self.subresource)
            )?;
        }
        match self.operation {
            Operation::Update => write!(f, " using {}", self.api_version),
            Operation::Apply => Ok(()),
        }
    }
}

/// What a manager owns, in terms of one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manager {
    pub set: Set,
    pub api_version: String,
    pub time: Option<String>,
}

/// All managers of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Managed(pub BTreeMap<ManagerId, Manager>);

impl Managed {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads `managedFields`. The errors are upstream's.
    pub fn decode(entries: Option<&Value>) -> Result<Managed, String> {
        let mut managed = Managed::default();
        let entries = entries.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (at, entry) in entries.iter().enumerate() {
            let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or("");
            let operation = match text("operation") {
                "Apply" => Operation::Apply,
                "Update" => Operation::Update,
                _ => return Err("operation must be `Apply` or `Update`".to_string()),
            };
            if text("apiVersion").is_empty() {
                return Err("apiVersion must not be empty".to_string());
            }
            match text("fieldsType") {
                "FieldsV1" => {}
                "" => return Err(format!("missing fieldsType in managed fields entry {at}")),
                other => {
                    let other = crate::decode::go_quote(other);
                    return Err(format!("invalid fieldsType {other} in managed fields entry {at}"));
                }
            }
            let id = ManagerId {
                name: text("manager").to_string(),
                operation,
                api_version: match operation {
                    Operation::Apply => String::new(),
                    Operation::Update => text("apiVersion").to_string(),
                },
                subresource: text("subresource").to_string(),
            };
            let manager = Manager {
                set: Set::from_value(entry.get("fieldsV1").unwrap_or(&Value::Null))?,
                api_version: text("apiVersion").to_string(),
                time: entry.get("time").and_then(Value::as_str).map(str::to_string),
            };
            managed.0.insert(id, manager);
        }
        Ok(managed)
    }

    /// As `managedFields`; null when there is no manager.
    pub fn encode(&self) -> Value {
        if self.0.is_empty() {
            return Value::Null;
        }
        let mut entries: Vec<(&ManagerId, &Manager)> = self.0.iter().collect();
        entries.sort_by(|(a, x), (b, y)| {
            let time = |manager: &Manager| manager.time.clone().unwrap_or_default();
            (a.operation, time(x), &a.name, &x.api_version, &a.subresource).cmp(&(
                b.operation,
                time(y),
                &b.name,
                &y.api_version,
                &b.subresource,
            ))
        });
        Value::Array(
            entries
                .into_iter()
                .map(|(id, manager)| entry(id, manager))
                .collect(),
        )
    }
}

fn entry(id: &ManagerId, manager: &Manager) -> Value {
    let mut map = Map::new();
    let mut put = |key: &str, value: &str| {
        if !value.is_empty() {
            map.insert(key.to_string(), Value::String(value.to_string()));
        }
    };
    put("apiVersion", &manager.api_version);
    put("fieldsType", "FieldsV1");
    put("manager", &id.name);
    put("operation", id.operation.as_str());
    put("subresource", &id.subresource);
    put("time", manager.time.as_deref().unwrap_or(""));
    map.insert("fieldsV1".to_string(), manager.set.to_value());
    Value::Object(map)
}
