//! KMS v2: a plugin behind a unix socket keeps the key that encrypts our seeds. Values are encrypted here, each by a
//! key that is derived from a seed; the encrypted seed is stored beside the value. So the plugin is asked once per
//! seed and not once per value, and a write never waits for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use prost::Message;
use tokio::time::Instant;
use tonic::Code;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::cipher::{self, Cipher, Result};
use crate::config::KmsConfiguration;
use crate::provider::Plain;

/// How often a plugin is asked for its status.
const POLL_HEALTHY: Duration = Duration::from_secs(60);
const POLL_UNHEALTHY: Duration = Duration::from_secs(10);
/// How long an answer about its health is good.
const HEALTHY_TTL: Duration = Duration::from_secs(20);
const UNHEALTHY_TTL: Duration = Duration::from_secs(3);
/// How long a seed may write after the plugin last confirmed its key.
const WRITE_TTL: Duration = Duration::from_secs(180);
const KEY_ID_MAX: usize = 1024;
const ENCRYPTED_SEED_MAX: usize = 1024;
const ANNOTATIONS_MAX: usize = 32 * 1024;
/// Decrypted seeds that are kept. There is one per key of the plugin and start of a server.
const MOST_SEEDS: usize = 1024;
/// How long a plugin that did not decrypt a seed is not asked for it again.
const REFUSED_TTL: Duration = Duration::from_secs(1);
/// The most that a plugin may answer.
const ANSWER_MAX: usize = 256 * 1024;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EncryptedObject {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
    #[prost(string, tag = "2")]
    key_id: String,
    #[prost(bytes = "vec", tag = "3")]
    encrypted_seed: Vec<u8>,
    #[prost(btree_map = "string, bytes", tag = "4")]
    annotations: std::collections::BTreeMap<String, Vec<u8>>,
    /// 0: it is an AES-GCM key; 1: it is a seed.
    #[prost(int32, tag = "5")]
    source_type: i32,
}

const SOURCE_KEY: i32 = 0;
const SOURCE_SEED: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    healthz: String,
    #[prost(string, tag = "3")]
    key_id: String,
}

#[derive(Clone, PartialEq, Message)]
struct DecryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    key_id: String,
    #[prost(btree_map = "string, bytes", tag = "4")]
    annotations: std::collections::BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct DecryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    plaintext: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct EncryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    plaintext: Vec<u8>,
    #[prost(string, tag = "2")]
    uid: String,
}

#[derive(Clone, PartialEq, Message)]
struct EncryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    key_id: String,
    #[prost(btree_map = "string, bytes", tag = "3")]
    annotations: std::collections::BTreeMap<String, Vec<u8>>,
}

/// The seed that writes.
struct WriteSeed {
    cipher: Arc<Cipher>,
    /// What is stored beside each value; its data is empty.
    envelope: EncryptedObject,
    until: Instant,
}

pub(crate) struct Kms {
    name: String,
    timeout: Duration,
    channel: Channel,
    write: ArcSwapOption<WriteSeed>,
    /// By the envelope without its data. Leaf lock.
    seeds: Mutex<HashMap<Vec<u8>, Arc<Cipher>>>,
    /// Seeds that the plugin did not decrypt just now: it is not asked once per value. Leaf lock.
    refused: Mutex<HashMap<Vec<u8>, (String, Instant)>>,
    /// A seed could not be had for a reason that may pass.
    was_away: AtomicBool,
    /// The last answer about its health, and until when it is good. Held while the plugin is asked.
    health: tokio::sync::Mutex<Option<(Result<()>, Instant)>>,
    /// The version that it first said. Leaf lock.
    version: Mutex<Option<String>>,
}

impl Kms {
    /// Connects when it is first asked something.
    pub fn new(config: &KmsConfiguration) -> Result<Kms> {
        let socket = config.socket().unwrap_or_default();
        // The kernel's name of an abstract socket starts with a zero byte.
        let path = match socket.strip_prefix('@') {
            Some(name) => format!("\0{name}"),
            None => socket.to_owned(),
        };
        let connector = tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move {
                let stream = tokio::net::UnixStream::connect(path).await?;
                Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
            }
        });
        Ok(Kms {
            name: config.name.clone(),
            timeout: config.timeout().unwrap_or(Duration::from_secs(3)),
            channel: Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector),
            write: ArcSwapOption::empty(),
            seeds: Mutex::default(),
            refused: Mutex::default(),
            was_away: AtomicBool::new(false),
            health: tokio::sync::Mutex::default(),
            version: Mutex::default(),
        })
    }

    /// Asks for its status again and again, for as long as somebody else holds it.
    pub fn follow(self: &Arc<Self>) {
        let plugin = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                let Some(kms) = plugin.upgrade() else { return };
                let wait = match kms.check().await {
                    Ok(()) => POLL_HEALTHY,
                    Err(why) => {
                        tracing::error!(name = %kms.name, %why, "kms plugin failed health check probe");
                        POLL_UNHEALTHY
                    }
                };
                drop(kms);
                tokio::time::sleep(wait).await;
            }
        });
    }

    /// Whether the plugin is well; a new seed is made when its key changed.
    pub async fn check(&self) -> Result<()> {
        let mut health = self.health.lock().await;
        if let Some((known, until)) = &*health
            && Instant::now() < *until
        {
            return known.clone();
        }
        let found = self.probe().await;
        let ttl = if found.is_ok() { HEALTHY_TTL } else { UNHEALTHY_TTL };
        *health = Some((found.clone(), Instant::now() + ttl));
        found
    }

    async fn probe(&self) -> Result<()> {
        let until = Instant::now() + WRITE_TTL;
        let status: StatusResponse = self.call("Status", StatusRequest {}).await.map_err(|why| {
            format!(
                "failed to perform status section of the healthz check for KMS Provider {}, error: {why}",
                self.name
            )
        })?;
        let mut errors = Vec::new();
        if status.healthz != "ok" {
            errors.push(format!("got unexpected healthz status: {}", status.healthz));
        }
        if status.version != "v2" && status.version != "v2beta1" {
            errors.push(format!("expected KMSv2 API version v2, got {}", status.version));
        } else {
            let mut known = self.version.lock();
            let first = known.get_or_insert_with(|| status.version.clone());
            if *first != status.version {
                errors.push(format!(
                    "KMSv2 API version should not change after the initial status response version {first}, got {}",
                    status.version
                ));
            }
        }
        let rotated = match check_key_id(&status.key_id) {
            Ok(()) => self.rotate(&status.key_id, until).await,
            Err(why) => Err(format!("got invalid KMSv2 KeyID: {why}")),
        };
        errors.extend(rotated.err());
        match errors.as_slice() {
            [] => Ok(()),
            [one] => Err(format!(
                "kmsv2 Provider {} is not healthy, error: {one}",
                self.name
            )),
            several => Err(format!(
                "kmsv2 Provider {} is not healthy, error: [{}]",
                self.name,
                several.join(", ")
            )),
        }
    }

    /// Keeps writing by the present seed if the plugin's key is still the same, or else makes another.
    async fn rotate(&self, key_id: &str, until: Instant) -> Result<()> {
        if let Some(current) = self.write.load_full()
            && current.envelope.key_id == key_id
        {
            self.write.store(Some(Arc::new(WriteSeed {
                cipher: current.cipher.clone(),
                envelope: current.envelope.clone(),
                until,
            })));
            return Ok(());
        }
        let seed: [u8; cipher::SEED] = cipher::random()?;
        let request = EncryptRequest {
            plaintext: seed.to_vec(),
            uid: uuid::Uuid::new_v4().to_string(),
        };
        let answer: EncryptResponse = self
            .call("Encrypt", request)
            .await
            .map_err(|why| format!("failed to rotate DEK: failed to encrypt DEK, error: {why}"))?;
        let envelope = EncryptedObject {
            data: Vec::new(),
            key_id: answer.key_id,
            encrypted_seed: answer.ciphertext,
            annotations: answer.annotations,
            source_type: SOURCE_SEED,
        };
        check_envelope(&envelope).map_err(|why| format!("failed to rotate DEK: {why}"))?;
        if envelope.key_id != key_id {
            return Err(
                "failed to rotate DEK: the key of Encrypt is not the one that Status names".to_owned(),
            );
        }
        let cipher = Arc::new(Cipher::seed(&seed)?);
        self.remember(envelope.encode_to_vec(), cipher.clone());
        self.write.store(Some(Arc::new(WriteSeed {
            cipher,
            envelope,
            until,
        })));
        Ok(())
    }

    fn remember(&self, envelope: Vec<u8>, cipher: Arc<Cipher>) {
        let mut seeds = self.seeds.lock();
        if seeds.len() >= MOST_SEEDS {
            seeds.clear();
        }
        seeds.insert(envelope, cipher);
    }

    pub fn seal(&self, key: &str, plain: &[u8]) -> Result<Vec<u8>> {
        let seed = self.write.load_full();
        let seed = seed.ok_or_else(|| format!("the KMS provider {} was never healthy", self.name))?;
        if Instant::now() > seed.until {
            return Err(format!(
                "encryptedDEKSource of the KMS provider {} expired: the plugin has not been healthy for {WRITE_TTL:?}",
                self.name
            ));
        }
        let mut envelope = seed.envelope.clone();
        envelope.data = seed.cipher.seal(key.as_bytes(), plain)?;
        Ok(envelope.encode_to_vec())
    }

    /// `None`: the plugin must be asked.
    pub fn open_now(&self, key: &str, data: &[u8]) -> Option<Result<Plain>> {
        let envelope = match parse(data) {
            Ok(envelope) => envelope,
            Err(why) => return Some(Err(why)),
        };
        let (id, data) = envelope.split();
        let encoded = id.encode_to_vec();
        let cipher = self.seeds.lock().get(&encoded).cloned();
        if let Some(cipher) = cipher {
            return Some(self.finish(key, &id, &cipher, &data));
        }
        let refused = self.refused.lock();
        let (why, at) = refused.get(&encoded)?;
        (at.elapsed() < REFUSED_TTL).then(|| Err(why.clone()))
    }

    /// Whether since the last call a seed could not be had for a reason that may pass.
    pub fn take_was_away(&self) -> bool {
        self.was_away.swap(false, Ordering::AcqRel)
    }

    pub async fn open(&self, key: &str, data: &[u8]) -> Result<Plain> {
        let (id, data) = parse(data)?.split();
        let request = DecryptRequest {
            ciphertext: id.encrypted_seed.clone(),
            uid: uuid::Uuid::new_v4().to_string(),
            key_id: id.key_id.clone(),
            annotations: id.annotations.clone(),
        };
        let encoded = id.encode_to_vec();
        let answer: DecryptResponse = match self.call("Decrypt", request).await {
            Ok(answer) => answer,
            Err(error) => {
                if error.passing {
                    self.was_away.store(true, Ordering::Release);
                }
                let why = format!("failed to decrypt DEK, error: {error}");
                let mut refused = self.refused.lock();
                refused.retain(|_, (_, at)| at.elapsed() < REFUSED_TTL);
                if refused.len() < MOST_SEEDS {
                    refused.insert(encoded, (why.clone(), Instant::now()));
                }
                return Err(why);
            }
        };
        let cipher = Arc::new(match id.source_type {
            SOURCE_SEED => Cipher::seed(&answer.plaintext)?,
            _ => Cipher::aes_gcm(&answer.plaintext)?,
        });
        self.remember(encoded, cipher.clone());
        self.finish(key, &id, &cipher, &data)
    }

    fn finish(&self, key: &str, id: &EncryptedObject, cipher: &Cipher, data: &[u8]) -> Result<Plain> {
        let value = cipher.open(key.as_bytes(), data)?.into();
        let current = self.write.load();
        let written_now = |seed: &Arc<WriteSeed>| {
            seed.envelope.key_id == id.key_id && seed.envelope.source_type == id.source_type
        };
        // While the plugin has not said its key, nothing is known to be stale.
        let stale = current.as_ref().is_some_and(|seed| !written_now(seed));
        Ok(Plain { value, stale })
    }

    async fn call<Q, A>(&self, method: &'static str, request: Q) -> std::result::Result<A, CallError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = match method {
            "Status" => "/v2.KeyManagementService/Status",
            "Encrypt" => "/v2.KeyManagementService/Encrypt",
            _ => "/v2.KeyManagementService/Decrypt",
        };
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_MAX);
        let answer = async {
            let away = |error: tonic::transport::Error| CallError::new(Code::Unavailable, &error.to_string());
            grpc.ready().await.map_err(away)?;
            let path = http::uri::PathAndQuery::from_static(path);
            let request = tonic::Request::new(request);
            let answer = grpc.unary(request, path, ProstCodec::<Q, A>::default()).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| CallError::new(status.code(), status.message()))
        };
        let late = || CallError::new(Code::DeadlineExceeded, "context deadline exceeded");
        let answered = tokio::time::timeout(self.timeout, answer).await;
        answered.unwrap_or_else(|_| Err(late()))
    }
}

/// A call that the plugin did not answer.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
struct CallError {
    message: String,
    /// It was not reached, or not in time.
    passing: bool,
}

impl CallError {
    fn new(code: Code, message: &str) -> CallError {
        CallError {
            message: format!("rpc error: code = {code:?} desc = {message}"),
            passing: matches!(code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled),
        }
    }
}

impl EncryptedObject {
    /// What tells the seed, and the data.
    fn split(mut self) -> (EncryptedObject, Vec<u8>) {
        let data = std::mem::take(&mut self.data);
        (self, data)
    }
}

fn parse(data: &[u8]) -> Result<EncryptedObject> {
    let envelope = EncryptedObject::decode(data).map_err(|error| error.to_string())?;
    if envelope.data.is_empty() {
        return Err("encrypted data is empty".to_owned());
    }
    check_envelope(&envelope)?;
    Ok(envelope)
}

fn check_envelope(envelope: &EncryptedObject) -> Result<()> {
    if envelope.source_type != SOURCE_KEY && envelope.source_type != SOURCE_SEED {
        return Err(format!(
            "unknown encryptedDEKSourceType: {}",
            envelope.source_type
        ));
    }
    let length = envelope.encrypted_seed.len();
    if length == 0 {
        return Err("failed to validate encrypted DEK source: encrypted DEK source is empty".to_owned());
    }
    if length > ENCRYPTED_SEED_MAX {
        return Err(format!(
            "failed to validate encrypted DEK source: encrypted DEK source is {length} bytes, which exceeds the max size of {ENCRYPTED_SEED_MAX}"
        ));
    }
    check_key_id(&envelope.key_id).map_err(|why| format!("failed to validate key id: {why}"))?;
    let mut size = 0;
    for (name, value) in &envelope.annotations {
        size += name.len() + value.len();
        if !name.contains('.') || !skiff_meta::names::dns1123_subdomain(name).is_empty() {
            return Err(format!(
                "failed to validate annotations: annotations: Invalid value: {name:?}: should be a domain with at least two segments separated by dots"
            ));
        }
    }
    if size > ANNOTATIONS_MAX {
        return Err(format!(
            "failed to validate annotations: total size of annotations is {size}, which exceeds the max size of {ANNOTATIONS_MAX}"
        ));
    }
    Ok(())
}

fn check_key_id(key_id: &str) -> Result<()> {
    if key_id.is_empty() {
        return Err("keyID is empty".to_owned());
    }
    if key_id.len() > KEY_ID_MAX {
        return Err(format!(
            "keyID is {} bytes, which exceeds the max size of {KEY_ID_MAX}",
            key_id.len()
        ));
    }
    Ok(())
}
