#!/usr/bin/env bash
# Applies the two examples of CONTRIBUTING.md, a strategy and a mask, to a copy of this checkout, and runs it: what the examples leave
# out, the compiler or a suite finds. --smoke: only whether they apply and compile.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$PWD/target/guide
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z | xargs -0 cp --parents -t "$copy"
# Build outputs are shared with this checkout.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
cd "$copy"
# No part of the repository around it, whose paths git would take instead.
export GIT_CEILING_DIRECTORIES=${copy%/*}
git apply tests/guide/strategy.patch tests/guide/mask.patch
cargo check --quiet --release -p kyklos-plan -p kyklos-oracle
[ "${1:-}" != --smoke ] || exit 0

program=(cargo run --quiet --release -p kyklos-cli --)
"${program[@]}" plan --strategy thirds --mesh 1x4 --shape 1,4096,8,2,64
"${program[@]}" attend --strategy thirds --mask prefix:100 --mesh 1x4 --shape 1,512,4,2,32 --device cpu --verify
cargo test --release -p kyklos-plan -p kyklos-oracle
cargo test --release -p kyklos-tests --all-features --test suites
