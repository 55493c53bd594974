//! Tokens that another server knows: it is posted a TokenReview. What it says is kept for a while; requests with the
//! same token wait for one call.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::{BoxFuture, Shared};
use futures::{FutureExt, TryFutureExt};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use skiff_https::{Backoff, BadKubeconfig, Endpoint};
use std::collections::BTreeMap;

use crate::expiring::{Expiring, Key, Weight, key};
use crate::{AuthError, Authenticated, TokenAuthenticator, UserInfo};

/// Upstream's time for a call, and for all that wait for the same answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Upstream's size of the cache.
const KEPT: usize = 32 * 1024;

/// Calls under way at a time. They go on when who asked has gone, and anybody can send a token: without a limit,
/// strangers could make the memory grow for as long as the webhook takes to answer.
const CALLS: usize = 256;

impl Weight for Option<Authenticated> {
    fn weight(&self) -> usize {
        let Some(Authenticated { user, audiences }) = self else {
            return 0;
        };
        let lists = user
            .extra
            .iter()
            .map(|(key, values)| key.len() + of_texts(values));
        user.name.len()
            + user.uid.len()
            + of_texts(&user.groups)
            + of_texts(audiences.as_deref().unwrap_or_default())
            + lists.sum::<usize>()
    }
}

fn of_texts(texts: &[String]) -> usize {
    texts.iter().map(|text| size_of::<String>() + text.len()).sum()
}

type Verdict = Result<Option<Authenticated>, AuthError>;
type Flight = Shared<BoxFuture<'static, Verdict>>;

pub struct TokenWebhook {
    asked: Arc<ReviewClient>,
    ttl: Duration,
    /// Calls under way. Leaf lock: never held over an await.
    flights: Arc<Mutex<HashMap<Key, Flight>>>,
    verdicts: Arc<Expiring<Option<Authenticated>>>,
}

struct ReviewClient {
    endpoint: Endpoint,
    version: String,
    backoff: Backoff,
}

/// As much of the answer as counts.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Review {
    status: Status,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    authenticated: bool,
    user: User,
    audiences: Option<Vec<String>>,
    error: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct User {
    username: String,
    uid: String,
    groups: Option<Vec<String>>,
    extra: Option<BTreeMap<String, Vec<String>>>,
}

impl TokenWebhook {
    /// `version` of the review: `v1` or `v1beta1`. A `ttl` of zero keeps nothing.
    pub fn load(file: &Path, version: &str, ttl: Duration) -> Result<TokenWebhook, BadKubeconfig> {
        Ok(TokenWebhook {
            asked: Arc::new(ReviewClient {
                endpoint: Endpoint::load(file, TIMEOUT)?,
                version: version.to_owned(),
                backoff: Backoff::default(),
            }),
            ttl,
            flights: Arc::default(),
            verdicts: Arc::new(Expiring::new(KEPT)),
        })
    }

    fn flight(&self, key: Key, token: &str, audiences: &[String]) -> Result<Flight, AuthError> {
        let mut flights = self.flights.lock();
        if let Some(flight) = flights.get(&key) {
            return Ok(flight.clone());
        }
        if flights.len() >= CALLS {
            return Err(told("too many tokens are being reviewed"));
        }
        let review = json!({
            "apiVersion": format!("authentication.k8s.io/{}", self.asked.version),
            "kind": "TokenReview",
            "metadata": {},
            "spec": {"token": token, "audiences": audiences},
            "status": {"user": {}},
        });
        let (asked, flights_of) = (self.asked.clone(), self.flights.clone());
        let (verdicts, ttl) = (self.verdicts.clone(), self.ttl);
        // A task of its own: it goes on if who asked first has gone.
        let call = tokio::spawn(async move {
            let verdict = tokio::time::timeout(TIMEOUT, asked.ask(review.to_string().into())).await;
            let verdict = verdict.unwrap_or_else(|_| Err(told("context deadline exceeded")));
            if let Ok(known) = &verdict {
                verdicts.keep(key, known.clone(), Instant::now(), ttl);
            }
            flights_of.lock().remove(&key);
            verdict
        });
        let flights_after = self.flights.clone();
        let flight = call
            .unwrap_or_else(move |_| {
                // It has panicked: the next one who asks tries again.
                flights_after.lock().remove(&key);
                Err(told("authentication failed unexpectedly"))
            })
            .boxed()
            .shared();
        flights.insert(key, flight.clone());
        Ok(flight)
    }
}

fn told(text: &str) -> AuthError {
    AuthError::Told(text.to_owned())
}

impl ReviewClient {
    async fn ask(&self, review: Bytes) -> Verdict {
        let answer = self.backoff.run(|| self.endpoint.post(review.clone())).await;
        let document = match answer {
            Ok(answer) => answer.document_of("TokenReview"),
            Err(failure) => Err(self.endpoint.explain(&failure)),
        };
        let document = document.map_err(|why| {
            tracing::error!(why, "the token webhook cannot be reached");
            AuthError::Told(why)
        })?;
        let review: Review =
            serde_json::from_value(document).map_err(|error| AuthError::Told(error.to_string()))?;
        let status = review.status;
        if !status.authenticated {
            return match status.error.as_str() {
                "" => Ok(None),
                error => Err(told(error)),
            };
        }
        let user = status.user;
        let mut known = UserInfo::new(user.username, user.groups.unwrap_or_default());
        known.uid = user.uid;
        known.extra = user.extra.unwrap_or_default();
        Ok(Some(Authenticated {
            user: known,
            audiences: status.audiences.filter(|audiences| !audiences.is_empty()),
        }))
    }
}

#[async_trait]
impl TokenAuthenticator for TokenWebhook {
    async fn authenticate(&self, token: &str, audiences: &[String]) -> Verdict {
        let mut parts = vec![token.as_bytes()];
        parts.extend(audiences.iter().map(|audience| audience.as_bytes()));
        let key = key(&parts);
        if let Some(known) = self.verdicts.get(&key, Instant::now()) {
            return Ok(known);
        }
        self.flight(key, token, audiences)?.await
    }

    fn knows_audiences(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reviews_under_way_have_a_limit() {
        // Connections are taken by the kernel, and nobody ever answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let file = std::env::temp_dir().join(format!("skiff-token-webhook-{}", std::process::id()));
        let config = format!(
            r#"{{"clusters": [{{"name": "c", "cluster": {{"server": "https://{address}", "insecure-skip-tls-verify": true}}}}],
                "users": [{{"name": "u", "user": {{}}}}], "current-context": "x",
                "contexts": [{{"name": "x", "context": {{"cluster": "c", "user": "u"}}}}]}}"#
        );
        std::fs::write(&file, config).unwrap();
        let webhook = TokenWebhook::load(&file, "v1", Duration::from_secs(60));
        std::fs::remove_file(&file).unwrap();
        let webhook = webhook.unwrap();
        let (mut waiting, mut refused) = (0, 0);
        for number in 0..CALLS + 50 {
            // Who asked goes away at once; the call goes on.
            match webhook.authenticate(&number.to_string(), &[]).now_or_never() {
                None => waiting += 1,
                Some(Err(_)) => refused += 1,
                Some(Ok(_)) => panic!("nobody has answered"),
            }
        }
        assert_eq!((waiting, refused), (CALLS, 50));
        let again = webhook.authenticate("0", &[]).now_or_never();
        assert!(again.is_none(), "the same token joins its call");
    }
}
