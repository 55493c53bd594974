//! Exec and attach: a client's streams, as frames on its connection, beside a process of a container.

use super::io::{AsyncPipe, resize};
use super::launch::launch;
use super::protocol::{ExecRequest, Response, frame, read_frame, write_frame, write_message};
use super::server::{CHUNK, Chunk, DRAIN, Shim};
use crate::init::spec::Task;
use bytes::Bytes;
use std::io;
use std::rc::Rc;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::spawn_local;

/// Chunks an attached client may lag behind before it is let go; the container never waits for it.
const ATTACH_BACKLOG: usize = 64;

impl Shim {
    pub(super) async fn attach(
        &self,
        id: &str,
        mut reader: OwnedReadHalf,
        mut writer: OwnedWriteHalf,
    ) -> io::Result<()> {
        let container = self.containers.borrow().get(id).cloned();
        let Some(container) = container.filter(|container| !*container.exited.borrow()) else {
            let message = format!("container {id} is not running");
            return write_message(&mut writer, &Response::Error(message)).await;
        };
        let (sender, mut chunks) = mpsc::channel(ATTACH_BACKLOG);
        container.attached.borrow_mut().push(sender);
        write_message(&mut writer, &Response::Ok).await?;

        let input = async {
            while let Ok((kind, data)) = read_frame(&mut reader).await {
                match kind {
                    frame::STDIN => {
                        let stdin = container.stdin.borrow().clone();
                        if let Some(stdin) = stdin
                            && stdin.write_all(&data).await.is_err()
                        {
                            container.stdin.borrow_mut().take();
                        }
                    }
                    frame::STDIN_CLOSED if container.stdin_once && container.console.is_none() => {
                        container.stdin.borrow_mut().take();
                    }
                    // The container's stdin stays open for the next client, and this one has nothing more to say:
                    // `kubectl run --leave-stdin-open` waits for the end of its session.
                    frame::STDIN_CLOSED if container.stdin.borrow().is_some() => return true,
                    frame::RESIZE => resize_by_frame(container.console.as_deref(), &data),
                    _ => {}
                }
            }
            if container.stdin_once && container.console.is_none() {
                container.stdin.borrow_mut().take();
            }
            false
        };
        let output = async {
            while let Some((kind, data)) = chunks.recv().await {
                if write_frame(&mut writer, kind, &data).await.is_err() {
                    return;
                }
            }
            let mut exited = container.exited.clone();
            if tokio::time::timeout(DRAIN, exited.wait_for(|exited| *exited))
                .await
                .is_ok()
            {
                let code = container.state.borrow().exit_code;
                let _ = write_frame(&mut writer, frame::EXIT, &code.to_be_bytes()).await;
            }
        };
        let detached = tokio::select! {
            detached = input => detached,
            () = output => false,
        };
        if detached {
            while let Ok((kind, data)) = chunks.try_recv() {
                write_frame(&mut writer, kind, &data).await?;
            }
            write_frame(&mut writer, frame::EXIT, &0_i32.to_be_bytes()).await?;
        }
        Ok(())
    }

    pub(super) async fn exec(
        &self,
        request: ExecRequest,
        mut reader: OwnedReadHalf,
        mut writer: OwnedWriteHalf,
    ) -> io::Result<()> {
        let container = self.containers.borrow().get(&request.id).cloned();
        let Some(container) = container.filter(|container| !*container.exited.borrow()) else {
            let message = format!("container {} is not running", request.id);
            return write_message(&mut writer, &Response::Error(message)).await;
        };
        let terminal = request.process.terminal;
        // The container counts as running until its output is read to the end; its process does not.
        let Ok(target) = self.reaper.handle(container.state.borrow().pid) else {
            let message = format!("container {} is not running", request.id);
            return write_message(&mut writer, &Response::Error(message)).await;
        };
        let task = Task::Exec {
            process: Box::new(request.process),
        };
        let launched = launch(
            &self.reaper,
            &self.binary,
            &task,
            Some(target),
            request.stdin,
            terminal,
        );
        let mut launched = match launched.await {
            Ok(launched) => launched,
            Err(message) => return write_message(&mut writer, &Response::Error(message)).await,
        };
        write_message(&mut writer, &Response::Pid(launched.pid)).await?;

        let pid = launched.pid;
        let console = launched
            .streams
            .console
            .take()
            .map(AsyncPipe::new)
            .transpose()?
            .map(Rc::new);
        let mut stdin = match &console {
            Some(console) => request.stdin.then(|| console.clone()),
            None => launched
                .streams
                .stdin
                .take()
                .map(AsyncPipe::new)
                .transpose()?
                .map(Rc::new),
        };
        let (sender, mut chunks) = mpsc::channel::<Chunk>(4);
        let mut copies = Vec::new();
        if let Some(console) = &console {
            copies.push(spawn_local(forward(
                console.clone(),
                frame::STDOUT,
                sender.clone(),
            )));
        }
        for (fd, kind) in [
            (launched.streams.stdout.take(), frame::STDOUT),
            (launched.streams.stderr.take(), frame::STDERR),
        ] {
            if let Some(fd) = fd {
                copies.push(spawn_local(forward(
                    Rc::new(AsyncPipe::new(fd)?),
                    kind,
                    sender.clone(),
                )));
            }
        }
        drop(sender);

        let input = async {
            while let Ok((kind, data)) = read_frame(&mut reader).await {
                match kind {
                    frame::STDIN => {
                        let failed = match &stdin {
                            Some(stdin) => stdin.write_all(&data).await.is_err(),
                            None => false,
                        };
                        if failed {
                            stdin = None;
                        }
                    }
                    frame::STDIN_CLOSED => {
                        match (&console, stdin.take()) {
                            // The end of a terminal's input is a character of its own.
                            (Some(console), Some(_)) => drop(console.write_all(&[4]).await),
                            (_, stdin) => drop(stdin),
                        }
                    }
                    frame::RESIZE => resize_by_frame(console.as_deref(), &data),
                    frame::SIGNAL => {
                        if let Some(signal) = data.first() {
                            self.kill(pid, i32::from(*signal));
                        }
                    }
                    _ => {}
                }
            }
            // The client went away: its end of the streams closes with it.
            drop(stdin.take());
            if request.kill_on_close {
                self.kill(pid, libc::SIGKILL);
            }
            std::future::pending::<()>().await;
        };
        let output = async {
            let mut exit = launched.exit;
            let mut code = None;
            loop {
                tokio::select! {
                    chunk = chunks.recv() => match chunk {
                        Some((kind, data)) => write_frame(&mut writer, kind, &data).await?,
                        None => break,
                    },
                    exited = &mut exit, if code.is_none() => {
                        code = Some(exited.unwrap_or(255));
                        // What is in the pipes still comes; what a left-behind child writes later does not.
                        let aborts: Vec<_> = copies.iter().map(|copy| copy.abort_handle()).collect();
                        spawn_local(async move {
                            tokio::time::sleep(DRAIN).await;
                            aborts.iter().for_each(|copy| copy.abort());
                        });
                    }
                }
            }
            let code = match code {
                Some(code) => code,
                None => exit.await.unwrap_or(255),
            };
            write_frame(&mut writer, frame::EXIT, &code.to_be_bytes()).await
        };
        tokio::select! {
            () = input => Ok(()),
            result = output => result,
        }
    }
}

async fn forward(pipe: Rc<AsyncPipe>, kind: u8, sender: mpsc::Sender<Chunk>) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(length) = pipe.read(&mut buffer).await {
        if length == 0
            || sender
                .send((kind, Bytes::copy_from_slice(&buffer[..length])))
                .await
                .is_err()
        {
            return;
        }
    }
}

fn resize_by_frame(console: Option<&AsyncPipe>, data: &[u8]) {
    if let (Some(console), [a, b, c, d]) = (console, data) {
        let _ = resize(
            console.as_fd(),
            u16::from_be_bytes([*a, *b]),
            u16::from_be_bytes([*c, *d]),
        );
    }
}
