#!/usr/bin/env bash
# Compares predicted with measured wall time over a grid of shapes, masks, ranks and links on this machine's CPU: every
# plan that fits, in turns with the probe that calibrates its prediction. Links: memory, QUIC on loopback, and QUIC on a
# loopback of 1 Gb/s (a network namespace with a token bucket; skipped where this user cannot make one).
# Prints a table and the median and worst error of each link and of all.
# Usage: scripts/bench/predictions.sh [rounds] [folder for the JSON]
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-5}
folder=${2:-target/predictions}
mkdir -p "$folder"
cargo build --release -q

shaped() {
    unshare -rn sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms && "$@"' sh "$@"
}

# compare LINK TRANSPORT [WRAPPER]
compare() {
    local case shape mask ranks
    for case in "1,2048,8,2,64 full 2" "1,4096,8,2,64 full 4" "1,4096,8,2,64 causal 4" "1,2048,8,8,128 causal 4" \
        "2,1024,4,4,64 full 3" "1,4096,6,6,64 window:512,0 4"; do
        read -r shape mask ranks <<<"$case"
        ${3:-} target/release/kyklos plan --explain --probe --measure "$rounds" --device cpu --transport "$2" \
            --shape "$shape" --mask "$mask" --ranks "$ranks" --json >"$folder/$1-$ranks-$shape-${mask//[:,]/-}.json"
    done
}

compare memory in-process
compare loopback quic
if shaped true 2>/dev/null; then
    compare 1gbit quic shaped
else
    echo "# 1gbit: skipped: unshare, ip and tc (tbf) are needed, and the right to make a network namespace" >&2
fi
python3 - "$folder" <<'PY'
import json, pathlib, sys
errors = {}
print("link,ranks,shape,mask,plan,predicted_ms,measured_ms,error_percent")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    report = json.loads(path.read_text())
    link = path.name.split("-")[0]
    p = report["problem"]
    shape = " ".join(str(p[key]) for key in ("batch", "kv_len", "q_heads", "kv_heads", "head_dim"))
    for line in report["measured"]:
        plan = line["plan"]
        errors.setdefault(link, []).append(abs(line["error"]))
        print(f'{link},{report["ranks"]},{shape},{path.stem.split(",")[-1].split("-", 1)[-1]},'
              f'{plan["strategy"]} {plan["mesh"]} {plan["placement"]},{line["predicted_s"] * 1e3:.2f},'
              f'{line["measured_s"] * 1e3:.2f},{line["error"] * 100:+.1f}')
errors["all"] = sum(errors.values(), [])
for name, found in errors.items():
    found.sort()
    print(f"# {name}: {len(found)} plans, error median {found[len(found) // 2] * 100:.1f} %, worst {found[-1] * 100:.1f} %")
PY
