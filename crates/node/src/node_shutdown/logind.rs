//! systemd-logind on the system bus: it is asked to hold up a shutdown while this node has a lock, and tells of it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use skiff_dbus::{Body, Connection, Message};

const LOGIND: &str = "org.freedesktop.login1";
const LOGIND_PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const SIGNAL: &str = "PrepareForShutdown";
/// COMPAT: upstream's file. It is only written with more time than logind gives, so clusters on one machine share it.
const DROP_IN: &str = "99-kubelet.conf";
/// logind reads its configuration some time after it was told to.
const FIRST_LOOK: Duration = Duration::from_millis(100);
const LOOKS: u32 = 5;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Bus(#[from] skiff_dbus::Error),
    #[error("logind's answer has no file descriptor")]
    NoLock,
    #[error("logind's {0} has an unknown type")]
    Property(String),
    #[error("cannot write {path}: {source}")]
    DropIn { path: String, source: std::io::Error },
    #[error(
        "logind holds up a shutdown for at most {given:?}, and pods need {wanted:?}: it did not follow {DROP_IN}"
    )]
    TooShort { given: Duration, wanted: Duration },
}

pub(super) struct Logind {
    bus: Connection,
}

impl Logind {
    pub(super) async fn connect(address: &str) -> Result<Self, Error> {
        Ok(Logind {
            bus: Connection::open(address).await?,
        })
    }

    async fn call(&mut self, member: &str, body: Body) -> Result<Message, Error> {
        let call = Message::call(LOGIND, LOGIND_PATH, MANAGER, member, body);
        Ok(self.bus.call(call).await?)
    }

    /// One of logind's properties, which has a type of one letter.
    async fn property(&mut self, name: &str, type_: &str) -> Result<Message, Error> {
        let body = Body::default().string(MANAGER).string(name);
        let call = Message::call(
            LOGIND,
            LOGIND_PATH,
            "org.freedesktop.DBus.Properties",
            "Get",
            body,
        );
        let answer = self.bus.call(call).await?;
        if answer.body.signature() != "v" || answer.read().signature()? != type_ {
            return Err(Error::Property(name.to_owned()));
        }
        Ok(answer)
    }

    /// How long a shutdown can be held up.
    async fn longest_delay(&mut self) -> Result<Duration, Error> {
        let answer = self.property("InhibitDelayMaxUSec", "t").await?;
        let mut values = answer.read();
        values.signature()?;
        Ok(Duration::from_micros(values.u64()?))
    }

    /// Whether a shutdown has begun.
    pub(super) async fn is_preparing(&mut self) -> Result<bool, Error> {
        let answer = self.property("PreparingForShutdown", "b").await?;
        let mut values = answer.read();
        values.signature()?;
        Ok(values.bool()?)
    }

    /// Has logind hold up a shutdown for this long, if it would not already.
    pub(super) async fn allow_delay(&mut self, wanted: Duration, folder: &Path) -> Result<(), Error> {
        if self.longest_delay().await? >= wanted {
            return Ok(());
        }
        write_drop_in(folder, wanted)?;
        self.reload().await?;
        let mut pause = FIRST_LOOK;
        let mut given = Duration::ZERO;
        for _ in 0..LOOKS {
            given = self.longest_delay().await?;
            if given >= wanted {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        Err(Error::TooShort { given, wanted })
    }

    /// Has systemd send SIGHUP to logind.
    async fn reload(&mut self) -> Result<(), Error> {
        let body = Body::default()
            .string("systemd-logind.service")
            .string("all")
            .int(1);
        let call = Message::call(
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager",
            "KillUnit",
            body,
        );
        self.bus.call(call).await?;
        Ok(())
    }

    /// The lock: while this descriptor is open, a shutdown waits.
    pub(super) async fn inhibit(&mut self) -> Result<OwnedFd, Error> {
        // COMPAT: `systemd-inhibit --list` shows upstream's words.
        let body = Body::default()
            .string("shutdown")
            .string("kubelet")
            .string("Kubelet needs time to handle node shutdown")
            .string("delay");
        let mut answer = self.call("Inhibit", body).await?;
        if answer.body.signature() != "h" {
            return Err(Error::NoLock);
        }
        let place = usize::try_from(answer.read().u32()?).unwrap_or(usize::MAX);
        if place >= answer.fds.len() {
            return Err(Error::NoLock);
        }
        Ok(answer.fds.swap_remove(place))
    }

    /// Asks to be told of shutdowns.
    pub(super) async fn subscribe(&mut self) -> Result<(), Error> {
        let rule = format!(
            "type='signal',sender='{LOGIND}',path='{LOGIND_PATH}',interface='{MANAGER}',member='{SIGNAL}'"
        );
        self.bus
            .call_bus("AddMatch", Body::default().string(&rule))
            .await?;
        Ok(())
    }

    /// Waits for the next news: a shutdown begins (`true`), or was cancelled.
    pub(super) async fn next(&mut self) -> Result<bool, Error> {
        loop {
            let message = self.bus.receive().await?;
            if !message.is(MANAGER, SIGNAL) || message.body.signature() != "b" {
                continue;
            }
            // Whoever is on the bus may send us a signal; only logind's counts.
            let asked = Body::default().string(LOGIND);
            let owner = self.bus.call_bus("GetNameOwner", asked).await?;
            if message.sender.as_deref() == Some(owner.read().string()?) {
                return Ok(message.read().bool()?);
            }
            tracing::warn!(sender = message.sender, "{SIGNAL} of somebody else than logind");
        }
    }
}

fn write_drop_in(folder: &Path, delay: Duration) -> Result<(), Error> {
    let path = folder.join(DROP_IN);
    let text = format!(
        "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={}\n",
        delay.as_secs()
    );
    std::fs::create_dir_all(folder)
        .and_then(|()| skiff_fs::write_atomically(&path, text.as_bytes(), 0o644))
        .map_err(|source| Error::DropIn {
            path: path.display().to_string(),
            source,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drop_in() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("logind.conf.d");
        write_drop_in(&folder, Duration::from_secs(30)).unwrap();
        let text = std::fs::read_to_string(folder.join("99-kubelet.conf")).unwrap();
        assert_eq!(
            text,
            "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=30\n"
        );
        std::fs::write(dir.path().join("file"), "").unwrap();
        let error = write_drop_in(&dir.path().join("file"), Duration::from_secs(1)).unwrap_err();
        assert!(
            error.to_string().contains("cannot write") && error.to_string().contains("99-kubelet.conf"),
            "{error}"
        );
    }
}
