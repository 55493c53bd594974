//! Tokens of identity providers: one on loopback publishes its keys, and the server lets in whom they have signed, and
//! nobody else. All words are those of a real kube-apiserver.

mod support;

use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};
use skiff_auth::{AuthenticationConfiguration, JwtAuthenticators, OidcFlags};
use support::peer::Peer;
use support::{Cluster, Https};

/// A key of a provider, and how it is published.
struct Signer {
    key: EncodingKey,
    algorithm: Algorithm,
    id: &'static str,
    published: Value,
}

impl Signer {
    fn new(id: &'static str) -> Signer {
        let pair = rcgen::KeyPair::generate().expect("a key");
        let key = EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).expect("a key");
        Signer::of(key, Algorithm::ES256, id)
    }

    fn rsa(id: &'static str) -> Signer {
        let size = rcgen::RsaKeySize::_2048;
        let pair = rcgen::KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, size).expect("a key");
        let key = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes()).expect("a key");
        Signer::of(key, Algorithm::RS256, id)
    }

    fn of(key: EncodingKey, algorithm: Algorithm, id: &'static str) -> Signer {
        let jwk = Jwk::from_encoding_key(&key, algorithm).expect("a public key");
        let mut published = serde_json::to_value(jwk).expect("JSON");
        published["kid"] = json!(id);
        published["use"] = json!("sig");
        Signer {
            key,
            algorithm,
            id,
            published,
        }
    }

    fn sign(&self, claims: &Value) -> String {
        let mut header = Header::new(self.algorithm);
        header.kid = Some(self.id.to_owned());
        jsonwebtoken::encode(&header, claims, &self.key).expect("a token")
    }
}

/// A provider whose keys may change.
struct Provider {
    url: String,
    keys: Arc<Mutex<Vec<Value>>>,
    peer: Peer,
}

impl Provider {
    fn start(listener: std::net::TcpListener, cluster: &Cluster, signers: &[&Signer]) -> Provider {
        let port = listener.local_addr().expect("an address").port();
        let url = format!("https://localhost:{port}");
        let keys: Arc<Mutex<Vec<Value>>> = Arc::default();
        let (of_peer, issuer) = (keys.clone(), url.clone());
        let peer = Peer::start(
            listener,
            &cluster.pki,
            Arc::new(move |path: &str, _: &Value| {
                let document = match path {
                    "/.well-known/openid-configuration" => {
                        json!({"issuer": issuer, "jwks_uri": format!("{issuer}/keys")})
                    }
                    "/keys" => json!({"keys": *of_peer.lock().expect("whole")}),
                    "/large/.well-known/openid-configuration" => {
                        return Some((200, "x".repeat(3 << 20)));
                    }
                    _ => return None,
                };
                Some((200, document.to_string()))
            }),
        );
        let provider = Provider { url, keys, peer };
        provider.publish(signers);
        provider
    }

    fn publish(&self, signers: &[&Signer]) {
        let list = signers.iter().map(|signer| signer.published.clone()).collect();
        *self.keys.lock().expect("whole") = list;
    }

    fn fetches(&self) -> usize {
        self.peer
            .seen()
            .iter()
            .filter(|(path, _)| path == "/keys")
            .count()
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock")
        .as_secs()
}

/// Waits until the server knows the provider: a token of it is refused for another reason, or let in.
async fn known(cluster: &Cluster, token: &str) {
    loop {
        let status = reviewed(cluster, token).await;
        if status["error"] != "[invalid bearer token, oidc: authenticator not initialized]" {
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn reviewed(cluster: &Cluster, token: &str) -> Value {
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let reply = cluster
        .post("/apis/authentication.k8s.io/v1/tokenreviews", review)
        .await;
    assert_eq!(reply.code, 201, "{}", reply.text);
    reply.json["status"].clone()
}

#[tokio::test]
async fn a_provider_by_flags() {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, _, pki| {
        let flags = OidcFlags {
            issuer_url: format!("https://localhost:{port}"),
            client_id: "skiff".to_owned(),
            username_claim: "sub".to_owned(),
            groups_claim: "groups".to_owned(),
            groups_prefix: "oidc:".to_owned(),
            required_claims: [("hd".to_owned(), "example.com".to_owned())].into(),
            signing_algs: vec!["RS256".to_owned(), "ES256".to_owned()],
            ca: Some(pki.ca_certificate().to_owned()),
            ..OidcFlags::default()
        };
        let list = flags.authenticators(&[]).expect("good flags");
        config.authentication.jwt = Some(Arc::new(JwtAuthenticators::new(list)));
    })
    .await;
    let (one, two, rsa) = (Signer::new("one"), Signer::new("two"), Signer::rsa("rsa"));
    let provider = Provider::start(listener, &cluster, &[&one, &rsa]);
    let https = Https::open(&cluster).await;
    let claims = |changes: Value| {
        let mut claims = json!({"iss": provider.url, "aud": "skiff", "sub": "jane", "exp": now() + 3600,
            "groups": ["devs"], "hd": "example.com", "jti": "id"});
        for (key, value) in changes.as_object().into_iter().flatten() {
            claims[key] = value.clone();
        }
        claims
    };
    let good = one.sign(&claims(json!({})));
    known(&cluster, &good).await;
    let who = https.who(&cluster, &good).await;
    assert_eq!(
        who.json["status"]["userInfo"],
        json!({"username": format!("{}#jane", provider.url), "groups": ["oidc:devs", "system:authenticated"],
            "extra": {"authentication.kubernetes.io/credential-id": ["JTI=id"]}}),
        "{}",
        who.text
    );
    let by_rsa = https.who(&cluster, &rsa.sign(&claims(json!({})))).await;
    assert_eq!(by_rsa.code, 201, "{}", by_rsa.text);

    let parts = |header: Value, claims: &Value, signature: &str| {
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        format!("{}.{}.{signature}", encode(&header), encode(claims))
    };
    // The public key as the secret of a token that anybody can make.
    let public = one.published["x"].as_str().expect("a key").to_owned();
    let symmetric = jsonwebtoken::encode(
        &Header::new(Algorithm::HS256),
        &claims(json!({})),
        &EncodingKey::from_secret(public.as_bytes()),
    )
    .expect("a token");
    let mut wrong_kid = Header::new(Algorithm::ES256);
    wrong_kid.kid = Some("rsa".to_owned());
    let wrong_kid = jsonwebtoken::encode(&wrong_kid, &claims(json!({})), &one.key).expect("a token");
    // Signed well, but with a demand that nobody here understands.
    let mut critical = Header::new(Algorithm::ES256);
    (critical.kid, critical.crit) = (Some("one".to_owned()), Some(vec!["x".to_owned()]));
    let critical = jsonwebtoken::encode(&critical, &claims(json!({})), &one.key).expect("a token");
    let signature = good.rsplit('.').next().expect("a signature").to_owned();
    let changed = claims(json!({"sub": "root"}));
    let unsigned = "failed to verify signature: failed to verify id token signature";
    let unsupported = |found: &str| {
        format!(
            "oidc: id token signed with unsupported algorithm, expected [\"RS256\" \"ES256\"] got \"{found}\""
        )
    };
    for (token, why) in [
        (parts(json!({"alg": "none"}), &changed, ""), unsupported("none")),
        (symmetric, unsupported("HS256")),
        (
            parts(json!({"alg": "ES256", "kid": "one"}), &changed, &signature),
            unsigned.to_owned(),
        ),
        (
            parts(json!({"alg": "ES256"}), &changed, &signature),
            unsigned.to_owned(),
        ),
        (
            parts(json!({"alg": "RS256", "kid": "one"}), &changed, &signature),
            unsigned.to_owned(),
        ),
        (critical, unsigned.to_owned()),
        (wrong_kid, unsigned.to_owned()),
        (
            one.sign(&claims(json!({"aud": "other"}))),
            "oidc: expected audience \"skiff\" got [\"other\"]".to_owned(),
        ),
        (
            one.sign(&claims(json!({"exp": 1_577_836_800}))),
            "oidc: token is expired (Token Expiry: 2020-01-01 00:00:00 +0000 UTC)".to_owned(),
        ),
    ] {
        assert_eq!(https.who(&cluster, &token).await.code, 401, "{why}");
        let told = format!("[invalid bearer token, oidc: verify token: {why}]");
        assert_eq!(
            reviewed(&cluster, &token).await,
            json!({"user": {}, "error": told})
        );
    }
    let other = one.sign(&claims(json!({"hd": "example.org"})));
    assert_eq!(
        reviewed(&cluster, &other).await["error"],
        "[invalid bearer token, oidc: required claim hd value does not match. Got = example.org, want = example.com]"
    );
    // Tokens of other issuers, and garbage, are nobody's.
    for token in [
        one.sign(&claims(json!({"iss": "https://elsewhere"}))),
        "a.b.c".to_owned(),
        "x".repeat(10_000),
        format!("{good}.{good}"),
    ] {
        assert_eq!(reviewed(&cluster, &token).await["error"], "invalid bearer token");
    }
    // All that did not fit made few fetches, and a new key is found.
    assert!(provider.fetches() <= 4, "{}", provider.fetches());
    provider.publish(&[&two]);
    let new = two.sign(&claims(json!({})));
    while https.who(&cluster, &new).await.code != 201 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    https.end().await;
}

#[tokio::test]
async fn providers_by_a_file() {
    let (listener, port) = Peer::reserve();
    let url = format!("https://localhost:{port}");
    let cluster = Cluster::adjusted(|config, _, pki| {
        let file = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration",
            "anonymous": {"enabled": true, "conditions": [{"path": "/livez"}]},
            "jwt": [{
                "issuer": {"url": url, "audiences": ["a", "b"], "audienceMatchPolicy": "MatchAny",
                    "certificateAuthority": pki.ca_certificate()},
                "claimValidationRules": [{"expression": "claims.exp - claims.nbf <= 86400", "message": "too long"}],
                "claimMappings": {"username": {"expression": "'ext:' + claims.sub"},
                    "groups": {"expression": "claims.roles.split(',')"}, "uid": {"claim": "sub"},
                    "extra": [{"key": "example.com/tenant", "valueExpression": "claims.tenant.id"}]},
                "userValidationRules": [{"expression": "!user.groups.exists(g, g.startsWith('system:'))", "message": "reserved"}],
            }]});
        let file = AuthenticationConfiguration::parse(&file.to_string()).expect("a file");
        config.authentication.anonymous = file.anonymous().expect("conditions");
        let list = file.authenticators(&[]).expect("good providers");
        config.authentication.jwt = Some(Arc::new(JwtAuthenticators::new(list)));
    })
    .await;
    let signer = Signer::new("k");
    let provider = Provider::start(listener, &cluster, &[&signer]);
    let https = Https::open(&cluster).await;
    let token = |changes: Value| {
        let mut claims = json!({"iss": provider.url, "aud": ["b", "c"], "sub": "jane", "nbf": now() - 10,
            "exp": now() + 3600, "roles": "x,y", "tenant": {"id": "t1"}});
        for (key, value) in changes.as_object().into_iter().flatten() {
            claims[key] = value.clone();
        }
        signer.sign(&claims)
    };
    known(&cluster, &token(json!({}))).await;
    let who = https.who(&cluster, &token(json!({}))).await;
    assert_eq!(
        who.json["status"]["userInfo"],
        json!({"username": "ext:jane", "uid": "jane", "groups": ["x", "y", "system:authenticated"],
            "extra": {"example.com/tenant": ["t1"]}}),
        "{}",
        who.text
    );
    for (changes, why) in [
        (
            json!({"exp": now() + 1_000_000}),
            "error evaluating claim validation expression: validation expression 'claims.exp - claims.nbf <= 86400' failed: too long",
        ),
        (
            json!({"roles": "system:masters"}),
            "error evaluating user info validation rule: validation expression '!user.groups.exists(g, g.startsWith('system:'))' failed: reserved",
        ),
        (
            json!({"aud": "d"}),
            "verify token: oidc: expected audience in [\"a\" \"b\"] got [\"d\"]",
        ),
    ] {
        let told = format!("[invalid bearer token, oidc: {why}]");
        assert_eq!(reviewed(&cluster, &token(changes)).await["error"], told);
    }
    // Without a credential only what the file names can be had.
    assert_eq!(https.ask(&cluster, "", "GET", "/livez", "").await.code, 200);
    assert_eq!(https.ask(&cluster, "", "GET", "/version", "").await.code, 401);
    https.end().await;
}

#[tokio::test]
async fn a_file_may_change() {
    let (listener, port) = Peer::reserve();
    let jwt = Arc::new(JwtAuthenticators::default());
    let taken = jwt.clone();
    let cluster = Cluster::adjusted(|config, _, _| config.authentication.jwt = Some(taken)).await;
    let signer = Signer::new("k");
    let provider = Provider::start(listener, &cluster, &[&signer]);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("authentication.json");
    let write = |providers: Value| {
        let config = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration", "jwt": providers});
        std::fs::write(&file, config.to_string()).expect("a file");
    };
    let claims = json!({"iss": provider.url, "aud": "a", "sub": "jane", "exp": now() + 3600});
    let token = signer.sign(&claims);
    assert_eq!(reviewed(&cluster, &token).await["error"], "invalid bearer token");
    write(
        json!([{"issuer": {"url": format!("https://localhost:{port}"), "audiences": ["a"],
            "certificateAuthority": cluster.pki.ca_certificate()},
        "claimMappings": {"username": {"claim": "sub", "prefix": "p:"}}}]),
    );
    jwt.reload(&file, &[], None).await.expect("a good file");
    // It is in force when its providers can be used, not before.
    assert_eq!(reviewed(&cluster, &token).await["user"]["username"], "p:jane");
    std::fs::write(&file, "nonsense").expect("a file");
    assert!(jwt.reload(&file, &[], None).await.is_err());
    // Who comes without a credential is decided at the start.
    let open = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration", "jwt": [],
        "anonymous": {"enabled": true}});
    std::fs::write(&file, open.to_string()).expect("a file");
    assert!(jwt.reload(&file, &[], None).await.is_err());
    assert_eq!(reviewed(&cluster, &token).await["authenticated"], true);
    write(json!([]));
    jwt.reload(&file, &[], None).await.expect("a good file");
    assert_eq!(reviewed(&cluster, &token).await["error"], "invalid bearer token");
}

#[tokio::test]
async fn a_provider_that_is_no_good_is_no_way_in() {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, _, pki| {
        let jwt = |path: &str| {
            json!({"issuer": {"url": format!("https://localhost:{port}{path}"), "audiences": ["a"],
                    "certificateAuthority": pki.ca_certificate()},
                "claimMappings": {"username": {"claim": "sub", "prefix": ""}}})
        };
        let file = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration",
            "jwt": [jwt("/large"), jwt("/hanging"), jwt("/another")]});
        let file = AuthenticationConfiguration::parse(&file.to_string()).expect("a file");
        let list = file.authenticators(&[]).expect("good providers");
        config.authentication.jwt = Some(Arc::new(JwtAuthenticators::new(list)));
    })
    .await;
    let signer = Signer::new("k");
    let provider = Provider::start(listener, &cluster, &[&signer]);
    let https = Https::open(&cluster).await;
    while provider.peer.seen().len() < 3 {
        tokio::task::yield_now().await;
    }
    for path in ["/large", "/hanging", "/another"] {
        let issuer = format!("{}{path}", provider.url);
        let token = signer.sign(&json!({"iss": issuer, "aud": "a", "sub": "jane", "exp": now() + 3600}));
        assert_eq!(https.who(&cluster, &token).await.code, 401);
        assert_eq!(
            reviewed(&cluster, &token).await["error"],
            "[invalid bearer token, oidc: authenticator not initialized]"
        );
    }
    https.end().await;
}
