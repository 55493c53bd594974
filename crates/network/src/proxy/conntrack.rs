//! UDP knows no end of a connection: clients that keep sending would stay with an endpoint that is gone, or with the
//! way that they had before there was a service, for as long as the kernel remembers their flow. Here such flows are
//! forgotten. It is done beside the work: rules never wait for it.

use std::collections::HashMap;
use std::net::IpAddr;

use futures::StreamExt;
use nlink::netlink::netfilter::{ConntrackEntry, IpProtocol};
use nlink::netlink::{Connection, Netfilter, Route};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::elements::Front;
use super::endpoints::Target;
use super::objects::Protocol;

/// Flows to look at: where they came to, and the endpoints that still answer there.
type Flows = HashMap<Front, Vec<Target>>;

/// What is to be looked at next. Newer facts take the place of older ones, so it has at most one entry for each
/// address and port of a service.
#[derive(Default)]
pub(super) struct Stale {
    /// A leaf lock.
    flows: Mutex<Flows>,
    added: Notify,
}

impl Stale {
    /// Call it when the rules are in the kernel.
    pub(super) fn add(&self, flows: Flows) {
        if !flows.is_empty() {
            self.flows.lock().extend(flows);
            self.added.notify_one();
        }
    }

    /// Forgets flows until it is dropped; calls `done` with the family (true for IPv4) and the number each time.
    pub(super) async fn run(&self, done: impl Fn(bool, usize, std::time::Duration)) {
        loop {
            self.added.notified().await;
            let flows = std::mem::take(&mut *self.flows.lock());
            for ipv4 in [true, false] {
                if !flows.keys().any(|at| at.is_ipv4() == ipv4) {
                    continue;
                }
                let start = std::time::Instant::now();
                match forget(&flows, ipv4).await {
                    Ok(count) => done(ipv4, count, start.elapsed()),
                    Err(error) => tracing::warn!(%error, "cannot forget stale UDP flows"),
                }
            }
        }
    }
}

/// Forgets the flows that do not go to an endpoint that still answers, in both families.
pub async fn forget_stale_flows(flows: &Flows) -> Result<usize, nlink::Error> {
    let mut count = 0;
    for ipv4 in [true, false] {
        if flows.keys().any(|at| at.is_ipv4() == ipv4) {
            count += forget(flows, ipv4).await?;
        }
    }
    Ok(count)
}

async fn forget(flows: &Flows, ipv4: bool) -> Result<usize, nlink::Error> {
    let own = match flows.keys().any(|at| matches!(at, Front::NodePort(..))) {
        true => own_addresses().await?,
        false => Vec::new(),
    };
    let connection = Connection::<Netfilter>::new()?;
    let mut stale = Vec::new();
    {
        let mut entries = match ipv4 {
            true => connection.stream_conntrack_v4().await?,
            false => connection.stream_conntrack_v6().await?,
        };
        while let Some(entry) = entries.next().await {
            match entry {
                Ok(entry) if is_stale(&entry, flows, ipv4, &own) => stale.push(entry),
                Ok(_) => {}
                // The table changed meanwhile: what was not seen is newer than the rules.
                Err(error) if error.is_dump_interrupted() => break,
                Err(error) => return Err(error),
            }
        }
    }
    let mut removed = 0;
    for entry in &stale {
        match connection.del_conntrack_entry(entry).await {
            Ok(()) => removed += 1,
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(removed)
}

async fn own_addresses() -> Result<Vec<IpAddr>, nlink::Error> {
    let addresses = Connection::<Route>::new()?.get_addresses().await?;
    Ok(addresses
        .iter()
        .filter_map(|address| address.address().copied())
        .collect())
}

fn is_stale(entry: &ConntrackEntry, flows: &Flows, ipv4: bool, own: &[IpAddr]) -> bool {
    let (Some(to), Some(port)) = (entry.orig.dst_ip, entry.orig.dst_port) else {
        return false;
    };
    let (Some(from), Some(from_port)) = (entry.reply.src_ip, entry.reply.src_port) else {
        return false;
    };
    if !matches!(entry.proto, IpProtocol::Udp) {
        return false;
    }
    let by_address = flows.get(&Front::Service(to, Protocol::Udp, port));
    let by_port = || {
        let of_port = flows.get(&Front::NodePort(ipv4, Protocol::Udp, port));
        of_port.filter(|_| own.contains(&to) || to.is_loopback())
    };
    let serving = by_address.or_else(by_port);
    serving.is_some_and(|serving| !serving.contains(&(from, from_port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nlink::netlink::netfilter::ConntrackTuple;

    #[test]
    fn which_flows_are_stale() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (service, node, pod) = (ip("10.96.0.10"), ip("192.0.2.1"), ip("10.244.0.5"));
        let flows = Flows::from([
            (Front::Service(service, Protocol::Udp, 53), vec![(pod, 5353)]),
            (Front::NodePort(true, Protocol::Udp, 30053), vec![(pod, 5353)]),
        ]);
        let check = |proto: IpProtocol, to: (IpAddr, u16), answers: (IpAddr, u16), stale: bool| {
            let mut entry = ConntrackEntry::default();
            entry.proto = proto;
            let tuple = |src: (IpAddr, u16), dst: (IpAddr, u16)| {
                let mut tuple = ConntrackTuple::default();
                (tuple.src_ip, tuple.src_port) = (Some(src.0), Some(src.1));
                (tuple.dst_ip, tuple.dst_port) = (Some(dst.0), Some(dst.1));
                tuple
            };
            let client = (ip("10.244.0.2"), 4000);
            (entry.orig, entry.reply) = (tuple(client, to), tuple(answers, client));
            assert_eq!(
                is_stale(&entry, &flows, true, &[node]),
                stale,
                "{to:?} {answers:?}"
            );
        };
        check(IpProtocol::Udp, (service, 53), (pod, 5353), false);
        check(IpProtocol::Udp, (service, 53), (ip("10.244.0.6"), 5353), true);
        // Older than the service.
        check(IpProtocol::Udp, (service, 53), (service, 53), true);
        check(IpProtocol::Tcp, (service, 53), (service, 53), false);
        check(IpProtocol::Udp, (service, 54), (service, 54), false);
        check(IpProtocol::Udp, (node, 30053), (node, 30053), true);
        check(IpProtocol::Udp, (node, 30053), (pod, 5353), false);
        // Another machine's port of the same number.
        let other = (ip("198.51.100.1"), 30053);
        check(IpProtocol::Udp, other, other, false);
    }
}
