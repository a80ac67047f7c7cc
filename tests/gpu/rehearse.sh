#!/usr/bin/env bash
# Rehearses the rounds without a GPU, from the archive of pack.sh, on the fake driver and software Vulkan:
#   tests/gpu/rehearse.sh FOLDER [CASE…]   cases: right, hang, wrong, no-vulkan, killed, variants; all of them without a CASE
# Each case is a copy of this system without Rust and the repository, without a network and without a Vulkan loader but that of the
# archive, in a namespace of its own. It needs root, a C++ compiler and a Vulkan driver (scripts/test.sh installs them), and for the last case
# what variants.sh has compiled. FOLDER gets the results of each case. A quarter of an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
case "${1:-}" in
    "" | -*)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
        exit 2
        ;;
esac
mkdir -p "$1"
results=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- right hang wrong no-vulkan killed variants
pack=$PWD/target/gpu-pack/pack.tar.xz
fake=${KYKLOS_FAKE_LIBRARIES:-$(CARGO_PROFILE_RELEASE_DEBUG=none CARGO_INCREMENTAL=0 cargo run -q --release -p kyklos-fake-cuda --example folder)}

# A driver whose kernel for Hopper does not rescale the sums of a row.
wrong_driver() {
    local copy=$1/source flags=(-std=c++17 -march=native -ffp-contract=off -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=0 -fPIC -fvisibility=hidden)
    mkdir -p "$copy"
    cp -r cuda-backend/{kernels,emulator,fake} "$copy/"
    grep -q 'mine.scale_sums(rescale);' "$copy/kernels/attend_hopper.h"
    sed -i 's/mine.scale_sums(rescale);//' "$copy/kernels/attend_hopper.h"
    flags+=(-I "$copy/fake" -I "$copy/emulator" -I "$copy/kernels")
    g++ "${flags[@]}" -O1 -c -o "$1/kernels.o" -x c++ "$copy/kernels/kernels.cu"
    g++ "${flags[@]}" -O2 -shared -pthread -o "$1/libcuda.so.1" "$copy"/fake/driver/{driver,memory,kernels,state}.cpp \
        "$copy"/emulator/{machine,instructions,hopper}.cpp -x none "$1/kernels.o"
    cp "$fake"/libnv* "$1/"
}

# enter ROOT CASE COMMAND: in a copy of this system.
enter() {
    # shellcheck disable=SC2016
    unshare -m -n bash -c '
        set -e
        mount -t tmpfs none "$1" && mkdir "$1"/{upper,work,root}
        mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" none "$1/root"
        cd "$1/root"
        for place in proc dev sys; do mount --rbind /$place $place; done
        mount -t tmpfs none tmp && mkdir tmp/{fake,results,pack,run}
        mount --bind "$3" tmp/fake && mount --bind "$4" tmp/results
        tar xJf "$5" -C tmp/pack
        rm -rf ".$8" ".$HOME/.cargo" ".$HOME/.rustup" usr/lib/*/libvulkan.so.1*
        [ "$2" != no-vulkan ] || rm -rf tmp/pack/gl
        chroot . /sbin/ldconfig
        ! chroot . /usr/bin/env -i PATH=/usr/bin:/bin sh -c "command -v cargo rustc" || exit 1
        exec chroot . /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp XDG_RUNTIME_DIR=/tmp/run LD_LIBRARY_PATH=/tmp/fake \
            KYKLOS_FAKE_CUDA="$6" bash -c "cd /tmp/pack; $7"' enter "$@"
}

# rehearse NAME CASE SETTINGS COMMAND
rehearse() {
    local root start=$SECONDS code=0 driver=$fake
    root=$(mktemp -d)
    mkdir -p "$results/$1"
    if [ "$2" = wrong ]; then
        driver=$results/wrong-driver
        [ -e "$driver/libcuda.so.1" ] || { mkdir -p "$driver" && wrong_driver "$driver"; }
    fi
    echo "== $1"
    enter "$root" "$2" "$driver" "$results/$1" "$pack" "$3" "$4" "$PWD" 2>&1 | tee "$results/$1/printed.txt" || code=$?
    rmdir "$root"
    echo "== $1: exit code $code after $((SECONDS - start)) s; left running: $(pgrep -f "^/tmp/pack/(kyklos|cuda|backends)" | wc -l)"
}

for name in "$@"; do
    case "$name" in
        right)
            rehearse right-first right capability=90 './round.sh --first --short /tmp/results'
            rehearse right-rest right capability=90 './round.sh --rest --short /tmp/results'
            ;;
        # Every process hangs at its second launch.
        hang)
            rehearse hang-first hang capability=90,hang_at=2 './round.sh --first --short /tmp/results'
            rehearse hang-rest hang capability=90,hang_at=2 './round.sh --rest --short /tmp/results'
            ;;
        wrong | no-vulkan)
            rehearse "$name-first" "$name" capability=90 './round.sh --first --short /tmp/results'
            rehearse "$name-rest" "$name" capability=90 './round.sh --rest --short /tmp/results'
            ;;
        # By force, while a kernel hangs. The guard ends what it has started.
        killed) rehearse killed right capability=90,hang_at=2 'timeout -s KILL 45 ./round.sh --first --short /tmp/results; sleep 8' ;;
        variants)
            mkdir -p "$results/variants/of"
            cp target/gpu-pack/variants/* "$results/variants/of/"
            rehearse variants right capability=90 './round.sh --variants /tmp/results/of --short /tmp/results'
            ;;
    esac
done
