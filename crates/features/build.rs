//! Nothing: cargo counts the build dependencies only of a package that has a build script.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
