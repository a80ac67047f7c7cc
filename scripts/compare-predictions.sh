#!/usr/bin/env bash
# Predicted against measured wall time over a grid of shapes, masks, ranks and transports on this machine's CPU: every
# plan that fits, in turns with the probe that calibrates its prediction. Prints a table for each and the median and worst error of
# all. Usage: scripts/compare-predictions.sh [rounds] [folder for the JSON]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5}
folder=${2:-target/predictions}
mkdir -p "$folder"
cargo build --release -q
for transport in in-process quic; do
    for case in "1,2048,8,2,64 full 2" "1,4096,8,2,64 full 4" "1,4096,8,2,64 causal 4" "1,2048,8,8,128 causal 4" \
        "2,1024,4,4,64 full 3" "1,4096,6,6,64 window:512,0 4"; do
        read -r shape mask ranks <<<"$case"
        name="$transport-$ranks-$shape-${mask//[:,]/-}.json"
        target/release/kyklos plan --explain --probe --measure "$rounds" --device cpu --transport "$transport" \
            --shape "$shape" --mask "$mask" --ranks "$ranks" --json >"$folder/$name"
    done
done
python3 - "$folder" <<'PY'
import json, pathlib, sys
errors = {}
print("transport,ranks,shape,mask,plan,predicted_ms,measured_ms,error_percent")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    report = json.loads(path.read_text())
    transport = "quic" if path.name.startswith("quic") else "in-process"
    p = report["problem"]
    shape = " ".join(str(p[key]) for key in ("batch", "kv_len", "q_heads", "kv_heads", "head_dim"))
    for line in report["measured"]:
        plan = line["plan"]
        errors.setdefault(transport, []).append(abs(line["error"]))
        print(f'{transport},{report["ranks"]},{shape},{path.stem.split(",")[-1].split("-", 1)[-1]},'
              f'{plan["strategy"]} {plan["mesh"]} {plan["placement"]},{line["predicted_s"] * 1e3:.2f},'
              f'{line["measured_s"] * 1e3:.2f},{line["error"] * 100:+.1f}')
errors["all"] = sum(errors.values(), [])
for name, found in errors.items():
    found.sort()
    print(f"# {name}: {len(found)} plans, error median {found[len(found) // 2] * 100:.1f} %, worst {found[-1] * 100:.1f} %")
PY
