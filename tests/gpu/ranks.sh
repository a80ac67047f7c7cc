#!/usr/bin/env bash
# Several ranks on the NVIDIA GPUs of one machine, from the folder that tests/gpu/pack.sh made, after round.sh was right:
#   ranks.sh [RESULTS]           at most nine minutes
#   ranks.sh --short [RESULTS]   with small shapes, for the fake driver
# With two GPUs or more: a rank on each, messages through host memory and by NCCL, Ulysses and a ring, gradients, ranks as threads and as
# processes; then times of all strategies both ways, each rank's waiting beside its computing, and the bytes from rank to rank.
# With one GPU: two and four ranks share it, which NCCL allows from version 2.30 on.
# NCCL is the library that the system finds: LD_LIBRARY_PATH says where another one is.
# RESULTS (default: results-ranks beside ranks.sh) gets all.txt, README.md and RESULTS.tgz, as from round.sh. Each stage prints "right" or
# "WRONG"; one that does not end is ended at its limit, and the others still run. Exit code 0: no stage went wrong.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
short=0 total=540 name=ranks
[ "${1:-}" = --short ] && short=1 total=900 && shift
# shellcheck source=tests/gpu/stages.sh
. "$here/stages.sh"
# shellcheck source=tests/gpu/page.sh
. "$here/page.sh"
begin "${1:-$here/results-ranks}"
# Where the kernels were built without nvcc, the devices compile them here, which is then a matter of minutes.
look 180
has_cuda || finish

# Those that can be used.
gpus=$(sed -n '/"id": "cuda:/,/}/p' "$files/facts.txt" | grep -c '"error": null')
device=cuda counts=(2 "$gpus")
if [ "$gpus" = 1 ]; then
    echo "one GPU: 2 and 4 ranks share it, so their times say nothing of several GPUs"
    device=cuda:0 counts=(2 4)
    export NCCL_MULTI_RANK_GPU_ENABLE=1
fi
[ "${counts[0]}" = "${counts[1]}" ] && counts=("${counts[0]}")

tokens=16384 heads=16 dim=128 repeat=5
[ $short = 1 ] && tokens=192 heads=4 dim=64 repeat=1
problem=(--mask causal --dtype bf16 --device "$device")

# attend NAME OPTION…: ranks as threads of one process.
attend() {
    local name=$1
    shift
    stage "$name" 60 2 "$here/kyklos" attend --shape "1,$tokens,$heads,$heads,$dim" "${problem[@]}" --split even --verify "$@"
}

# Where NCCL cannot be used, its reason is printed, and the GPUs of a process copy to each other.
way=nccl advice=1
attend nccl --ranks 2 --collective nccl || way=auto
advice=0
for ranks in "${counts[@]}"; do
    for collective in host $way; do
        attend "ulysses-$collective-$ranks" --mesh "${ranks}x1" --collective "$collective"
        attend "ring-$collective-$ranks" --mesh "1x$ranks" --collective "$collective"
    done
    stage "gradients-$way-$ranks" 60 2 "$here/kyklos" attend --shape "1,$((tokens / 16)),$heads,2,$dim" "${problem[@]}" --split even \
        --mesh "1x$ranks" --collective $way --grad --verify
    # A process for each rank, as in a cluster.
    stage "processes-$way-$ranks" 60 2 "$here/kyklos" launch -n "$ranks" -- attend --shape "1,$tokens,$heads,$heads,$dim" "${problem[@]}" \
        --split even --mesh "1x$ranks" --collective $way --verify
done

# Beside the times stand predictions for a cluster of H100.
for collective in host $way; do
    stage "strategies-$collective" 120 0 "$here/kyklos" bench strategies --shape "$tokens,$heads,$heads,$dim" --batch 1 "${problem[@]}" \
        --ranks "${counts[-1]}" --collective "$collective" --placement contiguous,zigzag --repeat "$repeat" \
        --hardware "$here/h100-infiniband.toml" --output "$files/strategies-$collective" &&
        say "$(sed -n '/^strategy, mesh/,/^$/p' "$files/strategies-$collective.txt")"
done
finish
