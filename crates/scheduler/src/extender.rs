//! The client of an extender: a server of somebody else's that filters and scores nodes, has a say in preemption, and may
//! bind. It speaks upstream's `extender/v1`: fields are named as Go names them, and read in any case, as Go reads them.
//!
//! It knows no cache and no queue: `extended` asks it between the steps of a cycle.

use crate::config::ExtenderFile;
use crate::pod::PodInfo;
use base64::Engine;
use bytes::Bytes;
use http::HeaderMap;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::Serialize;
use serde_json::{Value, json};
use skiff_https::{Call, CallTarget, Client, Failure};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// The largest answer that is read: every node of a large cluster, as an extender without a cache sends them back.
const MAX_ANSWER: usize = 256 << 20;
/// Scores of extenders go up to 10, those of plugins to 100.
const SCALE: i64 = crate::framework::MAX_SCORE / 10;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ExtenderError {
    #[error("Post {url:?}: {failure}")]
    Call { url: String, failure: String },
    #[error("failed {verb} with extender at URL {url}, code {code}")]
    Code { verb: String, url: String, code: u16 },
    #[error("cannot read the answer of the extender at URL {url}: {message}")]
    Answer { url: String, message: String },
    /// What the extender itself, or the check of its answer, says.
    #[error("{0}")]
    Refused(String),
}

pub(crate) struct Extender {
    url: String,
    filter_verb: String,
    preempt_verb: String,
    prioritize_verb: String,
    bind_verb: String,
    weight: i64,
    pub(crate) node_cache_capable: bool,
    pub(crate) ignorable: bool,
    managed: HashSet<String>,
    timeout: Duration,
    server_name: Option<String>,
    client: Client,
}

/// A node as an extender is shown it.
pub(crate) enum NodesArg<'a> {
    Names(&'a [Arc<str>]),
    Objects(&'a [Arc<Node>]),
}

/// What an extender's filter came to: the nodes that pass, and why others do not.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Filtered {
    pub(crate) passed: Vec<String>,
    pub(crate) failed: BTreeMap<String, String>,
    /// Of these, preemption changes nothing.
    pub(crate) unresolvable: BTreeMap<String, String>,
}

/// Victims of one node, as pods or as uids.
pub(crate) enum VictimsArg {
    Pods(Vec<Arc<Pod>>),
    Uids(Vec<String>),
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct NodeArgs<'a> {
    pod: &'a Pod,
    nodes: Option<NodeList<'a>>,
    node_names: Option<&'a [Arc<str>]>,
}

#[derive(Serialize)]
struct NodeList<'a> {
    metadata: Value,
    items: Vec<&'a Node>,
}

/// A field by its Go name, in any case.
fn field<'a>(value: &'a Value, name: &str) -> &'a Value {
    static NULL: Value = Value::Null;
    let fields = value.as_object();
    let exact = fields.and_then(|fields| fields.get(name));
    let folded = || {
        let mut fields = fields?.iter();
        fields
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    };
    exact.or_else(folded).unwrap_or(&NULL)
}

fn strings(value: &Value) -> BTreeMap<String, String> {
    let fields = value.as_object().into_iter().flatten();
    fields
        .map(|(name, text)| (name.clone(), text.as_str().unwrap_or_default().to_owned()))
        .collect()
}

fn pem(what: &str, data: Option<&String>, file: Option<&String>) -> Result<Option<String>, String> {
    let wrong = |why: String| format!("tlsConfig.{what}: {why}");
    if let Some(data) = data.filter(|data| !data.is_empty()) {
        let bytes = base64::engine::general_purpose::STANDARD.decode(data);
        let bytes = bytes.map_err(|error| wrong(error.to_string()))?;
        return String::from_utf8(bytes)
            .map(Some)
            .map_err(|error| wrong(error.to_string()));
    }
    let Some(file) = file.filter(|file| !file.is_empty()) else {
        return Ok(None);
    };
    let read = std::fs::read_to_string(file);
    read.map(Some).map_err(|error| wrong(format!("{file}: {error}")))
}

/// COMPAT: with `enableHTTPS` and no authority to trust, upstream trusts any certificate.
fn tls(file: &ExtenderFile) -> Result<Arc<rustls::ClientConfig>, String> {
    let given = file.tls_config.clone().unwrap_or_default();
    let authority = pem("caData", given.ca_data.as_ref(), given.ca_file.as_ref())?;
    let certificate = pem("certData", given.cert_data.as_ref(), given.cert_file.as_ref())?;
    let key = pem("keyData", given.key_data.as_ref(), given.key_file.as_ref())?;
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(skiff_pki::Identity { certificate, key }),
        (None, None) => None,
        _ => return Err("tlsConfig: a certificate needs its key, and a key its certificate".to_owned()),
    };
    if given.insecure && authority.is_some() {
        return Err(
            "tlsConfig: specifying a root certificates file with the insecure flag is not allowed".to_owned(),
        );
    }
    if given.insecure || (file.enable_https && authority.is_none()) {
        let config = skiff_pki::insecure_client_config(identity.as_ref());
        return config.map(Arc::new).map_err(|error| error.to_string());
    }
    skiff_https::trusting_as(authority.as_deref(), identity.as_ref())
}

impl Extender {
    /// What is wrong with the address or the certificates is an error here; a machine that trusts nobody fails the calls.
    pub(crate) fn new(file: &ExtenderFile) -> Result<Self, String> {
        let url = file.url_prefix.trim_end_matches('/').to_owned();
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err("urlPrefix: must be a URL of the scheme http or https".to_owned());
        }
        let place = CallTarget::of(&url).map_err(|error| format!("urlPrefix: {error}"))?;
        let tls = match place.server_name {
            Some(_) => tls(file),
            None => Err("the URL is not of the scheme https".to_owned()),
        };
        // Of the machine's own trust nothing was said in the file.
        let tls = match tls {
            Err(message) if message.starts_with("tlsConfig") => return Err(message),
            other => other,
        };
        let names = file.managed_resources.iter().map(|one| one.name.clone());
        Ok(Self {
            url,
            filter_verb: file.filter_verb.clone(),
            preempt_verb: file.preempt_verb.clone(),
            prioritize_verb: file.prioritize_verb.clone(),
            bind_verb: file.bind_verb.clone(),
            weight: file.weight,
            node_cache_capable: file.node_cache_capable,
            ignorable: file.ignorable,
            managed: names.collect(),
            timeout: file.timeout().map_err(|error| error.to_string())?,
            server_name: file.tls_config.as_ref().and_then(|tls| tls.server_name.clone()),
            client: Client::new(tls),
        })
    }

    /// Named by its address, as upstream does.
    pub(crate) fn name(&self) -> &str {
        &self.url
    }

    pub(crate) fn filters(&self) -> bool {
        !self.filter_verb.is_empty()
    }

    pub(crate) fn prioritizes(&self) -> bool {
        !self.prioritize_verb.is_empty()
    }

    pub(crate) fn preempts(&self) -> bool {
        !self.preempt_verb.is_empty()
    }

    pub(crate) fn binds(&self) -> bool {
        !self.bind_verb.is_empty()
    }

    /// True if the pod asks for a resource that the extender manages, or if it manages none in particular.
    pub(crate) fn is_interested(&self, pod: &PodInfo) -> bool {
        self.managed.is_empty()
            || pod
                .shape
                .requests
                .others
                .keys()
                .any(|name| self.managed.contains(&**name))
    }

    async fn send(&self, verb: &str, arguments: &impl Serialize) -> Result<Value, ExtenderError> {
        let url = format!("{}/{verb}", self.url);
        let failed = |failure: String| ExtenderError::Call {
            url: url.clone(),
            failure,
        };
        let body = serde_json::to_vec(arguments).map_err(|error| failed(error.to_string()))?;
        let mut place = CallTarget::of(&url).map_err(failed)?;
        if place.server_name.is_some()
            && let Some(name) = self.server_name.as_ref().filter(|name| !name.is_empty())
        {
            place.server_name = Some(name.clone());
        }
        let headers = HeaderMap::new();
        let call = Call {
            limit: MAX_ANSWER,
            ..Call::post(&place, &headers, Bytes::from(body), self.timeout)
        };
        let answer = self.client.call(call).await.map_err(|failure| {
            failed(match failure {
                // COMPAT: Go's words.
                Failure::Timeout => {
                    "context deadline exceeded (Client.Timeout exceeded while awaiting headers)".to_owned()
                }
                other => other.to_string(),
            })
        })?;
        if answer.code != 200 {
            return Err(ExtenderError::Code {
                verb: verb.to_owned(),
                url,
                code: answer.code,
            });
        }
        serde_json::from_slice(&answer.body).map_err(|error| ExtenderError::Answer {
            url,
            message: error.to_string(),
        })
    }

    async fn send_nodes(&self, verb: &str, pod: &Pod, nodes: &NodesArg<'_>) -> Result<Value, ExtenderError> {
        let arguments = match nodes {
            NodesArg::Names(names) => NodeArgs {
                pod,
                nodes: None,
                node_names: Some(names),
            },
            NodesArg::Objects(objects) => NodeArgs {
                pod,
                nodes: Some(NodeList {
                    metadata: json!({}),
                    items: objects.iter().map(|node| &**node).collect(),
                }),
                node_names: None,
            },
        };
        self.send(verb, &arguments).await
    }

    /// `known` are the nodes that were sent: an answer must name no other.
    pub(crate) async fn filter(
        &self,
        pod: &Pod,
        nodes: &NodesArg<'_>,
        known: &HashSet<&str>,
    ) -> Result<Filtered, ExtenderError> {
        let answer = self.send_nodes(&self.filter_verb, pod, nodes).await?;
        if let Some(error) = field(&answer, "Error").as_str().filter(|text| !text.is_empty()) {
            return Err(ExtenderError::Refused(error.to_owned()));
        }
        let names = field(&answer, "NodeNames").as_array();
        let objects = field(field(&answer, "Nodes"), "items").as_array();
        let passed: Vec<String> = match names.filter(|_| self.node_cache_capable) {
            Some(names) => names
                .iter()
                .filter_map(|name| name.as_str().map(str::to_owned))
                .collect(),
            None => {
                let name = |node: &Value| node["metadata"]["name"].as_str().map(str::to_owned);
                objects.into_iter().flatten().filter_map(name).collect()
            }
        };
        if let Some(stranger) = passed.iter().find(|name| !known.contains(name.as_str())) {
            return Err(ExtenderError::Refused(format!(
                "extender {:?} claims a filtered node {stranger:?} which is not found in the input node list",
                self.url
            )));
        }
        Ok(Filtered {
            passed,
            failed: strings(field(&answer, "FailedNodes")),
            unresolvable: strings(field(&answer, "FailedAndUnresolvableNodes")),
        })
    }

    /// What each node gets on top of its score.
    pub(crate) async fn prioritize(
        &self,
        pod: &Pod,
        nodes: &NodesArg<'_>,
    ) -> Result<Vec<(String, i64)>, ExtenderError> {
        let answer = self.send_nodes(&self.prioritize_verb, pod, nodes).await?;
        let Some(list) = answer.as_array() else {
            return Err(ExtenderError::Answer {
                url: format!("{}/{}", self.url, self.prioritize_verb),
                message: "it is no list of priorities".to_owned(),
            });
        };
        let scores = list.iter().filter_map(|one| {
            let (host, score) = (field(one, "Host").as_str()?, field(one, "Score").as_i64()?);
            Some((
                host.to_owned(),
                score.saturating_mul(self.weight).saturating_mul(SCALE),
            ))
        });
        Ok(scores.collect())
    }

    /// By node: the uids of the victims that the extender leaves, and how many budgets they break.
    pub(crate) async fn preempt(
        &self,
        pod: &Pod,
        victims: &BTreeMap<String, (VictimsArg, usize)>,
    ) -> Result<BTreeMap<String, (Vec<String>, usize)>, ExtenderError> {
        let (mut pods, mut uids) = (BTreeMap::new(), BTreeMap::new());
        for (node, (victims, violations)) in victims {
            match victims {
                VictimsArg::Pods(list) => {
                    let list: Vec<&Pod> = list.iter().map(|pod| &**pod).collect();
                    pods.insert(node, json!({"Pods": list, "NumPDBViolations": violations}));
                }
                VictimsArg::Uids(list) => {
                    let list: Vec<Value> = list.iter().map(|uid| json!({ "UID": uid })).collect();
                    uids.insert(node, json!({"Pods": list, "NumPDBViolations": violations}));
                }
            }
        }
        let or_null = |map: BTreeMap<&String, Value>| if map.is_empty() { Value::Null } else { json!(map) };
        let arguments =
            json!({"Pod": pod, "NodeNameToVictims": or_null(pods), "NodeNameToMetaVictims": or_null(uids)});
        let answer = self.send(&self.preempt_verb, &arguments).await?;
        let nodes = field(&answer, "NodeNameToMetaVictims").as_object();
        let read = nodes.into_iter().flatten().map(|(node, victims)| {
            let pods = field(victims, "Pods").as_array().into_iter().flatten();
            let uids = pods.filter_map(|pod| field(pod, "UID").as_str().map(str::to_owned));
            let violations = field(victims, "NumPDBViolations").as_u64().unwrap_or(0);
            (
                node.clone(),
                (uids.collect(), usize::try_from(violations).unwrap_or(usize::MAX)),
            )
        });
        Ok(read.collect())
    }

    pub(crate) async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), ExtenderError> {
        let arguments = json!({"PodName": pod.key.name, "PodNamespace": pod.key.namespace, "PodUID": pod.uid,
            "Node": node});
        let answer = self.send(&self.bind_verb, &arguments).await?;
        match field(&answer, "Error").as_str() {
            None | Some("") => Ok(()),
            Some(error) => Err(ExtenderError::Refused(error.to_owned())),
        }
    }
}
