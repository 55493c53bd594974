//! The socket at which device plugins register. Plugins watch for it to be made anew: that is how they learn of a new kubelet.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use skiff_devices::deviceplugin::registration_server::{Registration, RegistrationServer};
use skiff_devices::deviceplugin::{Empty, RegisterRequest};
use skiff_devices::{Request, Response, Status};
use tokio_util::sync::CancellationToken;

use super::{DevicePlugins, plugin};
use crate::plugin_registry::{Plugin, PluginHandler};

const SOCKET: &str = "kubelet.sock";
const VERSION: &str = "v1beta1";
const RETRY: Duration = Duration::from_secs(5);

struct Server {
    plugins: Arc<DevicePlugins>,
    shutdown: CancellationToken,
}

/// COMPAT: upstream's rule for names of extended resources.
fn is_extended(name: &str) -> bool {
    let qualified = |name: &str| {
        let Some((domain, rest)) = name.split_once('/') else {
            return false;
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let edge = |c: char| c.is_ascii_alphanumeric();
        let part = |text: &str, most: usize| {
            !text.is_empty()
                && text.len() <= most
                && text.chars().all(plain)
                && text.starts_with(edge)
                && text.ends_with(edge)
        };
        part(rest, 63) && part(domain, 253)
    };
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
        && qualified(&format!("requests.{name}"))
}

#[tonic::async_trait]
impl Registration for Server {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest {
            version,
            endpoint,
            resource_name,
            ..
        } = request.into_inner();
        if version != VERSION {
            return Err(Status::unknown(format!(
                "requested API version {version:?} is not supported by kubelet. Supported version is [{VERSION:?}]"
            )));
        }
        if !is_extended(&resource_name) {
            return Err(Status::unknown(format!(
                "the ResourceName {resource_name:?} is invalid"
            )));
        }
        // A plugin is a socket of the folder, wherever else it may point.
        if endpoint.is_empty() || Path::new(&endpoint).file_name() != Some(endpoint.as_ref()) {
            return Err(Status::unknown(format!(
                "bad socketPath, {endpoint:?} is not a name"
            )));
        }
        let socket = self.plugins.folder.join(&endpoint);
        plugin::connect(&self.plugins, &resource_name, &socket, &self.shutdown)
            .await
            .map_err(Status::unknown)?;
        Ok(Response::new(Empty {}))
    }
}

/// Plugins that register in `plugins_registry`.
pub struct Handler {
    pub plugins: Arc<DevicePlugins>,
    pub shutdown: CancellationToken,
}

#[tonic::async_trait]
impl PluginHandler for Handler {
    fn validate(&self, plugin: &Plugin) -> Result<(), String> {
        if !plugin.versions.iter().any(|version| version == VERSION) {
            return Err(format!(
                "requested API version {:?} is not supported by kubelet. Supported version is [{VERSION:?}]",
                plugin.versions
            ));
        }
        if !is_extended(&plugin.name) {
            return Err(format!("the ResourceName {:?} is invalid", plugin.name));
        }
        Ok(())
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), String> {
        plugin::connect(&self.plugins, &plugin.name, &plugin.endpoint, &self.shutdown).await
    }

    async fn deregister(&self, plugin: &Plugin) {
        self.plugins.removed(&plugin.name);
    }
}

/// COMPAT: sockets of earlier plugins go, so that nobody waits for who has ended.
fn clean(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o750))?;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

async fn serve(plugins: &Arc<DevicePlugins>, shutdown: &CancellationToken) -> Result<(), String> {
    let socket = plugins.folder.join(SOCKET);
    clean(&plugins.folder).map_err(|error| format!("{}: {error}", plugins.folder.display()))?;
    let listener = tokio::net::UnixListener::bind(&socket)
        .map_err(|error| format!("cannot listen on {}: {error}", socket.display()))?;
    let incoming = futures::stream::unfold(listener, async |listener| {
        let accepted = listener.accept().await;
        let accepted = accepted.map(|(stream, _)| skiff_devices::Connection::new(stream));
        Some((accepted, listener))
    });
    let server = Server {
        plugins: plugins.clone(),
        shutdown: shutdown.clone(),
    };
    tonic::transport::Server::builder()
        .add_service(RegistrationServer::new(server))
        .serve_with_incoming_shutdown(incoming, shutdown.cancelled())
        .await
        .map_err(|error| error.to_string())
}

/// Serves registrations until `shutdown`.
pub async fn run(plugins: Arc<DevicePlugins>, shutdown: CancellationToken) {
    while !shutdown.is_cancelled() {
        if let Err(error) = serve(&plugins, &shutdown).await {
            tracing::error!(error, "device plugins cannot register");
        }
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_extended_resources() {
        let check = |name: &str, expected: bool| assert_eq!(is_extended(name), expected, "{name}");
        check("example.com/gpu", true);
        check("example.com/a.b-c_d", true);
        check("gpu", false);
        check("kubernetes.io/gpu", false);
        check("requests.example.com/gpu", false);
        check("example.com/-gpu", false);
        check("example.com/a/b", false);
    }
}
