#!/usr/bin/env bash
# Compiles variants of single kernels for Hopper into small cubins, for round.sh --variants on a machine with the GPU:
#   tests/gpu/variants.sh [PREFIX…]     those of variants.txt whose names begin so, or all, into target/gpu-pack/variants
# It needs nvcc (NVCC, CUDA_HOME/bin, PATH, or that of scripts/check/cuda.sh) and no GPU; five seconds or more for a kernel. A variant whose
# switch no kernel has, or whose edit changes nothing, is an error, and the others are compiled. Each gets NAME.cubin, and NAME.txt with the calls of
# `kyklos bench` that it is timed with, if there are any. It replaces kernels of the same names in a program with the same tiles: another tile shape needs a
# program of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD
out=$PWD/target/gpu-pack/variants
wheels=$PWD/target/cuda-toolkit/wheels/nvidia/cu13/bin/nvcc
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/nvcc}}
[ -n "$nvcc" ] || nvcc=$(command -v nvcc || echo "$wheels")
"$nvcc" --version >/dev/null 2>&1 || { echo "no nvcc: run scripts/check/cuda.sh, or set NVCC" >&2 && exit 1; }
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# compile NAME INSTANCES CALLS SWITCHES EDIT
compile() {
    local switch name=$1 kernels=$work/$1
    cp -r "$here/cuda-backend/kernels" "$kernels"
    for switch in $4; do
        switch=${switch#-D}
        grep -qrw "${switch%%=*}" "$kernels" || { echo "$name: no kernel has the switch ${switch%%=*}" && return 1; }
    done
    if [ -n "$5" ]; then
        # FILE and a script for sed.
        sed -i -E "${5#* }" "$kernels/${5%% *}"
        ! cmp -s "$kernels/${5%% *}" "cuda-backend/kernels/${5%% *}" || { echo "$name: the edit changes nothing" && return 1; }
    fi
    # kernels.cu has an instance, or a group of them, in each line without indentation.
    sed -E '/^(KERNEL|CODES|[A-Z_]+_DIMS)\(/d' "$kernels/kernels.cu" >"$work/$name.cu"
    printf '%s\n' "$2" >>"$work/$name.cu"
    # As cuda-backend/build.rs calls it.
    # shellcheck disable=SC2086
    if ! { "$nvcc" --std=c++17 -O3 -ptx -arch compute_90a $4 -I "$kernels/cuda" -I "$kernels" -o "$work/$name.ptx" "$work/$name.cu" &&
        "$nvcc" -cubin -Xptxas -v -arch sm_90a -o "$out/$name.cubin" "$work/$name.ptx"; } >"$work/$name.log" 2>&1; then
        echo "$name: nvcc refuses it"
        cat "$work/$name.log"
        return 1
    fi
    [ -z "$3" ] || echo "$3" >"$out/$name.txt"
    # What the machine code must not have, and what it uses.
    echo "$name: $(stat -c %s "$out/$name.cubin") bytes$(grep -o 'Used [0-9]* registers\|[1-9][0-9]* bytes spill stores\|(C75[0-9]*) .*' "$work/$name.log" | sort | uniq -c | sed 's/^ */, /; s/ / x /' | tr -d '\n')"
}

failed=0
while IFS='|' read -r name instances calls switches edit; do
    name=${name// /}
    case "$name" in "" | \#*) continue ;; esac
    wanted=$(($# == 0))
    for prefix in "$@"; do case "$name" in "$prefix"*) wanted=1 ;; esac done
    [ $wanted = 1 ] || continue
    compile "$name" "$instances" "$(xargs <<<"$calls")" "$(xargs <<<"$switches")" "$(sed 's/^ *//; s/ *$//' <<<"$edit")" || failed=1
done <tests/gpu/variants.txt
(cd "$out" && tar cJf ../variants.tar.xz -- *)
echo "$out.tar.xz: $(stat -c %s "$out.tar.xz") bytes"
exit $failed
