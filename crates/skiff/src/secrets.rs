//! `skiff secrets reencrypt`: writes again every Secret that is stored in the clear or encrypted by an old key.

use crate::cli::{SecretsArgs, SecretsCommand};
use crate::daemon::existing;
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;

/// Secrets whose names are asked for at once.
const PAGE: u32 = 500;

pub async fn run(args: &SecretsArgs) -> Result<()> {
    let SecretsCommand::Reencrypt = args.command;
    let cluster = existing(&args.cluster)?;
    let client = skiff_client::remote(&cluster.kubeconfig(), None).await?;
    let all: Api<Secret> = Api::all(client.clone());
    let (mut seen, mut written) = (0, 0);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = all.list_metadata(&page).await;
        let list = list.context("cannot list Secrets; is the cluster up?")?;
        for PartialObjectMeta { metadata, .. } in list.items {
            let namespace = metadata.namespace.unwrap_or_default();
            let name = metadata.name.unwrap_or_default();
            let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
            // A patch that changes nothing writes only what is stored in a stale form.
            let nothing = Patch::Merge(serde_json::json!({}));
            match secrets
                .patch_metadata(&name, &PatchParams::default(), &nothing)
                .await
            {
                Ok(now) => {
                    seen += 1;
                    written += usize::from(now.metadata.resource_version != metadata.resource_version);
                }
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot write Secret {namespace}/{name} again"));
                }
            }
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    println!("{written} of {seen} Secrets were written again, encrypted by the key that is in use now.");
    Ok(())
}
