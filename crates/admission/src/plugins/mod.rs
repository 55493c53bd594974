//! The plugins, one file each, and the order in which they run.

mod always;
mod certificate_approval;
mod certificate_signing;
mod certificate_subject_restriction;
mod cluster_trust_bundle_attest;
mod default_ingress_class;
mod default_storage_class;
mod default_toleration_seconds;
mod limit_ranger;
mod namespace_lifecycle;
mod node_restriction;
mod persistent_volume_claim_resize;
mod pod_group_protection;
mod pod_group_workload_exists;
mod pod_resize;
mod pod_security;
mod pod_topology_labels;
mod priority;
mod resource_quota;
mod runtime_class;
mod service_account;
mod storage_object_in_use_protection;
mod taint_nodes_by_condition;

pub use always::{AlwaysDeny, AlwaysPullImages, DenyServiceExternalIPs};
pub use certificate_approval::CertificateApproval;
pub use certificate_signing::CertificateSigning;
pub use certificate_subject_restriction::CertificateSubjectRestriction;
pub use cluster_trust_bundle_attest::ClusterTrustBundleAttest;
pub use default_ingress_class::DefaultIngressClass;
pub use default_storage_class::DefaultStorageClass;
pub use default_toleration_seconds::DefaultTolerationSeconds;
pub use limit_ranger::LimitRanger;
pub use namespace_lifecycle::NamespaceLifecycle;
pub use node_restriction::NodeRestriction;
pub use persistent_volume_claim_resize::PersistentVolumeClaimResize;
pub use pod_group_protection::PodGroupProtection;
pub use pod_group_workload_exists::PodGroupWorkloadExists;
pub use pod_resize::{NodeDeclaredFeatureValidator, PodResizeValidator};
pub use pod_security::PodSecurity;
pub use pod_topology_labels::PodTopologyLabels;
pub use priority::Priority;
pub use resource_quota::ResourceQuota;
pub use runtime_class::RuntimeClass;
pub use service_account::ServiceAccount;
pub use storage_object_in_use_protection::StorageObjectInUseProtection;
pub use taint_nodes_by_condition::TaintNodesByCondition;

use crate::Plugin;

/// Upstream's default plugins, and NodeRestriction, which no cluster should be without, in upstream's order. Those that
/// are for features that are off by default are left out.
pub fn recommended() -> Vec<Box<dyn Plugin>> {
    vec![
        Box::new(NamespaceLifecycle::default()),
        Box::new(LimitRanger),
        Box::new(ServiceAccount::default()),
        Box::new(NodeRestriction),
        Box::new(TaintNodesByCondition),
        Box::new(PodSecurity::default()),
        Box::new(Priority),
        Box::new(DefaultTolerationSeconds),
        Box::new(DefaultStorageClass),
        Box::new(StorageObjectInUseProtection),
        Box::new(PodGroupProtection),
        Box::new(PersistentVolumeClaimResize),
        Box::new(RuntimeClass),
        Box::new(CertificateApproval),
        Box::new(CertificateSigning),
        Box::new(ClusterTrustBundleAttest),
        Box::new(CertificateSubjectRestriction),
        Box::new(DefaultIngressClass),
        Box::new(PodTopologyLabels),
        Box::new(PodGroupWorkloadExists),
        Box::new(NodeDeclaredFeatureValidator),
        Box::new(PodResizeValidator),
        Box::new(ResourceQuota),
    ]
}

/// The plugins that are off unless they are wanted.
pub fn optional(name: &str) -> Option<Box<dyn Plugin>> {
    Some(match name {
        "AlwaysDeny" => Box::new(AlwaysDeny),
        "AlwaysPullImages" => Box::new(AlwaysPullImages),
        "DenyServiceExternalIPs" => Box::new(DenyServiceExternalIPs),
        _ => return None,
    })
}

#[cfg(test)]
pub(crate) mod fake {
    //! A lister over a fixed set of objects, and attributes for tests.

    use crate::{Attributes, Lister, Operation, User};
    use async_trait::async_trait;
    use serde_json::Value;
    use skiff_api::node::text;
    use skiff_meta::Status;

    #[derive(Default)]
    pub struct Objects(pub Vec<(&'static str, Value)>);

    #[async_trait]
    impl Lister for Objects {
        async fn get(
            &self,
            _: &str,
            resource: &str,
            namespace: &str,
            name: &str,
        ) -> Result<Option<Value>, Status> {
            let all = self.list("", resource, namespace).await?;
            Ok(all.into_iter().find(|o| text(o, "metadata.name") == name))
        }

        async fn list(&self, _: &str, resource: &str, namespace: &str) -> Result<Vec<Value>, Status> {
            let here = |o: &Value| namespace.is_empty() || text(o, "metadata.namespace") == namespace;
            Ok(self
                .0
                .iter()
                .filter(|(r, o)| *r == resource && here(o))
                .map(|(_, o)| o.clone())
                .collect())
        }
    }

    struct DiscardingRecorder;

    impl crate::AdmissionRecorder for DiscardingRecorder {
        fn warn(&self, _: String) {}
    }

    /// Access to what is named: `verb resource name`.
    pub struct May(pub &'static str);

    impl crate::Access for May {
        fn may(&self, verb: &str, _: &str, resource: &str, _: &str, name: &str) -> bool {
            self.0 == format!("{verb} {resource} {name}")
        }
    }

    pub static USER: User = User {
        name: String::new(),
        uid: String::new(),
        groups: Vec::new(),
        extra: std::collections::BTreeMap::new(),
    };

    pub fn create<'a>(
        group: &'a str,
        resource: &'a str,
        kind: &'a str,
        object: &'a mut Value,
    ) -> Attributes<'a> {
        Attributes {
            user: &USER,
            operation: Operation::Create,
            group,
            version: "v1",
            resource,
            subresource: "",
            kind,
            kind_group: group,
            kind_version: "v1",
            namespace: "ns",
            name: "",
            object: Some(object),
            old_object: None,
            dry_run: false,
            options: None,
            recorder: &DiscardingRecorder,
            access: &May(""),
            reinvocation: crate::Reinvocation::default(),
        }
    }
}
