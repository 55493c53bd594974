//! Takes upstream's descriptions of types and fields out of k8s-openapi, whose JSON schemas carry them, and
//! writes them to two files: all of them, compressed, and those of table columns, plain. No prose of
//! upstream is kept in this repository that way, and it always fits the version of the types.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use k8s_openapi::schemars::SchemaGenerator;
use k8s_openapi::schemars::generate::SchemaSettings;

/// The types that no other type refers to; all others are reached from them.
macro_rules! roots {
    ($generator:ident: $($path:path,)*) => { $( $generator.subschema_for::<$path>(); )* };
}

/// What stands between the parts of a line, and between lines: texts have tabs and line ends of their own.
const UNIT: &str = "\x1f";
const RECORD: &str = "\x1e";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=data/columns.txt");
    let mut generator = SchemaSettings::draft07().into_generator();
    reach(&mut generator);

    // (type, field) to text; the type's own text has the empty field.
    let mut texts: BTreeMap<(String, String), String> = BTreeMap::new();
    for (name, schema) in generator.definitions() {
        if let Some(text) = schema["description"].as_str() {
            texts.insert((name.clone(), String::new()), text.to_string());
        }
        for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
            if let Some(text) = schema["description"].as_str() {
                texts.insert((name.clone(), field.clone()), text.to_string());
            }
        }
    }
    // k8s-openapi's type is an enum, and has what upstream says of a field at the type.
    let event = "io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent".to_string();
    let whole = texts
        .get(&(event.clone(), String::new()))
        .cloned()
        .unwrap_or_default();
    if let Some((of_type, of_object)) = whole.split_once("\n\n") {
        texts.insert((event.clone(), String::new()), of_type.to_string());
        texts.insert((event, "object".to_string()), of_object.trim_end().to_string());
    }
    assert!(
        texts.len() > 2500,
        "k8s-openapi gave only {} descriptions",
        texts.len()
    );

    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let out = Path::new(&out);
    let mut all = String::new();
    for ((name, field), text) in &texts {
        all.extend([name, UNIT, field, UNIT, text, RECORD]);
    }
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(all.as_bytes()).expect("writing to memory");
    let compressed = encoder.finish().expect("writing to memory");
    std::fs::write(out.join("descriptions.deflate"), compressed).expect("OUT_DIR can be written");

    let columns = std::fs::read_to_string("data/columns.txt").expect("data/columns.txt is in the crate");
    let mut resolved: Vec<String> = columns
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut parts = line.splitn(3, '\t');
            let (Some(kind), Some(column), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
                panic!("data/columns.txt: {line:?} is not kind, column, text");
            };
            let text = match text.strip_prefix('=').and_then(|name| name.rsplit_once('.')) {
                Some((name, field)) => {
                    let whole = field.trim_end_matches('~');
                    // A name that upstream's own table misses stays empty, as it does there.
                    let found = texts
                        .get(&(name.to_string(), whole.to_string()))
                        .map_or("", String::as_str);
                    let end = match whole == field {
                        true => found.len(),
                        false => found.trim_end_matches('.').rfind(". ").map_or(0, |at| at + 1),
                    };
                    found[..end].to_string()
                }
                None => text.replace("\\n", "\n"),
            };
            [kind, UNIT, column, UNIT, &text, RECORD].concat()
        })
        .collect();
    resolved.sort();
    std::fs::write(out.join("columns.txt"), resolved.concat()).expect("OUT_DIR can be written");
}

fn reach(generator: &mut SchemaGenerator) {
    roots!(generator:
        k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy,
        k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding,
        k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration,
        k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy,
        k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding,
        k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration,
        k8s_openapi::api::apps::v1::ControllerRevision,
        k8s_openapi::api::apps::v1::DaemonSet,
        k8s_openapi::api::apps::v1::Deployment,
        k8s_openapi::api::apps::v1::ReplicaSet,
        k8s_openapi::api::apps::v1::StatefulSet,
        k8s_openapi::api::authentication::v1::SelfSubjectReview,
        k8s_openapi::api::authentication::v1::TokenRequest,
        k8s_openapi::api::authentication::v1::TokenReview,
        k8s_openapi::api::authorization::v1::LocalSubjectAccessReview,
        k8s_openapi::api::authorization::v1::SelfSubjectAccessReview,
        k8s_openapi::api::authorization::v1::SelfSubjectRulesReview,
        k8s_openapi::api::authorization::v1::SubjectAccessReview,
        k8s_openapi::api::autoscaling::v1::HorizontalPodAutoscaler,
        k8s_openapi::api::autoscaling::v1::Scale,
        k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler,
        k8s_openapi::api::batch::v1::CronJob,
        k8s_openapi::api::batch::v1::Job,
        k8s_openapi::api::certificates::v1::CertificateSigningRequest,
        k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle,
        k8s_openapi::api::certificates::v1beta1::PodCertificateRequest,
        k8s_openapi::api::coordination::v1::Lease,
        k8s_openapi::api::core::v1::Binding,
        k8s_openapi::api::core::v1::ComponentStatus,
        k8s_openapi::api::core::v1::ConfigMap,
        k8s_openapi::api::core::v1::Endpoints,
        k8s_openapi::api::core::v1::Event,
        k8s_openapi::api::core::v1::LimitRange,
        k8s_openapi::api::core::v1::Namespace,
        k8s_openapi::api::core::v1::Node,
        k8s_openapi::api::core::v1::PersistentVolume,
        k8s_openapi::api::core::v1::Pod,
        k8s_openapi::api::core::v1::PodTemplate,
        k8s_openapi::api::core::v1::ReplicationController,
        k8s_openapi::api::core::v1::ResourceQuota,
        k8s_openapi::api::core::v1::Secret,
        k8s_openapi::api::core::v1::Service,
        k8s_openapi::api::core::v1::ServiceAccount,
        k8s_openapi::api::discovery::v1::EndpointSlice,
        k8s_openapi::api::events::v1::Event,
        k8s_openapi::api::flowcontrol::v1::FlowSchema,
        k8s_openapi::api::flowcontrol::v1::PriorityLevelConfiguration,
        k8s_openapi::api::networking::v1::IPAddress,
        k8s_openapi::api::networking::v1::Ingress,
        k8s_openapi::api::networking::v1::IngressClass,
        k8s_openapi::api::networking::v1::NetworkPolicy,
        k8s_openapi::api::networking::v1::ServiceCIDR,
        k8s_openapi::api::node::v1::RuntimeClass,
        k8s_openapi::api::policy::v1::Eviction,
        k8s_openapi::api::policy::v1::PodDisruptionBudget,
        k8s_openapi::api::rbac::v1::ClusterRole,
        k8s_openapi::api::rbac::v1::ClusterRoleBinding,
        k8s_openapi::api::rbac::v1::Role,
        k8s_openapi::api::rbac::v1::RoleBinding,
        k8s_openapi::api::resource::v1::DeviceClass,
        k8s_openapi::api::resource::v1::ResourceClaim,
        k8s_openapi::api::resource::v1::ResourceClaimTemplate,
        k8s_openapi::api::resource::v1::ResourceSlice,
        k8s_openapi::api::scheduling::v1::PriorityClass,
        k8s_openapi::api::scheduling::v1alpha2::PodGroup,
        k8s_openapi::api::scheduling::v1alpha2::Workload,
        k8s_openapi::api::storage::v1::CSIDriver,
        k8s_openapi::api::storage::v1::CSINode,
        k8s_openapi::api::storage::v1::CSIStorageCapacity,
        k8s_openapi::api::storage::v1::StorageClass,
        k8s_openapi::api::storage::v1::VolumeAttachment,
        k8s_openapi::api::storage::v1::VolumeAttributesClass,
        k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration,
        k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
        k8s_openapi::apimachinery::pkg::apis::meta::v1::APIGroupList,
        k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResourceList,
        k8s_openapi::apimachinery::pkg::apis::meta::v1::APIVersions,
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Status,
        k8s_openapi::apimachinery::pkg::apis::meta::v1::WatchEvent<k8s_openapi::api::core::v1::Pod>,
        k8s_openapi::apimachinery::pkg::version::Info,
        k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService,
    );
}
