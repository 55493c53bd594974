//! The certificates of a running cluster: those that its components show each other, kept fresh while it runs.

use crate::cluster::Cluster;
use anyhow::{Context, Result};
use skiff_client::kubeconfig::{self, ClusterEntry};
use skiff_pki::{FrontProxy, LiveIdentity, Pki, Renewer};
use skiff_server::Server;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How often the certificates are looked at: so soon what `skiff certs renew` made is in use, and a clock that was set
/// right no longer hurts.
pub const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

pub struct Certificates {
    pub ca: String,
    pub api_server: Arc<LiveIdentity>,
    pub kubelet_client: Arc<LiveIdentity>,
    pub kubelet: Arc<LiveIdentity>,
    pub admin: Arc<LiveIdentity>,
    pub front_proxy: FrontProxy,
    pub service_account: (String, String),
    /// The certificate of the authority as it is now; it changes when that is renewed.
    pub current_ca: watch::Sender<String>,
    folder: PathBuf,
}

impl Cluster {
    pub fn pki_dir(&self) -> PathBuf {
        self.data_dir.join("pki")
    }
}

impl Certificates {
    /// `advertise` is where others reach the API server, `endpoint` the host in front of several, `node` the name and the
    /// address of this machine.
    pub fn open(
        cluster: &Cluster,
        domain: &str,
        advertise: IpAddr,
        endpoint: Option<&str>,
        (node_name, node_address): (&str, IpAddr),
    ) -> Result<Certificates> {
        let folder = cluster.pki_dir();
        let pki = Pki::open(&folder)?;
        let mut hosts = vec![
            "kubernetes".to_owned(),
            "kubernetes.default".to_owned(),
            "kubernetes.default.svc".to_owned(),
            format!("kubernetes.default.svc.{domain}"),
            "localhost".to_owned(),
            node_name.to_owned(),
        ];
        let mut addresses = vec![
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            cluster.service_ip(1)?,
            advertise,
            cluster.pod_gateway()?,
            cluster.bind.ip(),
        ];
        match endpoint.map(str::parse::<IpAddr>) {
            Some(Ok(ip)) => addresses.push(ip),
            Some(Err(_)) => hosts.extend(endpoint.map(str::to_owned)),
            None => {}
        }
        addresses.retain(|ip| !ip.is_unspecified());
        addresses.sort();
        addresses.dedup();
        hosts.extend(addresses.iter().map(IpAddr::to_string));
        hosts.sort();
        hosts.dedup();
        let node_hosts = vec![node_name.to_owned(), node_address.to_string()];
        let serving = |name: &str, user: &str, hosts: &[String]| {
            LiveIdentity::new(name, pki.serving(name, user, hosts)?)
        };
        let client = |name: &str, user: &str, group: Option<&str>| {
            LiveIdentity::new(name, pki.client(name, user, group)?)
        };
        Ok(Certificates {
            ca: pki.ca_certificate().to_owned(),
            api_server: serving("apiserver", "kube-apiserver", &hosts)?,
            // In no group: a node whose status names the API server's own address must not make the API server a
            // cluster administrator at itself. Kubelets know this client by its name.
            kubelet_client: client("apiserver-kubelet-client", "kube-apiserver-kubelet-client", None)?,
            kubelet: serving("kubelet", &format!("system:node:{node_name}"), &node_hosts)?,
            admin: client("admin", "kubernetes-admin", Some("system:masters"))?,
            front_proxy: pki.front_proxy()?,
            service_account: pki.service_account_keys()?,
            current_ca: watch::Sender::new(pki.ca_certificate().to_owned()),
            folder,
        })
    }

    /// Writes the admin's kubeconfig. `merge`: also into the user's, where the cluster becomes the current context if
    /// that is `make_current`.
    pub fn write_kubeconfig(&self, cluster: &Cluster, merge: bool, make_current: bool) -> Result<()> {
        let admin = self.admin.identity();
        let entry = ClusterEntry {
            name: cluster.name.clone(),
            server: cluster.endpoint(),
            ca_pem: self.current_ca.borrow().clone(),
            client_certificate_pem: admin.certificate.clone(),
            client_key_pem: admin.key.clone(),
        };
        kubeconfig::write(&cluster.kubeconfig(), &entry)?;
        if merge && let Some(path) = kubeconfig::paths().first() {
            // The user's file is a convenience: a start does not fail for it.
            if let Err(error) = kubeconfig::merge(path, &entry, make_current) {
                tracing::warn!(%error, "the context is not in the user's kubeconfig");
            }
        }
        Ok(())
    }

    /// Renews certificates when they are due, for as long as the server runs. Handshakes show the new ones from then
    /// on; connections that are open are not touched.
    pub fn follow(
        self: &Arc<Self>,
        cluster: &Cluster,
        merge: bool,
        server: &Server,
        stop: CancellationToken,
    ) -> Result<()> {
        let identities = vec![
            self.api_server.clone(),
            self.kubelet_client.clone(),
            self.kubelet.clone(),
            self.admin.clone(),
            self.front_proxy.live.clone(),
        ];
        let mut renewer = Some(Renewer::new(Pki::open(&self.folder)?, identities.clone()));
        let (certificates, cluster, server) = (self.clone(), cluster.clone(), server.clone());
        tokio::spawn(async move {
            let mut unfinished = false;
            while tokio::time::timeout(RENEWAL_INTERVAL, stop.cancelled())
                .await
                .is_err()
            {
                let (known, folder, all) = (renewer.take(), certificates.folder.clone(), identities.clone());
                let renewal = tokio::task::spawn_blocking(move || {
                    let mut renewer = match known {
                        Some(known) => known,
                        None => Renewer::new(Pki::open(&folder)?, all),
                    };
                    let (renewed, failure) = renewer.renew();
                    if let Some(error) = failure {
                        tracing::error!(%error, "cannot renew all certificates");
                    }
                    let authorities = renewer.authority_certificates().to_vec();
                    Ok::<_, skiff_pki::Error>((renewer, renewed, authorities))
                });
                let done = match renewal.await {
                    Ok(done) => done.map_err(|error| error.to_string()),
                    Err(panicked) => Err(panicked.to_string()),
                };
                let (back, renewed, authorities) = match done {
                    Ok(done) => done,
                    Err(error) => {
                        tracing::error!(error, "cannot renew certificates; trying again");
                        unfinished = true;
                        continue;
                    }
                };
                renewer = Some(back);
                if renewed.is_empty() && !unfinished {
                    continue;
                }
                if !renewed.is_empty() {
                    tracing::info!(certificates = ?renewed.certificates, authorities = renewed.authorities, "certificates were renewed");
                }
                let published = certificates.publish(&cluster, merge, &server, &authorities).await;
                unfinished = published.is_err();
                if let Err(error) = published {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "cannot publish renewed certificates; trying again"
                    );
                }
            }
        });
        Ok(())
    }

    /// Tells those who cannot see for themselves that certificates changed.
    async fn publish(
        &self,
        cluster: &Cluster,
        merge: bool,
        server: &Server,
        authorities: &[Option<String>],
    ) -> Result<()> {
        if let [Some(ca), front_proxy] = authorities {
            // Those who hold it start again only when it did change.
            self.current_ca.send_if_modified(|current| {
                let changed = current != ca;
                current.clone_from(ca);
                changed
            });
            let told = server.publish_authorities(ca.clone(), front_proxy.clone()).await;
            told.map_err(|status| anyhow::anyhow!("{}", status.message))?;
        }
        self.write_kubeconfig(cluster, merge, false)
            .context("cannot write the admin kubeconfig")
    }
}

impl Certificates {
    /// Signs the tokens of service-account token Secrets.
    pub fn token_signer(&self) -> Result<skiff_controllers::TokenSigner> {
        let (private, public) = &self.service_account;
        let issuer = skiff_auth::TokenIssuer::new(private, public, String::new(), Vec::new())?;
        Ok(Arc::new(move |claims: &serde_json::Value| {
            let signed = issuer.sign(claims);
            signed.map_err(|error| skiff_controllers::SignError(error.to_string()))
        }))
    }
}

/// The cluster's authority, for the controller that signs certificates.
pub struct Signer(skiff_pki::SigningAuthority);

impl Signer {
    pub fn new(cluster: &Cluster) -> Signer {
        Signer(skiff_pki::SigningAuthority::new(cluster.pki_dir()))
    }
}

impl skiff_controllers::CertificateSigner for Signer {
    fn sign(
        &self,
        order: &skiff_controllers::CertificateOrder,
        now: i64,
    ) -> Result<String, skiff_controllers::SignError> {
        let order = order.clone();
        let order = skiff_pki::CertificateOrder {
            subject: order.subject,
            dns_names: order.dns_names,
            addresses: order.addresses,
            emails: order.emails,
            uris: order.uris,
            public_key: order.public_key,
            usages: order.usages,
            not_before: order.not_before,
            not_after: order.not_after,
        };
        let signed = self.0.sign(&order, now);
        signed.map_err(|error| skiff_controllers::SignError(error.to_string()))
    }
}
