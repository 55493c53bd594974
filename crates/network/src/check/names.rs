//! The name of the target: what cluster DNS says to the pod.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Node, Service};
use kube::Api;

use super::dns::{self, Answer};
use super::inside;
use super::objects::{cluster_ips, list, node_of};
use super::target::ObjectName;
use super::walk::{Origin, Walker};
use super::{Error, Outcome};
use crate::dns_endpoints;
use crate::policy::{Direction, Party};
use crate::proxy::Protocol;

impl Walker {
    /// Asks cluster DNS for a name, as the pod does, and compares with what it should say.
    pub(super) async fn resolve(
        &mut self,
        origin: &Origin,
        name: &str,
        expected: Option<&[IpAddr]>,
    ) -> Result<Vec<IpAddr>, Error> {
        const STEP: &str = "dns";
        let service = ObjectName {
            namespace: Some("kube-system".to_owned()),
            name: dns_endpoints::SERVICE.to_owned(),
        };
        let servers = self.find::<Service>(&service).await?;
        let servers = servers.map(|service| cluster_ips(&service)).unwrap_or_default();
        let of_family = |address: &&IpAddr| address.is_ipv4() == origin.address.is_ipv4();
        let Some(server) = servers.iter().find(of_family).or(servers.first()).copied() else {
            self.step(STEP, Outcome::Stops, "there is no service kube-system/kube-dns");
            return Ok(Vec::new());
        };
        if self.dns_is_closed(origin, server).await? {
            return Ok(Vec::new());
        }
        let ipv4 = expected
            .and_then(|expected| expected.first())
            .is_none_or(IpAddr::is_ipv4);
        let (asked, at) = (name.to_owned(), SocketAddr::new(server, dns_endpoints::PORT));
        let answer = inside::run(self.netns.as_deref(), move || dns::ask(at, &asked, ipv4)).await;
        let who = if self.netns.is_some() {
            "the pod"
        } else {
            "this machine"
        };
        let (outcome, detail, found) = match answer {
            Err(error) => {
                let text = format!("{server} does not answer {who} about {name}: {error}");
                (Outcome::Stops, text, Vec::new())
            }
            Ok(Answer::NoSuchName) => (Outcome::Stops, format!("{server} knows no {name}"), Vec::new()),
            Ok(Answer::Failed(code)) => {
                let text = format!("{server} answers {name} with error {code}");
                (Outcome::Stops, text, Vec::new())
            }
            Ok(Answer::Addresses(found)) => {
                let shown = list(&found);
                let wrong = expected.is_some_and(|expected| !found.iter().any(|one| expected.contains(one)));
                match (found.is_empty(), wrong) {
                    (true, _) => (Outcome::Stops, format!("{name} has no address"), found),
                    (false, true) => {
                        let text = format!("{name} is {shown}, which is not the service's");
                        (Outcome::Stops, text, found)
                    }
                    (false, false) => {
                        let text = format!("{name} is {shown} ({server} asked by {who})");
                        (Outcome::Passes, text, found)
                    }
                }
            }
        };
        self.step(STEP, outcome, detail);
        Ok(found)
    }

    /// Whether policies keep the pod from cluster DNS; says so.
    async fn dns_is_closed(&mut self, origin: &Origin, server: IpAddr) -> Result<bool, Error> {
        if origin.has_host_network {
            return Ok(false);
        }
        // Pods ask the instance of their own node, at the gateway of its pods.
        let nodes: Api<Node> = Api::all(self.client.clone());
        let named = format!("metadata.name={}", node_of(&origin.pod));
        let node = self.list(nodes, Some(named), None).await?.into_iter().next();
        let cidrs = node.and_then(|node| node.spec?.pod_cidrs).unwrap_or_default();
        let gateways = cidrs
            .iter()
            .filter_map(|cidr| cidr.parse::<skiff_meta::net::Cidr>().ok()?.nth(1));
        let Some(gateway) = gateways.into_iter().find(|one| one.is_ipv4() == server.is_ipv4()) else {
            return Ok(false);
        };
        let verdict = self
            .verdict(
                Direction::Egress,
                &origin.pod,
                origin.address,
                &Party::dns(gateway),
                gateway,
                Protocol::Udp,
                53,
            )
            .await?;
        if verdict.0 == Outcome::Stops {
            self.step(
                "dns",
                Outcome::Stops,
                format!("cluster DNS is not reached: {}", verdict.1),
            );
        }
        Ok(verdict.0 == Outcome::Stops)
    }
}
