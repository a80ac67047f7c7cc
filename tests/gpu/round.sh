#!/usr/bin/env bash
# One round on a machine with an NVIDIA GPU, from the folder that tests/gpu/pack.sh made:
#   round.sh --first [RESULTS]   the first half, at most five minutes; begin with it
#   round.sh [RESULTS]           the whole round, at most nine minutes
#   round.sh --short [RESULTS]   the whole round with small shapes, for the fake driver
# The first half: facts and all kernels; the kernels for Hopper from one tile up (on other GPUs those for sm_80 in the same cases);
# the same bytes in every run; times of long calls, by the clock of the device too, beside PyTorch where python3 has it with CUDA.
# The second half: the suite of all backends, whole runs against the oracle, all other times; at the end, as advice only,
# compute-sanitizer and ncu, where they are. Later stages need what earlier ones test.
# Each stage prints "right" or "WRONG", and writes its output to RESULTS/STAGE.txt (default: results beside round.sh). A stage that does
# not end is ended at its limit, and the others still run. Exit code 0: no stage went wrong.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kind=whole total=540
case "${1:-}" in
    --first) kind=first total=300 && shift ;;
    # The steps are small too where this is set.
    --short) kind=short total=900 && shift && export KYKLOS_FAKE_CUDA=${KYKLOS_FAKE_CUDA-} ;;
esac
# shellcheck source=tests/gpu/stages.sh
. "$here/stages.sh"
begin "${1:-$here/results}"

# The steps are scenarios of the test program `cuda`, which here finds the real driver.
step=0
while read -r name; do
    step=$((step + 1))
    echo "$name"
    stage "step-$step" 40 12 env KYKLOS_CUDA_SCENARIO="$name" "$here/cuda"
done < <("$here/cuda" --list 2>/dev/null | sed -n 's/^\(step [0-9].*\): test$/\1/p')
[ $step -gt 0 ] || failed+=(steps)

repeat=20
[ $kind = short ] && repeat=1
# bench NAME SECONDS SHAPE MASK OPTION…
bench() {
    local name=bench-$1 limit=$2 shape=$3 mask=$4
    shift 4
    stage "$name" "$limit" 3 "$here/kyklos" bench --device cuda:0 --shape "$shape" --mask "$mask" --dtype bf16 --repeat $repeat "$@"
}
has_torch=0
python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null && has_torch=1
# Our times beside those of PyTorch, both by the clock of the host and by that of the device. FLASH is FlashAttention 2 there; only
# cuDNN is of the class of FlashAttention 3.
beside_torch() {
    [ $has_torch = 1 ] || { echo "torch-$1: not run, no PyTorch with CUDA"; return; }
    bench "torch-$1" 60 "$2" "$3" --rounds 1 --against "cudnn=python3 $here/torch_cuda.py cudnn" \
        --against "flash=python3 $here/torch_cuda.py flash"
}

main=1,16384,16,16,128
[ $kind = short ] && main=1,128,2,2,64
for mask in full causal; do
    bench "main-$mask" 40 $main $mask
done
for mask in full causal; do
    beside_torch "main-$mask" $main $mask
done
[ $kind = first ] && finish

suite=(cuda)
[ $kind = short ] && suite=("downloads the bytes" "merges two states" "encodes int8")
for claim in "${suite[@]}"; do
    stage "suite-${claim// /-}" 120 0 "$here/backends" "$claim" --skip wgpu --skip "cpu:"
done

tokens=4096
[ $kind = short ] && tokens=96
for dtype in bf16 f16 f32; do
    for mesh in 1x1 1x2 2x2; do
        stage "attend-$dtype-$mesh" 30 0 "$here/kyklos" attend --device cuda --shape "1,$tokens,8,4,128" --mask causal \
            --dtype $dtype --mesh $mesh --split even --verify --json
    done
done
for wire in f16 int8; do
    stage "attend-f32-1x2-wire-$wire" 30 0 "$here/kyklos" attend --device cuda --shape "1,$tokens,8,4,128" --mask causal \
        --dtype f32 --mesh 1x2 --split even --wire $wire --verify --json
done

if [ $kind = short ]; then
    shapes=(1,100,2,1,128)
else
    shapes=(1,16384,32,32,64 1,16384,8,8,256 1,8192,32,8,128 1,2048,16,16,128 1,2048,32,32,64)
fi
for shape in "${shapes[@]}"; do
    for mask in full causal; do
        bench "$shape-$mask" 30 "$shape" $mask
    done
done
# One token over many keys, a call of a few microseconds: what graphs save.
bench decoding 30 $main full --queries 1
KYKLOS_CUDA_GRAPHS=off bench decoding-no-graphs 30 $main full --queries 1
if [ $kind = whole ]; then
    for shape in 1,16384,32,32,64 1,16384,8,8,256; do
        beside_torch "$shape-causal" $shape causal
    done
fi

# Advice: compute-sanitizer is known to report accesses of wgmma that are none.
advice=1
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck synccheck racecheck; do
        stage "sanitizer-$tool" 45 0 compute-sanitizer --tool $tool --error-exitcode 9 "$here/kyklos" attend --device cuda:0 \
            --shape 1,150,4,2,64 --mask causal --dtype bf16 --ranks 2 --verify --json
    done
else
    echo "sanitizer: not run, no compute-sanitizer"
fi
if command -v ncu >/dev/null; then
    stage ncu 45 40 ncu --clock-control none -k regex:hopper --launch-count 1 "$here/kyklos" bench --device cuda:0 --shape $main \
        --mask full --dtype bf16 --repeat 1
else
    echo "ncu: not run, it is not there"
fi
finish
