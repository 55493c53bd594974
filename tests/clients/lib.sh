# What the scripts of this folder share: `. lib.sh`.
fail() { echo "FAILED: $*"; exit 1; }
# is EXPECTED COMMAND...: what the command prints
is() {
    expected=$1
    shift
    got=$("$@") || fail "$*"
    [ "$got" = "$expected" ] || fail "$*: expected '$expected', got '$got'"
}
