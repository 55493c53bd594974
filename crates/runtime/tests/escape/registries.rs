//! Registries and archives that never end, lie about their sizes, or hold far more than they seem to. Each
//! must end in an error soon, in little memory, and leave nothing in the store.

use crate::environment::{gzip, layer, oci_files, sha256, write_archive};
use skiff_runtime::image::{ImageStore, Limits, silent};
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What a process may grow by while it pulls. The endless answers are sent as fast as they are read.
const MAX_GROWTH: u64 = 40 << 20;

fn store(directory: &Path, patience: Duration) -> Arc<ImageStore> {
    let limits = Limits {
        document_timeout: patience,
        slow_window: patience,
        unpacked_bytes: 8 << 20,
        files: 300,
        ..Limits::default()
    };
    Arc::new(ImageStore::open(directory).expect("store").with_limits(limits))
}

/// Largest resident size since the last call, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .expect("VmHWM");
    let kilobytes: u64 = line
        .split_whitespace()
        .nth(1)
        .expect("number")
        .parse()
        .expect("number");
    std::fs::write("/proc/self/clear_refs", "5").expect("reset the peak");
    kilobytes * 1024
}

fn assert_empty(store: &ImageStore, case: &str) {
    assert!(store.list().expect("list").is_empty(), "{case}: no image");
    for directory in ["tmp", "layers", "blobs/sha256"] {
        let left: Vec<_> = std::fs::read_dir(store.root().join(directory))
            .expect("list")
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        assert!(left.is_empty(), "{case}: {directory} holds {left:?}");
    }
}

/// One image in a registry, and what the registry does with it.
#[derive(Clone, Default)]
struct Hostile {
    manifest: Vec<u8>,
    config: Vec<u8>,
    layer: Vec<u8>,
}

impl Hostile {
    /// An image of one packed layer whose manifest says `size` of it.
    fn new(plain: &[u8], packed: Vec<u8>, size: u64) -> Hostile {
        let files = oci_files("unused", plain, packed.clone());
        let mut manifest: serde_json::Value = serde_json::from_slice(&files[4].1).expect("manifest");
        manifest["layers"][0]["size"] = size.into();
        Hostile {
            manifest: manifest.to_string().into_bytes(),
            config: files[2].1.clone(),
            layer: packed,
        }
    }
}

async fn serve(image: Hostile) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let image = image.clone();
            tokio::spawn(async move {
                let _ = answer(stream, address, &image).await;
            });
        }
    });
    address
}

/// The repository's name says what goes wrong.
async fn answer(mut stream: TcpStream, address: SocketAddr, image: &Hostile) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let case = path.split('/').nth(2).unwrap_or_default();
        let (part, body) = if path.starts_with("/token") {
            ("token", &b"{}"[..])
        } else if path.contains("/manifests/") {
            ("manifest", image.manifest.as_slice())
        } else if path.ends_with(&sha256(&image.config)) {
            ("config", image.config.as_slice())
        } else {
            ("layer", image.layer.as_slice())
        };
        let wrong = case
            .strip_suffix(part)
            .or(path.strip_prefix("/token/"))
            .unwrap_or_default();
        if case == "endless-token" && part == "manifest" {
            let head = format!(
                "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\
                 WWW-Authenticate: Bearer realm=\"http://{address}/token/endless-\",service=\"x\"\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await?;
            continue;
        }
        match wrong.split('?').next().unwrap_or_default() {
            "endless-" => return endless(stream, "200 OK").await,
            "error-" => return endless(stream, "404 Not Found").await,
            "slow-" => return slow(stream).await,
            "claims-" => {
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 1u64 << 40);
                stream.write_all(head.as_bytes()).await?;
                return endless_bytes(stream).await;
            }
            "redirected-" => {
                let head = format!(
                    "HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\nLocation: {path}\r\n\r\n"
                );
                stream.write_all(head.as_bytes()).await?;
            }
            _ => {
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(body).await?;
            }
        }
    }
}

async fn endless(mut stream: TcpStream, status: &str) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    endless_bytes(stream).await
}

async fn endless_bytes(mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        stream.write_all(&[b' '; 64 << 10]).await?;
    }
}

/// Never silent for long enough to be taken for dead.
async fn slow(mut stream: TcpStream) -> std::io::Result<()> {
    stream
        .write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        .await?;
    loop {
        stream.write_all(b" ").await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn refused(store: &Arc<ImageStore>, image: Hostile, case: &str, expected: &str) {
    let address = serve(image).await;
    peak();
    let before = peak();
    let (name, progress) = (format!("{address}/{case}:1"), silent());
    let pull = store.pull(&name, None, &progress);
    let error = tokio::time::timeout(Duration::from_secs(60), pull)
        .await
        .unwrap_or_else(|_| panic!("{case} does not end"))
        .expect_err(case)
        .to_string();
    let growth = peak().saturating_sub(before);
    assert!(error.contains(expected), "{case}: {error}");
    assert!(growth < MAX_GROWTH, "{case} took {growth} bytes");
    assert_empty(store, case);
}

pub async fn hostile_registry() {
    let directory = tempfile::tempdir().expect("directory");
    let store = |patience| store(directory.path(), Duration::from_secs(patience));
    let (impatient, store) = (store(1), store(60));
    let plain = layer();
    let packed = gzip(&plain);
    let size = packed.len() as u64;
    let honest = || Hostile::new(&plain, packed.clone(), size);
    for (case, expected) in [
        ("endless-manifest", "the manifest is larger than 4194304 bytes"),
        ("claims-manifest", "the manifest is larger than 4194304 bytes"),
        ("error-manifest", "not found"),
        ("slow-manifest", "the manifest did not arrive within 1 seconds"),
        ("redirected-manifest", "redirect"),
        (
            "endless-token",
            "the answer of the token server is larger than 1048576 bytes",
        ),
        ("endless-config", "is larger than"),
        ("slow-config", "did not arrive within 1 seconds"),
        ("endless-layer", "is larger than"),
        ("claims-layer", "is larger than"),
        ("slow-layer", "did not arrive within 1 seconds"),
    ] {
        let slow = case.starts_with("slow-");
        refused(if slow { &impatient } else { &store }, honest(), case, expected).await;
    }
    // Of what the manifest says about the layer, nothing is believed beyond the limits.
    let said = |size: u64| Hostile::new(&plain, packed.clone(), size);
    refused(&store, said(0), "endless-layer", "is larger than 0 bytes").await;
    refused(&store, said(0), "honest", "is larger than 0 bytes").await;
    refused(&store, said(size - 1), "honest", "is larger than").await;
    refused(&store, said(1 << 50), "honest", "its layers are larger than").await;
    refused(&store, said(u64::MAX), "honest", "its layers are larger than").await;
    let mut many = said(size);
    let mut manifest: serde_json::Value = serde_json::from_slice(&many.manifest).expect("manifest");
    manifest["layers"][0]["digest"] = "sha256:../../../../etc/passwd".into();
    many.manifest = manifest.to_string().into_bytes();
    refused(&store, many, "honest", "is not a sha256 digest").await;

    // And what is as it should be is still taken.
    let address = serve(said(size)).await;
    let name = format!("{address}/honest:1");
    store.pull(&name, None, &silent()).await.expect("pulls");
    assert_eq!(store.list().expect("list").len(), 1);
}

fn set_owner(header: &mut tar::Header) {
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
}

/// A file of zeros, a thousandth as large when it is packed.
fn bomb(bytes: u64) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    set_owner(&mut header);
    header.set_size(bytes);
    builder
        .append_data(&mut header, "zeros", std::io::repeat(0).take(bytes))
        .expect("append");
    builder.into_inner().expect("tar")
}

fn many_files(count: usize) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for number in 0..count {
        let mut header = tar::Header::new_gnu();
        set_owner(&mut header);
        header.set_size(0);
        builder
            .append_data(&mut header, format!("f{number}"), &[][..])
            .expect("append");
    }
    builder.into_inner().expect("tar")
}

/// A sparse file says how large it is; its archive holds none of that.
fn sparse(bytes: u64) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_path("sparse").expect("path");
    set_owner(&mut header);
    header.set_entry_type(tar::EntryType::GNUSparse);
    header.set_size(0);
    let gnu = header.as_gnu_mut().expect("gnu");
    gnu.set_real_size(bytes);
    gnu.sparse[0].set_offset(bytes);
    gnu.sparse[0].set_length(0);
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, &[][..]).expect("append");
    builder.into_inner().expect("tar")
}

pub async fn bombs() {
    let directory = tempfile::tempdir().expect("directory");
    let store = store(&directory.path().join("store"), Duration::from_secs(60));
    let trailing = {
        let mut plain = many_files(1);
        plain.resize(plain.len() + (12 << 20), 0);
        plain
    };
    for (case, plain, expected) in [
        (
            "gzip-bomb",
            bomb(12 << 20),
            "is too large when it is decompressed",
        ),
        ("file-bomb", many_files(1000), "has more than 300 files"),
        (
            "sparse-bomb",
            sparse(1 << 40),
            "larger than 8388608 bytes when it is unpacked",
        ),
        ("trailing-zeros", trailing, "is too large when it is decompressed"),
    ] {
        let packed = gzip(&plain);
        let size = packed.len() as u64;
        let image = Hostile::new(&plain, packed.clone(), size);
        let zstd = zstd::encode_all(plain.as_slice(), 1).expect("zstd");
        let size = zstd.len() as u64;
        let image_zstd = Hostile::new(&plain, zstd, size);
        let archive = directory.path().join("image.tar");
        write_archive(&archive, &oci_files("example.com/bomb:1", &plain, packed));
        drop(plain);
        refused(&store, image, case, expected).await;
        refused(&store, image_zstd, case, expected).await;
        let error = store.import(&archive, &silent()).expect_err(case).to_string();
        assert!(error.contains(expected), "{case}: {error}");
        assert_empty(&store, case);
    }

    // The archive around the image may be the bomb as well.
    let archive = directory.path().join("bomb.tar.gz");
    std::fs::write(&archive, gzip(&bomb(12 << 20))).expect("write");
    peak();
    let before = peak();
    let error = store.import(&archive, &silent()).expect_err("a bomb").to_string();
    assert!(error.contains("when it is unpacked"), "{error}");
    assert!(peak().saturating_sub(before) < MAX_GROWTH);
    assert_empty(&store, "an archive");
}

/// A layer is known by its whole digest: one that shares the first half with it is another.
pub async fn whole_digests() {
    let directory = tempfile::tempdir().expect("directory");
    let store = ImageStore::open(&directory.path().join("store")).expect("store");
    let plain = layer();
    let digest = sha256(&plain);
    let planted = store.layers_directory().join(&digest[..16]);
    std::fs::create_dir(&planted).expect("make");
    let archive = directory.path().join("image.tar");
    write_archive(&archive, &oci_files("example.com/web:1", &plain, gzip(&plain)));
    store.import(&archive, &silent()).expect("imports");
    let image = store.find("example.com/web:1").expect("find").expect("there");
    assert_eq!(image.layers, std::slice::from_ref(&digest));
    assert!(
        store
            .layers_directory()
            .join(&digest)
            .join("bin/busybox")
            .exists()
    );

    // A list of an earlier version names the short directory. It serves, until the image comes again.
    let list = store.root().join("images.json");
    let text = std::fs::read_to_string(&list).expect("read");
    std::fs::write(
        &list,
        text.replace(&format!("[\"{digest}\"]"), &format!("[\"{}\"]", &digest[..16])),
    )
    .expect("write");
    let image = store.find("example.com/web:1").expect("find").expect("there");
    assert_eq!(image.layers, [digest[..16].to_owned()]);
    store
        .lease("a container", &image.layers)
        .expect("the old directory serves");
    store.import(&archive, &silent()).expect("imports");
    let image = store.find("example.com/web:1").expect("find").expect("there");
    assert_eq!(image.layers, [digest]);
    store.collect_garbage().expect("collects");
    assert!(planted.exists(), "held by a lease");
    store.release("a container");
    store.collect_garbage().expect("collects");
    assert!(!planted.exists());
}
