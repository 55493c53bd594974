//! `make bench-scheduler`: pods a second over the shapes of upstream's scheduler_perf, without an API server.
//!
//! Arguments: the number of nodes (default 5000), and `plain` to measure the plain algorithm as well.

use skiff_scheduler::bench::{SHAPES, measure};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let nodes = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or(5000);
    let plain = args.iter().any(|arg| arg == "plain");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return };
    let _guard = runtime.enter();
    println!("{nodes} nodes");
    println!(
        "{:<32} {:>10} {:>10} {:>8} {:>9}",
        "shape", "pods/s", "scheduled", "failed", "took"
    );
    for shape in SHAPES {
        for plain in [false].into_iter().chain(plain.then_some(true)) {
            let measured = measure(shape, nodes, plain);
            let name = if plain {
                format!("  {} (plain)", shape.name)
            } else {
                shape.name.to_owned()
            };
            println!(
                "{name:<32} {:>10.0} {:>10} {:>8} {:>9.2?}",
                measured.pods_per_second, measured.scheduled, measured.failed, measured.took
            );
        }
    }
}
