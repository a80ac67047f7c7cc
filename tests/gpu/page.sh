# shellcheck shell=bash disable=SC2154
# README.md of the results: which machine, what was right, and the times as tables. With the other files of RESULTS.tgz it
# becomes docs/results/DATE-gpu-NAME.tar.xz; what was predicted and learnt is written into it by hand.

page() {
    local gpu
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
    cat <<EOF
# $(date -u +%Y-%m-%d), ${gpu:-no NVIDIA GPU}, round \`$name\`

$(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv,noheader 2>/dev/null | sed 's/^/GPU, driver, memory, power limit, highest clock: /')
$(uname -sr), $(nproc) cores, $(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1). $(pytorch_line)
Program: $(timeout 5 "$here/kyklos" --version 2>/dev/null); kernels: $(cat "$here/kernels.txt" 2>/dev/null || echo unknown). Command: \`round.sh --$name\`.

**Prediction**: (write it before you read the tables)

**What was learnt**: (to be written)

EOF
    sed -n 's/.*"id": "\(.*\)".*/\1/p' "$files/facts.txt" 2>/dev/null | while read -r device; do
        awk -F'"' -v wanted="$device" '$2 == "id" { id = $4 } id == wanted && $2 ~ /^(name|driver|kernel|error)$/ && $4 { line = line "; " $2 ": " $4 }
            id == wanted && /gflops/ { gsub(/[^0-9.]/, "", $3); line = line "; GFLOP/s in a short test: " ($3 ? int($3) : "none") }
            END { print "- " wanted line }' "$files/facts.txt"
    done
    echo
    echo "## Stages"
    echo
    awk '{ n[$2]++; if ($2 != "right") list = list sprintf("| %s | %s | %s | %s |\n", $1, $2, $3, $4 == "advice" ? "not counted" : "counted") }
        END { printf "%d right, %d WRONG, %d ended at their limit or after no progress, %d not run.\n\n", n["right"], n["WRONG"], n["hang"], n["missing"]
            if (list) printf "| stage | result | s | |\n|---|---|--:|---|\n%s\n", list }' "$files/status"
    beside_peers
    local file
    for file in "$files"/bench-*.txt "$files"/wgpu-*.txt "$files"/program-*.txt "$files"/peers-*.txt "$files"/in-place.txt "$files"/torch-*.txt "$files"/group-*.txt; do
        [ -s "$file" ] || continue
        case "$file" in *group-* | *wgpu-tune*) head -n 60 "$file" ;; *) cat "$file" ;; esac |
            awk -v name="$(basename "$file" .txt)" 'BEGIN { print "### " name "\n\n```text" } { print substr($0, 1, 260) } END { print "```\n" }'
    done
    timed_variants
}

pytorch_line() {
    tail -n 1 "$files/pytorch.txt" 2>/dev/null | cut -c 1-120
}

# Our calls beside those of PyTorch, by the clock of the device. Cells of both tables are two spaces apart.
beside_peers() {
    local tables=("$files"/bench-*.txt) theirs
    [ -e "${tables[0]}" ] || return 0
    mapfile -t theirs < <(compgen -G "$files/peers-*.txt")
    echo "## Times of a call by the clock of the device"
    echo
    echo "In brackets: their time over ours; above 1 Kyklos is faster. A multiply-add counts as two operations, a backward pass as five products."
    [ ${#theirs[@]} = 0 ] || grep -h '^product of' "${theirs[@]}" | sed 's/^/The largest speed seen here: /'
    echo
    awk -F'  +' '
        FNR == 1 { way = FILENAME ~ /backward/ ? "backward" : "forward"; split("", column); peers = FILENAME ~ /peers-/
            note = FILENAME ~ /sm80/ ? " (kernels for sm_80)" : FILENAME ~ /no-graphs/ ? " (no graphs)" : "" }
        /^(device|program)  / { for (i = 1; i <= NF; i++) column[$i] = i; next }
        !("shape" in column) || NF < 8 { next }
        peers { key = $column["shape"] " " $column["mask"] " " $column["dtype"] " " $column["pass"]
            if ($column["median ms"] + 0 > 0) their[key, $column["program"]] = $column["median ms"]; next }
        { keys = $column["shape"]; sub(/^[^,]*,/, "", keys); sub(/,.*/, "", keys)
            rows = $column["queries"] == keys ? "" : " " $column["queries"] " queries"
            key = $column["shape"] rows " " $column["mask"] " " $column["dtype"] " " way note
            ms = $column["device ms"] + 0 ? $column["device ms"] : $column["median ms"]
            if (!(key in our)) order[++count] = key
            plain[key] = $column["shape"] rows " " $column["mask"] " " $column["dtype"] " " way
            our[key] = ms; host[key] = $column["median ms"]; speed[key] = $column["GFLOP/s"] * $column["median ms"] / ms / 1000 }
        function cell(key, who) { return (plain[key], who) in their ? sprintf("%s ms (%.2f)", their[plain[key], who], their[plain[key], who] / our[key]) : "" }
        END { if (!count) exit
            print "| call | Kyklos | TFLOP/s | host clock | cuDNN | FlashAttention 2 | FlashAttention 3 |\n|---|--:|--:|--:|--:|--:|--:|"
            for (n = 1; n <= count; n++) { key = order[n]
                printf "| %s | %s ms | %.1f | %s ms | %s | %s | %s |\n", key, our[key], speed[key], host[key], cell(key, "cudnn"), cell(key, "fa2"), cell(key, "fa3") } }
    ' "${tables[@]}" "${theirs[@]}"
    echo
}

# The table of round.sh --variants.
timed_variants() {
    [ -n "${variants:-}" ] || return 0
    echo "## Variants"
    echo
    echo "| variant | call | device ms | median ms | TFLOP/s |"
    echo "|---|---|--:|--:|--:|"
    local file tables
    mapfile -t tables < <(compgen -G "$files/program-*.txt")
    for file in "$variants"/*.cubin; do
        file=$files/$(basename "$file" .cubin).txt
        [ ! -e "$file" ] || tables+=("$file")
    done
    [ ${#tables[@]} -gt 0 ] || return 0
    # shellcheck disable=SC2016
    awk -F'  +' '
        FNR == 1 { name = FILENAME; sub(/.*\//, "", name); sub(/\.txt$/, "", name); split("", column) }
        /^device  / { for (i = 1; i <= NF; i++) column[$i] = i; next }
        ("shape" in column) && NF > 8 { ms = $column["device ms"] + 0 ? $column["device ms"] : $column["median ms"]
            printf "| %s | %s %s %s | %s | %s | %.1f |\n", name, $column["shape"], $column["mask"], $column["dtype"], ms, $column["median ms"], $column["GFLOP/s"] * $column["median ms"] / ms / 1000 }
    ' "${tables[@]}"
    echo
}
