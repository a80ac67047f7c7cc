#!/usr/bin/env bash
# Kyklos as a user has it: tests/outside is a crate outside the workspace that depends on the libraries by path. Runs the example
# of the README, every example of runtime/examples as it is written, and the suite of backends, whose test there has two lines.
# With a target folder of its own, because features and profile are not those of the workspace: the first run compiles all
# dependencies, 5 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none} CARGO_TARGET_DIR=$PWD/target/outside
manifest=tests/outside/Cargo.toml

# The driver of software Vulkan needs a private folder.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

scripts/tools/lock.sh tests/outside
cargo fmt --manifest-path "$manifest" -- --check
cargo test --release --locked --manifest-path "$manifest"
for example in runtime/examples/*.rs; do
    name=$(basename "$example" .rs)
    echo "== example $name"
    # `scale` prices thousands of plans, which takes minutes.
    timeout 1500 cargo run --quiet --release --locked --manifest-path "$manifest" --example "$name" >"$CARGO_TARGET_DIR/$name.txt" ||
        { echo "test-outside: $name failed" >&2; exit 1; }
    tail -n 3 "$CARGO_TARGET_DIR/$name.txt"
done
echo "test-outside: passed in $SECONDS s"
