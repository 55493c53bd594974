//! A container's environment: declared variables, `valueFrom`, `envFrom`, and the variables of services.
//! ConfigMaps and Secrets are fetched before and passed in; this file does no I/O.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, Secret, Service};

use crate::expansion::expand;
use crate::field_ref::{self, FieldError, NodeFacts};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EnvError {
    #[error("configmap {0:?} not found")]
    NoConfigMap(String),
    #[error("secret {0:?} not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in ConfigMap {namespace}/{name}")]
    NoConfigMapKey {
        key: String,
        namespace: String,
        name: String,
    },
    #[error("couldn't find key {key} in Secret {namespace}/{name}")]
    NoSecretKey {
        key: String,
        namespace: String,
        name: String,
    },
    #[error("environment variable key {key:?} not found in file {path:?}")]
    NoFileKey { key: String, path: String },
    #[error(transparent)]
    Field(#[from] FieldError),
}

/// The objects a container's environment refers to, by name; what does not exist is not in the map.
#[derive(Default)]
pub struct Sources {
    pub config_maps: HashMap<String, Arc<ConfigMap>>,
    pub secrets: HashMap<String, Arc<Secret>>,
    /// What files of volumes say, by the name of the variable.
    pub from_files: HashMap<String, String>,
}

/// The names of the ConfigMaps and Secrets that the container's environment needs.
pub fn references(container: &Container) -> (Vec<String>, Vec<String>) {
    let (mut config_maps, mut secrets) = (Vec::new(), Vec::new());
    for source in container.env_from.iter().flatten() {
        config_maps.extend(source.config_map_ref.iter().map(|r| r.name.clone()));
        secrets.extend(source.secret_ref.iter().map(|r| r.name.clone()));
    }
    for from in container
        .env
        .iter()
        .flatten()
        .filter_map(|v| v.value_from.as_ref())
    {
        config_maps.extend(from.config_map_key_ref.iter().map(|r| r.name.clone()));
        secrets.extend(from.secret_key_ref.iter().map(|r| r.name.clone()));
    }
    for names in [&mut config_maps, &mut secrets] {
        names.sort();
        names.dedup();
    }
    (config_maps, secrets)
}

/// The variables of a container in a stable order.
pub fn environment(
    pod: &Pod,
    container: &Container,
    sources: &Sources,
    service_env: &BTreeMap<String, String>,
    facts: &NodeFacts,
) -> Result<Vec<(String, String)>, EnvError> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        if let Some(reference) = &source.config_map_ref {
            match sources.config_maps.get(&reference.name) {
                Some(map) => {
                    for (key, value) in map.data.iter().flatten() {
                        env.insert(format!("{prefix}{key}"), value.clone());
                    }
                }
                None if reference.optional == Some(true) => {}
                None => return Err(EnvError::NoConfigMap(reference.name.clone())),
            }
        } else if let Some(reference) = &source.secret_ref {
            match sources.secrets.get(&reference.name) {
                Some(secret) => {
                    for (key, value) in secret.data.iter().flatten() {
                        env.insert(
                            format!("{prefix}{key}"),
                            String::from_utf8_lossy(&value.0).into_owned(),
                        );
                    }
                }
                None if reference.optional == Some(true) => {}
                None => return Err(EnvError::NoSecret(reference.name.clone())),
            }
        }
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(value), _) if !value.is_empty() => expand(value, &|name| {
                env.get(name).or_else(|| service_env.get(name)).cloned()
            }),
            (_, Some(from)) => {
                let found = if let Some(field) = &from.field_ref {
                    Some(field_ref::field_value(pod, &field.field_path, facts)?)
                } else if let Some(selector) = &from.resource_field_ref {
                    Some(field_ref::resource_value(pod, selector, Some(container), facts)?)
                } else if let Some(key) = &from.config_map_key_ref {
                    let optional = key.optional == Some(true);
                    match sources.config_maps.get(&key.name) {
                        Some(map) => match map.data.as_ref().and_then(|d| d.get(&key.key)) {
                            Some(value) => Some(value.clone()),
                            None if optional => None,
                            None => {
                                return Err(EnvError::NoConfigMapKey {
                                    key: key.key.clone(),
                                    namespace: namespace.to_owned(),
                                    name: key.name.clone(),
                                });
                            }
                        },
                        None if optional => None,
                        None => return Err(EnvError::NoConfigMap(key.name.clone())),
                    }
                } else if let Some(key) = &from.secret_key_ref {
                    let optional = key.optional == Some(true);
                    match sources.secrets.get(&key.name) {
                        Some(secret) => match secret.data.as_ref().and_then(|d| d.get(&key.key)) {
                            Some(value) => Some(String::from_utf8_lossy(&value.0).into_owned()),
                            None if optional => None,
                            None => {
                                return Err(EnvError::NoSecretKey {
                                    key: key.key.clone(),
                                    namespace: namespace.to_owned(),
                                    name: key.name.clone(),
                                });
                            }
                        },
                        None if optional => None,
                        None => return Err(EnvError::NoSecret(key.name.clone())),
                    }
                } else if let Some(key) = &from.file_key_ref {
                    match sources.from_files.get(&variable.name) {
                        Some(value) => Some(value.clone()),
                        None if key.optional == Some(true) => None,
                        None => {
                            return Err(EnvError::NoFileKey {
                                key: key.key.clone(),
                                path: key.path.clone(),
                            });
                        }
                    }
                } else {
                    Some(String::new())
                };
                // An optional source that is missing leaves the variable out.
                match found {
                    Some(value) => value,
                    None => continue,
                }
            }
            _ => String::new(),
        };
        env.insert(variable.name.clone(), value);
    }
    for (name, value) in service_env {
        env.entry(name.clone()).or_insert_with(|| value.clone());
    }
    Ok(env.into_iter().collect())
}

/// The variables that announce services: those of the pod's namespace if it asked for links, and always
/// `kubernetes` of `default`, by which clients inside pods find the API.
pub fn service_environment(
    services: &[Arc<Service>],
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let mut master = None;
    let mut own = BTreeMap::new();
    for service in services {
        let (Some(name), Some(service_namespace)) = (&service.metadata.name, &service.metadata.namespace)
        else {
            continue;
        };
        if service_namespace == "default" && name == "kubernetes" {
            master = Some(service);
        } else if links && service_namespace == namespace {
            own.insert(name.clone(), service);
        }
    }
    for service in own.into_values().chain(master) {
        add_service(&mut env, service);
    }
    env
}

fn add_service(env: &mut BTreeMap<String, String>, service: &Service) {
    let Some(spec) = &service.spec else { return };
    let Some(ip) = spec
        .cluster_ip
        .as_deref()
        .filter(|ip| !ip.is_empty() && *ip != "None")
    else {
        return;
    };
    let Some(ports) = spec.ports.as_ref().filter(|p| !p.is_empty()) else {
        return;
    };
    let base = variable_name(service.metadata.name.as_deref().unwrap_or_default());
    let host = if ip.contains(':') {
        format!("[{ip}]")
    } else {
        ip.to_owned()
    };
    env.insert(format!("{base}_SERVICE_HOST"), ip.to_owned());
    env.insert(format!("{base}_SERVICE_PORT"), ports[0].port.to_string());
    for port in ports {
        if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            env.insert(
                format!("{base}_SERVICE_PORT_{}", variable_name(name)),
                port.port.to_string(),
            );
        }
    }
    for (index, port) in ports.iter().enumerate() {
        let protocol = port
            .protocol
            .as_deref()
            .filter(|p| !p.is_empty())
            .unwrap_or("TCP");
        let url = format!("{}://{host}:{}", protocol.to_lowercase(), port.port);
        if index == 0 {
            env.insert(format!("{base}_PORT"), url.clone());
        }
        let prefix = format!("{base}_PORT_{}_{}", port.port, protocol.to_uppercase());
        env.insert(format!("{prefix}_PROTO"), protocol.to_lowercase());
        env.insert(format!("{prefix}_PORT"), port.port.to_string());
        env.insert(format!("{prefix}_ADDR"), ip.to_owned());
        env.insert(prefix, url);
    }
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn environment_of(container: serde_json::Value) -> Result<Vec<(String, String)>, EnvError> {
        let container: Container = serde_json::from_value(container).unwrap();
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": {"containers": []}}),
        )
        .unwrap();
        let map: ConfigMap = serde_json::from_value(json!({"data": {"k": "v", "UP": "x"}})).unwrap();
        let secret: Secret = serde_json::from_value(json!({"data": {"pw": "czNjcmV0"}})).unwrap();
        let sources = Sources {
            config_maps: HashMap::from([("m".to_owned(), Arc::new(map))]),
            secrets: HashMap::from([("s".to_owned(), Arc::new(secret))]),
            from_files: HashMap::from([("F".to_owned(), "of a file".to_owned())]),
        };
        let services = BTreeMap::from([("SVC_SERVICE_HOST".to_owned(), "10.0.0.9".to_owned())]);
        environment(&pod, &container, &sources, &services, &NodeFacts::default())
    }

    fn check(env: serde_json::Value, env_from: serde_json::Value, expected: &[(&str, &str)]) {
        let found = environment_of(json!({"name": "c", "env": env, "envFrom": env_from})).unwrap();
        let found: Vec<(&str, &str)> = found
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .filter(|(k, _)| *k != "SVC_SERVICE_HOST")
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn values_and_references() {
        check(
            json!([{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)-$(SVC_SERVICE_HOST)-$(C)"}]),
            json!([]),
            &[("A", "1"), ("B", "1-10.0.0.9-$(C)")],
        );
        let of_file = |name: &str, optional: bool| {
            let key = json!({"volumeName": "v", "path": "env", "key": "K", "optional": optional});
            json!({"name": name, "valueFrom": {"fileKeyRef": key}})
        };
        check(
            json!([of_file("F", false), of_file("G", true)]),
            json!([]),
            &[("F", "of a file")],
        );
        let missing = environment_of(json!({"name": "c", "env": [of_file("G", false)]}));
        assert_eq!(
            missing,
            Err(EnvError::NoFileKey {
                key: "K".into(),
                path: "env".into()
            })
        );
        check(
            json!([{"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                     {"name": "M", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
                     {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "pw"}}},
                     {"name": "O", "valueFrom": {"secretKeyRef": {"name": "none", "key": "pw", "optional": true}}}]),
            json!([]),
            &[("M", "v"), ("N", "p"), ("S", "s3cret")],
        );
        check(
            json!([{"name": "k", "value": "own"}]),
            json!([{"configMapRef": {"name": "m"}}, {"prefix": "P_", "secretRef": {"name": "s"}},
                     {"configMapRef": {"name": "none", "optional": true}}]),
            &[("P_pw", "s3cret"), ("UP", "x"), ("k", "own")],
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        let check = |env: serde_json::Value, message: &str| {
            assert_eq!(
                environment_of(json!({"name": "c", "env": [env]}))
                    .unwrap_err()
                    .to_string(),
                message
            );
        };
        check(
            json!({"name": "A", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}}),
            "configmap \"none\" not found",
        );
        check(
            json!({"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "q"}}}),
            "couldn't find key q in ConfigMap ns/m",
        );
        check(
            json!({"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "q"}}}),
            "couldn't find key q in Secret ns/s",
        );
    }

    #[test]
    fn services() {
        let service = |ns: &str, name: &str, ip: &str| -> Arc<Service> {
            Arc::new(
                serde_json::from_value(
                    json!({"metadata": {"name": name, "namespace": ns}, "spec": {"clusterIP": ip,
                "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]}}),
                )
                .unwrap(),
            )
        };
        let all = [
            service("default", "kubernetes", "10.96.0.1"),
            service("ns", "my-db", "10.96.0.2"),
            service("ns", "headless", "None"),
        ];
        let env = service_environment(&all, "ns", true);
        assert_eq!(env["KUBERNETES_SERVICE_HOST"], "10.96.0.1");
        assert_eq!(env["KUBERNETES_SERVICE_PORT_HTTPS"], "443");
        assert_eq!(env["KUBERNETES_PORT"], "tcp://10.96.0.1:443");
        assert_eq!(env["MY_DB_PORT_443_TCP_ADDR"], "10.96.0.2");
        assert!(!env.keys().any(|k| k.starts_with("HEADLESS")));
        let env = service_environment(&all, "ns", false);
        assert!(env.contains_key("KUBERNETES_SERVICE_HOST") && !env.contains_key("MY_DB_SERVICE_HOST"));
    }
}
