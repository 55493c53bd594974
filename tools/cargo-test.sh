#!/bin/sh
# cargo test with the given arguments; a test that fails is run once more, alone. Many of these tests start whole clusters,
# and a noisy machine makes one of hundreds late now and then: that is shown as FLAKY, with its first output above, and does
# not fail the run. One that fails again does, and so do more than MOST at once.
#   sh tools/cargo-test.sh --package skiff-node
set -u
MOST=4

log=$(mktemp)
trap 'rm -f "$log" "$log".*' EXIT
{ ${CARGO:-cargo} test --no-fail-fast "$@" 2>&1; echo $? >"$log.status"; } | tee "$log"
status=$(cat "$log.status")
[ "$status" -eq 0 ] && exit 0

# A line for each failed test: the arguments that choose its program, a tab, its name.
awk '
    /^ +Running |^ +Doc-tests / { count = 0 }
    /^test .* \.\.\. FAILED$/ { name = $0; sub(/^test /, "", name); sub(/ \.\.\. FAILED$/, "", name); sub(/ - should panic$/, "", name); names[count++] = name }
    /^error: test failed, to rerun pass `/ {
        arguments = $0; sub(/^[^`]*`/, "", arguments); sub(/`.*/, "", arguments)
        # A program that ended without naming a test cannot be run again in part.
        if (count == 0) print arguments "\t"
        for (i = 0; i < count; i++) print arguments "\t" names[i]
        count = 0
    }' "$log" >"$log.failed"
count=$(wc -l <"$log.failed")
# A program that was ended by a signal has left tests out.
if grep -q "didn't exit successfully.*(signal:" "$log"; then
    exit "$status"
fi
if [ "$count" -eq 0 ] || [ "$count" -gt "$MOST" ] || grep -q "$(printf '\t')\$" "$log.failed"; then
    exit "$status"
fi

echo
echo "Running what failed once more, alone:"
while IFS="$(printf '\t')" read -r arguments name; do
    # shellcheck disable=SC2086
    if ${CARGO:-cargo} test $arguments -- --exact "$name" --test-threads=1 </dev/null >"$log.again" 2>&1 \
        && grep -q "^test result: ok. 1 passed" "$log.again"; then
        echo "FLAKY: $arguments $name passed the second time"
    else
        cat "$log.again"
        echo "FAILED twice: $arguments $name"
        exit "$status"
    fi
done <"$log.failed"
