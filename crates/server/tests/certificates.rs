//! A serving certificate is replaced while clients are connected: their connections go on, and new handshakes see the
//! new one.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use skiff_pki::{LiveIdentity, Renewer};
use support::{Cluster, Https};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

fn shown(stream: &TlsStream<TcpStream>) -> Vec<u8> {
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

async fn asks(stream: &mut TlsStream<TcpStream>) -> String {
    let request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = vec![0; 4096];
    let mut length = 0;
    while !answer[..length].ends_with(b"ok") {
        let read = stream.read(&mut answer[length..]).await.unwrap();
        assert_ne!(read, 0, "the connection was closed");
        length += read;
    }
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_outlive_a_renewal() {
    let mut live = None;
    let cluster = Cluster::adjusted(|config, folder, pki| {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let identity = pki.serving("apiserver", "kube-apiserver", &names).unwrap();
        let identity = LiveIdentity::new("apiserver", identity).unwrap();
        let mut tls = (*config.tls).clone();
        tls.cert_resolver = identity.clone();
        config.tls = Arc::new(tls);
        live = Some((identity, folder.join("pki")));
    })
    .await;
    let (live, folder) = live.unwrap();
    let https = Https::open(&cluster).await;
    let mut before = https.connect(&cluster, None, "http/1.1").await;
    assert!(asks(&mut before).await.starts_with("HTTP/1.1 200"));
    let pki = || skiff_pki::Pki::open(&folder).unwrap();
    pki().renewed("apiserver", true).unwrap();
    let (renewed, failure) = Renewer::new(pki(), vec![live]).renew();
    assert!(failure.is_none(), "{failure:?}");
    assert_eq!(renewed.certificates, ["apiserver"]);
    let mut after = https.connect(&cluster, None, "http/1.1").await;
    assert_ne!(shown(&before), shown(&after));
    assert!(asks(&mut after).await.starts_with("HTTP/1.1 200"));
    assert!(
        asks(&mut before).await.starts_with("HTTP/1.1 200"),
        "the old connection goes on"
    );
}
