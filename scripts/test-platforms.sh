#!/usr/bin/env bash
# Other platforms, on a Debian or Ubuntu machine (x86-64) with rustup, as root. What has no hardware here runs in an emulator:
# aarch64 Linux in qemu-user, Windows in wine. An hour and more on two cores, mostly compiling: no part of CI and of test-all.sh.
#   scripts/test-platforms.sh                 all of it
#   scripts/test-platforms.sh musl windows    some of: glibc, musl, aarch64, windows, check
# glibc    program and wheel that start with glibc 2.28 (scripts/tools/build-portable.sh); the program in Debian 11 (glibc 2.31)
# musl     the static program: CPU, QUIC, what it says about GPUs
# aarch64  unit tests, CPU suite, three ranks, a QUIC group of an x86-64 and an aarch64 rank
# windows  the same; and `launch`, a killed rank, key files, records, a QUIC group of x86-64 Linux, aarch64 and Windows
# check    macOS, Windows (MSVC), Android, wasm: types only
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD target=$PWD/target/platforms
export CARGO_TARGET_DIR=$target CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=none
arm_target=aarch64-unknown-linux-gnu windows_target=x86_64-pc-windows-gnu musl_target=x86_64-unknown-linux-musl
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
# musl-gcc compiles the C of dependencies. It must not link: its result is not static, and crashes.
export CC_x86_64_unknown_linux_musl=musl-gcc

# What these runs do not use, or use for milliseconds, is not optimised.
light=()
for crate in naga wgpu wgpu-core wgpu-hal wgpu-types ash clap_builder clap_derive toml x509-parser indicatif serde_json \
    kyklos-cli kyklos-cuda kyklos-launch; do
    light+=(--config "profile.release.package.$crate.opt-level=0")
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Without this folder the program would start itself again, which needs an emulator that the kernel knows.
export XDG_RUNTIME_DIR=$folder/runtime
mkdir -m 700 "$XDG_RUNTIME_DIR"

# Each a command with its first words. `find_wine` sets the last one.
here=("$target/release/kyklos")
musl=("$target/$musl_target/release/kyklos")
qemu=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
arm=("${qemu[@]}" "$target/$arm_target/release/kyklos")
windows=()
problem=(--device cpu --shape 1,256,4,2,32 --verify)

say() { echo "== $*"; }

# Installs Debian packages if a command is missing: `needs COMMAND PACKAGE…`.
needs() {
    local tool=$1
    shift
    command -v "$tool" >/dev/null || apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Builds the program for a target, or for this machine.
build() {
    local start=$SECONDS
    [ $# = 0 ] || rustup target add "$1"
    cargo build --release -p kyklos-cli ${1:+--target "$1"} "${light[@]}"
    say "built for ${1:-this machine}: $((SECONDS - start)) s"
}

# Runs the CPU suite and the unit tests of the library and of the transport, with the runner that is set for the target. Words
# after the target are unit tests to leave out.
run_tests() {
    local target=$1 skip=() test
    shift
    for test in "$@"; do skip+=(--skip "$test"); done
    timeout 1800 cargo test --release -p kyklos-tests --test backends --target "$target" "${light[@]}" -- cpu: --quiet
    say "$target: CPU suite passed"
    timeout 1800 cargo test --release -p kyklos -p kyklos-plan -p kyklos-transport --lib --target "$target" "${light[@]}" -- --quiet "${skip[@]}"
    say "$target: unit tests of library and transport passed, left out: $*"
}

# Three ranks in one process, in every dtype: `three_ranks NAME COMMAND…`.
three_ranks() {
    local name=$1 dtype
    shift
    for dtype in f32 f16 bf16; do
        timeout 300 "$@" attend "${problem[@]}" --mesh 1x3 --dtype "$dtype" >/dev/null
        say "$name, 3 ranks, $dtype: verified"
    done
}

# A QUIC group whose ranks are processes of unlike systems: `group here arm windows`, names of the commands above.
group() {
    local rank=0 pids=() status=0 name pid
    (umask 077 && mkdir "$folder/group")
    cd "$folder/group"
    "${here[@]}" certs init >/dev/null
    "${here[@]}" certs issue -n $# --job mixed >/dev/null
    for name in "$@"; do
        local -n command=$name
        timeout 300 "${command[@]}" attend --world $# --rank $rank --coordinator 127.0.0.1:29733 --identity "rank-$rank.pem" \
            "${problem[@]}" >"rank-$rank.log" 2>&1 &
        pids+=($!)
        rank=$((rank + 1))
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
    [ $status = 0 ] || { cat rank-*.log; exit 1; }
    grep -q '^verified' rank-0.log
    cd "$root"
    rm -r "$folder/group"
    say "a QUIC group of $*: verified"
}

test_glibc() {
    scripts/tools/build-portable.sh
    needs debootstrap debootstrap
    local debian=$target/debian-11
    [ -e "$debian/bin/sh" ] || debootstrap --variant=minbase bullseye "$debian" >/dev/null
    cp target/portable/kyklos "$debian/kyklos"
    export XDG_RUNTIME_DIR=/tmp
    # First with nothing of this machine there, not even /proc; `launch` finds its program in /proc.
    timeout 300 chroot "$debian" /kyklos attend "${problem[@]}" --mesh 1x3 | grep '^verified'
    timeout 300 unshare --mount sh -c "mount -t proc proc '$debian/proc' && exec chroot '$debian' /kyklos launch -n 2 -- attend ${problem[*]}" |
        grep '^verified'
    export XDG_RUNTIME_DIR=$folder/runtime
    say "in Debian 11: $(chroot "$debian" ldd --version | sed -n 1p): three ranks, and two processes over QUIC, verified"
}

test_musl() {
    needs musl-gcc musl-tools
    build "$musl_target"
    three_ranks musl "${musl[@]}"
    timeout 300 "${musl[@]}" launch -n 2 -- attend "${problem[@]}" >/dev/null
    say "musl, two processes over QUIC: verified"
    # Captured first: grep -q would end the pipe early.
    listed=$("${musl[@]}" devices)
    grep -q "a static program loads no driver" <<<"$listed"
    say "musl names the reason why it finds no GPU"
}

build_arm() {
    needs aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    needs qemu-aarch64 qemu-user
    build "$arm_target"
}

# `launch` is left out: it starts this program again, which needs an emulator that the kernel knows.
test_aarch64() {
    build
    build_arm
    three_ranks aarch64 "${arm[@]}"
    group here arm
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="${qemu[*]}"
    run_tests "$arm_target"
}

# Wine 8, with the library that it lacks, and a Windows of its own.
find_wine() {
    needs /usr/lib/wine/wine64 wine64
    needs x86_64-w64-mingw32-gcc gcc-mingw-w64-x86-64-posix
    export WINEPREFIX=$target/wine WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml=;bcryptprimitives=n'
    export WINEPATH="Z:${target//\//\\}\\wine-libraries"
    mkdir -p "$target/wine-libraries"
    x86_64-w64-mingw32-gcc -O1 -Wall -Wextra -Werror -shared -s -o "$target/wine-libraries/bcryptprimitives.dll" \
        tests/wine/bcryptprimitives.c -ladvapi32 -lws2_32
    windows=(/usr/lib/wine/wine64 "$target/$windows_target/release/kyklos.exe")
    export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=/usr/lib/wine/wine64
    # Wine makes access lists from modes, and gives a file that of its folder too. With a folder that others can read, no file
    # with a key could be protected.
    umask 077
    # The first start makes the prefix.
    timeout 300 /usr/lib/wine/wine64 cmd /c ver >/dev/null
}

test_windows() {
    build
    build_arm
    find_wine
    build "$windows_target"
    timeout 120 "${windows[@]}" devices
    three_ranks Windows "${windows[@]}"
    group here arm windows
    group windows here
    windows_files
    windows_launch
    # TCP between ranks, which most of these use, is refused on Windows. `what_cannot_work` is about sizes of Linux's sockets.
    # `spans_lead` fails now and then beside other tests, and passes alone.
    run_tests "$windows_target" tunnel over_another_carrier holder_of_a_revoked_key a_renewed_identity_counts \
        connections_stay_within_their_memory what_cannot_work spans_lead
}

# Files with keys, tensors and records.
windows_files() {
    mkdir "$folder/files"
    cd "$folder/files"
    timeout 60 "${windows[@]}" certs init >/dev/null
    timeout 60 "${windows[@]}" certs issue -n 2 --job windows >/dev/null
    timeout 60 "${windows[@]}" certs show rank-0.pem >/dev/null
    chmod o+r rank-0.pem
    if timeout 60 "${windows[@]}" certs show rank-0.pem >/dev/null 2>shown; then
        echo "a file with a key that everybody can read was accepted" >&2 && exit 1
    fi
    grep -q 'gives rights to WD: others can use it' shown
    say "Windows, certs: files with keys are for their owner, and refused if others can read them"

    timeout 60 "${here[@]}" attend "${problem[@]}" --fixed-order --mesh 1x1 --output linux >/dev/null
    timeout 60 "${windows[@]}" attend "${problem[@]}" --fixed-order --mesh 1x1 --output windows >/dev/null
    cmp linux windows
    say "Windows, output file: the bytes of x86-64 Linux"
    cd "$root"
    rm -r "$folder/files"
}

windows_launch() {
    mkdir "$folder/launch"
    cd "$folder/launch"
    timeout 120 "${windows[@]}" launch -n 2 -- attend "${problem[@]}" --record records >/dev/null
    timeout 60 "${windows[@]}" doctor records | grep -q 'no problem found'
    say "Windows, two processes of launch over QUIC: verified; doctor reads their records"

    timeout 300 "${windows[@]}" launch -n 3 -- attend --device cpu --shape 1,2048,8,2,64 --repeat 100000 --progress json >log 2>&1 &
    local launch=$! pid=
    # Rank 2 computes.
    for _ in $(seq 600); do
        pid=$(grep '"rank":2' log | grep attend | grep -o '"pid":[0-9]*' | head -n 1 | cut -d: -f2) || true
        [ -z "$pid" ] || break
        sleep 0.2
    done
    /usr/lib/wine/wine64 taskkill /F /PID "$pid" >/dev/null
    ! wait "$launch"
    # Wine gives a process that it kills the exit code 0.
    grep -q '^launch: rank 2 was killed' log && grep -q '^\[0\] error: .*rank 2 died' log || { grep -v '^{' log; exit 1; }
    say "Windows, a killed rank: named by the others and by launch"
    cd "$root"
    rm -r "$folder/launch"
}

# Types only: nothing is linked, so C code (aws-lc, BLAKE3) needs no SDK of those systems. A program that writes empty files stands
# in for their compilers and archivers. `check --release` shares what runs on this machine, such as macros, with the builds above.
test_check() {
    local empty=$target/empty-files one
    cat >"$empty" <<'EMPTY'
#!/bin/sh
# Writes the file that a C compiler or an archiver would write, empty.
case "$1" in c*q* | c*r* | s) : >>"$2" ;; esac
for word; do
    case "$word" in -out:* | -OUT:* | /out:*) : >"${word#????:}" ;; -Fo?* | /Fo?*) : >"${word#???}" ;; esac
    [ "$before" != -o ] && [ "$before" != -Fo ] || : >"$word"
    before=$word
done
EMPTY
    chmod +x "$empty"
    for one in aarch64-apple-darwin x86_64-pc-windows-msvc; do
        rustup target add "$one"
        env "CC_${one//-/_}=$empty" "CXX_${one//-/_}=$empty" "AR_${one//-/_}=$empty" AWS_LC_SYS_PREBUILT_NASM=1 AWS_LC_SYS_CMAKE_BUILDER=0 \
            cargo check --release -p kyklos -p kyklos-cli --target "$one" "${light[@]}"
        say "$one: the types of library and program are right; nothing was linked, nothing ran"
    done
    rustup target add aarch64-linux-android wasm32-unknown-unknown
    cargo check --release -p kyklos --target aarch64-linux-android
    say "aarch64-linux-android: the types of the library are right"
    cargo check --release -p kyklos --no-default-features --features wgpu --target wasm32-unknown-unknown
    say "wasm32-unknown-unknown: the types of the library are right"
}

[ $# -gt 0 ] || set -- glibc musl aarch64 windows check
for section in "$@"; do
    case $section in
    glibc | musl | aarch64 | windows | check) ;;
    *) echo "$section: the sections are glibc, musl, aarch64, windows and check" >&2 && exit 2 ;;
    esac
done
for section in "$@"; do "test_$section"; done
say "passed: $*, in $SECONDS s"
