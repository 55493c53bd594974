//! The storage version migrator: writes every object of the resource that a StorageVersionMigration names again, so that
//! it is stored in the current version and with the current encryption key. It changes nothing in the objects.
//!
//! A migration survives the controller: up to which resourceVersion objects are to be written is noted in the status
//! before the first write, and what was written has a later one.

mod definition;
mod objects;
mod plan;

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::GroupResource;
use kube::Api;
use kube::api::PostParams;
use kube::core::ApiResource;
use skiff_client::{Action, Change, Client, ErrorExt, Informer, Reconcile};

use crate::discovery::find_resource;
use crate::{Context, Error};
use objects::Outcome;
use plan::{FAILED, Migration, RUNNING, SUCCEEDED, Step};

const NAME: &str = "storage-version-migrator-controller";
const WORKERS: usize = 5;
/// What a resource must allow to be migrated.
const VERBS: [&str; 3] = ["update", "patch", "list"];
/// For so long after a migration was created its resource may still be on its way.
const RESOURCE_GRACE: SignedDuration = SignedDuration::from_mins(1);
const RESOURCE_RETRY: Duration = Duration::from_secs(2);
const BY_RESOURCE: &str = "resource";

/// Group and plural name of the resource whose migrations are looked at.
type Key = (String, String);

struct Migrator {
    client: Client,
    migrations: Informer<Migration>,
}

pub(crate) async fn run(context: Context) {
    let migrations: Informer<Migration> = context.informers.informer();
    migrations.add_index(BY_RESOURCE, |migration| {
        let (group, resource) = key_of(migration);
        vec![format!("{resource}.{group}")]
    });
    let reconciler = Arc::new(Migrator {
        client: context.client.clone(),
        migrations,
    });
    context
        .controller(NAME, reconciler)
        .watches(
            |r| &r.migrations,
            |_, change: &Change<Migration>| [key_of(change.object())],
        )
        .workers(WORKERS)
        .run()
        .await;
}

fn key_of(migration: &Migration) -> Key {
    let resource = migration.spec.as_ref().map(|spec| &spec.resource);
    resource.map_or_else(Key::default, |GroupResource { group, resource }| {
        (group.clone(), resource.clone())
    })
}

impl Reconcile for Migrator {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, (group, resource): Key) -> Result<Action, Error> {
        let all = self
            .migrations
            .by_index(BY_RESOURCE, &format!("{resource}.{group}"));
        let now = Timestamp::now();
        match plan::step(&all) {
            Step::Rest => Ok(Action::Done),
            Step::Finish(migration) => {
                let succeeded = plan::is_true(migration, SUCCEEDED);
                definition::finish(&self.client, &group, &resource, succeeded, now).await?;
                self.write_status(plan::finished(migration, now)).await
            }
            Step::Start(migration) => {
                let name = migration.metadata.name.as_deref().unwrap_or_default();
                definition::begin(&self.client, &group, &resource, name, now).await?;
                let message = "The migration is running".to_owned();
                let running = plan::with_condition(migration, RUNNING, "MigrationRunning", message, now);
                self.write_status(running).await
            }
            Step::Note(migration) => self.note(migration, &group, &resource, now).await,
            Step::Write(migration, up_to) => {
                let Some(served) = find_resource(&self.client, &group, &resource).await? else {
                    let message =
                        "migration encountered unhandled error: unable to obtain GVR from discovery";
                    return self.await_resource(migration, now, message).await;
                };
                match objects::write_all(&self.client, &served, up_to).await? {
                    Outcome::Written => {
                        let reason = "StorageVersionMigrationSucceeded";
                        let done = plan::with_condition(migration, SUCCEEDED, reason, String::new(), now);
                        self.write_status(done).await
                    }
                    Outcome::Refused(why) => {
                        let message = format!("migration encountered unhandled error: {why}");
                        self.fail(migration, message, now).await
                    }
                }
            }
        }
    }
}

impl Migrator {
    /// Notes the newest resourceVersion: objects with a later one have the current form.
    async fn note(
        &self,
        migration: &Migration,
        group: &str,
        resource: &str,
        now: Timestamp,
    ) -> Result<Action, Error> {
        let Some(served) = find_resource(&self.client, group, resource).await? else {
            return self
                .await_resource(migration, now, "resource does not exist in discovery")
                .await;
        };
        let ApiResource {
            group,
            version,
            plural,
            ..
        } = &served.resource;
        let qualified = format!("{group}/{version}, Resource={plural}");
        if !VERBS.iter().all(|verb| served.can(verb)) {
            let verbs = VERBS.join(" ");
            let message =
                format!("resource \"{qualified}\" does not support discovery operations: [{verbs}]");
            return self.fail(migration, message, now).await;
        }
        let wanted = definition::storage_version_hash(&self.client, group, plural).await?;
        if wanted.is_some() && wanted != served.storage_version_hash {
            // The server writes the stored version of before until it has taken over the definition.
            return Ok(Action::RequeueAfter(RESOURCE_RETRY));
        }
        let newest = objects::newest_version(&self.client, &served).await?;
        if plan::is_later(&newest, &newest).is_none() {
            let why = format!("resource version is not well formed: {newest}");
            let message = format!("latest resourceVersion for {qualified} is not valid: {why}");
            return self.fail(migration, message, now).await;
        }
        let mut noted = migration.clone();
        noted.status.get_or_insert_default().resource_version = Some(newest);
        self.write_status(noted).await
    }

    /// A custom resource may have been defined a moment ago.
    async fn await_resource(
        &self,
        migration: &Migration,
        now: Timestamp,
        message: &str,
    ) -> Result<Action, Error> {
        let created = migration.metadata.creation_timestamp.as_ref().map(|time| time.0);
        if created.is_some_and(|created| now.duration_since(created) < RESOURCE_GRACE) {
            return Ok(Action::RequeueAfter(RESOURCE_RETRY));
        }
        self.fail(migration, message.to_owned(), now).await
    }

    async fn fail(&self, migration: &Migration, message: String, now: Timestamp) -> Result<Action, Error> {
        let failed = plan::with_condition(migration, FAILED, "StorageVersionMigrationFailed", message, now);
        self.write_status(failed).await
    }

    async fn write_status(&self, migration: Migration) -> Result<Action, Error> {
        let name = migration.metadata.name.clone().unwrap_or_default();
        let api: Api<Migration> = Api::all(self.client.clone());
        match api
            .replace_status(&name, &PostParams::default(), &migration)
            .await
        {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}
