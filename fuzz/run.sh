#!/bin/sh
# Builds the fuzzer and runs it: run.sh SECONDS [TARGET]…, each target that long, or all of them one after another.
# run.sh --keep [TARGET]… adds to the corpus what the last runs found and the corpus does not reach yet.
set -eu
cd "$(dirname "$0")"

# libFuzzer's instrumentation by the stable compiler: no cargo-fuzz and no nightly. A sanitizer would need the latter.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
RUSTFLAGS="$RUSTFLAGS -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
RUSTFLAGS="$RUSTFLAGS -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
export RUSTFLAGS
triple=x86_64-unknown-linux-gnu
target_dir=${CARGO_TARGET_DIR:-target}
fuzzer=$target_dir/$triple/release/skiff-fuzz

# What an input may take. The stack is that of a worker of the server.
limits="-timeout=5 -rss_limit_mb=1024 -max_len=2048"
ulimit -s 2048

first=${1:?SECONDS or --keep}
shift
[ $# -gt 0 ] || set -- $(ls corpus)
CARGO_TARGET_DIR=$target_dir ${CARGO:-cargo} build --release --target $triple

for target; do
    mkdir -p "found/$target" "corpus/$target" "artifacts/$target"
    export SKIFF_FUZZ_TARGET=$target
    if [ "$first" = --keep ]; then
        # shellcheck disable=SC2086
        "$fuzzer" -merge=1 $limits "corpus/$target" "found/$target"
        rm -r "found/$target"
    else
        echo "== $target: $first s"
        # shellcheck disable=SC2086
        "$fuzzer" $limits -max_total_time="$first" -print_final_stats=1 -dict=words.dict \
            -artifact_prefix="artifacts/$target/" "found/$target" "corpus/$target"
    fi
done
