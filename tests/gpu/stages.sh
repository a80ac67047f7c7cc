# shellcheck shell=bash disable=SC2154
# What round.sh and ranks.sh share: stages with limits, and the facts of the machine. The script that reads it has set `here`, the folder
# of the programs, and `total`, the seconds that all stages may take together.

failed=() advice=0

# begin RESULTS: the usage instead, where that is asked for.
begin() {
    case "$1" in
        -*)
            # The comment at the top of the script.
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            [ "$1" = --help ] || [ "$1" = -h ]
            exit
            ;;
    esac
    results=$1
    mkdir -p "$results"
    export KYKLOS_REQUIRE_CUDA=1 KYKLOS_CACHE_DIR=$here/cache
    look
}

# stage NAME SECONDS LINES COMMAND…: at most LINES lines of the output are printed where all is right.
stage() {
    local name=$1 limit=$2 lines=$3 start=$SECONDS code=0 left=$((total - SECONDS))
    shift 3
    if [ $left -lt 5 ]; then
        echo "$name: not run, the round has no time left"
        [ $advice = 1 ] || failed+=("$name")
        return 1
    fi
    # The shell's own message about a killed process says nothing that is not said below.
    { timeout -k 3 $((limit < left ? limit : left)) "$@" >"$results/$name.txt" 2>&1 </dev/null; } 2>/dev/null || code=$?
    case $code in
        0) echo "$name: right, $((SECONDS - start)) s" ;;
        124 | 137) echo "$name: WRONG, it was killed after $((SECONDS - start)) s: it did not end, or memory was missing" ;;
        *) echo "$name: WRONG ($code), $((SECONDS - start)) s" ;;
    esac
    if [ $code = 0 ]; then
        [ "$lines" = 0 ] || tail -n "$lines" "$results/$name.txt"
        return 0
    fi
    tail -n 15 "$results/$name.txt"
    [ $advice = 1 ] || failed+=("$name")
    return 1
}

finish() {
    echo "${#failed[@]} stages went wrong in $SECONDS s: ${failed[*]:-none}"
    # facts.txt says which machine it was.
    echo "to report it, right or WRONG: tar czf kyklos-gpu.tgz -C '$(dirname "$results")' '$(basename "$results")'"
    echo "and attach kyklos-gpu.tgz to an issue of https://github.com/kyklos/kyklos (facts.txt has the name of this host)"
    [ ${#failed[@]} = 0 ]
    exit
}

facts() {
    uname -a
    nvidia-smi 2>/dev/null || echo "no nvidia-smi"
    nvidia-smi topo -m 2>/dev/null
    "$here/kyklos" devices --json
}

# The first stage: names and drivers of the devices, and what keeps a device from use. Without cuda:0 it is the last one.
look() {
    # Where the kernels were built without nvcc, the devices compile them here, which is then a matter of minutes.
    stage facts 180 0 bash -c "$(declare -f facts); here='$here'; facts"
    if ! grep -q '"id": "cuda:0"' "$results/facts.txt"; then
        echo "no device cuda:0, see $results/facts.txt. What the program says of it:"
        timeout -k 3 20 "$here/kyklos" attend --device cuda:0 --shape 1,64,1,1,64 2>&1 </dev/null | tail -n 1
        exit 1
    fi
    grep -E '"(name|driver)"|"error": "' "$results/facts.txt"
}
