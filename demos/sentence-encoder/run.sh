#!/usr/bin/env bash
# Fetches the model if it is not there, and runs the demonstration. Options go to the program, see --help.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
"$folder/fetch-model.sh"
# With a target folder that the tests share: candle is compiled once, 8 minutes on two cores.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$folder/../../target/demos}
exec cargo run --quiet --release --locked --manifest-path "$folder/Cargo.toml" -- "$@"
