//! How a backup gets at the objects: a running server has the store to itself and sends them over a socket that only
//! root can reach; of a cluster that is stopped they are read by this process, in the same form.

use super::records::{Manifest, Record};
use crate::VERSION;
use crate::cluster::Cluster;
use crate::stores::transfer::Source;
use anyhow::{Context, Result};
use skiff_encryption::Encryption;
use skiff_store::Store;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

/// What is sent at once.
const BUFFER: usize = 256 << 10;
/// A client that reads nothing for so long is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rest after the socket could not be made or used.
const PAUSE: Duration = Duration::from_secs(5);

impl Cluster {
    pub fn backup_socket(&self) -> PathBuf {
        self.run_dir().join("backup.sock")
    }

    fn manifest(&self, source: &Source) -> Manifest {
        Manifest {
            cluster: self.name.clone(),
            version: VERSION.to_owned(),
            created: jiff::Timestamp::now().to_string(),
            revision: source.revision(),
            pod_cidr: self.pod_cidr.clone(),
            service_cidr: self.service_cidr.clone(),
            encrypted_at_rest: source.is_encrypted(),
        }
    }
}

/// Answers `skiff backup` for as long as the server runs. Without it a cluster works as well, so that nothing here fails.
pub fn answer(
    cluster: &Cluster,
    in_etcd: bool,
    store: &Arc<dyn Store>,
    encryption: Option<&Arc<Encryption>>,
    shutdown: &CancellationToken,
) {
    let (cluster, store, encryption) = (cluster.clone(), store.clone(), encryption.cloned());
    skiff_supervise::keep("backup", shutdown, move || {
        let (cluster, store, encryption) = (cluster.clone(), store.clone(), encryption.clone());
        async move {
            if let Err(error) = listen(&cluster, in_etcd, &store, encryption.as_ref()).await {
                tracing::error!(error = format!("{error:#}"), "backups cannot be answered");
            }
            tokio::time::sleep(PAUSE).await;
        }
    });
}

/// One backup after the other.
async fn listen(
    cluster: &Cluster,
    in_etcd: bool,
    store: &Arc<dyn Store>,
    encryption: Option<&Arc<Encryption>>,
) -> Result<()> {
    let path = cluster.backup_socket();
    crate::cluster::remove_if_there(&path)?;
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let source = Source::of_store(store.clone(), in_etcd, encryption.cloned());
        if let Err(error) = send(cluster, source, &mut stream).await {
            tracing::warn!(error = format!("{error:#}"), "a backup was not finished");
        }
    }
}

/// Sends everything; a failure is sent too.
async fn send(
    cluster: &Cluster,
    source: impl Future<Output = Result<Source>>,
    to: &mut UnixStream,
) -> Result<()> {
    let sent = async { send_all(cluster, source.await?, to).await }.await;
    if let Err(error) = &sent {
        let mut bytes = Vec::new();
        Record::Failed(format!("{error:#}")).write(&mut bytes)?;
        write(to, &mut bytes).await?;
    }
    sent
}

async fn send_all(cluster: &Cluster, mut source: Source, to: &mut UnixStream) -> Result<()> {
    let mut bytes = Vec::with_capacity(BUFFER);
    Record::Manifest(cluster.manifest(&source)).write(&mut bytes)?;
    let mut count = 0;
    while let Some(item) = source.next().await? {
        Record::Object(item).write(&mut bytes)?;
        count += 1;
        if bytes.len() >= BUFFER {
            write(to, &mut bytes).await?;
        }
    }
    Record::End(count).write(&mut bytes)?;
    write(to, &mut bytes).await
}

async fn write(to: &mut UnixStream, bytes: &mut Vec<u8>) -> Result<()> {
    let written = tokio::time::timeout(PATIENCE, to.write_all(bytes)).await;
    written.context("the client does not read")??;
    bytes.clear();
    Ok(())
}

/// The records of a running cluster.
pub fn from_server(cluster: &Cluster) -> Result<std::os::unix::net::UnixStream> {
    let path = cluster.backup_socket();
    let stream = std::os::unix::net::UnixStream::connect(&path);
    let stream = stream.with_context(|| {
        format!(
            "the server does not answer at {}; if it is of an older skiff, restart it with this one",
            path.display()
        )
    })?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The records of a cluster that is stopped. They come from a thread of this process.
pub fn from_store(
    cluster: &Cluster,
    source: impl Future<Output = Result<Source>> + Send + 'static,
) -> Result<std::os::unix::net::UnixStream> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    let cluster = cluster.clone();
    std::thread::Builder::new()
        .name("backup".to_owned())
        .spawn(move || {
            // What goes wrong is among the records, or ends them.
            let _ = crate::block_on(async {
                let mut to = UnixStream::from_std(theirs)?;
                send(&cluster, source, &mut to).await
            });
        })?;
    Ok(ours)
}
