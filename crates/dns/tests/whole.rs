//! Cluster DNS as a whole: a real API server in this process, real sockets on loopback, resolvers by UDP, TCP and TLS.
#![allow(clippy::unwrap_used, reason = "a test ends with the first error")]

use hickory_proto::op::{Edns, Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Service};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use skiff_auth::UserInfo;
use skiff_dns::{DnsConfig, Listen, Metrics};
use skiff_testkit::ApiServer;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(60);

/// A resolver on loopback. By UDP, names that begin with `long` do not fit and must be asked for by TCP.
#[derive(Clone, Default)]
struct Resolver {
    by_udp: Arc<AtomicU32>,
    by_stream: Arc<AtomicU32>,
}

impl Resolver {
    fn answer(&self, question: &[u8], last: u8, udp: bool) -> Vec<u8> {
        let count = if udp { &self.by_udp } else { &self.by_stream };
        count.fetch_add(1, Ordering::SeqCst);
        let question = Message::from_vec(question).unwrap();
        let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
        answer.queries.clone_from(&question.queries);
        let name = question.queries[0].name().clone();
        if udp && name.to_ascii().starts_with("long") {
            answer.metadata.truncation = true;
        } else {
            let data = RData::A(Ipv4Addr::new(192, 0, 2, last).into());
            answer.answers = vec![Record::from_rdata(name, 300, data)];
        }
        answer.to_vec().unwrap()
    }

    async fn converse(self, mut stream: impl AsyncRead + AsyncWrite + Unpin, last: u8) {
        while let Ok(length) = stream.read_u16().await {
            let mut question = vec![0; usize::from(length)];
            stream.read_exact(&mut question).await.unwrap();
            let answer = self.answer(&question, last, false);
            stream.write_u16(answer.len() as u16).await.unwrap();
            stream.write_all(&answer).await.unwrap();
            stream.flush().await.unwrap();
        }
    }

    /// UDP and TCP on one port. Answers end in `last`.
    async fn start(&self, last: u8) -> SocketAddr {
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let (of_udp, of_tcp) = (self.clone(), self.clone());
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            while let Ok((length, peer)) = udp.recv_from(&mut buffer).await {
                let answer = of_udp.answer(&buffer[..length], last, true);
                let _ = udp.send_to(&answer, peer).await;
            }
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = tcp.accept().await {
                tokio::spawn(of_tcp.clone().converse(stream, last));
            }
        });
        address
    }

    /// TLS, with a certificate for `resolver.test`; its PEM comes second.
    async fn start_tls(&self, last: u8) -> (SocketAddr, String) {
        let made = rcgen::generate_simple_self_signed(vec!["resolver.test".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, resolver) = (listener.local_addr().unwrap(), self.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, resolver) = (acceptor.clone(), resolver.clone());
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        resolver.converse(stream, last).await;
                    }
                });
            }
        });
        (address, made.cert.pem())
    }
}

struct Dns {
    address: SocketAddr,
}

impl Dns {
    async fn ask_as(&self, name: &str, kind: RecordType, tcp: bool) -> std::io::Result<Message> {
        let mut question = Message::query();
        question.metadata.recursion_desired = true;
        question.edns = Some(Edns::new());
        question.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        let bytes = question.to_vec().unwrap();
        let asking = async {
            let mut answer = vec![0; 65535];
            let length = if tcp {
                let mut stream = TcpStream::connect(self.address).await?;
                stream.write_u16(bytes.len() as u16).await?;
                stream.write_all(&bytes).await?;
                let length = usize::from(stream.read_u16().await?);
                stream.read_exact(&mut answer[..length]).await?
            } else {
                let socket = UdpSocket::bind("127.0.0.1:0").await?;
                socket.connect(self.address).await?;
                socket.send(&bytes).await?;
                socket.recv(&mut answer).await?
            };
            let answer = Message::from_vec(&answer[..length]).map_err(std::io::Error::other)?;
            assert_eq!(answer.metadata.id, question.metadata.id);
            Ok(answer)
        };
        tokio::time::timeout(Duration::from_secs(10), asking)
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
    }

    /// The data of an answer, or its code.
    async fn ask(&self, name: &str) -> String {
        match self.ask_as(name, RecordType::A, false).await {
            Ok(answer) if answer.metadata.response_code == ResponseCode::NoError => {
                let data: Vec<String> = answer.answers.iter().map(|r| r.data.to_string()).collect();
                data.join(" ")
            }
            Ok(answer) => format!("{:?}", answer.metadata.response_code),
            Err(error) => error.to_string(),
        }
    }

    /// Waits until a name has this answer.
    async fn until(&self, name: &str, expected: &str) {
        let waiting = async {
            loop {
                let found = self.ask(name).await;
                if found == expected {
                    return;
                }
                println!("{name}: {found}, not {expected}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let done = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(done.is_ok(), "{name} does not become {expected}");
    }
}

async fn free_port() -> SocketAddr {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = udp.local_addr().unwrap();
        if TcpListener::bind(address).await.is_ok() {
            return address;
        }
    }
}

/// What skiff's own roles give the service account, so that a missing permission fails here.
async fn permit(api: &ApiServer) {
    let admin = api.admin();
    let roles: Api<k8s_openapi::api::rbac::v1::ClusterRole> = Api::all(admin.clone());
    let role = json!({"metadata": {"name": "system:coredns"}, "rules": [
        {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]});
    let create = PostParams::default();
    roles
        .create(&create, &serde_json::from_value(role).unwrap())
        .await
        .unwrap();
    let subjects = json!([{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}]);
    let bindings: Api<k8s_openapi::api::rbac::v1::ClusterRoleBinding> = Api::all(admin.clone());
    let binding = json!({"metadata": {"name": "system:coredns"}, "subjects": subjects,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}});
    bindings
        .create(&create, &serde_json::from_value(binding).unwrap())
        .await
        .unwrap();
    let roles: Api<Role> = Api::namespaced(admin.clone(), "kube-system");
    let role = json!({"metadata": {"name": "corefile"}, "rules": [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["coredns"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}]});
    roles
        .create(&create, &serde_json::from_value(role).unwrap())
        .await
        .unwrap();
    let bindings: Api<RoleBinding> = Api::namespaced(admin, "kube-system");
    let binding = json!({"metadata": {"name": "corefile"}, "subjects": subjects,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "corefile"}});
    bindings
        .create(&create, &serde_json::from_value(binding).unwrap())
        .await
        .unwrap();
}

async fn set_corefile(api: &ApiServer, corefile: &str, more: serde_json::Value) {
    let maps: Api<ConfigMap> = Api::namespaced(api.admin(), "kube-system");
    let mut data = json!({"Corefile": corefile});
    for (key, value) in more.as_object().unwrap() {
        data[key] = value.clone();
    }
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "coredns"}, "data": data});
    let apply = PatchParams::apply("test").force();
    maps.patch("coredns", &apply, &Patch::Apply(map)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_resolvers_and_corefiles() {
    let api = ApiServer::start().await.unwrap();
    permit(&api).await;
    let namespaces: Api<Namespace> = Api::all(api.admin());
    let services: Api<Service> = Api::namespaced(api.admin(), "default");
    assert!(namespaces.get("default").await.is_ok());
    let create = PostParams::default();
    let service =
        json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.77", "ports": [{"port": 80}]}});
    services
        .create(&create, &serde_json::from_value(service).unwrap())
        .await
        .unwrap();

    let (plain, first, tls) = (Resolver::default(), Resolver::default(), Resolver::default());
    let (plain_at, first_at) = (plain.start(1).await, first.start(2).await);
    let (tls_at, tls_pem) = tls.start_tls(3).await;
    let resolv_conf = api.folder().join("resolv.conf");
    std::fs::write(&resolv_conf, "nameserver 192.0.2.250\n").unwrap();

    let (stop, registry) = (CancellationToken::new(), skiff_prometheus::Registry::new());
    let config = DnsConfig {
        listen: Listen::On(vec![free_port().await]),
        pods: vec!["10.244.0.0/16".parse().unwrap()],
        domain: "cluster.local".to_owned(),
        resolv_conf,
        own: vec!["10.96.0.10".parse().unwrap()],
        node_name: "here".to_owned(),
        metrics: Arc::new(Metrics::new(&registry)),
    };
    let Listen::On(addresses) = config.listen.clone() else {
        unreachable!()
    };
    let dns = Dns {
        address: addresses[0],
    };
    let client = api.client(UserInfo::service_account("kube-system", "coredns"));
    let running = tokio::spawn(skiff_dns::run(config, client, stop.clone()));

    // Without a ConfigMap, kubeadm's Corefile.
    let web = "web.default.svc.cluster.local.";
    dns.until(web, "10.96.0.77").await;
    let by_tcp = dns.ask_as(web, RecordType::A, true).await.unwrap();
    assert_eq!((by_tcp.answers.len(), by_tcp.answers[0].ttl), (1, 30));
    let other =
        json!({"metadata": {"name": "later"}, "spec": {"clusterIP": "10.96.0.78", "ports": [{"port": 80}]}});
    services
        .create(&create, &serde_json::from_value(other).unwrap())
        .await
        .unwrap();
    dns.until("later.default.svc.cluster.local.", "10.96.0.78").await;
    services.delete("later", &DeleteParams::default()).await.unwrap();
    dns.until("later.default.svc.cluster.local.", "NXDomain").await;

    // A stub domain, an answer by TCP, and a resolver by TLS whose certificate is a key of the ConfigMap.
    let kubernetes = "kubernetes cluster.local in-addr.arpa ip6.arpa {\n pods insecure\n fallthrough in-addr.arpa ip6.arpa\n ttl 12\n }";
    let corefile = format!(
        ".:53 {{\n errors\n {kubernetes}\n hosts /etc/coredns/hosts.list {{\n fallthrough\n }}\n forward . {first_at}\n cache 30\n loop\n}}\nacme.local {{\n forward . {plain_at}\n}}\nsecret.local {{\n forward . tls://{tls_at} {{\n tls /etc/coredns/ca.pem\n tls_servername resolver.test\n }}\n}}\n"
    );
    let files = json!({"hosts.list": "192.0.2.99 listed.org", "ca.pem": tls_pem});
    set_corefile(&api, &corefile, files.clone()).await;
    dns.until("a.acme.local.", "192.0.2.1").await;
    assert_eq!(dns.ask("listed.org.").await, "192.0.2.99");
    assert_eq!(dns.ask("a.secret.local.").await, "192.0.2.3");
    assert_eq!(dns.ask("b.secret.local.").await, "192.0.2.3");
    assert_eq!(
        (
            tls.by_udp.load(Ordering::SeqCst),
            tls.by_stream.load(Ordering::SeqCst)
        ),
        (0, 2)
    );
    let whole = dns
        .ask_as("long.acme.local.", RecordType::A, false)
        .await
        .unwrap();
    assert!(!whole.metadata.truncation && whole.answers.len() == 1);
    assert_eq!(plain.by_stream.load(Ordering::SeqCst), 1);
    let again = dns.ask_as(web, RecordType::A, false).await.unwrap();
    assert_eq!(again.answers[0].ttl, 12, "the Corefile says so");
    let before = first.by_udp.load(Ordering::SeqCst);
    for _ in 0..5 {
        assert_eq!(dns.ask("cached.org.").await, "192.0.2.2");
    }
    assert_eq!(first.by_udp.load(Ordering::SeqCst), before + 1);

    // A certificate for another name is refused.
    set_corefile(
        &api,
        &corefile.replace("resolver.test", "other.test"),
        files.clone(),
    )
    .await;
    dns.until("c.secret.local.", "ServFail").await;

    // What is not supported is refused by name, and changes nothing.
    set_corefile(&api, &corefile.replace("errors", "etcd"), files.clone()).await;
    let events: Api<Event> = Api::namespaced(api.admin(), "kube-system");
    let refused = async {
        loop {
            let all = events.list(&ListParams::default()).await.unwrap();
            let found = all.items.into_iter().find(|event| {
                event.involved_object.name.as_deref() == Some("coredns")
                    && event.reason.as_deref() == Some("CorefileRefused")
            });
            match found {
                Some(event) => return event.message.unwrap(),
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    };
    let message = tokio::time::timeout(PATIENCE, refused).await.unwrap();
    assert!(message.contains("the plugin etcd is not supported"), "{message}");
    assert_eq!(
        dns.ask("d.acme.local.").await,
        "192.0.2.1",
        "the last good one stays"
    );

    // Without the ConfigMap, the default again.
    let maps: Api<ConfigMap> = Api::namespaced(api.admin(), "kube-system");
    maps.delete("coredns", &DeleteParams::default()).await.unwrap();
    let default_again = async {
        loop {
            let answer = dns.ask_as(web, RecordType::A, false).await.unwrap();
            if answer.answers[0].ttl == 30 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, default_again).await.unwrap();

    let text = registry.text();
    for expected in [
        "coredns_dns_requests_total{family=\"1\",proto=\"tcp\",server=\"dns://:53\",type=\"A\",view=\"\",zone=\".\"} 1",
        "coredns_dns_responses_total{plugin=\"kubernetes\",rcode=\"NXDOMAIN\"",
        "coredns_cache_hits_total{server=\"dns://:53\",type=\"success\",view=\"\",zones=\".\"} 4",
        "coredns_proxy_request_duration_seconds_count{proxy_name=\"forward\",rcode=\"NOERROR\"",
        "coredns_reload_failed_total 1",
    ] {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    stop.cancel();
    running.await.unwrap().unwrap();
}
