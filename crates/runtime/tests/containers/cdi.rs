//! Devices by CDI in real containers.

use crate::environment::{Environment, Pod, container_config, log_text, security};
use skiff_cri::v1 as cri;

fn naming(name: &str, script: &str, devices: &[&str]) -> cri::ContainerConfig {
    let mut config = container_config(name, script);
    let devices = devices.iter().map(|device| cri::CdiDevice {
        name: (*device).to_owned(),
    });
    config.cdi_devices = devices.collect();
    config
}

pub async fn devices() {
    let environment = Environment::new().await;
    let folder = &environment.config.cdi_spec_dirs[0];
    std::fs::create_dir_all(folder).expect("folder");
    let files = environment.path("files");
    std::fs::create_dir_all(&files).expect("files");
    std::fs::write(files.join("model"), "big\n").expect("file");
    let files = files.display();
    let spec = format!(
        "cdiVersion: 0.7.0\nkind: vendor.com/gpu\ncontainerEdits:\n  env: [FROM_SPEC=yes]\ndevices:\n\
         - name: one\n  containerEdits:\n    env: [GPU=one, OWN=device]\n    additionalGids: [4343]\n    deviceNodes:\n\
         \x20   - {{path: /dev/gpu0, hostPath: /dev/zero, fileMode: 416}}\n\
         \x20   - {{path: /dev/gpu1, type: c, major: 240, minor: 7, permissions: r}}\n\
         \x20   mounts:\n    - {{hostPath: {files}, containerPath: /gpu, options: [ro, nosuid, nodev, bind]}}\n\
         - name: hooked\n  containerEdits:\n    hooks: [{{hookName: createContainer, path: /bin/true}}]\n"
    );
    std::fs::write(folder.join("gpu.yaml"), spec).expect("spec");

    let mut pod = Pod::run(&environment, "cdi").await;
    let script = "echo $FROM_SPEC $GPU $OWN; cat /gpu/model; touch /gpu/x || echo ro; head -c 3 /dev/gpu0 | wc -c; \
        stat -c %a /dev/gpu0; (: < /dev/gpu1) 2>&1; (: > /dev/gpu1) 2>&1; id -G";
    let mut config = naming("main", script, &["vendor.com/gpu=one"]);
    config.envs.push(cri::KeyValue {
        key: "OWN".into(),
        value: "container".to_owned().into(),
    });
    security(&mut config).supplemental_groups = vec![4242];
    let id = pod.start(config).await;
    let status = pod.wait(&id).await;
    let log = log_text(&status.log_path);
    for line in ["yes one device", "big", "ro", "3", "640"] {
        assert!(log.lines().any(|have| have == line), "{line} in {log}");
    }
    // Nobody serves that number, which is what a reader learns; a writer is not let through to learn it.
    assert!(log.contains("/dev/gpu1: No such device or address"), "{log}");
    assert!(log.contains("/dev/gpu1: Operation not permitted"), "{log}");
    let groups = log.lines().last().expect("groups");
    assert!(groups.contains("4242") && groups.contains("4343"), "{groups}");

    // What is not named is not there.
    let id = pod
        .start(naming("plain", "test -e /dev/gpu0 || echo none", &[]))
        .await;
    let status = pod.wait(&id).await;
    assert_eq!(log_text(&status.log_path).trim(), "none");

    let mut refused = async |name: &str| {
        let config = naming(&format!("c{}", rand::random::<u32>()), "true", &[name]);
        pod.create(config)
            .await
            .expect_err("refused")
            .message()
            .to_owned()
    };
    let unknown = refused("vendor.com/gpu=two").await;
    assert!(
        unknown.contains("unresolvable CDI devices vendor.com/gpu=two"),
        "{unknown}"
    );
    let hooked = refused("vendor.com/gpu=hooked").await;
    assert!(
        hooked.contains("hooks of CDI device vendor.com/gpu=hooked are not supported"),
        "{hooked}"
    );
}
