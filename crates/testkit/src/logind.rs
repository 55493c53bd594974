//! A stand-in for systemd-logind on a real dbus-daemon: it has the part of logind that a kubelet speaks to, and the call
//! of systemd that makes it read its configuration again. Nothing of the machine's own bus is touched.

use crate::eventually;
use crate::external::Process;
use anyhow::{Context, Result, anyhow};
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use skiff_dbus::{Body, Connection, Message};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(20);
const LOGIND: &str = "org.freedesktop.login1";
const LOGIND_PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const SIGNAL: &str = "PrepareForShutdown";

#[derive(Default)]
struct State {
    delay: Duration,
    is_shutting_down: bool,
    /// What was said with each lock, and the end of its pipe that stays here.
    locks: Vec<(String, OwnedFd)>,
    conf_dir: PathBuf,
}

pub struct Logind {
    _daemon: Process,
    dir: TempDir,
    state: Arc<Mutex<State>>,
    signals: mpsc::UnboundedSender<bool>,
}

impl Logind {
    /// Holds up a shutdown for at most `delay`, as long as its configuration says nothing else.
    pub fn start(delay: Duration) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let address = format!("unix:path={}", dir.path().join("bus").display());
        let config = format!(
            "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\" \
             \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n\
             <busconfig><type>system</type><listen>{address}</listen><auth>EXTERNAL</auth>\
             <policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/>\
             <allow send_destination=\"*\" eavesdrop=\"false\"/><allow receive_sender=\"*\"/>\
             <allow send_type=\"signal\"/></policy></busconfig>\n"
        );
        let file = dir.path().join("bus.conf");
        std::fs::write(&file, config)?;
        let mut command = Command::new("dbus-daemon");
        command
            .arg(format!("--config-file={}", file.display()))
            .args(["--nofork", "--nopidfile", "--nosyslog"])
            .stdout(Stdio::null());
        let daemon = Process::start("dbus-daemon", "dbus-daemon", &mut command)?;
        let conf_dir = dir.path().join("logind.conf.d");
        let state = Arc::new(Mutex::new(State {
            delay,
            is_shutting_down: false,
            locks: Vec::new(),
            conf_dir,
        }));
        let (signals, orders) = mpsc::unbounded_channel();
        let (served, (ready, is_ready)) = (state.clone(), std::sync::mpsc::channel());
        let bus = address.clone();
        eventually("the bus listens", PATIENCE, || {
            Ok(std::os::unix::net::UnixStream::connect(dir.path().join("bus")).map(drop)?)
        })?;
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let run = runtime
                .map_err(anyhow::Error::from)
                .and_then(|runtime| runtime.block_on(serve(&bus, &served, orders, &ready)));
            if let Err(error) = run {
                let _ = ready.send(Err(error));
            }
        });
        is_ready.recv_timeout(PATIENCE).context("logind")??;
        Ok(Self {
            _daemon: daemon,
            dir,
            state,
            signals,
        })
    }

    /// As `DBUS_SYSTEM_BUS_ADDRESS` has it.
    pub fn address(&self) -> String {
        format!("unix:path={}", self.dir.path().join("bus").display())
    }

    /// Where this logind reads its configuration from.
    pub fn conf_dir(&self) -> PathBuf {
        self.dir.path().join("logind.conf.d")
    }

    /// A shutdown begins, or is cancelled.
    pub fn shut_down(&self, begins: bool) -> Result<()> {
        self.signals.send(begins).map_err(|_| anyhow!("logind has ended"))
    }

    /// What the locks say that are held now.
    pub fn locks(&self) -> Vec<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A pipe that nobody can write to any more ends.
        state
            .locks
            .retain(|(_, end)| rustix::io::read(end, &mut [0u8; 1]) == Err(rustix::io::Errno::AGAIN));
        state.locks.iter().map(|(said, _)| said.clone()).collect()
    }

    /// Sends the signal of a shutdown to all clients on the bus, as another user might.
    pub async fn pretend(&self) -> Result<()> {
        self.send_to_clients(Body::default().bool(true)).await
    }

    /// Sends more to all clients on the bus than they take.
    pub async fn disturb(&self) -> Result<()> {
        let long = "x".repeat(1 << 20);
        self.send_to_clients(Body::default().string(&long)).await
    }

    async fn send_to_clients(&self, body: Body) -> Result<()> {
        let mut bus = Connection::open(&self.address()).await?;
        let asked = Body::default().string(LOGIND);
        let owner = bus.call_bus("GetNameOwner", asked).await?;
        let own = [bus.unique_name().to_owned(), owner.read().string()?.to_owned()];
        let names = bus.call_bus("ListNames", Body::default()).await?;
        let mut values = names.read();
        let length = values.u32()?;
        anyhow::ensure!(length > 0, "nobody is on the bus");
        // The rest of the list: as many names as there are.
        while let Ok(name) = values.string() {
            if name.starts_with(':') && !own.iter().any(|own| own == name) {
                let mut signal = Message::signal(LOGIND_PATH, MANAGER, SIGNAL, body.clone());
                signal.destination = Some(name.to_owned());
                bus.send(signal).await?;
            }
        }
        // The bus has passed them on when it has answered this.
        bus.call_bus("GetId", Body::default()).await?;
        Ok(())
    }
}

async fn serve(
    address: &str,
    state: &Mutex<State>,
    mut orders: mpsc::UnboundedReceiver<bool>,
    ready: &std::sync::mpsc::Sender<Result<()>>,
) -> Result<()> {
    let mut bus = Connection::open(address).await?;
    for name in [LOGIND, "org.freedesktop.systemd1"] {
        bus.call_bus("RequestName", Body::default().string(name).uint(0))
            .await?;
    }
    let _ = ready.send(Ok(()));
    loop {
        tokio::select! {
            order = orders.recv() => {
                let Some(begins) = order else { return Ok(()) };
                state.lock().unwrap_or_else(PoisonError::into_inner).is_shutting_down = begins;
                let body = Body::default().bool(begins);
                bus.send(Message::signal(LOGIND_PATH, MANAGER, SIGNAL, body)).await?;
            }
            call = bus.receive() => {
                let call = call?;
                if let Some(answer) = answer(&call, state)? {
                    bus.send(answer).await?;
                }
            }
        }
    }
}

fn answer(call: &Message, state: &Mutex<State>) -> Result<Option<Message>> {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if call.is("org.freedesktop.DBus.Properties", "Get") {
        let mut values = call.read();
        let body = match (values.string()?, values.string()?) {
            (MANAGER, "InhibitDelayMaxUSec") => {
                Body::default().variant_u64(u64::try_from(state.delay.as_micros())?)
            }
            (MANAGER, "PreparingForShutdown") => Body::default().variant_bool(state.is_shutting_down),
            (_, name) => anyhow::bail!("logind here has no property {name}"),
        };
        return Ok(Some(call.reply(body)));
    }
    if call.is("org.freedesktop.systemd1.Manager", "KillUnit") {
        if let Ok(text) = std::fs::read_to_string(state.conf_dir.join("99-kubelet.conf")) {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("InhibitDelayMaxSec="));
            state.delay = Duration::from_secs(line.context("no delay")?.parse()?);
        }
        return Ok(Some(call.reply(Body::default())));
    }
    if call.is(MANAGER, "Inhibit") {
        let mut values = call.read();
        let said = [
            values.string()?,
            values.string()?,
            values.string()?,
            values.string()?,
        ]
        .join(" / ");
        let (here, there) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&here, OFlags::NONBLOCK)?;
        state.locks.push((said, here));
        let mut reply = call.reply(Body::default().fd(0));
        reply.fds.push(there);
        return Ok(Some(reply));
    }
    // Signals of the bus itself.
    Ok(None)
}
