//! The flag that says which APIs are served, and what it means for the controllers that need one.

use anyhow::{Context, Result, bail};
use clap::Args;
use skiff_api::facts::RuntimeConfig;
use skiff_controllers::ControllerSelection;

#[derive(Debug, Clone, Args)]
pub struct ApiArgs {
    /// APIs that are off by default to serve, such as storagemigration.k8s.io/v1beta1=true, or api/beta=true for all
    /// that skiff has
    #[arg(long, value_name = "API=BOOL", value_delimiter = ',')]
    pub runtime_config: Vec<String>,
}

impl ApiArgs {
    pub fn runtime_config(&self) -> Result<RuntimeConfig> {
        RuntimeConfig::parse(&self.runtime_config).context("--runtime-config")
    }

    /// Refuses a controller that is asked for by name, and whose API is not served.
    pub fn check(&self, controllers: &ControllerSelection) -> Result<()> {
        let served = self.runtime_config()?;
        for (name, (group, version, plural)) in skiff_controllers::needed_apis() {
            if controllers.names(name) && !served.serves_on_request(group, version, plural) {
                bail!("--controllers: {name} needs --runtime-config={group}/{version}/{plural}=true");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_needs_its_api() {
        let check = |apis: &[&str], controllers: &[&str], expected: &str| {
            let args = ApiArgs {
                runtime_config: apis.iter().map(|api| (*api).to_owned()).collect(),
            };
            let controllers = ControllerSelection::parse(controllers).unwrap();
            let found = args.check(&controllers).err().map(|error| format!("{error:#}"));
            assert_eq!(found.unwrap_or_default(), expected);
        };
        check(&[], &["*"], "");
        check(&[], &["*", "-svm"], "");
        check(&["storagemigration.k8s.io/v1beta1=true"], &["*", "svm"], "");
        check(
            &[],
            &["*", "svm"],
            "--controllers: storage-version-migrator-controller needs --runtime-config=storagemigration.k8s.io/v1beta1/storageversionmigrations=true",
        );
        check(
            &["certificates.k8s.io/v1beta1/clustertrustbundles=true"],
            &["podcertificaterequest-cleaner-controller"],
            "--controllers: podcertificaterequest-cleaner-controller needs --runtime-config=certificates.k8s.io/v1beta1/podcertificaterequests=true",
        );
        check(
            &["example.com/v1=true"],
            &["*"],
            "--runtime-config: unknown api group \"example.com\"",
        );
    }
}
