#!/usr/bin/env bash
# Groups of processes that form, work and meet with accidents: kills, stops and, where a network namespace can be made,
# ranks that nothing reaches. Prints a line a minute and a summary; fails on a wrong result, a hang, or memory or
# descriptors that grow. The same seed makes the same choices. Usage: scripts/soak.sh [minutes] [seed]
set -euo pipefail
cd "$(dirname "$0")/.."
export KYKLOS_SOAK_MINUTES=${1:-10} KYKLOS_SOAK_SEED=${2:-1}
test=(cargo test --release -q -p kyklos-tests --test suites)
"${test[@]}" --no-run
test+=(-- --ignored --exact accidents::soak::soak --nocapture)
if command -v ip >/dev/null && unshare --user --map-root-user --net ip link set lo up 2>/dev/null; then
    export KYKLOS_SOAK_CUTS=1
    exec unshare --user --map-root-user --net sh -c 'ip link set lo up && exec "$@"' sh "${test[@]}"
fi
exec "${test[@]}"
