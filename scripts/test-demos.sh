#!/usr/bin/env bash
# Demonstrations, those with many dependencies as packages of their own. They share a target folder, because features and profile
# are not those of the workspace: the first run compiles all dependencies, 10 minutes on two cores. Fetches a model, 84 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none} CARGO_TARGET_DIR=$PWD/target/demos
manifest=demos/sentence-encoder/Cargo.toml

# The driver of software Vulkan needs a private folder.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

demos/sentence-encoder/fetch-model.sh
cargo fmt --manifest-path "$manifest" -- --check
cargo clippy --quiet --release --locked --all-targets --manifest-path "$manifest" -- -D warnings
cargo test --release --locked --manifest-path "$manifest"
echo "== sentence-encoder"
demos/sentence-encoder/run.sh | tail -n 1
echo "== two-machines"
CARGO_TARGET_DIR=$PWD/target demos/two-machines/run.sh | grep '^verified'
echo "== long-context"
CARGO_TARGET_DIR=$PWD/target cargo run --release -q -p long-context -- 5000 | grep '^exact'
echo "== browser"
CARGO_TARGET_DIR=$PWD/target scripts/test-browser-page.sh
echo "test-demos: passed in $SECONDS s"
