#!/usr/bin/env bash
# Random failures of groups of processes: ranks are killed and stopped, strangers send packets, a router gives a rank another port, and,
# where a network namespace can be made, ranks are cut off and links are slow.
# Prints a line a minute and a summary; fails on a wrong result, a hang, or growing memory or descriptors. The same seed
# makes the same choices. Usage: scripts/soak.sh [MINUTES] [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
export KYKLOS_SOAK_MINUTES=${1:-10} KYKLOS_SOAK_SEED=${2:-1}
# As scripts/test.sh builds them: nothing is compiled twice.
test=(cargo test --release -q --workspace --all-features --test accidents)
"${test[@]}" --no-run
test+=(-- --ignored --exact soak::soak --nocapture)
if command -v ip >/dev/null && unshare --user --map-root-user --net ip link set lo up 2>/dev/null; then
    export KYKLOS_SOAK_CUTS=1
    exec unshare --user --map-root-user --net sh -c 'ip link set lo up && exec "$@"' sh "${test[@]}"
fi
exec "${test[@]}"
