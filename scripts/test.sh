#!/usr/bin/env bash
# Builds and runs the tests: a sample in which every claim occurs; with KYKLOS_TESTS=all everything (scripts/test-all.sh).
# On Debian and Ubuntu it installs the software Vulkan driver and g++ where they are missing; elsewhere it says what to
# install. Arguments go to cargo test.
set -euo pipefail
cd "$(dirname "$0")/.."

have_vulkan() { compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null; }

if [ "$(uname)" = Linux ] && ! have_vulkan; then
    if command -v apt-get >/dev/null; then
        echo "no Vulkan driver found: installing the software one (mesa-vulkan-drivers)"
        as_root=()
        [ "$(id -u)" = 0 ] || as_root=(sudo)
        "${as_root[@]}" apt-get update -qq
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends mesa-vulkan-drivers
    else
        echo "no Vulkan driver found: install one (Fedora: mesa-vulkan-drivers, Arch: vulkan-swrast)."
        echo "GPU tests will be reported as ignored."
    fi
fi

# The CUDA kernels are tested on an emulator, which a C++ compiler builds.
if [ -z "${CXX:-}" ] && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    if command -v apt-get >/dev/null; then
        echo "no C++ compiler found: installing g++"
        as_root=()
        [ "$(id -u)" = 0 ] || as_root=(sudo)
        "${as_root[@]}" apt-get update -qq
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends g++
    else
        echo "no C++ compiler found: install g++ or clang++, or set CXX" >&2
        exit 1
    fi
fi

# The driver needs a private folder, and keeps compiled shaders for the next run.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    made_runtime_dir=$(mktemp -d)
    export XDG_RUNTIME_DIR=$made_runtime_dir
    trap 'rm -rf "$made_runtime_dir"' EXIT
fi
export MESA_SHADER_CACHE_DIR=${MESA_SHADER_CACHE_DIR:-$PWD/target/shader-cache}
mkdir -p "$MESA_SHADER_CACHE_DIR"

# Many tests wait: for timeouts, for other processes. More of them than cores at a time keep the cores busy.
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores + 6))}

if [ $# -gt 0 ]; then
    cargo test --release --workspace --all-features "$@"
    exit
fi

# Some executables mostly wait, others only compute, so two run at a time. Each runs in the folder of its package, as with cargo
# test. What it prints appears when it has ended; which ones failed, at the end. A line of the list is a folder, "|" and an executable.
executables() {
    cargo test --release --workspace --all-features --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"executable":"\([^"]*\/deps\/[^"]*\)".*/\1|\2/p'
}
run() {
    local folder=${1%%|*} executable=${1#*|} start=$SECONDS output status=0
    echo "     Running $executable"
    # Tests name their package where they tell how to run them again.
    CARGO_PKG_NAME=$(sed -n 's/^name = "\(.*\)"/\1/p' "$folder/Cargo.toml" | head -n 1)
    export CARGO_PKG_NAME
    output=$(cd "$folder" && "$executable" 2>&1) || status=$?
    printf '     Ran %s: %s s\n%s\n' "$executable" $((SECONDS - start)) "$output"
    [ $status = 0 ] || echo "$executable ended with status $status" >>"$failed"
}
export -f run
failed=$(mktemp)
export failed
trap 'rm -rf "$failed" "${made_runtime_dir:-}"' EXIT
list=$(executables)
[ -n "$list" ] || { echo "cargo names no test executable" >&2; exit 1; }
# The longest ones first: one that starts last runs alone at the end.
longest='/(cuda|cli|kyklos_cli|suites|emulator|memory)-[0-9a-f]*$'
list=$(grep -E "$longest" <<<"$list"; grep -vE "$longest" <<<"$list")
tr '\n' '\0' <<<"$list" | xargs -0 -n 1 -P 2 bash -c 'run "$0"'
cargo test --release --workspace --all-features --doc || echo "tests of the documentation failed" >>"$failed"
if [ -s "$failed" ]; then
    cat "$failed" >&2
    exit 1
fi
