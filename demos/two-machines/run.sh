#!/usr/bin/env bash
# One attention call on two machines that are network namespaces of this one: each has a network of its own, and a cable of 1 Gbit/s
# joins them. The second machine gets one line of text, the token, and nothing else. Needs no privileges where users may make
# namespaces; iproute2 and util-linux.
# Usage: demos/two-machines/run.sh [PROGRAM], by default target/release/kyklos, which is built.
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/../.."

if [ "${1:-}" != --inside ]; then
    program=${1:-target/release/kyklos}
    [ $# -gt 0 ] || cargo build --release -q -p kyklos-cli
    for tool in ip unshare nsenter; do
        command -v "$tool" >/dev/null || { echo "two-machines: there is no $tool" >&2; exit 1; }
    done
    unshare --user --map-root-user --net true 2>/dev/null || { echo "two-machines: this user may make no namespaces" >&2; exit 1; }
    exec unshare --user --map-root-user --net "$self" --inside "$(realpath "$program")"
fi

program=$2
folder=$(mktemp -d)
unshare --net sleep 600 & # Holds the network of the second machine open.
second=$!
trap 'kill $second 2>/dev/null || true; rm -rf "$folder"' EXIT
on_second() { nsenter --target $second --net "$@"; }

until [ "$(readlink /proc/$second/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link set lo up
on_second ip link set lo up
ip link add cable0 type veth peer name cable1
ip link set cable1 netns $second
ip addr add 10.77.1.1/24 dev cable0
on_second ip addr add 10.77.1.2/24 dev cable1
ip link set cable0 up
on_second ip link set cable1 up
rate="not limited: there is no tc"
if tc qdisc add dev cable0 root tbf rate 1gbit burst 256kb latency 20ms 2>/dev/null &&
    on_second tc qdisc add dev cable1 root tbf rate 1gbit burst 256kb latency 20ms 2>/dev/null; then
    rate="1 Gbit/s"
fi

call=(attend --shape 1,4096,8,2,64 --mask causal --device cpu --verify)
cd "$folder"
"$program" certs init >/dev/null
token=$("$program" certs invite --coordinator 10.77.1.1:29600 --world 2 2>/dev/null | grep -m1 '^kyklos1')
echo "machine 1 is 10.77.1.1, machine 2 is 10.77.1.2, the cable is $rate"
echo "machine 1$ kyklos ${call[*]} --invite invitation.pem"
echo "machine 2$ KYKLOS_JOIN=${token:0:12}… kyklos ${call[*]}"
echo
KYKLOS_JOIN=$token timeout 120 nsenter --target $second --net "$program" "${call[@]}" 2>second.err &
rank=$!
status=0
timeout 120 "$program" "${call[@]}" --invite invitation.pem 2>first.err || status=$?
wait $rank || status=$?
[ $status = 0 ] || cat first.err second.err >&2
exit $status
