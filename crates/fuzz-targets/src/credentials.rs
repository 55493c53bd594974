//! Bearer tokens: any text, and signed tokens with any claims.

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use skiff_auth::{Lookup, TokenVerifier};
use tokio::runtime::{Builder, Runtime};

use crate::input;

struct Fixture {
    runtime: Runtime,
    verifier: TokenVerifier,
    key: EncodingKey,
}

/// Everything lives.
struct Objects;

#[async_trait]
impl Lookup for Objects {
    async fn uid(&self, _resource: &str, _namespace: &str, _name: &str) -> Option<String> {
        Some("u1".to_owned())
    }
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let pair = rcgen::KeyPair::generate().expect("a key");
    let verifier = TokenVerifier::new(
        &pair.public_key_pem(),
        "iss".to_owned(),
        vec!["api".to_owned()],
        Arc::new(Objects),
    );
    Fixture {
        runtime: Builder::new_current_thread().build().expect("a runtime"),
        verifier: verifier.expect("a verifier"),
        key: EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).expect("a key"),
    }
});

pub fn bearer_token(data: &[u8]) {
    let fixture = &*FIXTURE;
    let verify = |token: &str| {
        let mut notes = Vec::new();
        let verified = fixture.verifier.verify(token, None, &mut notes);
        fixture.runtime.block_on(verified)
    };
    if let Ok(text) = std::str::from_utf8(data) {
        assert!(verify(text).is_err(), "nobody signed this");
    }
    let Some(claims) = input::json(data) else {
        return;
    };
    if let Ok(token) = encode(&Header::new(Algorithm::ES256), &claims, &fixture.key)
        && let Ok(user) = verify(&token)
    {
        assert!(user.name.starts_with("system:serviceaccount:"), "{}", user.name);
    }
}
