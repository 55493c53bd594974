//! Hosts by `hosts.toml`: which are asked, in which order, for what, over which TLS and with which credentials.

use crate::fake::{Answer, Content, Fake, Seen, answer};
use skiff_runtime::image::{Credentials, ImageStore, silent};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store, and the folder of its registries' configuration.
struct Setup {
    directory: tempfile::TempDir,
    store: Arc<ImageStore>,
}

impl Setup {
    fn new() -> Setup {
        let directory = tempfile::tempdir().expect("directory");
        let store = ImageStore::open(&directory.path().join("images")).expect("store");
        let store = Arc::new(store.with_registry_configs(vec![directory.path().join("certs.d")]));
        Setup { directory, store }
    }

    fn folder(&self, registry: &str) -> PathBuf {
        let folder = self.directory.path().join("certs.d").join(registry);
        std::fs::create_dir_all(&folder).expect("make");
        folder
    }

    fn configure(&self, registry: &str, text: &str) {
        std::fs::write(self.folder(registry).join("hosts.toml"), text).expect("write");
    }

    /// Pulls anew, whatever is there.
    async fn pull(&self, name: &str, credentials: Option<&Credentials>) -> Result<(), String> {
        for image in self.store.list().expect("list") {
            self.store.remove(&image.id).expect("remove");
        }
        let pulled = self.store.pull(name, credentials, &silent()).await;
        pulled.map(|_| ()).map_err(|error| error.to_string())
    }
}

fn folder_of(address: SocketAddr) -> String {
    format!("{}_{}_", address.ip(), address.port())
}

/// What is asked of a host that serves the whole image.
fn whole(content: &Content, prefix: &str, query: &str) -> Vec<String> {
    let manifest: serde_json::Value = serde_json::from_slice(&content.manifest).expect("manifest");
    let config = manifest["config"]["digest"].as_str().expect("digest");
    vec![
        format!("GET {prefix}/manifests/1{query}"),
        format!("GET {prefix}/blobs/{config}{query}"),
        format!("GET {prefix}/blobs/{}{query}", content.layer_digest),
    ]
}

pub async fn order() {
    let setup = Setup::new();
    let content = Content::new();
    let (upstream, mirror) = (content.registry().await, content.registry().await);
    let broken = Fake::start(|_| answer(503, "later")).await;
    let empty = Fake::start(|_| answer(404, "{}")).await;
    let name = format!("{}/team/web:1", upstream.address);
    let ns = format!("?ns=127.0.0.1%3A{}", upstream.address.port());

    // Without a configuration.
    setup.pull(&name, None).await.expect("pulls");
    assert_eq!(upstream.take_lines(), whole(&content, "/v2/team/web", ""));

    // The file is read anew at each pull. Hosts that fail are passed over, and nobody asks twice.
    let mirrors = format!(
        "[host.\"http://127.0.0.1:1\"]\n[host.\"http://{}\"]\n[host.\"http://{}\"]\n[host.\"http://{}\"]\n\
         [host.\"http://{}\".header]\nX-Team = [\"a\", \"b\"]\n",
        broken.address, empty.address, mirror.address, mirror.address
    );
    setup.configure(&folder_of(upstream.address), &mirrors);
    setup.pull(&name, None).await.expect("pulls");
    let seen = mirror.take();
    let lines: Vec<String> = seen
        .iter()
        .map(|seen| format!("{} {}", seen.method, seen.path))
        .collect();
    assert_eq!(lines, whole(&content, "/v2/team/web", &ns));
    assert!(
        seen.iter().all(|seen| seen.header("x-team") == "b"),
        "{:?}",
        seen[0].headers
    );
    assert_eq!(
        (broken.take().len(), empty.take().len(), upstream.take().len()),
        (3, 3, 0)
    );

    // The last one is the registry itself, which is told nothing of a proxy.
    let mirrors = format!("[host.\"http://{}\"]\n", empty.address);
    setup.configure(&folder_of(upstream.address), &mirrors);
    setup.pull(&name, None).await.expect("pulls");
    assert_eq!(upstream.take_lines(), whole(&content, "/v2/team/web", ""));
    assert_eq!(empty.take_lines(), whole(&content, "/v2/team/web", &ns));

    // A host that must not resolve tags serves what they stand for.
    let mirrors = format!(
        "[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n",
        mirror.address
    );
    setup.configure(&folder_of(upstream.address), &mirrors);
    setup.pull(&name, None).await.expect("pulls");
    assert_eq!(upstream.take_lines(), ["HEAD /v2/team/web/manifests/1"]);
    let lines = mirror.take_lines();
    assert!(
        lines[0].starts_with("GET /v2/team/web/manifests/sha256:"),
        "{lines:?}"
    );
    assert_eq!(lines[1..], whole(&content, "/v2/team/web", &ns)[1..]);
    // Without HEAD the manifest itself is asked of the registry.
    let served = content.clone();
    let without_head = Fake::start(move |seen| match seen.method.as_str() {
        "HEAD" => answer(405, ""),
        _ => served.serve(seen),
    })
    .await;
    let server = format!("server = \"http://{}\"\n", without_head.address);
    setup.configure(&folder_of(upstream.address), &(server + &mirrors));
    setup.pull(&name, None).await.expect("pulls");
    assert_eq!(
        without_head.take_lines()[1],
        format!("GET /v2/team/web/manifests/1{ns}")
    );
    assert_eq!(mirror.take_lines(), whole(&content, "/v2/team/web", &ns)[1..]);
    // And one that may only resolve serves nothing.
    setup.configure(
        &folder_of(upstream.address),
        &format!(
            "server = \"http://{}\"\ncapabilities = [\"resolve\"]",
            mirror.address
        ),
    );
    let error = setup.pull(&name, None).await.expect_err("nobody serves");
    assert!(
        error.contains("no host is configured that may resolve tags"),
        "{error}"
    );
    assert_eq!(mirror.take().len() + upstream.take().len(), 0);

    // A server in place of the registry, with a path of its own; docker.io goes by its name.
    setup.configure(
        "docker.io",
        &format!(
            "server = \"http://{}/v2/hub\"\noverride_path = true",
            mirror.address
        ),
    );
    setup.pull("web:1", None).await.expect("pulls");
    assert_eq!(
        mirror.take_lines(),
        whole(&content, "/v2/hub/library/web", "?ns=docker.io")
    );
    setup.configure("_default", &format!("server = \"http://{}\"", mirror.address));
    setup.pull("reg.example/web:1", None).await.expect("pulls");
    assert_eq!(mirror.take_lines(), whole(&content, "/v2/web", "?ns=reg.example"));

    // A file that cannot be understood: nobody is asked.
    setup.configure(
        &folder_of(upstream.address),
        "[host.\"https://mirror.example\"]\nskip_verfy = true",
    );
    let error = setup.pull(&name, None).await.expect_err("a bad file");
    let file = setup.folder(&folder_of(upstream.address)).join("hosts.toml");
    assert!(
        error.contains(&file.display().to_string()) && error.contains("skip_verfy"),
        "{error}"
    );
    assert_eq!(upstream.take().len() + mirror.take().len(), 0);

    // Of several errors, the one that came furthest.
    let mirrors = format!(
        "server = \"http://127.0.0.1:1\"\n[host.\"http://{}\"]\n[host.\"http://127.0.0.1:2\"]",
        empty.address
    );
    setup.configure(&folder_of(upstream.address), &mirrors);
    let error = setup.pull(&name, None).await.expect_err("nobody has it");
    assert!(error.ends_with("not found"), "{error}");
}

/// Certificates of a test: an authority, a server's for 127.0.0.1 and a client's.
struct Keys {
    ca: String,
    client: String,
    client_key: String,
    server: tokio_rustls::TlsAcceptor,
    strict_server: tokio_rustls::TlsAcceptor,
}

impl Keys {
    fn new() -> Keys {
        use tokio_rustls::rustls;
        let mut params = rcgen::CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca_key = rcgen::KeyPair::generate().expect("key");
        let ca = params.self_signed(&ca_key).expect("certificate");
        let issuer = rcgen::Issuer::new(params, ca_key);
        let signed = |name: &str, usage: rcgen::ExtendedKeyUsagePurpose| {
            let key = rcgen::KeyPair::generate().expect("key");
            let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).expect("parameters");
            params.extended_key_usages = vec![usage];
            (params.signed_by(&key, &issuer).expect("signed"), key)
        };
        let (client, client_key) = signed("client", rcgen::ExtendedKeyUsagePurpose::ClientAuth);
        let (server, server_key) = signed("127.0.0.1", rcgen::ExtendedKeyUsagePurpose::ServerAuth);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.der().clone()).expect("a root");
        let verifier =
            rustls::server::WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
        let acceptor = |verifier| {
            let config = rustls::ServerConfig::builder_with_provider(provider.clone())
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_client_cert_verifier(verifier);
            let key = rustls::pki_types::PrivateKeyDer::try_from(server_key.serialize_der()).expect("key");
            let config = config.with_single_cert(vec![server.der().clone()], key);
            tokio_rustls::TlsAcceptor::from(Arc::new(config.expect("a configuration")))
        };
        Keys {
            ca: ca.pem(),
            client: client.pem(),
            client_key: client_key.serialize_pem(),
            server: acceptor(rustls::server::WebPkiClientVerifier::no_client_auth()),
            strict_server: acceptor(verifier.build().expect("a verifier")),
        }
    }

    fn write(&self, folder: &Path, names: &[&str]) {
        for name in names {
            let body = match *name {
                name if name.ends_with(".crt") => self.ca.clone(),
                name if name.ends_with(".cert") => self.client.clone(),
                name if name.ends_with(".key") => self.client_key.clone(),
                _ => format!("{}{}", self.client, self.client_key),
            };
            std::fs::write(folder.join(name), body).expect("write");
        }
    }
}

pub async fn tls() {
    let setup = Setup::new();
    let content = Content::new();
    let (keys, others) = (Keys::new(), Keys::new());
    let serve = |tls: &tokio_rustls::TlsAcceptor| {
        let content = content.clone();
        Fake::start_with(
            Some(tls.clone()),
            Arc::new(move |seen: &Seen| content.serve(seen)),
        )
    };
    let (server, strict) = (serve(&keys.server).await, serve(&keys.strict_server).await);
    let plain = content.registry().await;
    let folder = setup.folder("reg.example");
    keys.write(&folder, &["ca.crt", "client.pem", "client.cert", "client.key"]);
    std::fs::write(folder.join("other.crt"), &others.ca).expect("write");
    std::fs::write(folder.join("empty.crt"), "").expect("write");
    let (lenient, needs_client) = (server.address, strict.address);
    for (text, expected) in [
        (format!("server = \"https://{lenient}\""), Some("certificate")),
        (
            format!("server = \"https://{lenient}\"\nca = \"other.crt\""),
            Some("certificate"),
        ),
        (
            format!("server = \"https://{lenient}\"\nca = [\"other.crt\", \"ca.crt\"]"),
            None,
        ),
        (
            format!("server = \"https://{lenient}\"\nskip_verify = true"),
            None,
        ),
        (
            format!("server = \"https://{lenient}\"\nskip_verify = false"),
            Some("certificate"),
        ),
        (
            format!("server = \"https://{lenient}\"\nca = \"missing.crt\""),
            Some("missing.crt"),
        ),
        (
            format!("server = \"https://{lenient}\"\nca = \"empty.crt\""),
            Some("empty.crt"),
        ),
        (
            format!("server = \"https://{needs_client}\"\nca = \"ca.crt\""),
            Some("failed to resolve"),
        ),
        (
            format!("server = \"https://{needs_client}\"\nca = \"ca.crt\"\nclient = \"client.pem\""),
            None,
        ),
        (
            format!(
                "server = \"https://{needs_client}\"\nca = \"ca.crt\"\nclient = [[\"client.cert\", \"client.key\"]]"
            ),
            None,
        ),
        (
            format!("server = \"https://{needs_client}\"\nca = \"ca.crt\"\nclient = [\"ca.crt\"]"),
            Some("cannot load the client certificate"),
        ),
        // Plain HTTP with something about TLS: both are tried, and a certificate that is wrong stays wrong.
        (format!("server = \"http://{lenient}\"\nskip_verify = true"), None),
        (
            format!("server = \"http://{lenient}\"\nca = \"other.crt\""),
            Some("certificate"),
        ),
        (
            format!("server = \"http://{}\"\nskip_verify = true", plain.address),
            None,
        ),
        (format!("server = \"http://{}\"", plain.address), None),
        (
            format!("server = \"https://{}\"\nskip_verify = true", plain.address),
            Some("failed to resolve"),
        ),
    ] {
        setup.configure("reg.example", &text);
        let pulled = setup.pull("reg.example/web:1", None).await;
        match (pulled, expected) {
            (Ok(()), None) => {}
            (Err(error), Some(expected)) if error.contains(expected) => {}
            (pulled, expected) => panic!("{text}: {pulled:?}, not {expected:?}"),
        }
    }

    // By the files alone, as docker has them.
    let address = strict.address;
    let folder = setup.folder(&format!("localhost_{}_", address.port()));
    keys.write(&folder, &["ca.crt", "client.cert", "client.key"]);
    // The certificate is for 127.0.0.1, so nobody is believed who calls himself localhost.
    let error = setup
        .pull(&format!("localhost:{}/web:1", address.port()), None)
        .await;
    assert!(error.expect_err("another name").contains("certificate"));
    let folder = setup.folder(&folder_of(address));
    keys.write(&folder, &["ca.crt", "client.cert", "client.key"]);
    setup
        .pull(&format!("{address}/web:1"), None)
        .await
        .expect("pulls");
}

/// Serves to those who show `user:secret`.
fn guarded(content: &Content, seen: &Seen) -> Answer {
    match seen.header("authorization") {
        "Basic dXNlcjpzZWNyZXQ=" => content.serve(seen),
        _ => answer(401, "").with("WWW-Authenticate", "Basic realm=\"x\""),
    }
}

/// Whether any request showed anything.
fn shown(fake: &Fake) -> bool {
    fake.take()
        .iter()
        .any(|seen| !seen.header("authorization").is_empty() || seen.body.contains("secret"))
}

pub async fn credentials() {
    let setup = Setup::new();
    let content = Content::new();
    let serve = || {
        let content = content.clone();
        Fake::start(move |seen| guarded(&content, seen))
    };
    let (upstream, mirror) = (serve().await, serve().await);
    let name = format!("{}/web:1", upstream.address);
    let mirrors = format!("[host.\"http://{}\"]", mirror.address);
    setup.configure(&folder_of(upstream.address), &mirrors);
    let mut credentials = Credentials {
        username: "user".into(),
        password: "secret".into(),
        ..Credentials::default()
    };

    // As with containerd: without a server they are for all hosts of the configuration, else for that server alone.
    setup.pull(&name, Some(&credentials)).await.expect("pulls");
    assert!(shown(&mirror) && !shown(&upstream));
    credentials.server_address = format!("http://{}/v2/", upstream.address);
    setup.pull(&name, Some(&credentials)).await.expect("pulls");
    assert!(shown(&upstream) && !shown(&mirror));
    credentials.server_address = "other.example".into();
    let error = setup.pull(&name, Some(&credentials)).await.expect_err("refused");
    assert!(error.contains("authorization failed"), "{error}");
    assert!(!shown(&upstream) && !shown(&mirror));

    // What a registry says about where its content is, tells nobody the password.
    let stranger = content.registry().await;
    let (elsewhere, served) = (stranger.address, content.clone());
    let redirecting = Fake::start(move |seen| match seen.path.contains("/blobs/") {
        false => guarded(&served, seen),
        true => match seen.header("authorization") {
            "" => guarded(&served, seen),
            _ => answer(307, "").with("Location", format!("http://{elsewhere}{}", seen.path)),
        },
    })
    .await;
    let name = format!("{}/web:1", redirecting.address);
    credentials.server_address = redirecting.address.to_string();
    setup.pull(&name, Some(&credentials)).await.expect("pulls");
    assert!(!stranger.seen.lock().expect("lock").is_empty());
    assert!(shown(&redirecting) && !shown(&stranger));

    // Nor if whoever is there asks for it.
    let thief = Fake::start(|seen| {
        let realm = format!("Bearer realm=\"http://{}/token\"", seen.header("host"));
        answer(401, "").with("WWW-Authenticate", realm)
    })
    .await;
    let (elsewhere, served) = (thief.address, content.clone());
    let redirecting = Fake::start(move |seen| match seen.path.contains("/blobs/") {
        false => guarded(&served, seen),
        true => answer(307, "").with("Location", format!("http://{elsewhere}{}", seen.path)),
    })
    .await;
    let name = format!("{}/web:1", redirecting.address);
    credentials.server_address = redirecting.address.to_string();
    let error = setup.pull(&name, Some(&credentials)).await.expect_err("refused");
    assert!(error.contains("authorization failed"), "{error}");
    assert!(!thief.seen.lock().expect("lock").is_empty());
    assert!(shown(&redirecting) && !shown(&thief));
}

/// A token server and its registry in one. `/token` does what `grant` says.
async fn tokens(content: &Content, grant: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Fake {
    let content = content.clone();
    Fake::start(move |seen| {
        if seen.path.starts_with("/token") {
            return grant(seen);
        }
        match seen.header("authorization") {
            "Bearer granted" => content.serve(seen),
            _ => answer(401, "").with(
                "WWW-Authenticate",
                format!(
                    "Bearer realm=\"http://{}/token\",service=\"reg & co\",scope=\"repository:web:pull\"",
                    seen.header("host")
                ),
            ),
        }
    })
    .await
}

pub async fn identity_tokens() {
    let setup = Setup::new();
    let content = Content::new();
    let identity = Credentials {
        username: "00000000-0000-0000-0000-000000000000".into(),
        identity_token: "long+secret/token=".into(),
        ..Credentials::default()
    };
    let access = r#"{"access_token": "granted", "expires_in": 60, "refresh_token": "other"}"#;

    let fake = tokens(&content, move |_| answer(200, access)).await;
    let name = format!("{}/web:1", fake.address);
    setup.pull(&name, Some(&identity)).await.expect("pulls");
    let asked: Vec<Seen> = fake
        .take()
        .into_iter()
        .filter(|seen| seen.path.starts_with("/token"))
        .collect();
    let [asked] = asked.as_slice() else {
        panic!("{} tokens were asked for", asked.len())
    };
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("POST", "/token"));
    assert!(
        asked
            .header("content-type")
            .starts_with("application/x-www-form-urlencoded")
    );
    assert_eq!(
        asked.body,
        "grant_type=refresh_token&service=reg+%26+co&client_id=skiff&scope=repository%3Aweb%3Apull&\
         refresh_token=long%2Bsecret%2Ftoken%3D"
    );
    assert_eq!(asked.header("authorization"), "");

    // A token server that takes no POST: the identity token is the password then.
    let fake = tokens(&content, |seen| match seen.method.as_str() {
        "POST" => answer(404, "no"),
        _ if seen.header("authorization") == "Basic Omxvbmcrc2VjcmV0L3Rva2VuPQ==" => {
            answer(200, r#"{"token": "granted"}"#)
        }
        _ => answer(401, "who?"),
    })
    .await;
    setup
        .pull(&format!("{}/web:1", fake.address), Some(&identity))
        .await
        .expect("pulls");

    // Refusals, with and without a second way.
    for status in [401, 403] {
        let fake = tokens(&content, move |_| answer(status, "revoked")).await;
        let error = setup
            .pull(&format!("{}/web:1", fake.address), Some(&identity))
            .await;
        let error = error.expect_err("refused");
        assert!(
            error.contains("failed to fetch a token") && error.contains("revoked"),
            "{error}"
        );
        assert!(!error.contains("long"), "{error}");
    }
    let endless = tokens(&content, |_| answer(200, vec![b' '; 2 << 20])).await;
    let error = setup
        .pull(&format!("{}/web:1", endless.address), Some(&identity))
        .await;
    let error = error.expect_err("too large");
    assert!(
        error.contains("the answer of the token server is larger than"),
        "{error}"
    );

    // A registry that wants a password gets no identity token.
    let served = content.clone();
    let fake = Fake::start(move |seen| guarded(&served, seen)).await;
    let error = setup
        .pull(&format!("{}/web:1", fake.address), Some(&identity))
        .await;
    assert!(error.expect_err("no password").contains("authorization failed"));
    assert!(!shown(&fake));

    // The registry's own token is shown as it is.
    let fake = tokens(&content, |_| answer(500, "nobody asks")).await;
    let token = Credentials {
        registry_token: "granted".into(),
        ..Credentials::default()
    };
    setup
        .pull(&format!("{}/web:1", fake.address), Some(&token))
        .await
        .expect("pulls");
    assert!(fake.take().iter().all(|seen| !seen.path.starts_with("/token")));
}
