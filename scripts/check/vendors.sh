#!/usr/bin/env bash
# What the shader compilers of GPU vendors make of the kernels that Kyklos chooses on their GPUs, without such a GPU: spills,
# registers, size and inner loops, held against tests/vendors/ceilings.toml. The compilers are Mesa's, which Linux users of
# AMD and Intel run; NVIDIA, Apple and Qualcomm have others of their own, for the same registers.
#   scripts/check/vendors.sh --smoke  a device of each compiler: some 20 s
#   scripts/check/vendors.sh          all devices, and every kernel through Microsoft's compiler for DX12: four minutes
#   scripts/check/vendors.sh --bless  writes the ceilings anew; look at the diff
#
# The drivers and the stand-ins for their kernel parts are Debian's (tests/peers/newest_mesa.sh). Its packages have no
# stand-in for Intel's: KYKLOS_INTEL_SHIM names a libintel_noop_drm_shim.so, which Mesa's source has among its tools.
# Without one these devices are not run, and --bless leaves their ceilings as they are.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}

# In CI a check that cannot run is a failure.
cannot() {
    if [ "${CI:-}" = true ]; then
        echo "vendors' compilers cannot be asked: $1" >&2
        exit 1
    fi
    echo "skipped, vendors' compilers cannot be asked: $1"
    exit 0
}
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "this is $(uname -sm), and the drivers are for Linux x86_64"
command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    cannot "the drivers are unpacked from Debian's packages, and there is no apt-get or no dpkg here"

mesa=target/newest-mesa
# A mirror that is being updated can lack a file for some minutes.
for pause_s in 0 30 90; do
    sleep "$pause_s"
    if tests/peers/newest_mesa.sh "$mesa" >/dev/null; then
        unpacked=true
        break
    fi
done
${unpacked:-false} || cannot "their packages cannot be downloaded, see above"
[ -z "${KYKLOS_INTEL_SHIM:-}" ] || cp "$KYKLOS_INTEL_SHIM" "$mesa/tree/usr/lib/x86_64-linux-gnu/libintel_noop_drm_shim.so"

# With the features of scripts/test.sh, which has compiled it already: an example brings in those of tests.
cargo build --quiet --release --workspace --all-features --bin kyklos-vendors --bin kyklos --example print_kernel
programs=${CARGO_TARGET_DIR:-target}/release
program=$programs/kyklos-vendors

# The product finds and opens each GPU, and names its kernels; that it cannot compute is an error, and nothing else is printed.
named() {
    local name=$1 expected=$2 seen
    seen=$("$program" over "$mesa" "$name" "$programs/kyklos" devices 2>&1) || true
    if ! grep -qE " $expected  .*the driver gave up" <<<"$seen" || grep -q panicked <<<"$seen"; then
        echo "kyklos devices over a stand-in for $name does not report its device with the kernel \"$expected\", or panics:" >&2
        echo "$seen" >&2
        exit 1
    fi
}
with_matrices='portable, or cooperative-16x16 \(f16\) where it is faster'
named rdna3 "$with_matrices"
named ampere "$with_matrices"
named m1 portable
if [ "${1:-}" != --smoke ]; then
    for name in rdna4 ada blackwell; do named "$name" "$with_matrices"; done
    for name in vega20 rdna2 adreno630 adreno740; do named "$name" portable; done
fi
# The compiler is in the source package of compushady on PyPI, with its headers.
dx12() {
    for tool in python3 c++; do
        command -v "$tool" >/dev/null || cannot "there is no $tool here for DX12"
    done
    python3 -m venv -h >/dev/null 2>&1 || cannot "there is no python3-venv here for DX12"
    local folder=$PWD/target/dxc
    local backends=$folder/compushady-0.17.5/compushady/backends
    if [ ! -e "$backends/dxcapi.h" ]; then
        rm -rf "$folder"
        python3 -m venv "$folder/python"
        "$folder/python/bin/pip" --quiet download --no-deps --no-binary compushady --dest "$folder" compushady==0.17.5 ||
            cannot "Microsoft's compiler cannot be downloaded"
        tar xzf "$folder/compushady-0.17.5.tar.gz" -C "$folder"
    fi
    c++ -O1 -o "$folder/dxc" -I "$backends" tests/vendors/dxc.cpp -ldl
    rm -rf "$folder/kernels"
    "$program" hlsl "$folder/kernels"
    local count
    count=$(find "$folder/kernels" -name '*.hlsl' | wc -l)
    [ "$count" -gt 0 ] || {
        echo "no kernel was written for DX12" >&2
        exit 1
    }
    find "$folder/kernels" -name '*.hlsl' -print0 |
        xargs -0 -n 50 -P "$(nproc)" "$folder/dxc" "$backends/libdxcompiler_x86_64.so.3.7"
    echo "dx12      $count kernels, none refused"
}
case ${1:-} in
    --smoke) exec "$program" check "$mesa" --smoke ;;
    --bless) exec "$program" bless "$mesa" ;;
    '')
        "$program" check "$mesa"
        dx12
        ;;
    *)
        echo "unknown argument $1: there are --smoke and --bless" >&2
        exit 2
        ;;
esac
