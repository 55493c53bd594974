//! Layers that try to write outside of their directory, or to speak to overlayfs itself.

use crate::environment::{Environment, Pod, layer, oci_files, sha256, write_archive};
use crate::support::{Entry, container, image, layer_with};
use skiff_runtime::image::silent;
use tar::EntryType::{Directory, Link, Regular, Symlink};

pub async fn stay_inside() {
    let environment = Environment::new().await;
    let outside = environment.path("outside");
    std::fs::create_dir(&outside).expect("make");
    std::fs::write(outside.join("victim"), "untouched").expect("write");
    let absolute = outside.to_string_lossy().into_owned();
    let victim = format!("{absolute}/victim");
    let up = format!("../../../../../../../../../..{absolute}");
    let relative = victim.trim_start_matches('/').to_owned();
    let attacks: [&[Entry<'_>]; 10] = [
        &[(&up, Directory, ""), (&format!("{up}/made"), Regular, "x")],
        &[("../../../made", Regular, "x")],
        &[("out", Symlink, &absolute), ("out/made", Regular, "x")],
        &[("out", Symlink, &absolute), ("out/victim", Regular, "changed")],
        &[("out", Symlink, &absolute), ("out/.wh.victim", Regular, "")],
        &[("out", Symlink, &absolute), ("out/.wh..wh..opq", Regular, "")],
        &[("hard", Link, &victim), ("hard", Regular, "changed")],
        &[("hard", Link, &relative)],
        &[("out", Symlink, &victim), ("out", Regular, "changed")],
        &[
            (".wh...", Regular, ""),
            (".wh..", Regular, ""),
            (".wh.", Regular, ""),
        ],
    ];
    let images = environment.runtime.as_ref().expect("started").images();
    for attack in attacks {
        let plain = layer_with(attack);
        let archive = environment.path("hostile.tar");
        write_archive(
            &archive,
            &oci_files("example.com/layers:1", &plain, plain.clone()),
        );
        let _ = images.import(&archive, &silent());
        let left: Vec<_> = std::fs::read_dir(&outside).expect("list").collect();
        assert_eq!(left.len(), 1, "{attack:?}");
        let content = std::fs::read_to_string(outside.join("victim")).expect("read");
        assert_eq!(content, "untouched", "{attack:?}");
        assert_eq!(
            std::fs::metadata(&victim)
                .map(|m| std::os::unix::fs::MetadataExt::nlink(&m))
                .ok(),
            Some(1)
        );
    }

    // A link that leads up to the root leads up to that of the image.
    let mut pod = Pod::run(&environment, "layers").await;
    let entries = [
        ("inner", Directory, ""),
        ("out", Symlink, "../../../../inner"),
        ("out/made", Regular, "x"),
    ];
    let image = image(&environment, "inside", &entries);
    let config = container("main", &image, "cat /inner/made");
    assert_eq!(pod.script(config).await, (0, "x\n".into()));
    pod.remove().await;
    environment.finish().await;
}

/// Names of layers are long, and a mount's options are one page.
pub async fn many_layers() {
    const COUNT: usize = 130;
    let environment = Environment::new().await;
    let mut plain = vec![layer()];
    for number in 1..COUNT {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        builder
            .append_data(&mut header, format!("files/f{number}"), &[][..])
            .expect("append");
        plain.push(builder.into_inner().expect("tar"));
    }
    let digests: Vec<String> = plain
        .iter()
        .map(|layer| format!("sha256:{}", sha256(layer)))
        .collect();
    let config =
        serde_json::json!({"config": {}, "rootfs": {"type": "layers", "diff_ids": digests}}).to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    let names: Vec<String> = (0..COUNT).map(|number| format!("{number}/layer.tar")).collect();
    let manifest = serde_json::json!([
        {"Config": config_name, "RepoTags": ["example.com/many:1"], "Layers": names}
    ]);
    let mut files = vec![
        (config_name, config.into_bytes()),
        ("manifest.json".to_owned(), manifest.to_string().into_bytes()),
    ];
    files.extend(names.into_iter().zip(plain));
    let archive = environment.path("many.tar");
    write_archive(&archive, &files);
    let images = environment.runtime.as_ref().expect("started").images();
    images.import(&archive, &silent()).expect("import");
    let mut pod = Pod::run(&environment, "many").await;
    let config = container("main", "example.com/many:1", "ls /files | busybox wc -l");
    assert_eq!(pod.script(config).await, (0, format!("{}\n", COUNT - 1)));
    pod.remove().await;
    environment.finish().await;
}
