//! The keys of an issuer: found by its discovery document, fetched when a token needs them, and again when none of them
//! fits a token, but not more often than every few seconds: anybody can send a token that nothing fits.

use std::str::FromStr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use http::{HeaderMap, Method};
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use parking_lot::Mutex;
use serde_json::{Map, Value};
use skiff_https::{Call, CallTarget, Client};

/// As long as upstream waits for a provider, and as long as it waits before it asks again.
const TIMEOUT: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(10);
/// Between two fetches of keys.
const FETCH: Duration = Duration::from_secs(5);
/// The largest document that is read.
const LARGEST: usize = 1 << 20;
/// So many keys are looked at.
const MOST: usize = 256;

struct Key {
    id: String,
    key: DecodingKey,
}

type Fetched = Result<Arc<Vec<Key>>, String>;
type Flight = Shared<BoxFuture<'static, Fetched>>;

/// Leaf lock: never held over an await.
#[derive(Default)]
struct State {
    keys: Arc<Vec<Key>>,
    fetched: Option<Instant>,
    flight: Option<Flight>,
    /// Where the keys are, as soon as it is known.
    at: Option<String>,
}

pub struct Keys {
    client: Client,
    issuer: String,
    /// Where the discovery document is.
    discovery: String,
    state: Mutex<State>,
}

impl Keys {
    /// Begins to look for the keys of an issuer, and goes on until they are found or nobody asks any more.
    pub fn of(issuer: &str, discovery: Option<&str>, ca: Option<&str>) -> Result<Arc<Keys>, String> {
        let base = issuer.strip_suffix('/').unwrap_or(issuer);
        let well_known = format!("{base}/.well-known/openid-configuration");
        let keys = Arc::new(Keys {
            client: Client::new(Ok(skiff_https::trusting(ca)?)),
            issuer: issuer.to_owned(),
            discovery: discovery.map_or(well_known, str::to_owned),
            state: Mutex::default(),
        });
        let looking = Arc::downgrade(&keys);
        tokio::spawn(skiff_supervise::finished(
            "identity-provider-discovery",
            move || discover(looking.clone()),
        ));
        Ok(keys)
    }

    #[cfg(test)]
    pub fn unready() -> Arc<Keys> {
        Arc::new(Keys {
            client: Client::new(Err("none".to_owned())),
            issuer: String::new(),
            discovery: String::new(),
            state: Mutex::default(),
        })
    }

    pub fn ready(&self) -> bool {
        self.state.lock().at.is_some()
    }

    /// The claims of a token, if one of the keys has signed it.
    pub async fn verify(
        self: &Arc<Keys>,
        token: &str,
        algorithm: &str,
        id: &str,
    ) -> Result<Map<String, Value>, String> {
        let algorithm = Algorithm::from_str(algorithm).map_err(|error| error.to_string())?;
        let known = self.state.lock().keys.clone();
        if let Some(claims) = by(&known, token, algorithm, id) {
            return Ok(claims);
        }
        let fetched = self.fetch().await.map_err(|why| format!("fetching keys {why}"))?;
        let claims = by(&fetched, token, algorithm, id);
        claims.ok_or_else(|| "failed to verify id token signature".to_owned())
    }

    /// The keys as they are now. Who asks while they are fetched waits for the same answer.
    fn fetch(self: &Arc<Keys>) -> Flight {
        let mut state = self.state.lock();
        if let Some(flight) = &state.flight {
            return flight.clone();
        }
        if state.fetched.is_some_and(|at| at.elapsed() < FETCH) {
            let keys = state.keys.clone();
            return futures::future::ready(Ok(keys)).boxed().shared();
        }
        let keys = self.clone();
        let call = tokio::spawn(async move {
            let url = keys.state.lock().at.clone().unwrap_or_default();
            let fetched = keys.get(&url).await.map(|document| Arc::new(read(&document)));
            let mut state = keys.state.lock();
            state.fetched = Some(Instant::now());
            state.flight = None;
            if let Ok(fetched) = &fetched {
                state.keys = fetched.clone();
            }
            fetched
        });
        let after = Arc::downgrade(self);
        let flight = call
            .map(move |done| {
                done.unwrap_or_else(|_| {
                    // It has panicked: the next one who asks tries again.
                    if let Some(keys) = after.upgrade() {
                        keys.state.lock().flight = None;
                    }
                    Err("oidc: get keys failed".to_owned())
                })
            })
            .boxed()
            .shared();
        state.flight = Some(flight.clone());
        flight
    }

    async fn get(&self, url: &str) -> Result<Value, String> {
        let place = CallTarget::of(url)?;
        let headers = HeaderMap::new();
        let call = Call {
            method: Method::GET,
            place: &place,
            headers: &headers,
            body: Bytes::new(),
            timeout: TIMEOUT,
            limit: LARGEST,
        };
        let answer = self.client.call(call).await;
        let answer = answer.map_err(|failure| format!("oidc: get keys failed Get \"{url}\": {failure}"))?;
        if answer.code != 200 {
            return Err(format!("oidc: get keys failed: {}", answer.code));
        }
        serde_json::from_slice(&answer.body).map_err(|error| format!("oidc: failed to decode keys: {error}"))
    }

    /// Reads the discovery document once: where the keys are.
    async fn look(&self) -> Result<String, String> {
        let document = self.get(&self.discovery).await?;
        let said = document["issuer"].as_str().unwrap_or("");
        if said != self.issuer {
            return Err(format!(
                "oidc: issuer did not match the issuer returned by provider, expected {:?} got {said:?}",
                self.issuer
            ));
        }
        match document["jwks_uri"].as_str() {
            Some(at) if !at.is_empty() => Ok(at.to_owned()),
            _ => Err("provider did not return JWKS URL".to_owned()),
        }
    }
}

async fn discover(keys: Weak<Keys>) {
    while let Some(keys) = keys.upgrade() {
        match keys.look().await {
            Ok(at) => {
                keys.state.lock().at = Some(at);
                return;
            }
            Err(why) => tracing::error!(
                why,
                issuer = keys.issuer,
                "an identity provider cannot be used yet"
            ),
        }
        drop(keys);
        tokio::time::sleep(AGAIN).await;
    }
}

/// The keys of a set that can be used; others are passed over.
fn read(document: &Value) -> Vec<Key> {
    let list = document["keys"].as_array();
    let usable = list.into_iter().flatten().take(MOST).filter_map(|key| {
        if key["use"].as_str().is_some_and(|of| of != "sig") {
            return None;
        }
        let jwk: Jwk = serde_json::from_value(key.clone()).ok()?;
        Some(Key {
            id: key["kid"].as_str().unwrap_or("").to_owned(),
            key: DecodingKey::from_jwk(&jwk).ok()?,
        })
    });
    usable.collect()
}

/// The claims of a token, if one of these keys has signed it.
fn by(keys: &[Key], token: &str, algorithm: Algorithm, id: &str) -> Option<Map<String, Value>> {
    let mut validation = Validation::new(algorithm);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_nbf = false;
    validation.validate_aud = false;
    let fitting = keys
        .iter()
        .filter(|key| (id.is_empty() || key.id == id) && key.key.family() == algorithm.family());
    for key in fitting {
        if let Ok(data) = decode::<Map<String, Value>>(token, &key.key, &validation) {
            return Some(data.claims);
        }
    }
    None
}
