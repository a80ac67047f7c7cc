#!/usr/bin/env bash
# One round on a machine with an NVIDIA GPU, in under ten minutes, from the folder that tests/gpu/pack.sh made:
#   round.sh [--short] [RESULTS]
# Facts, the suite of all backends with poisoned outputs, whole runs against the oracle, times (beside PyTorch, where it is),
# and compute-sanitizer on small shapes, where it is. Everything goes to RESULTS too; the exit code says whether all was right.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
short=0
[ "${1:-}" = --short ] && { short=1; shift; }
results=${1:-$here/results}
mkdir -p "$results"
export KYKLOS_REQUIRE_CUDA=1 KYKLOS_CACHE_DIR=$results/cache
failed=()

# stage NAME SECONDS COMMAND…
stage() {
    local name=$1 limit=$2 start=$SECONDS code=0
    shift 2
    timeout "$limit" "$@" >"$results/$name.txt" 2>&1 || code=$?
    echo "$name: $([ $code = 0 ] && echo right || echo "WRONG ($code)"), $((SECONDS - start)) s"
    [ $code = 0 ] || { failed+=("$name"); tail -n 15 "$results/$name.txt"; }
}

facts() {
    uname -a
    nvidia-smi 2>/dev/null || echo "no nvidia-smi"
    "$here/kyklos" devices --json
}
stage facts 60 bash -c "$(declare -f facts); here='$here'; facts"
grep -q '"id": "cuda:0"' "$results/facts.txt" || { echo "no device cuda:0, see $results/facts.txt"; exit 1; }

suite=(cuda)
[ $short = 1 ] && suite=("downloads the bytes" "merges two states" "encodes int8")
for claim in "${suite[@]}"; do
    stage "suite-${claim// /-}" 150 "$here/backends" "$claim" --skip wgpu --skip "cpu:"
done

tokens=4096
[ $short = 1 ] && tokens=96
for dtype in f32 f16 bf16; do
    for mesh in 1x1 1x2 2x2; do
        stage "attend-$dtype-$mesh" 60 "$here/kyklos" attend --device cuda --shape "1,$tokens,8,4,128" --mask causal \
            --dtype $dtype --mesh $mesh --verify --json
    done
done

for wire in f16 int8; do
    stage "attend-f32-1x2-wire-$wire" 60 "$here/kyklos" attend --device cuda --shape "1,$tokens,8,4,128" --mask causal \
        --dtype f32 --mesh 1x2 --wire $wire --verify --json
done

if [ $short = 1 ]; then
    shapes=(--shape 1,128,2,2,64) repeat=1
else
    shapes=(--shape 1,2048,32,32,64 --shape 1,16384,32,32,64 --shape 1,2048,16,16,128 --shape 1,16384,16,16,128
        --shape 1,16384,8,8,256 --shape 1,8192,32,8,128) repeat=20
fi
bench=("$here/kyklos" bench --device cuda:0 "${shapes[@]}" --mask full --mask causal --dtype bf16 --repeat $repeat
    --verify)
stage bench 120 "${bench[@]}"
# One token over many keys, a call of a few microseconds: what graphs save.
decoding=("$here/kyklos" bench --device cuda:0 "${shapes[@]}" --mask full --dtype bf16 --queries 1 --repeat $repeat)
stage bench-decoding 60 "${decoding[@]}"
stage bench-decoding-no-graphs 60 env KYKLOS_CUDA_GRAPHS=off "${decoding[@]}"
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    # Python starts for each turn: the long shapes are what the targets are about.
    long=(--shape 1,16384,32,32,64 --shape 1,16384,16,16,128 --shape 1,16384,8,8,256)
    stage bench-torch 240 "$here/kyklos" bench --device cuda:0 "${long[@]}" --mask full --mask causal --dtype bf16 \
        --repeat $repeat --against "flash=python3 $here/torch_cuda.py flash" \
        --against "cudnn=python3 $here/torch_cuda.py cudnn" --rounds 2
else
    echo "bench-torch: not run, no PyTorch with CUDA"
fi

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        stage "sanitizer-$tool" 60 compute-sanitizer --tool $tool --error-exitcode 9 "$here/kyklos" attend --device cuda:0 \
            --shape 1,150,4,2,64 --mask causal --dtype bf16 --ranks 2 --verify --json
    done
else
    echo "sanitizer: not run, no compute-sanitizer"
fi

echo "${#failed[@]} stages went wrong in $SECONDS s: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
