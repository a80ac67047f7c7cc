# shellcheck shell=bash disable=SC2154
# What round.sh and ranks.sh share: stages with limits, and what is kept of them. The script that reads it has set `here`, the folder of
# the pack, `total`, the seconds that all stages may take together, and `name`, the name of the round.
#
# In the folder of the results: all.txt, which grows, README.md, and RESULTS.tgz, which has the output of every stage too. Names of files
# have letters, digits, ".", "_" and "-" only.

advice=0 slow=1 quiet=0

# begin RESULTS: makes the folders, and the guard that ends the programs of stages when this script is no more, however it ended.
begin() {
    case "$1" in
        -*)
            # The comment at the top of the script.
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            [ "$1" = --help ] || [ "$1" = -h ]
            exit
            ;;
    esac
    mkdir -p "$1"
    results=$(cd "$1" && pwd)
    files=$here/stages-$name
    running=$files/running
    rm -rf "$files"
    mkdir -p "$running"
    # Status of each stage: name, right, WRONG, hang or missing, seconds, and "advice" if it does not count.
    : >"$files/status" && : >"$results/all.txt"
    export KYKLOS_REQUIRE_CUDA=1 KYKLOS_CACHE_DIR=$here/cache
    # shellcheck disable=SC2016
    setsid bash -c 'while kill -0 "$1" 2>/dev/null && [ $SECONDS -lt "$3" ]; do sleep 1; done
        for file in "$2"/*; do kill -KILL -- "-${file##*/}" 2>/dev/null; done' guard $$ "$running" $((total + 10)) \
        >/dev/null 2>&1 </dev/null &
    guard=$!
    trap 'interrupted' TERM INT HUP
}

# Prints, and keeps what it prints.
say() { [ $quiet = 1 ] || printf '%s\n' "$*" | tee -a "$results/all.txt"; }

# A command with its arguments could not be run here; says what is missing.
missing() {
    say "$1: not run, $2"
    echo "$1 missing 0 advice" >>"$files/status"
}

# stage NAME SECONDS LINES COMMAND…: at most LINES lines of the output are printed where all is right; 0 if it was right, 124 if it had to
# be killed, otherwise 1.
stage() {
    local stage=$1 limit=$(($2 * slow)) lines=$3 start=$SECONDS code=0 left=$((total - SECONDS)) pid word what counts=counts
    shift 3
    [ $advice = 0 ] || counts=advice
    if [ $left -lt 5 ]; then
        say "$stage: not run, the round has no time left"
        echo "$stage missing 0 $counts" >>"$files/status"
        return 1
    fi
    # In a process group of its own, which has its number.
    timeout -k 3 $((limit < left ? limit : left)) "$@" >"$files/$stage.txt" 2>&1 </dev/null &
    pid=$!
    : >"$running/$pid"
    # The shell's own message about a killed process says nothing that is not said below.
    { wait $pid; } 2>/dev/null || code=$?
    rm -f "$running/$pid"
    case $code in
        0) word=right what=right ;;
        124 | 137) word=hang what="WRONG, it was killed: it did not end, or memory was missing" ;;
        *) word=WRONG what="WRONG ($code)" ;;
    esac
    # The backend ends a hang itself where it can.
    [ $word != WRONG ] || ! grep -q "$hang_words" "$files/$stage.txt" || word=hang
    echo "$stage $word $((SECONDS - start)) $counts" >>"$files/status"
    [ $code = 0 ] || lines=15
    say "$stage: $what, $((SECONDS - start)) s$([ "$lines" = 0 ] || tail -n "$lines" "$files/$stage.txt" | cut -c 1-400 | sed '1s/^/\n/')"
    case $word in
        right) return 0 ;;
        hang) return 124 ;;
        *) return 1 ;;
    esac
}
# What the CUDA backend says of a device that makes no progress.
hang_words='the device completed nothing for'

# The archive as it is now. It also survives the end of the round by force.
keep() {
    page >"$results/README.md"
    local folder
    folder=$(mktemp -d)
    mkdir -p "$folder/$name"
    cp -r "$files"/*.txt "$files"/strategies-*/ "$files"/*.ncu-rep "$results/all.txt" "$results/README.md" "$folder/$name/" 2>/dev/null
    tar czf "$folder/RESULTS.tgz" -C "$folder" "$name" && mv "$folder/RESULTS.tgz" "$results/RESULTS.tgz"
    rm -rf "$folder"
}

# Of the stages that count.
wrong() { awk '$4 == "counts" && $2 != "right" { print $1 }' "$files/status"; }

finish() {
    local list
    list=$(wrong)
    # All times once more, in few columns.
    say "$(beside_peers | grep '^|' || true)$(timed_variants | grep '^|' | sed '1s/^/\n/' || true)"
    say "$(wc -w <<<"$list") stages went wrong in $SECONDS s: $(tr '\n' ' ' <<<"${list:-none}")"
    keep
    kill "$guard" 2>/dev/null
    say "to report it, right or WRONG: attach $results/RESULTS.tgz to an issue of https://github.com/kyklos/kyklos"
    say "(it has the output of nvidia-smi, which may list processes, and the name of this host)"
    [ -z "$list" ]
    exit
}

# Ends the programs of all stages, and keeps what there is.
interrupted() {
    trap '' TERM INT HUP
    say "interrupted after $SECONDS s: the programs of the stages are ended"
    local file end=$((SECONDS + 4)) left=1
    # timeout passes it on.
    for file in "$running"/*; do kill -TERM "${file##*/}" 2>/dev/null; done
    while [ $left = 1 ] && [ $SECONDS -lt $end ]; do
        left=0
        for file in "$running"/*; do ! kill -0 -- "-${file##*/}" 2>/dev/null || left=1; done
        sleep 0.2
    done
    for file in "$running"/*; do kill -KILL -- "-${file##*/}" 2>/dev/null; done
    keep
    kill "$guard" 2>/dev/null
    exit 143
}

# What the machine is.
facts() {
    date -u +%Y-%m-%dT%H:%M:%SZ
    uname -a
    nproc
    nvidia-smi 2>/dev/null || echo "no nvidia-smi"
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu --format=csv 2>/dev/null
    nvidia-smi topo -m 2>/dev/null
    "$here/kyklos" devices --json
}

# look SECONDS, the first stage: names and drivers of the devices, and what keeps a device from use.
look() {
    stage facts "$1" 0 bash -c "$(declare -f facts); here='$here'; facts"
    say "$(grep -E '"(id|name|driver|gflops)":|"error": "' "$files/facts.txt" | sed 's/^ *//' | cut -c 1-300)"
}
has_cuda() {
    ! grep -q '"id": "cuda:0"' "$files/facts.txt" || return 0
    echo "cuda WRONG 0 counts" >>"$files/status"
    say "no device cuda:0. What the program says of it:"
    say "$(timeout -k 3 20 "$here/kyklos" attend --device cuda:0 --shape 1,64,1,1,64 2>&1 </dev/null | tail -n 1)"
    false
}
