//! Who may use the node's server. A client is known by its certificate or by its bearer token, which the API server
//! reviews (TokenReview), and may do what the API server says it may with the node's subresources
//! (SubjectAccessReview). Nothing is decided here; answers are kept as long as upstream keeps them.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderMap, Method, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::objects::error_message;

/// Upstream's `authentication.webhook.cacheTTL`.
const TOKEN_TTL: Duration = Duration::from_secs(2 * 60);
/// Upstream's `authorization.webhook.cacheAuthorizedTTL`.
const ALLOWED_TTL: Duration = Duration::from_secs(5 * 60);
/// Upstream's `authorization.webhook.cacheUnauthorizedTTL`.
const DENIED_TTL: Duration = Duration::from_secs(30);
/// Answers that are kept, of each sort.
const CACHE_SIZE: usize = 1024;
/// Reviews under way at once: whoever reaches the port can send tokens.
const MAX_REVIEWS: usize = 32;
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Larger identities are reviewed each time instead of being kept.
const MAX_CACHED_IDENTITY: usize = 10_000;
const AUTHENTICATED: &str = "system:authenticated";

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Identity {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

impl Identity {
    fn size(&self) -> usize {
        let lists = self.extra.iter().map(|(key, values)| key.len() + length(values));
        self.name.len() + self.uid.len() + length(&self.groups) + lists.sum::<usize>()
    }
}

fn length(texts: &[String]) -> usize {
    texts.iter().map(String::len).sum()
}

/// The identity in a client certificate that TLS has already verified.
pub fn identity(der: &[u8]) -> Option<Identity> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let mut groups: Vec<String> = subject
        .iter_organization()
        .filter_map(|o| o.as_str().ok())
        .map(str::to_owned)
        .collect();
    if !groups.iter().any(|group| group == AUTHENTICATED) {
        groups.push(AUTHENTICATED.to_owned());
    }
    Some(Identity {
        name,
        groups,
        ..Identity::default()
    })
}

/// Asks the API server.
#[async_trait]
pub trait Reviewer: Send + Sync {
    /// Whose token it is; `None` if it is nobody's.
    async fn token(&self, token: &str) -> Result<Option<Identity>, String>;
    async fn access(&self, identity: &Identity, verb: &str, subresource: &str) -> Result<bool, String>;
}

pub struct ApiReviewer {
    pub client: Client,
    pub node_name: String,
}

#[async_trait]
impl Reviewer for ApiReviewer {
    async fn token(&self, token: &str) -> Result<Option<Identity>, String> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                ..Default::default()
            },
            ..Default::default()
        };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let answered = reviews
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| error_message(&error))?;
        let status = answered.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(None);
        }
        let user = status.user.unwrap_or_default();
        Ok(Some(Identity {
            name: user.username.unwrap_or_default(),
            uid: user.uid.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    async fn access(&self, identity: &Identity, verb: &str, subresource: &str) -> Result<bool, String> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(identity.name.clone()),
                uid: Some(identity.uid.clone()).filter(|uid| !uid.is_empty()),
                groups: Some(identity.groups.clone()),
                extra: Some(identity.extra.clone()).filter(|extra| !extra.is_empty()),
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    version: Some("v1".to_owned()),
                    resource: Some("nodes".to_owned()),
                    subresource: Some(subresource.to_owned()),
                    name: Some(self.node_name.clone()),
                    ..Default::default()
                }),
                ..Default::default()
            },
            ..Default::default()
        };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let answered = reviews
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| error_message(&error))?;
        let SubjectAccessReviewStatus { allowed, denied, .. } = answered.status.unwrap_or_default();
        Ok(allowed && denied != Some(true))
    }
}

/// Answers with the time at which each ends.
struct Answers<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K: Hash + Eq + Clone, V: Clone> Answers<K, V> {
    fn new() -> Self {
        Answers(Mutex::default())
    }

    fn get(&self, key: &K, now: Instant) -> Option<V> {
        let answers = self.0.lock();
        let (answer, end) = answers.get(key)?;
        (now < *end).then(|| answer.clone())
    }

    fn put(&self, key: K, answer: V, now: Instant, ttl: Duration) {
        let mut answers = self.0.lock();
        if answers.len() >= CACHE_SIZE && !answers.contains_key(&key) {
            answers.retain(|_, (_, end)| now < *end);
            if answers.len() >= CACHE_SIZE {
                let soonest = answers.iter().min_by_key(|(_, (_, end))| *end);
                if let Some(key) = soonest.map(|(key, _)| key.clone()) {
                    answers.remove(&key);
                }
            }
        }
        answers.insert(key, (answer, now + ttl));
    }
}

/// Why a request is not served.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused(pub StatusCode, pub String);

pub struct Auth {
    reviewer: Box<dyn Reviewer>,
    /// By the hash of the token: the tokens themselves are not kept.
    tokens: Answers<[u8; 32], Option<Identity>>,
    decisions: Answers<(Identity, &'static str, &'static str), bool>,
    reviews: Semaphore,
}

impl Auth {
    pub fn new(reviewer: impl Reviewer + 'static) -> Self {
        Auth {
            reviewer: Box::new(reviewer),
            tokens: Answers::new(),
            decisions: Answers::new(),
            reviews: Semaphore::new(MAX_REVIEWS),
        }
    }

    /// Whether a request may be served: `certificate` is the client's, `path` the segments that the request is
    /// routed by, so that what is asked and what is served cannot differ.
    pub async fn check(
        &self,
        certificate: Option<&Identity>,
        method: &Method,
        headers: &HeaderMap,
        path: &[&str],
    ) -> Result<(), Refused> {
        let by_token;
        let identity = match certificate {
            Some(identity) => identity,
            None => {
                by_token = self.authenticate(headers).await?;
                &by_token
            }
        };
        let (verb, subresources) = (verb(method), subresources(path));
        for subresource in subresources {
            match self.authorize(identity, verb, subresource).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(error, user = identity.name, "authorization error");
                    return Err(Refused(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        format!(
                            "Authorization error (user={}, verb={verb}, resource=nodes, subresource={subresource})",
                            identity.name
                        ),
                    ));
                }
            }
        }
        Err(Refused(
            StatusCode::FORBIDDEN,
            format!(
                "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])\n",
                identity.name,
                subresources.join(" ")
            ),
        ))
    }

    async fn authenticate(&self, headers: &HeaderMap) -> Result<Identity, Refused> {
        let unauthorized = || Refused(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned());
        let token = bearer_token(headers).ok_or_else(unauthorized)?;
        let key: [u8; 32] = Sha256::digest(token).into();
        if let Some(known) = self.tokens.get(&key, Instant::now()) {
            return known.ok_or_else(unauthorized);
        }
        match self.reviewed(self.reviewer.token(token)).await {
            Ok(found) => {
                self.tokens.put(key, found.clone(), Instant::now(), TOKEN_TTL);
                found.ok_or_else(unauthorized)
            }
            Err(error) => {
                tracing::error!(error, "unable to authenticate the request due to an error");
                Err(unauthorized())
            }
        }
    }

    async fn authorize(
        &self,
        identity: &Identity,
        verb: &'static str,
        subresource: &'static str,
    ) -> Result<bool, String> {
        let key = (identity.clone(), verb, subresource);
        if let Some(known) = self.decisions.get(&key, Instant::now()) {
            return Ok(known);
        }
        let review = self.reviewer.access(identity, verb, subresource);
        let allowed = self.reviewed(review).await?;
        if identity.size() <= MAX_CACHED_IDENTITY {
            let ttl = if allowed { ALLOWED_TTL } else { DENIED_TTL };
            self.decisions.put(key, allowed, Instant::now(), ttl);
        }
        Ok(allowed)
    }

    async fn reviewed<T>(&self, review: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        let review = async {
            let _turn = self.reviews.acquire().await.map_err(|error| error.to_string())?;
            review.await
        };
        match tokio::time::timeout(REVIEW_TIMEOUT, review).await {
            Ok(answer) => answer,
            Err(_) => Err("context deadline exceeded".to_owned()),
        }
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.trim().split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && !token.contains(' ')).then_some(token)
}

fn verb(method: &Method) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

/// Which subresources of the node a path belongs to; one that the client may use is enough.
fn subresources(path: &[&str]) -> &'static [&'static str] {
    match path.first().copied() {
        Some("pods" | "runningpods") => &["pods", "proxy"],
        Some("healthz") => &["healthz", "proxy"],
        Some("configz") => &["configz", "proxy"],
        Some("stats") => &["stats"],
        Some("metrics") => &["metrics"],
        Some("logs") => &["log"],
        Some("checkpoint") => &["checkpoint"],
        Some("statusz") => &["statusz"],
        Some("flagz") => &["configz"],
        _ => &["proxy"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Knows the token `good`, and lets its owner read metrics and pods. Counts what it is asked.
    #[derive(Default)]
    struct Fake {
        tokens: AtomicUsize,
        accesses: AtomicUsize,
    }

    #[async_trait]
    impl Reviewer for Arc<Fake> {
        async fn token(&self, token: &str) -> Result<Option<Identity>, String> {
            self.tokens.fetch_add(1, Ordering::Relaxed);
            if token == "broken" {
                return Err("no API server".into());
            }
            let identity = Identity {
                name: "prometheus".into(),
                ..Identity::default()
            };
            Ok((token == "good").then_some(identity))
        }

        async fn access(&self, identity: &Identity, verb: &str, subresource: &str) -> Result<bool, String> {
            self.accesses.fetch_add(1, Ordering::Relaxed);
            if identity.name == "unlucky" {
                return Err("no API server".into());
            }
            Ok(verb == "get" && matches!(subresource, "metrics" | "pods"))
        }
    }

    fn bearer(token: &str) -> HeaderMap {
        let value = format!("Bearer {token}");
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_reviewed_and_answers_kept() {
        let fake = Arc::new(Fake::default());
        let auth = Auth::new(fake.clone());
        let check = async |token: &str, path: &[&str]| {
            auth.check(None, &Method::GET, &bearer(token), path)
                .await
                .map_err(|refused| (refused.0.as_u16(), refused.1))
        };
        let unauthorized = Err((401, "Unauthorized".to_owned()));
        assert_eq!(check("bad", &["metrics", "resource"]).await, unauthorized);
        assert_eq!(check("bad", &["metrics", "resource"]).await, unauthorized);
        assert_eq!(fake.tokens.load(Ordering::Relaxed), 1, "a refusal is kept");
        assert_eq!(check("broken", &["metrics"]).await, unauthorized);
        assert_eq!(check("broken", &["metrics"]).await, unauthorized);
        assert_eq!(
            fake.tokens.load(Ordering::Relaxed),
            3,
            "what could not be asked is asked again"
        );
        for path in [
            &["metrics", "resource"][..],
            &["pods"],
            &["runningpods"],
            &["metrics", "resource"],
        ] {
            assert_eq!(check("good", path).await, Ok(()), "{path:?}");
        }
        assert_eq!(fake.tokens.load(Ordering::Relaxed), 4);
        assert_eq!(
            fake.accesses.load(Ordering::Relaxed),
            2,
            "pods and metrics, once each"
        );
        let forbidden = |verb: &str, subresources: &str| {
            let user = "Forbidden (user=prometheus";
            let text = format!("{user}, verb={verb}, resource=nodes, subresource(s)=[{subresources}])\n");
            Err((403, text))
        };
        let exec = ["exec", "ns", "pod", "c"];
        assert_eq!(check("good", &exec).await, forbidden("get", "proxy"));
        assert_eq!(
            check("good", &["healthz"]).await,
            forbidden("get", "healthz proxy")
        );
        assert_eq!(
            check("good", &["stats", "summary"]).await,
            forbidden("get", "stats")
        );
        let asked = fake.accesses.load(Ordering::Relaxed);
        tokio::time::advance(DENIED_TTL).await;
        assert_eq!(check("good", &exec).await, forbidden("get", "proxy"));
        assert_eq!(check("good", &["metrics"]).await, Ok(()));
        assert_eq!(
            fake.accesses.load(Ordering::Relaxed),
            asked + 1,
            "what was allowed is kept longer"
        );
        tokio::time::advance(ALLOWED_TTL).await;
        assert_eq!(check("good", &["metrics"]).await, Ok(()));
        assert_eq!(fake.accesses.load(Ordering::Relaxed), asked + 2);
        assert_eq!(fake.tokens.load(Ordering::Relaxed), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_are_authorized_too() {
        let auth = Auth::new(Arc::new(Fake::default()));
        let as_user = async |name: &str, method: Method, path: &[&str]| {
            let identity = Identity {
                name: name.into(),
                ..Identity::default()
            };
            auth.check(Some(&identity), &method, &HeaderMap::new(), path)
                .await
                .map_err(|refused| refused.0.as_u16())
        };
        assert_eq!(as_user("anyone", Method::GET, &["metrics"]).await, Ok(()));
        assert_eq!(as_user("anyone", Method::POST, &["metrics"]).await, Err(403));
        assert_eq!(as_user("anyone", Method::GET, &[]).await, Err(403));
        assert_eq!(as_user("unlucky", Method::GET, &["metrics"]).await, Err(500));
        let nobody = auth
            .check(None, &Method::GET, &HeaderMap::new(), &["metrics"])
            .await;
        assert_eq!(
            nobody,
            Err(Refused(StatusCode::UNAUTHORIZED, "Unauthorized".into()))
        );
        assert_eq!(identity(b"garbage"), None);
    }

    #[test]
    fn the_cache_is_bounded() {
        let answers = Answers::new();
        let now = Instant::now();
        for number in 0..CACHE_SIZE * 2 {
            answers.put(number, (), now, Duration::from_secs(number as u64 + 1));
        }
        assert_eq!(answers.0.lock().len(), CACHE_SIZE);
        assert!(answers.get(&(CACHE_SIZE * 2 - 1), now).is_some());
        assert!(answers.get(&0, now).is_none(), "what ends first makes room");
    }

    #[test]
    fn where_the_token_stands() {
        let check = |value: &str, expected: Option<&str>| {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())]);
            assert_eq!(bearer_token(&headers), expected, "{value}");
        };
        check("Bearer abc", Some("abc"));
        check("bearer  abc ", Some("abc"));
        check("Bearer", None);
        check("Bearer ", None);
        check("Basic abc", None);
        check("Bearer a b", None);
    }
}
