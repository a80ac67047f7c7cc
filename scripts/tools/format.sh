#!/usr/bin/env bash
# Formats all Rust code, and wraps its comments at 100 columns; with --check it only says what it would change. Wrapping is not stable
# in rustfmt, so this permits it; no other part of the toolchain sees the variable.
set -euo pipefail
cd "$(dirname "$0")/../.."
RUSTC_BOOTSTRAP=1 cargo fmt --all -- --config wrap_comments=true,comment_width=100 "$@"
