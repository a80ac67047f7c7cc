#!/usr/bin/env bash
# Other platforms, on a Debian or Ubuntu machine (x86-64) with apt and rustup. Builds the program for aarch64 Linux, Windows (gnu)
# and static musl, runs it on aarch64 in an emulator and on musl, and runs a group of an x86-64 and an aarch64 rank over QUIC.
# The Windows program is only built. 30 minutes and more on two cores, mostly compiling: no part of CI and of test-all.sh.
#   scripts/test-platforms.sh            all of it
#   scripts/test-platforms.sh --no-build what was built before
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=$PWD/target/platforms CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=none
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
# musl-gcc compiles the C of dependencies. It must not link: its result is not static, and crashes.
export CC_x86_64_unknown_linux_musl=musl-gcc
targets=(aarch64-unknown-linux-gnu x86_64-pc-windows-gnu x86_64-unknown-linux-musl)

# What these runs do not use, or use for milliseconds, is not optimised.
light=()
for crate in naga wgpu wgpu-core wgpu-hal wgpu-types ash clap_builder clap_derive toml x509-parser indicatif serde_json \
    kyklos-cli kyklos-cuda kyklos-launch; do
    light+=(--config "profile.release.package.$crate.opt-level=0")
done

if [ "${1:-}" != --no-build ]; then
    missing=false
    for tool in aarch64-linux-gnu-gcc x86_64-w64-mingw32-gcc musl-gcc qemu-aarch64; do
        command -v "$tool" >/dev/null || missing=true
    done
    if $missing; then
        apt-get install -y --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross \
            gcc-mingw-w64-x86-64-posix musl-tools qemu-user
    fi
    rustup target add "${targets[@]}"
    for target in "${targets[@]}"; do
        start=$SECONDS
        cargo build --release -p kyklos-cli --target "$target" "${light[@]}"
        echo "== built $target: $((SECONDS - start)) s"
    done
    CARGO_TARGET_DIR=$PWD/target cargo build --release -p kyklos-cli
fi

x86=$PWD/target/release/kyklos
musl=$CARGO_TARGET_DIR/x86_64-unknown-linux-musl/release/kyklos
arm() { qemu-aarch64 -L /usr/aarch64-linux-gnu "$CARGO_TARGET_DIR/aarch64-unknown-linux-gnu/release/kyklos" "$@"; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export XDG_RUNTIME_DIR=$folder
cd "$folder"

for dtype in f32 f16 bf16; do
    timeout 300 "$musl" attend --device cpu --shape 1,256,4,2,32 --mesh 1x3 --dtype "$dtype" --verify >/dev/null
    echo "== musl, 3 ranks, $dtype: verified"
    (arm attend --device cpu --shape 1,256,4,2,32 --mesh 1x3 --dtype "$dtype" --verify) >/dev/null
    echo "== aarch64, 3 ranks, $dtype: verified"
done
# Captured first: grep -q would end the pipe early.
listed=$("$musl" devices)
grep -q "a static program loads no driver" <<<"$listed"
echo "== musl names the reason why it finds no GPU"

arm certs init >/dev/null
arm certs issue -n 2 --job mixed >/dev/null
call=(attend --world 2 --coordinator 127.0.0.1:29733 --device cpu --shape 1,256,4,2,32 --verify)
timeout 120 "$x86" "${call[@]}" --rank 0 --identity rank-0.pem >rank-0.log 2>&1 &
first=$!
(arm "${call[@]}" --rank 1 --identity rank-1.pem) >rank-1.log 2>&1 || { cat rank-*.log; exit 1; }
wait "$first" || { cat rank-*.log; exit 1; }
echo "== rank 0 on x86-64 and rank 1 on aarch64 over QUIC: verified"
