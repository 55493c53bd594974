//! The control loops: controllers, the scheduler and the provisioner of local volumes. They run beside an API server, whose keys and identities they use.

use super::{Machine, Prepared, component_metrics};
use crate::certificates::Signer;
use anyhow::{Context, Result};
use futures::FutureExt;
use skiff_auth::UserInfo;
use skiff_controllers::{ControllerSelection, ControllersConfig, MANAGER};
use std::sync::Arc;

pub(super) async fn prepare_controllers(machine: &Machine) -> Result<Prepared> {
    let certificates = &machine.control_plane()?.certificates;
    let mut ca = certificates.current_ca.subscribe();
    let metrics = component_metrics();
    let (access, measured) = (machine.access()?.clone(), metrics.clone());
    let client_for = Arc::new(move |name: &str| {
        let user = if name == MANAGER {
            UserInfo::new(name, [] as [&str; 0])
        } else {
            UserInfo::service_account("kube-system", name)
        };
        access.client(user, "kube-controller-manager", Some(measured.clone()))
    });
    let current = ca.borrow_and_update().clone();
    let mut config = ControllersConfig::new(client_for, current, machine.lease_holder());
    let pods = machine.cluster.pod_cidrs()?;
    config.cluster_cidrs = pods.iter().map(ToString::to_string).collect();
    let services = machine.cluster.service_cidrs()?;
    config.service_cidrs = services.iter().map(ToString::to_string).collect();
    config.node_cidr_mask_ipv4 = machine.args.node_cidr_mask_size;
    machine.args.node_health.set(&mut config);
    machine.args.controller_flags.set(&mut config);
    config.metrics = metrics.clone();
    config.certificate_signer = Some(Arc::new(Signer::new(&machine.cluster)));
    config.token_signer = Some(certificates.token_signer()?);
    config.controllers = ControllerSelection::parse(&machine.args.controllers)?;
    let served = machine.args.apis.runtime_config()?;
    config.serves_api =
        Arc::new(move |group, version, plural| served.serves_on_request(group, version, plural));
    // Each controller has a client of its own identity.
    let run = move |_, stop: tokio_util::sync::CancellationToken| {
        let (mut config, mut ca) = (config.clone(), ca.clone());
        config.root_ca_pem = ca.borrow_and_update().clone();
        async move {
            let mut running = std::pin::pin!(skiff_controllers::run(config, stop.clone()));
            let renewed = async {
                if ca.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = running.as_mut() => Ok(()),
                () = renewed => {
                    stop.cancel();
                    running.await;
                    Err("the certificate authority was renewed".to_owned())
                }
            }
        }
        .boxed()
    };
    Ok(Prepared::new(run).measured(metrics))
}

/// The provisioner of the class `local`, for the volumes of all nodes.
pub(super) async fn prepare_local_volumes(machine: &Machine) -> Result<Prepared> {
    let config = skiff_node::LocalVolumesConfig {
        identity: machine.lease_holder(),
    };
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            skiff_node::run_local_volumes(config, client, stop).await;
            Ok(())
        }
        .boxed()
    }))
}

pub(super) async fn prepare_scheduler(machine: &Machine) -> Result<Prepared> {
    let configuration = match &machine.args.config {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            let read = skiff_scheduler::Configuration::parse(&text);
            let configuration = read.with_context(|| path.display().to_string())?;
            if !configuration.without_effect().is_empty() {
                let fields = configuration.without_effect().join(", ");
                tracing::warn!(file = %path.display(), fields, "fields of the scheduler's configuration have no effect here");
            }
            configuration
        }
        None => skiff_scheduler::Configuration::default(),
    };
    let metrics = component_metrics();
    let config = skiff_scheduler::SchedulerConfig {
        configuration,
        leader_elect: Some(machine.lease_holder()),
        pod_groups: machine.args.apis.runtime_config()?.pod_features().pod_groups,
        metrics: metrics.clone(),
    };
    let run = move |client, stop| {
        let config = config.clone();
        async move {
            skiff_scheduler::run(config, client, stop).await;
            Ok(())
        }
        .boxed()
    };
    Ok(Prepared::new(run).measured(metrics))
}
