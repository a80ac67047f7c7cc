#!/usr/bin/env bash
# Groups that do not form, or only after a while, on hosts that are network namespaces of this machine: docker's bridge, address
# translation, a firewall between two workers, small packets, a name that gets its address late. Every rank must say why.
# A part of scripts/test-namespaces.sh, which makes the namespace in which this runs.
# Usage: scripts/namespaces/forming.sh PROGRAM [SCENARIO]
set -euo pipefail
program=$1

# --- one scenario, in a network namespace and a mount namespace of its own ---

others=()
# A further host: a namespace that the variable $1 enters, with the address $2 and the link $3 of this host.
host() {
    unshare --net sleep 600 &
    local process=$!
    others+=($process)
    until [ "$(readlink /proc/$process/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    printf -v "$1" 'nsenter --target %s --net' $process
    ip link add "$3" type veth peer name eth0 netns $process
    nsenter --target $process --net ip link set lo up
    nsenter --target $process --net ip addr add "$2" dev eth0
    nsenter --target $process --net ip link set eth0 up
}

# This host with rank 0, a worker in a container on its bridge, and a worker on another host.
two_networks() {
    ip link set lo up
    host container 172.17.0.2/16 docker0
    host worker 10.1.0.2/24 near
    ip addr add 172.17.0.1/16 dev docker0
    ip addr add 10.1.0.1/24 dev near
    ip link set docker0 up
    ip link set near up
    $container ip route add default via 172.17.0.1
    $worker ip route add default via 10.1.0.1
}

forwards() { echo "$1" >/proc/sys/net/ipv4/ip_forward || missing "this kernel does not forward"; }

missing() {
    echo "$1" >"$folder/missing"
    exit 0
}

# Runs rank $1 in the background, with the rest as options.
rank() {
    local rank=$1
    shift
    timeout 120 "$@" --device cpu --shape 1,256,2,2,32 >"$folder/$rank.out" 2>"$folder/$rank.err" &
    ranks+=($!)
}

attend() { echo "$program attend --rank $1 --world $2 --coordinator $3 --identity $folder/rank-$1.pem --join-deadline ${4:-20}"; }

# Three ranks, of which rank $1 starts ${2:-0} s after the others.
three() {
    local enter=("" "$container" "$worker") one
    for one in 0 1 2; do
        [ "$one" = "$1" ] || rank $one ${enter[one]} $(attend $one 3 10.1.0.1:29600)
    done
    sleep "${2:-0}"
    rank "$1" ${enter[$1]} $(attend "$1" 3 10.1.0.1:29600)
}

# All ranks end with exit code 1 and an error that has each of these patterns.
all_say() {
    local pid status pattern
    for pid in "${ranks[@]}"; do
        status=0
        wait "$pid" || status=$?
        [ $status = 1 ] || echo "a rank ended with exit code $status" >>"$folder/wrong"
    done
    for file in "$folder"/*.err; do
        for pattern in "$@"; do
            grep '^error: ' "$file" | grep -qE "$pattern" || echo "$(basename "$file" .err) does not say: $pattern" >>"$folder/wrong"
        done
        if grep '^error: ' "$file" | grep -qE 'was lost before|rank [12] did not come'; then
            echo "$(basename "$file" .err) names the wrong cause" >>"$folder/wrong"
        fi
    done
}

all_well() {
    local pid
    for pid in "${ranks[@]}"; do wait "$pid" || echo "a rank ended with exit code $?" >>"$folder/wrong"; done
}

PAIR='rank 2 did not reach rank 1 at 172\.17\.0\.2:[0-9]+ within'

scenario() {
    # What the system tells of interfaces is about those of this namespace.
    mount -t sysfs sysfs /sys 2>/dev/null || true
    trap 'kill -9 "${others[@]}" 2>/dev/null || true' EXIT
    ranks=()
    case $1 in
        bridge) two_networks && three 2 && all_say "$PAIR" 'let UDP through' ;;
        bridge,rank-0-last) two_networks && three 0 4 && all_say "$PAIR" ;;
        bridge,rank-1-last) two_networks && three 1 4 && all_say "$PAIR" ;;
        bridge,tcp)
            two_networks
            attend() { echo "$program attend --rank $1 --world $2 --coordinator $3 --identity $folder/rank-$1.pem --join-deadline 20 --network tcp"; }
            three 2 && all_say "$PAIR" 'let TCP through'
            ;;
        translation)
            two_networks
            forwards 1
            # As docker does it: what leaves a container for elsewhere has the address of the host, and nothing comes in.
            nft -f - <<'RULES' 2>/dev/null || missing "there is no nft, or no address translation in this kernel"
table ip nat { chain out { type nat hook postrouting priority 100; ip saddr 172.17.0.0/16 oifname != "docker0" masquerade; }; }
table ip filter { chain forward { type filter hook forward priority 0; oifname "docker0" ct state established,related accept; oifname "docker0" drop; }; }
RULES
            three 2 && all_say "$PAIR"
            ;;
        firewall,*)
            two_networks
            forwards 1
            # Dropped silently.
            case $1 in *,both | *,from-2)
                ip rule add from 10.1.0.2 to 172.17.0.2 blackhole 2>/dev/null || missing "this kernel has no rules of routing" ;;
            esac
            case $1 in *,both | *,from-1)
                ip rule add from 172.17.0.2 to 10.1.0.2 blackhole 2>/dev/null || missing "this kernel has no rules of routing" ;;
            esac
            three 2 && all_say "$PAIR"
            ;;
        no-firewall)
            two_networks
            forwards 1
            three 2 && all_well
            ;;
        small-packets)
            two_networks
            ip link set near mtu 1200
            $worker ip link set eth0 mtu 1200
            rank 0 $(attend 0 2 10.1.0.1:29600 8)
            rank 1 $worker $(attend 1 2 10.1.0.1:29600 8)
            wait "${ranks[@]}" || true
            # The second host has the files of the first one, which do not tell of its interfaces: it knows the path.
            for one in 0 1; do
                grep '^error: ' "$folder/$one.err" |
                    grep -qE 'needs IP packets of 1228 bytes, and the (interface near has MTU|path to 10.1.0.1 carries) 1200.*: use TCP.*hint: --network tcp' ||
                    echo "rank $one does not name the MTU" >>"$folder/wrong"
            done
            ;;
        small-packets,tcp)
            two_networks
            ip link set near mtu 1200
            $worker ip link set eth0 mtu 1200
            rank 0 $(attend 0 2 10.1.0.1:29600) --network tcp
            rank 1 $worker $(attend 1 2 10.1.0.1:29600) --network tcp
            all_well
            ;;
        late-name,*)
            ip link set lo up
            grep -v ring-0 /etc/hosts >"$folder/hosts"
            mount --bind "$folder/hosts" /etc/hosts || missing "/etc/hosts cannot be replaced"
            late_name "${1#*,}"
            # Both ranks have found that there is no such name.
            for one in 0 1; do
                until grep -q 'waiting for the address of ring-0.ring' "$folder/$one.err"; do
                    kill -0 "${ranks[one]}" || break
                    sleep 0.1
                done
            done
            echo 127.0.0.1 ring-0.ring >>"$folder/hosts"
            all_well
            ;;
    esac
}

# Two ranks that are told of rank 0 by its name, in the way $1.
late_name() {
    local one run
    printf 'coordinator = "ring-0.ring:29600"\n[[ranks]]\nhost = "a"\n[[ranks]]\nhost = "b"\n' >"$folder/cluster.toml"
    for one in 0 1; do
        run="$program attend --identity $folder/rank-$one.pem --join-deadline 110"
        case $1 in
            option) rank $one $run --rank $one --world 2 --coordinator ring-0.ring:29600 ;;
            variable) rank $one env KYKLOS_COORDINATOR=ring-0.ring:29600 KYKLOS_WORLD=2 $run --rank $one ;;
            cluster-file) rank $one $run --cluster "$folder/cluster.toml" --rank $one ;;
            torchrun) rank $one env RANK=$one WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=ring-0.ring MASTER_PORT=29600 $run ;;
            slurm) rank $one env SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=$one SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$one \
                SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=ring-0.ring $run ;;
            kubernetes) rank $one env JOB_COMPLETION_INDEX=$one KYKLOS_WORLD=2 KYKLOS_SERVICE=ring HOSTNAME=ring-$one $run ;;
        esac
    done
}

if [ $# = 2 ]; then
    scenario "$2"
    exit
fi

# --- all of them, side by side: they mostly wait ---

all=$(mktemp -d)
trap 'rm -rf "$all"' EXIT
"$program" certs init --authority "$all/authority" >/dev/null
SCENARIOS="bridge bridge,rank-0-last bridge,rank-1-last bridge,tcp translation firewall,from-1 firewall,from-2 firewall,both no-firewall
    small-packets small-packets,tcp late-name,option late-name,variable late-name,cluster-file late-name,torchrun late-name,slurm
    late-name,kubernetes"
for name in $SCENARIOS; do
    mkdir "$all/$name"
    "$program" certs issue --authority "$all/authority" -n 3 --output "$all/$name" >/dev/null
    folder=$all/$name unshare --net --mount "$0" "$program" "$name" >"$all/$name/log" 2>&1 || echo "the scenario failed" >>"$all/$name/wrong" &
done
wait
failed=0
for name in $SCENARIOS; do
    if [ -e "$all/$name/missing" ]; then
        echo "ignored: $name: $(cat "$all/$name/missing")"
    elif [ -e "$all/$name/wrong" ]; then
        failed=$((failed + 1))
        echo "FAILED: $name: $(sort "$all/$name/wrong" | uniq | tr '\n' ';')"
        for file in "$all/$name"/*.err "$all/$name/log"; do echo "  $(basename "$file"): $(tail -1 "$file" 2>/dev/null)"; done
    else
        echo "passed: $name$(grep -h '^error: ' "$all/$name/2.err" 2>/dev/null | sed 's/^error/; rank 2/')"
    fi
done
[ $failed = 0 ]
