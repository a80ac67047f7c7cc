#!/usr/bin/env bash
# Runs the program on two hosts that are network namespaces of this machine, joined by a veth pair: packets of 1500 and of
# 9000 bytes, a link that goes down for a second and for good, a link that carries one way only, and with --link wan one that is
# away for 3 s; with --all also slow links, a slow direction, packet loss and longer outages over UDP and TCP, and groups that form
# late or not at all (scripts/namespaces/forming.sh), which take ten minutes more.
# Four ranks, two on each host, with host identities and a cluster file; every result is verified.
# What this machine cannot do is reported as ignored, not as passed. Needs no privileges where users may make namespaces.
# Usage: scripts/test-namespaces.sh [--all] [PROGRAM], by default target/release/kyklos, which is built.
set -euo pipefail
cd "$(dirname "$0")/.."

ignore_all() {
    echo "ignored: namespaces: $1"
    exit 0
}

all=
if [ "${1:-}" = --all ]; then
    all=--all
    shift
fi
if [ "${1:-}" != --inside ]; then
    program=${1:-target/release/kyklos}
    [ $# -gt 0 ] || cargo build --release -q -p kyklos-cli
    for tool in ip tc unshare nsenter; do
        command -v "$tool" >/dev/null || ignore_all "there is no $tool"
    done
    unshare --user --map-root-user --net true 2>/dev/null || ignore_all "this user may not make any"
    exec unshare --user --map-root-user --net "$0" $all --inside "$(realpath "$program")"
fi

program=$2
folder=$(mktemp -d)
other= # The process that holds the second namespace open.
ranks=()
cleanup() {
    # Some ranks may have ended already.
    kill -9 "${ranks[@]}" ${other:+"$other"} 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

# This namespace is the first host, 10.77.0.1. The second one lives as long as its process.
unshare --net sleep 3600 &
other=$!
disown
ip link set lo up
ip link add near type veth peer name far 2>/dev/null || ignore_all "this kernel has no veth"
until [ "$(readlink "/proc/$other/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link set far netns "$other"
there() { nsenter --target "$other" --net "$@"; }
ip addr add 10.77.0.1/24 dev near
there ip addr add 10.77.0.2/24 dev far
there ip link set lo up

mtu() {
    ip link set near mtu "$1" up
    there ip link set far mtu "$1" up
}

"$program" certs init --authority "$folder/authority" >/dev/null
"$program" certs issue --authority "$folder/authority" --host 10.77.0.1 --output "$folder" >/dev/null
"$program" certs issue --authority "$folder/authority" --host 10.77.0.2 --output "$folder" >/dev/null
for host in 1 2 1 2; do printf '[[ranks]]\nhost = "10.77.0.%s"\n' "$host"; done >"$folder/cluster.toml"

# Starts four ranks on the mesh. Rank R writes $folder/R.err and $folder/R.out.
mesh=2x2
shape=1,2048,4,4,64
longest=60 # Seconds of a run.
start() {
    ranks=()
    for rank in 0 1 2 3; do
        host=$((rank % 2 + 1))
        enter=()
        [ $host = 1 ] || enter=(nsenter --target "$other" --net)
        timeout $longest "${enter[@]}" "$program" attend --cluster "$folder/cluster.toml" --rank $rank \
            --identity "$folder/host-10.77.0.$host.pem" --device cpu --join-deadline 20 --mesh $mesh --mask causal \
            --shape $shape --progress json "$@" >"$folder/$rank.out" 2>"$folder/$rank.err" &
        ranks+=($!)
    done
}

passed=0 failed=0 ignored=0
pass() { passed=$((passed + 1)) && echo "passed: $*"; }
ignore() { ignored=$((ignored + 1)) && echo "ignored: $*"; }
fail() {
    failed=$((failed + 1))
    echo "FAILED: $*"
    for rank in 0 1 2 3; do echo "  rank $rank: $(grep -v '^{' "$folder/$rank.err" | tail -3)"; done
}

now_ms() { echo $(($(date +%s%N) / 1000000)); }

# All four ranks succeed, and rank 0 has compared the result with the oracle.
all_well() {
    local pid well=true
    for pid in "${ranks[@]}"; do wait "$pid" || well=false; done
    $well && grep -q '"max_abs_error"' "$folder/0.out"
}

# Waits until every rank computes.
all_compute() {
    local rank tries=0
    for rank in 0 1 2 3; do
        until grep -q '"op":3' "$folder/$rank.err"; do
            sleep 0.05
            tries=$((tries + 1))
            [ $tries -lt 400 ] || return 1
        done
    done
}

# The link is away for $1 s while the ranks compute under --link wan over $2. Nothing ends.
outage() {
    local name="wan, link away for $1 s over $2"
    start --verify --json --repeat 40 --link wan --network "$2"
    if all_compute; then
        ip link set near down
        sleep "$1"
        ip link set near up
        if all_well; then pass "$name: the result is right"; else fail "$name"; fi
    else
        fail "$name: the ranks did not start to compute"
        wait "${ranks[@]}" || true
    fi
}

# The same with a link that swallows packets silently.
blackhole() {
    local name="wan, packets lost for $1 s over $2"
    start --verify --json --repeat 40 --link wan --network "$2"
    if all_compute; then
        # Frames of both directions go to addresses that no device has.
        ip neigh replace 10.77.0.2 lladdr 02:00:00:00:00:99 dev near nud permanent
        there ip neigh replace 10.77.0.1 lladdr 02:00:00:00:00:98 dev far nud permanent
        sleep "$1"
        ip neigh del 10.77.0.2 dev near
        there ip neigh del 10.77.0.1 dev far
        if all_well; then pass "$name: the result is right"; else fail "$name"; fi
    else
        fail "$name: the ranks did not start to compute"
        wait "${ranks[@]}" || true
    fi
}

# A link of $1 Mbit/s each way under --link wan over $2.
slow() {
    local name="wan, $1 Mbit/s over $2" started took
    tc qdisc add dev near root tbf rate "$1mbit" burst 64k latency 200ms
    there tc qdisc add dev far root tbf rate "$1mbit" burst 64k latency 200ms
    # So many tokens that the run takes some seconds.
    shape=1,$(($1 < 64 ? 256 * $1 : 16384)),4,4,64
    [ "$1" != 1 ] || shape=1,512,4,4,64
    started=$(now_ms)
    start --json --link wan --network "$2"
    if all_compute_once; then
        took=$(($(now_ms) - started))
        pass "$name: no rank counts as dead in $took ms"
    else
        fail "$name"
    fi
    shape=1,2048,4,4,64
    tc qdisc del dev near root
    there tc qdisc del dev far root
}

# All four ranks succeed.
all_compute_once() {
    local pid well=true
    for pid in "${ranks[@]}"; do wait "$pid" || well=false; done
    $well
}

# Every rank ends with an error that names a rank of the other host, soon after $2 (ms).
all_name_somebody() {
    local name=$1 since=$2 rank times=() worst=0 said took
    local open=(0 1 2 3)
    while [ ${#open[@]} -gt 0 ] && [ $(($(now_ms) - since)) -lt 20000 ]; do
        local left=()
        for rank in "${open[@]}"; do
            if grep -q '^error: ' "$folder/$rank.err"; then
                took=$(($(now_ms) - since))
                times[rank]=$took
                [ $took -le $worst ] || worst=$took
            else
                left+=("$rank")
            fi
        done
        open=(${left[@]+"${left[@]}"})
        sleep 0.05
    done
    if [ ${#open[@]} -gt 0 ]; then
        fail "$name: rank ${open[*]} reports no error after 20 s"
        kill "${ranks[@]}" 2>/dev/null || true
        wait "${ranks[@]}" 2>/dev/null || true
        return
    fi
    for rank in 0 1 2 3; do
        wait "${ranks[rank]}" && fail "$name: rank $rank ended without an error" && return
        # Ranks 0 and 2 are on the first host: to them a rank of the other one has failed, and the other way round.
        said=$(grep '^error: ' "$folder/$rank.err")
        case $((rank % 2)) in
            0) grep -qE 'rank [13] (died|failed)' <<<"$said" ;;
            *) grep -qE 'rank [02] (died|failed)' <<<"$said" ;;
        esac || { fail "$name: rank $rank names no rank of the other host: $said" && return; }
    done
    if [ $worst -gt $LIMIT_MS ]; then
        fail "$name: known after ${times[*]} ms (ranks 0 to 3), more than $LIMIT_MS ms"
    else
        pass "$name: every rank named one of the other host after ${times[*]} ms (ranks 0 to 3)"
    fi
}
# Twelve silent heartbeats and one second for a rank's last frames before it prints its error are 3400 ms; the rest is for a busy machine.
LIMIT_MS=20000

for size in 1500 9000; do
    mtu $size
    start --verify --json --repeat 3
    if all_well; then pass "MTU $size: the result is right"; else fail "MTU $size"; fi
done
mtu 1500

if [ -z "$all" ]; then
    echo "left out without --all: slow links, a slow direction, packet loss, outages of 1, 3 and 10 s over UDP and TCP"
elif tc qdisc add dev near root tbf rate 20mbit burst 64k latency 50ms 2>/dev/null; then
    there tc qdisc add dev far root tbf rate 20mbit burst 64k latency 50ms
    before=$(awk '/near:/ {print $10}' /proc/net/dev) started=$(now_ms)
    start --verify --json --repeat 4
    if all_well; then
        took=$(($(now_ms) - started)) bytes=$(($(awk '/near:/ {print $10}' /proc/net/dev) - before))
        mbit=$((bytes * 8 / 1000 / took))
        said="20 Mbit/s: the result is right; $((bytes >> 20)) MiB one way in $took ms, $mbit Mbit/s"
        # Without the limit the rate is several times as high.
        if [ $mbit -le 21 ]; then pass "$said"; else fail "$said: the limit had no effect"; fi
    else
        fail "20 Mbit/s"
    fi
    there tc qdisc del dev far root

    # Only the direction from the first host to the second is slow. In a ring, ranks 0 and 2 send over it.
    mesh=1x4
    start --verify --json --record "$folder/records"
    mesh=2x2
    if all_well; then
        said=$("$program" doctor "$folder/records") || true
        # For how many ns rank 0 was blocked: by receivers that had not asked (credit), by the link (send).
        spent() { grep -o "\"$1_blocked_ns\":[0-9]*" "$folder/records/rank-0.jsonl" | cut -d: -f2; }
        link=$(grep -E '^messages from rank (0 to rank 1|2 to rank 3) came at' <<<"$said" || true)
        if [ -z "$link" ]; then
            fail "20 Mbit/s one way: the doctor names no slow link: $said"
        elif [ "$(spent send)" -le $((4 * $(spent credit))) ]; then
            fail "20 Mbit/s one way: rank 0 was blocked $(spent credit) ns by ranks, $(spent send) ns by the link"
        else
            pass "20 Mbit/s one way: $link"
        fi
    else
        fail "20 Mbit/s one way"
    fi
    tc qdisc del dev near root
else
    ignore "20 Mbit/s: this kernel has no tbf"
fi

if [ -z "$all" ]; then
    :
elif tc qdisc add dev near root netem loss 2% 2>/dev/null; then
    start --verify --json --repeat 3
    if all_well; then pass "2 % loss: the result is right"; else fail "2 % loss"; fi
    tc qdisc del dev near root
else
    ignore "2 % loss: this kernel has no netem"
fi

start --verify --json --repeat 40
if all_compute; then
    ip link set near down
    sleep 1
    ip link set near up
    if all_well; then pass "link down for 1 s: the result is right"; else fail "link down for 1 s"; fi
else
    fail "link down for 1 s: the ranks did not start to compute"
    wait "${ranks[@]}" || true
fi

outage 3 udp
if [ -n "$all" ]; then
    longest=240
    for network in udp tcp; do
        for seconds in 1 3 10; do
            [ "$seconds $network" = "3 udp" ] || outage $seconds $network
            blackhole $seconds $network
        done
        if tc qdisc add dev near root tbf rate 20mbit burst 64k latency 50ms 2>/dev/null; then
            tc qdisc del dev near root
            for mbit in 1 8 20 100; do slow $mbit $network; done
        else
            ignore "slow links over $network: this kernel has no tbf"
        fi
    done
    longest=60
fi

start --repeat 1000000
if all_compute; then
    ip link set near down
    all_name_somebody "link down" "$(now_ms)"
else
    fail "link down: the ranks did not start to compute"
fi
ip link set near up

start --repeat 1000000
if all_compute; then
    # Frames go to an address that no device has: one direction loses everything, the other one works.
    ip neigh replace 10.77.0.2 lladdr 02:00:00:00:00:99 dev near nud permanent
    all_name_somebody "one way only" "$(now_ms)"
    ip neigh del 10.77.0.2 dev near
else
    fail "one way only: the ranks did not start to compute"
fi

if [ -n "$all" ]; then
    echo "groups that form late or not at all:"
    said=$(scripts/namespaces/forming.sh "$program") || true
    echo "$said"
    count() { grep -c "^$1: " <<<"$said" || true; }
    [ "$(count passed)" -gt 0 ] || fail "no group was formed"
    passed=$((passed + $(count passed))) failed=$((failed + $(count FAILED))) ignored=$((ignored + $(count ignored)))
fi

echo "namespaces: $passed passed, $failed failed, $ignored ignored in $SECONDS s"
[ $failed = 0 ]
