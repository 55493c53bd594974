//! Storage version migrations over a real store: what was stored with another provider or in another version is stored
//! anew, and nothing else changes.

use std::path::Path;
use std::sync::Arc;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use skiff_encryption::{Encrypted, Encryption, is_encrypted};
use skiff_store::{Embedded, Store};
use skiff_testkit::ApiServer;

use crate::cluster::{Cluster, check};

const API: &str = "storagemigration.k8s.io/v1beta1=true";

/// More than one page of a list.
const SECRETS: usize = 620;

struct Stored {
    cluster: Cluster,
    store: Arc<Embedded>,
    encryption: Arc<Encryption>,
    dir: tempfile::TempDir,
}

/// A cluster that knows an encryption key for all core resources, and does not use it yet.
async fn start() -> Stored {
    let dir = tempfile::tempdir().unwrap();
    let encryption = Encryption::load(&configure(dir.path(), false)).await.unwrap();
    let mut kept = None;
    let server = ApiServer::started(&[API], |store| {
        let store = Arc::new(store);
        kept = Some(store.clone());
        Arc::new(Encrypted::new(store, encryption.clone()))
    });
    let cluster = Cluster::of(server.await.unwrap());
    let store = kept.unwrap();
    Stored {
        cluster,
        store,
        encryption,
        dir,
    }
}

fn configure(dir: &Path, encrypt: bool) -> std::path::PathBuf {
    let key = json!({"secretbox": {"keys": [{"name": "k", "secret": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="}]}});
    let plain = json!({"identity": {}});
    let providers = if encrypt { [key, plain] } else { [plain, key] };
    let config = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration",
        "resources": [{"resources": ["secrets", "configmaps"], "providers": providers}]});
    let path = dir.join("encryption.yaml");
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

impl Stored {
    async fn encrypt_from_now_on(&self) {
        let path = configure(self.dir.path(), true);
        self.encryption.reload(&path).await.unwrap();
    }

    async fn create_secrets(&self, count: usize) {
        let api = self.cluster.api::<Secret>();
        let made = (0..count).map(|number| {
            let secret: Secret = serde_json::from_value(json!({"metadata": {"name": format!("s{number}")},
                "stringData": {"word": "swordfish"}}))
            .unwrap();
            let api = api.clone();
            async move { api.create(&PostParams::default(), &secret).await.unwrap() }
        });
        join_all(made).await;
    }

    /// What the store itself has.
    async fn values(&self, prefix: &str) -> Vec<bytes::Bytes> {
        let found = self.store.range(prefix, None, 0, None).await.unwrap();
        found.items.into_iter().map(|found| found.value).collect()
    }

    /// How many of the stored values below the prefix are encrypted, and how many there are.
    async fn encrypted(&self, prefix: &str) -> (usize, usize) {
        let found = self.values(prefix).await;
        (
            found.iter().filter(|value| is_encrypted(value)).count(),
            found.len(),
        )
    }

    fn controllers(&self) {
        self.cluster.run_controllers(|config| {
            config.serves_api = Arc::new(|group, _, _| group == "storagemigration.k8s.io")
        });
    }
}

fn migrations(cluster: &Cluster) -> Api<StorageVersionMigration> {
    Api::all(cluster.client.clone())
}

async fn migrate(cluster: &Cluster, name: &str, group: &str, resource: &str) {
    let object: StorageVersionMigration = serde_json::from_value(json!({"metadata": {"name": name},
        "spec": {"resource": {"group": group, "resource": resource}}}))
    .unwrap();
    migrations(cluster)
        .create(&PostParams::default(), &object)
        .await
        .unwrap();
}

/// The conditions as type, status and reason, when the migration has ended.
async fn ended(cluster: &Cluster, name: &str) -> StorageVersionMigration {
    let api = migrations(cluster);
    cluster
        .until_idle(name, async || {
            let found = api.get(name).await.unwrap();
            let conditions = conditions(&found);
            check(
                conditions.iter().any(|one| one.starts_with("Running False")),
                conditions,
            )
        })
        .await;
    api.get(name).await.unwrap()
}

fn conditions(migration: &StorageVersionMigration) -> Vec<String> {
    let conditions = migration
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .map(|one| format!("{} {} {}", one.type_, one.status, one.reason))
        .collect()
}

const DONE: [&str; 2] = [
    "Running False MigrationCompleted",
    "Succeeded True StorageVersionMigrationSucceeded",
];

#[tokio::test(flavor = "multi_thread")]
async fn every_stored_value_is_encrypted() {
    let stored = start().await;
    let cluster = &stored.cluster;
    stored.create_secrets(SECRETS).await;
    assert_eq!(stored.encrypted("/registry/secrets/").await, (0, SECRETS));
    stored.encrypt_from_now_on().await;
    let before = cluster.list::<Secret>().await;
    stored.controllers();
    migrate(cluster, "m", "", "secrets").await;
    let migration = ended(cluster, "m").await;
    assert_eq!(conditions(&migration), DONE);
    let up_to: i64 = migration
        .status
        .unwrap()
        .resource_version
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(stored.encrypted("/registry/secrets/").await, (SECRETS, SECRETS));
    let (encrypted, maps) = stored.encrypted("/registry/configmaps/").await;
    assert!(
        encrypted < maps,
        "another resource was written: {encrypted} of {maps}"
    );

    // Nothing but the version of the stored form is another.
    let after = cluster.list::<Secret>().await;
    let without_version = |mut secret: Secret| {
        secret.metadata.resource_version = None;
        secret
    };
    for (before, after) in before.into_iter().zip(after.clone()) {
        assert!(after.resource_version().unwrap().parse::<i64>().unwrap() > up_to);
        assert_eq!(without_version(before), without_version(after));
    }

    // There is nothing left to write.
    migrate(cluster, "again", "", "secrets").await;
    assert_eq!(conditions(&ended(cluster, "again").await), DONE);
    assert_eq!(cluster.list::<Secret>().await, after);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_survives_its_controller() {
    let stored = start().await;
    let cluster = &stored.cluster;
    stored.create_secrets(200).await;
    stored.encrypt_from_now_on().await;
    migrate(cluster, "m", "", "secrets").await;
    migrate(cluster, "next", "", "secrets").await;
    let mut first = cluster.start_manager_with("a", |config| {
        config.serves_api = Arc::new(|group, _, _| group == "storagemigration.k8s.io")
    });
    cluster
        .until_idle("a first write", async || {
            let count = stored.encrypted("/registry/secrets/").await;
            check(count.0 > 0, count)
        })
        .await;
    first.kill().await;
    let noted = migrations(cluster)
        .get("m")
        .await
        .unwrap()
        .status
        .unwrap()
        .resource_version;
    assert!(noted.is_some());
    let waiting = migrations(cluster).get("next").await.unwrap();
    let _second = cluster.start_manager_with("a", |config| {
        config.serves_api = Arc::new(|group, _, _| group == "storagemigration.k8s.io")
    });
    let migration = ended(cluster, "m").await;
    assert_eq!(conditions(&migration), DONE);
    assert_eq!(migration.status.unwrap().resource_version, noted);
    assert_eq!(stored.encrypted("/registry/secrets/").await, (200, 200));
    // One at a time: the second may have begun when the first had ended, and not before.
    if !conditions(&waiting).is_empty() {
        assert_eq!(conditions(&migrations(cluster).get("m").await.unwrap()), DONE);
    }
    assert_eq!(conditions(&ended(cluster, "next").await), DONE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resource_that_cannot_be_written_fails() {
    let stored = start().await;
    let cluster = &stored.cluster;
    stored.controllers();
    migrate(cluster, "m", "authentication.k8s.io", "tokenreviews").await;
    let failed = ended(cluster, "m").await;
    assert_eq!(
        conditions(&failed),
        [
            "Running False MigrationCompleted",
            "Failed True StorageVersionMigrationFailed"
        ]
    );
    let conditions = failed.status.unwrap().conditions.unwrap();
    assert_eq!(
        conditions[1].message,
        "resource \"authentication.k8s.io/v1, Resource=tokenreviews\" does not support discovery operations: [update patch list]"
    );
    // The migrator may write roles with rights that it does not have, as long as it changes nothing.
    for (group, resource) in [
        ("rbac.authorization.k8s.io", "clusterroles"),
        ("", "serviceaccounts"),
        ("", "nodes"),
    ] {
        migrate(cluster, resource, group, resource).await;
        let migration = ended(cluster, resource).await;
        assert_eq!(self::conditions(&migration), DONE, "{resource}: {migration:?}");
    }
}

fn definition(storage: &str) -> Value {
    let version = |name: &str| {
        json!({"name": name, "served": true, "storage": name == storage,
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}})
    };
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "gadgets.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced",
            "names": {"plural": "gadgets", "singular": "gadget", "kind": "Gadget", "listKind": "GadgetList"},
            "versions": [version("v1"), version("v2")]}})
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_a_definition_get_its_stored_version() {
    let stored = start().await;
    let cluster = &stored.cluster;
    stored.controllers();
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let made = serde_json::from_value(definition("v1")).unwrap();
    definitions.create(&PostParams::default(), &made).await.unwrap();
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("example.com", "v1", "Gadget"), "gadgets");
    let gadgets: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), "default", &resource);
    cluster
        .until_idle("the resource", async || {
            let listed = gadgets.list(&ListParams::default()).await;
            check(listed.is_ok(), listed.err())
        })
        .await;
    for number in 0..5 {
        let gadget = json!({"apiVersion": "example.com/v1", "kind": "Gadget", "metadata": {"name": format!("g{number}")},
            "word": "swordfish"});
        let gadget = serde_json::from_value(gadget).unwrap();
        gadgets.create(&PostParams::default(), &gadget).await.unwrap();
    }
    let versions = async || {
        let found = stored.values("/registry/example.com/gadgets/").await;
        let version = |value: &bytes::Bytes| {
            let value: Value = serde_json::from_slice(value).unwrap();
            value["apiVersion"].as_str().unwrap().to_owned()
        };
        found.iter().map(version).collect::<Vec<_>>()
    };
    // Back and forth: who applies the status of the definition again must not remove what it said before.
    for (round, storage) in ["v2", "v1", "v2"].into_iter().enumerate() {
        let changed = Patch::Merge(json!({"spec": definition(storage)["spec"]}));
        definitions
            .patch("gadgets.example.com", &PatchParams::default(), &changed)
            .await
            .unwrap();
        let name = format!("to-{storage}-{round}");
        // At once: the server takes the definition over in its own time, and the migration waits for it.
        let wanted = format!("example.com/{storage}");
        assert!(versions().await.iter().any(|version| *version != wanted));
        migrate(cluster, &name, "example.com", "gadgets").await;
        assert_eq!(conditions(&ended(cluster, &name).await), DONE);
        let found = versions().await;
        assert!(found.iter().all(|version| *version == wanted), "{found:?}");
        let status = definitions
            .get("gadgets.example.com")
            .await
            .unwrap()
            .status
            .unwrap();
        assert_eq!(status.stored_versions.unwrap(), [storage]);
        let condition = status
            .conditions
            .unwrap()
            .into_iter()
            .find(|one| one.type_ == "StorageMigrating")
            .unwrap();
        assert_eq!(
            (condition.status.as_str(), condition.reason.as_deref()),
            ("False", Some("MigrationSucceeded"))
        );
        assert_eq!(
            condition.message.as_deref(),
            Some("The migration has succeeded and the stored versions have been updated")
        );
    }
    let kept = gadgets.get("g0").await.unwrap();
    assert_eq!(kept.data["word"], "swordfish");
}
