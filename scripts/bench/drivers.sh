#!/usr/bin/env bash
# Measures shares of tokens by speed over unlike drivers: a ring of the cores, Mesa's software Vulkan (llvmpipe) and SwiftShader, the
# one that Chromium brings, in one process. In turns: even shares, `--split auto`, and each device alone. All of them compute on
# the same cores, so the cores alone are the best that there is; every result is compared with f64.
# Prints CSV: round,variant,devices,wall_s,tokens,max_abs_error,tolerance. Usage: scripts/bench/drivers.sh [rounds] [shape]
# SWIFTSHADER and LLVMPIPE name the description files of the drivers, KYKLOS the program.
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-5} shape=${2:-1,2048,8,2,64}
kyklos=${KYKLOS:-target/release/kyklos}
swiftshader=${SWIFTSHADER:-/usr/lib/chromium/vk_swiftshader_icd.json}
llvmpipe=${LLVMPIPE:-/usr/share/vulkan/icd.d/lvp_icd.x86_64.json}
for file in "$swiftshader" "$llvmpipe"; do
    [ -f "$file" ] || { echo "there is no $file" >&2; exit 1; }
done
export VK_DRIVER_FILES=$llvmpipe:$swiftshader

# The number of a driver: their order is the loader's.
number() { "$kyklos" devices | sed -n "s/^\(wgpu:[0-9]*\) .*$1.*/\1/Ip" | head -1; }
mesa=$(number llvmpipe) swift=$(number swiftshader)
[ -n "$mesa" ] && [ -n "$swift" ] || { echo "the Vulkan loader does not show both drivers" >&2; exit 1; }

measure() {
    local round=$1 variant=$2 devices=$3
    shift 3
    "$kyklos" attend --shape "$shape" --mask causal --device "$devices" --repeat 3 --verify --json "$@" 2>/dev/null |
        python3 -c '
import json, sys
report = json.load(sys.stdin)
tokens = " ".join(str(rank["tokens"]) for rank in report["per_rank"])
error, tolerance = report["max_abs_error"], report["tolerance"]
assert error <= tolerance, report
print("%s,%s,%s,%.4f,%s,%.3g,%.3g" % (*sys.argv[1:], report["wall_s"], tokens, error, tolerance))' \
            "$round" "$variant" "${devices//,/ }"
}

echo "round,variant,devices,wall_s,tokens,max_abs_error,tolerance"
for round in $(seq "$rounds"); do
    measure "$round" even "cpu,$mesa,$swift" --ranks 3 --split even
    measure "$round" auto "cpu,$mesa,$swift" --ranks 3 --split auto
    measure "$round" even-2 "$mesa,$swift" --ranks 2 --split even
    measure "$round" auto-2 "$mesa,$swift" --ranks 2 --split auto
    for device in cpu "$mesa" "$swift"; do
        measure "$round" alone "$device" --ranks 1
    done
done
