#!/usr/bin/env bash
# Measures throughput and CPU time per byte of raw TCP, TLS and QUIC, in turns: on loopback beside PyTorch's gloo (if
# PEER_PYTHON names a Python that has it), over a veth pair between two network namespaces with MTU 1500 and 9000, and over
# the same pair limited to 1 Gb/s, where it shows how much of the link a ring hop uses. Prints what this machine cannot do.
# Usage: scripts/bench/links.sh [rounds] [MiB] [parts: loopback,veth,limited,ping]
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-5} mib=${2:-1024} parts=${3:-loopback,veth,limited,ping}
bench=${BENCH:-$(cargo bench -p kyklos-transport --features quic --bench links --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*links-[^"]*\)".*/\1/p' | tail -1)}
a=kyklos-a b=kyklos-b

part() { case ",$parts," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }

run() {
    echo "## $1"
    shift
    "$@"
}

between() {
    ip netns exec $a "$bench" --here 10.77.0.1 --there 10.77.0.2 --there-by "ip netns exec $b" "$@"
}

mtu() {
    ip -n $a link set kyklos0 mtu "$1"
    ip -n $b link set kyklos1 mtu "$1"
}

tear_down() {
    ip netns del $a 2>/dev/null || true
    ip netns del $b 2>/dev/null || true
}

namespaces() {
    [ "$(id -u)" = 0 ] && command -v ip >/dev/null || return 1
    tear_down
    trap tear_down EXIT
    ip netns add $a && ip netns add $b &&
        ip -n $a link add kyklos0 type veth peer name kyklos1 netns $b &&
        ip -n $a addr add 10.77.0.1/24 dev kyklos0 && ip -n $b addr add 10.77.0.2/24 dev kyklos1 &&
        ip -n $a link set kyklos0 up && ip -n $b link set kyklos1 up
}

limit() {
    tc -n $a qdisc replace dev kyklos0 root tbf rate 1gbit burst 256kb latency 10ms 2>/dev/null &&
        tc -n $b qdisc replace dev kyklos1 root tbf rate 1gbit burst 256kb latency 10ms 2>/dev/null
}

echo "# $(uname -sr), $(nproc) cores, $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | xargs)," \
    "rmem_max $(cat /proc/sys/net/core/rmem_max)"
if part loopback; then
    peer=()
    [ -n "${PEER_PYTHON:-}" ] && peer=(--peer "$PEER_PYTHON tests/peers/gloo.py 2>/dev/null")
    run "loopback" "$bench" --rounds "$rounds" --mib "$mib" \
        --modes tcp,tls,quic:1500,quic:1500x2,quic:9000,quic,quic-hop,quic:tcp "${peer[@]}"
fi
if part ping; then
    run "agreements beside bulk, loopback" "$bench" --rounds "$rounds" --mib "$mib" --modes quic:1500-ping,quic:9000-ping,quic-ping,quic:tcp-ping
fi
part veth || part limited || exit 0
if ! namespaces; then
    echo "# skipped: no network namespaces or veth pairs here, or not root"
    exit 0
fi
if part veth; then
    mtu 1500
    run "veth, MTU 1500" between --rounds "$rounds" --mib "$mib" --modes tcp,tls,quic,quic:1500
    mtu 9000
    run "veth, MTU 9000" between --rounds "$rounds" --mib "$mib" --modes tcp,tls,quic:9000,quic
fi
if part limited; then
    if limit; then
        # A hop uses both directions at once: 100 % of the link is 238.4 MiB/s in the column, and 119.2 in one direction.
        mtu 1500
        run "1 Gb/s, MTU 1500" between --rounds "$rounds" --mib 256 --modes tcp,quic:1500,quic:1500-hop,quic:1500-hop-ping
        mtu 9000
        run "1 Gb/s, MTU 9000" between --rounds "$rounds" --mib 256 --modes tcp,quic:9000,quic:9000-hop,quic:9000-hop-ping
    else
        echo "# skipped: no tbf here"
    fi
fi
