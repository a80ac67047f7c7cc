#!/usr/bin/env bash
# Compiles variants of single kernels for Hopper into small cubins, for round.sh --variants on a machine with the GPU:
#   tests/gpu/variants.sh [NAME…]      those of variants.txt, or some of them, into target/gpu-pack/variants
# It needs nvcc (NVCC, CUDA_HOME/bin, PATH, or that of scripts/check-cuda.sh) and no GPU; ten seconds or more each. A variant whose switch no kernel
# has is left out, with a line that says so. Each gets NAME.cubin, and NAME.txt with the calls of `kyklos bench` that it is timed with.
# A variant replaces a kernel of the same name in a program with the same tiles: another tile shape needs a program of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
kernels=$PWD/cuda-backend/kernels
out=$PWD/target/gpu-pack/variants
wheels=$PWD/target/cuda-toolkit/wheels/nvidia/cu13/bin/nvcc
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/nvcc}}
[ -n "$nvcc" ] || nvcc=$(command -v nvcc || echo "$wheels")
"$nvcc" --version >/dev/null 2>&1 || { echo "no nvcc: run scripts/check-cuda.sh, or set NVCC" >&2 && exit 1; }
[ $# -gt 0 ] || rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# compile NAME INSTANCE CALLS SWITCHES
compile() {
    local switch name=$1
    for switch in $4; do
        switch=${switch#-D}
        grep -qrw "${switch%%=*}" "$kernels" || { echo "$name: left out, no kernel has the switch ${switch%%=*}" && return; }
    done
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
    echo "$3" >"$out/$name.txt"
    # What the machine code must not have, and what it uses.
    echo "$name: $(stat -c %s "$out/$name.cubin") bytes$(grep -o 'Used [0-9]* registers\|[0-9]* bytes spill stores\|(C75[0-9]*) .*' "$work/$name.log" | sed 's/^/, /' | tr -d '\n')"
}

failed=0
while IFS='|' read -r name instance calls switches; do
    name=${name// /}
    case "$name" in "" | \#*) continue ;; esac
    [ $# = 0 ] || [[ " $* " = *" $name "* ]] || continue
    compile "$name" "$(xargs <<<"$instance")" "$(xargs <<<"$calls")" "$(xargs <<<"$switches")" || failed=1
done <tests/gpu/variants.txt
(cd "$out" && tar cJf ../variants.tar.xz -- *)
echo "$out.tar.xz: $(stat -c %s "$out.tar.xz") bytes"
exit $failed
