#!/usr/bin/env bash
# Builds what tests/gpu/round.sh needs, with the kernels compiled in, into one archive that can be carried to a machine with an NVIDIA GPU:
#   tests/gpu/pack.sh [--without-nvcc]      makes target/gpu-pack/pack.tar.xz, and in target/gpu-pack/pack the same unpacked
# It needs no GPU. nvcc is the one in NVCC, CUDA_HOME/bin or on the PATH, or that of scripts/check/cuda.sh; without one the programs compile
# their kernels on the machine with the GPU. These parts are fetched, and left out with a line that says so where they cannot be:
# Vulkan loaders (apt-get download) and FlashAttention 3 (PyPI). The Python package is for CPython 3.10 and later.
# Fails if the archive and the tracked files have more than 60 MB together: both fit where 64 MiB may travel.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc_wanted=1
case "${1:-}" in
    "") ;;
    --without-nvcc) nvcc_wanted=0 ;;
    *)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
        exit 2
        ;;
esac
out=$PWD/target/gpu-pack
pack=$out/pack
fetched=$out/fetched
rm -rf "$pack" "$out/pack.tar.xz"
mkdir -p "$pack/gl" "$pack/site" "$fetched"
# The same form as .ci/run, so that what is compiled is shared.
export CARGO_PROFILE_RELEASE_DEBUG=none CARGO_INCREMENTAL=0

wheels=$PWD/target/cuda-toolkit/wheels/nvidia/cu13/bin/nvcc
if [ $nvcc_wanted = 0 ]; then
    unset NVCC CUDA_HOME
    # build.rs finds an nvcc on the PATH too.
    ! command -v nvcc >/dev/null || { echo "--without-nvcc: there is an nvcc on the PATH" >&2 && exit 1; }
elif [ -z "${NVCC:-}${CUDA_HOME:-}" ] && ! command -v nvcc >/dev/null && [ -x "$wheels" ]; then
    export NVCC=$wheels
fi
# As cuda-backend/build.rs looks for it.
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/nvcc}}
"${nvcc:-nvcc}" --version 2>/dev/null | grep -o 'release [0-9.]*' >"$pack/kernels.txt" || {
    echo "NVRTC, at the first start" >"$pack/kernels.txt"
    echo "no nvcc: the programs compile their kernels on the machine with the GPU, which then needs NVRTC (libnvrtc)"
}
git describe --always --dirty 2>/dev/null >>"$pack/kernels.txt" || true
tr '\n' ' ' <"$pack/kernels.txt" >"$pack/kernels.part" && mv "$pack/kernels.part" "$pack/kernels.txt"

# In one command: with tests the dependencies have the features that they have in scripts/test.sh.
built=$(cargo build --quiet --release --workspace --all-features --lib --bin kyklos --test backends --test cuda --message-format=json)
for suite in backends cuda; do
    strip -o "$pack/$suite" "$(grep -o "\"executable\":\"[^\"]*/deps/$suite-[0-9a-f]*\"" <<<"$built" | cut -d'"' -f4)"
done
strip -o "$pack/kyklos" target/release/kyklos
cp -r python/kyklos "$pack/site/kyklos"
rm -f "$pack"/site/kyklos/_kyklos.*.so
find "$pack/site/kyklos" -name __pycache__ -prune -exec rm -rf {} +
strip -o "$pack/site/kyklos/_kyklos.abi3.so" target/release/lib_kyklos.so
cp tests/gpu/{round,rounds,stages,vulkan,page,ranks}.sh tests/gpu/{in_place,torch_device}.py tests/peers/gpu_attention.py clusters/h100-infiniband.toml "$pack/"

# Libraries of the GPU's Vulkan driver that its machine may not have.
packages=(libvulkan1 libegl1 libglvnd0 libopengl0 libgl1 libglx0 libgles2 libx11-6 libxext6 libxcb1 libxau6 libxdmcp6 libbsd0 libmd0)
vulkan() {
    mkdir -p "$fetched/debs"
    compgen -G "$fetched/debs/libvulkan1_*.deb" >/dev/null ||
        (cd "$fetched/debs" && apt-get download "${packages[@]}" >/dev/null 2>"$fetched/debs.log") || return
    local file
    for file in "$fetched"/debs/*.deb; do dpkg -x "$file" "$fetched/root" || return; done
    # Links as they are loaded, with the files themselves.
    for file in "$fetched"/root/usr/lib/*/lib*.so.? "$fetched"/root/lib/*/lib*.so.?; do
        [ ! -e "$file" ] || cp -L "$file" "$pack/gl/"
    done
    [ -e "$pack/gl/libvulkan.so.1" ]
}
vulkan || echo "without Vulkan loaders: apt-get cannot download them here ($(tail -n 1 "$fetched/debs.log" 2>/dev/null)); wgpu needs those of the other machine"

flash=fa3-fwd==0.0.3
flash_attention() {
    [ -d target/cuda-toolkit/venv ] || scripts/tools/make-venv.sh target/cuda-toolkit/venv || return
    [ -e "$fetched/fa3" ] || {
        target/cuda-toolkit/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --target "$fetched/fa3.part" "$flash" &&
            mv "$fetched/fa3.part" "$fetched/fa3"
    } || return
    cp -r "$fetched"/fa3/* "$pack/site/"
}
flash_attention || echo "without FlashAttention 3: pip cannot install $flash here; times are compared with PyTorch's own only"

tar c -C "$pack" . | xz -2 -T 1 --lzma2=preset=2,dict=128MiB >"$out/pack.tar.xz"
bytes=$(stat -c %s "$out/pack.tar.xz")
tree=$(git ls-files -z | xargs -0 stat -c %s 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }')
echo "needs glibc $(objdump -T "$pack"/{kyklos,backends,cuda,site/kyklos/_kyklos.abi3.so} | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1 | cut -d_ -f2) or later"
du -b --max-depth=1 -a "$pack" | sort -rn | awk '$1 > 1e6 { printf "%6.1f MB  %s\n", $1 / 1e6, $2 }'
awk -v pack="$bytes" -v tree="$tree" 'BEGIN {
    printf "%s %.1f MB, tracked files %.1f MB, together %.1f MB\n", "pack.tar.xz", pack / 1e6, tree / 1e6, (pack + tree) / 1e6
    if (pack > 45e6 || pack + tree > 60e6) { print "too large: at most 45 MB, and 60 MB together"; exit 1 } }'
echo "next, on the machine with the GPU: tar xJf pack.tar.xz -C FOLDER, and FOLDER/round.sh --first RESULTS"
