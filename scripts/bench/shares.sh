#!/usr/bin/env bash
# Measures shares of tokens by speed: three ranks with parts of a core each (by cgroup quotas), in processes of their own, over QUIC.
# In turns: even shares, `--split auto`, and each rank's part of a core alone, whose times give the ideal (the work over the sum of
# the speeds). Prints CSV: round,variant,quotas,wall_s,tokens. Needs root and the cpu controller of cgroups.
# Usage: scripts/bench/shares.sh [rounds] [shape] [quotas in percent of a core]
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-5} shape=${2:-1,8192,8,2,64} quotas=${3:-100 60 30}
kyklos=${KYKLOS:-target/release/kyklos}
read -ra quota <<<"$quotas"
ranks=${#quota[@]}
period=10000

folder=$(mktemp -d)
groups=()
tear_down() {
    for group in "${groups[@]}"; do
        rmdir "$group" 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap tear_down EXIT

if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    base=/sys/fs/cgroup/kyklos-shares
    mkdir -p $base
    echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
    echo +cpu >$base/cgroup.subtree_control
else
    base=/sys/fs/cgroup/cpu/kyklos-shares
    mkdir -p $base
fi
for rank in "${!quota[@]}"; do
    group=$base/$rank
    mkdir -p "$group"
    us=$((quota[rank] * period / 100))
    if [ -f "$group/cpu.max" ]; then
        echo "$us $period" >"$group/cpu.max"
    else
        echo $period >"$group/cpu.cfs_period_us"
        echo $us >"$group/cpu.cfs_quota_us"
    fi
    groups+=("$group")
done
groups+=("$base")

# A call of one rank in the part of a core of `rank`.
within() {
    local rank=$1
    shift
    (echo "$BASHPID" >"$base/$rank/cgroup.procs" && exec "$@")
}

line() {
    python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
tokens = " ".join(str(rank["tokens"]) for rank in report["per_rank"])
print("%.4f,%s" % (report["wall_s"], tokens))' "$1" 2>/dev/null ||
        echo ","
}

port=17300
together() {
    port=$((port + 1))
    local pids=() status=0
    for rank in "${!quota[@]}"; do
        within "$rank" "$kyklos" attend --shape "$shape" --mask causal --device cpu --repeat 3 --json "$@" \
            --rank "$rank" --world "$ranks" --coordinator 127.0.0.1:$port --identity "$folder/rank-$rank.pem" \
            >"$folder/out-$rank" 2>"$folder/err-$rank" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || status=1
    done
    [ $status = 0 ] || cat "$folder"/err-* >&2
    line "$folder/out-0"
}

kyklos=$(realpath "$kyklos")
(cd "$folder" && "$kyklos" certs init && "$kyklos" certs issue -n "$ranks") >/dev/null
echo "round,variant,quotas,wall_s,tokens"
for round in $(seq "$rounds"); do
    echo "$round,even,$quotas,$(together --mesh "1x$ranks" --split "$(printf '1,%.0s' $(seq 2 "$ranks"))1")"
    echo "$round,auto,$quotas,$(together --split auto)"
    for rank in "${!quota[@]}"; do
        within "$rank" "$kyklos" attend --shape "$shape" --mask causal --device cpu --repeat 3 --json \
            >"$folder/alone" 2>/dev/null
        echo "$round,alone,${quota[rank]},$(line "$folder/alone")"
    done
done
