# shellcheck shell=bash disable=SC2154
# The stages of the rounds, in their order. First everything is held to the oracle, CUDA and wgpu at the same time; then times are taken,
# one program at a time. What is at the end of a round is what can be missed most easily when time runs out.

# What is there, and the waiting for PyTorch.
begin_round() {
    if [ "$short" = 1 ]; then
        amount=(--repeat 1)
    else
        amount=(--duration-ms 400)
    fi
    pytorch &
    look "$1"
    has_cuda || echo none >"$files/kernels"
    wgpu=$(wgpu_device "$short")
    number=${wgpu#wgpu:}
    if [ -n "$wgpu" ]; then
        kernels=$(wgpu_kernels "$number")
    else
        missing wgpu "$(why_no_vulkan)"
    fi
    keep
}

# The shapes of --short have no second meaning: each stage runs, on little data.
round_first() {
    local main=1,16384,16,16,128 tokens=4096
    [ "$short" = 0 ] || main=1,128,2,2,64 tokens=128
    begin_round 60

    { steps && suite suite-cuda 95 "cuda 0"; } &
    if [ -n "$wgpu" ]; then
        suite suite-wgpu-portable 95 "wgpu $number portable" &
        suite suite-wgpu-cooperative 95 "wgpu $number cooperative" &
    fi
    wait_for_stages
    keep

    bench main 30 --shape $main --mask full --mask causal
    if [ "$short" = 0 ]; then
        bench dims 40 --shape 1,16384,32,32,64 --shape 1,16384,8,8,256 --mask full --mask causal
        bench batch 20 --shape 8,2048,16,16,128 --shape 1,8192,32,8,128 --mask causal
        bench f16 15 --shape $main --mask full --dtype f16
        bench long 30 --shape 1,131072,4,4,128 --mask causal
    fi
    bench backward 30 --shape "${main/16384/8192}" --mask full --mask causal --backward
    bench decode 20 --shape "${main/16384,16,16/131072,32,8}" --queries 1 --mask full
    peers first 75
    keep
    if [ -n "$wgpu" ]; then
        bench_wgpu f16 30 12 --kernel "$kernels" --shape 1,$tokens,16,16,128 --mask full --mask causal --dtype f16
        bench_wgpu backward 20 4 --backward --shape 1,$((tokens / 2)),16,16,64 --mask causal --dtype f16
    fi
    for split in even auto; do
        group $split --shape 1,$((tokens * 3 / 4)),4,2,64 --split $split
    done
    group gradients --shape 1,384,4,2,64 --split even --grad
    in_place
    keep
    profile forward --shape $main --mask full
}

round_rest() {
    local main=1,16384,16,16,128 tokens=4096 budget=45
    [ "$short" = 0 ] || main=1,128,2,2,64 tokens=96 budget=15
    begin_round 30

    whole_runs $tokens &
    if [ -n "$wgpu" ]; then
        { suite suite-wgpu-subgroup 60 "wgpu $number subgroup"; suite suite-wgpu-bindings 30 "wgpu $number small bindings"; } &
    fi
    wait_for_stages
    keep

    if [ "$short" = 0 ]; then
        bench causal 30 --shape 1,2048,16,16,128 --shape 1,4096,16,16,128 --shape 1,32768,16,16,128 --mask causal
        bench small 20 --shape 1,2048,32,32,64 --shape 1,8192,16,16,96 --shape 1,8192,16,16,192 --mask full --mask causal
        bench full 15 --shape 1,8192,32,8,128 --mask full
        bench types 20 --shape 1,16384,32,32,64 --mask causal --dtype f16
        bench f32 20 --shape 1,4096,16,16,64 --mask causal --dtype f32
        bench backward-f16 25 --shape 1,8192,16,16,128 --mask causal --dtype f16 --backward
        bench backward-dims 30 --shape 1,8192,32,32,64 --shape 1,8192,32,8,128 --shape 1,4096,8,8,256 --mask causal --backward
    fi
    # Every GPU from sm_80 on has these kernels.
    if [ "$(cat "$files/kernels")" = all ]; then
        export KYKLOS_CUDA_WGMMA=off
        bench sm80 30 --shape $main --shape "${main/16384,16,16,128/16384,32,32,64}" --mask full --mask causal
        bench sm80-backward 30 --shape "${main/16384/8192}" --mask causal --backward
        unset KYKLOS_CUDA_WGMMA
    fi
    bench decode-4 15 --shape "${main/16384,16,16/65536,32,8}" --queries 4 --mask full
    bench decode-small 15 --shape $main --queries 1 --mask full
    KYKLOS_CUDA_GRAPHS=off bench decode-no-graphs 15 --shape $main --queries 1 --mask full
    peers rest 60
    keep
    if [ -n "$wgpu" ]; then
        bench_wgpu f32 25 10 --shape 1,$tokens,16,16,64 --shape 1,$tokens,16,16,128 --mask full --mask causal --dtype f32
        bench_wgpu f16-64 20 6 --kernel "$kernels" --shape 1,$tokens,32,32,64 --mask full --mask causal --dtype f16
        bench_wgpu decode 15 4 --shape 1,$tokens,32,8,128 --queries 1 --mask full --dtype f16
        bench_wgpu backward-f32 15 4 --backward --shape 1,$((tokens / 2)),16,16,64 --mask causal --dtype f32
        stage wgpu-tune 60 0 "$k" tune --device "$wgpu" --dtype f16,f32 --head-dim 64,128 --budget-s $budget --json
    fi
    group large --shape "1,$((tokens * 4)),16,4,128" --split auto
    keep
    profile backward --shape "${main/16384/8192}" --mask full --backward
    sanitizers
}

# Without Kyklos' own kernels for CUDA: PyTorch's GPU may be of another vendor.
round_torch() {
    pytorch &
    look 30
    wait_for_stages
    torch_device
    keep
}

# Whole runs of the program, ranks as threads on one GPU.
whole_runs() {
    for dtype in bf16 f16 f32; do
        for mesh in 1x1 1x2 2x2; do
            on_cuda "attend-$dtype-$mesh" 20 0 "$k" attend --device cuda:0 --shape "1,$1,8,4,128" --mask causal --dtype $dtype --mesh $mesh \
                --split even --verify --json
        done
    done
    for wire in f16 int8; do
        on_cuda "attend-f32-1x2-wire-$wire" 20 0 "$k" attend --device cuda:0 --shape "1,$1,8,4,128" --mask causal --dtype f32 --mesh 1x2 \
            --split even --wire $wire --verify --json
    done
    on_cuda attend-gradients 20 0 "$k" attend --device cuda:0 --shape "1,$(($1 / 4)),8,4,128" --mask causal --dtype bf16 --mesh 1x2 --split even \
        --grad --verify --json
}

# Advice: compute-sanitizer is known to report accesses of wgmma that are none.
sanitizers() {
    local advice=1
    command -v compute-sanitizer >/dev/null || { missing sanitizer "no compute-sanitizer"; return; }
    for tool in memcheck synccheck racecheck; do
        on_cuda "sanitizer-$tool" 35 0 compute-sanitizer --tool $tool --error-exitcode 9 "$k" attend --device cuda:0 \
            --shape 1,150,4,2,64 --mask causal --dtype bf16 --ranks 2 --verify --json
    done
}

# Kernels of variants.sh: each must be right in steps 2 and 3, then it is timed. Between two of them lies no other work, and the kernels of
# the program come first and last: the difference of these two is noise.
round_variants() {
    local image variant programs=0
    amount=(--duration-ms 400)
    [ "$short" = 0 ] || amount=(--repeat 1)
    look 30
    has_cuda || echo none >"$files/kernels"
    "$here/cuda" --list 2>/dev/null | sed -n 's/^\(step [23]: .*\): test$/\1/p' >"$files/steps.txt"
    for image in "" "$variants"/*.cubin ""; do
        if [ -z "$image" ]; then
            programs=$((programs + 1))
            program $programs
            continue
        fi
        variant=$(basename "$image" .cubin)
        export KYKLOS_CUDA_IMAGE=$image
        if variant_steps "$variant" && [ -s "${image%.cubin}.txt" ]; then
            # shellcheck disable=SC2046
            stage "$variant" 30 6 "$k" bench --device cuda:0 "${amount[@]}" $(calls "${image%.cubin}.txt")
        fi
        unset KYKLOS_CUDA_IMAGE
        keep
    done
}
# variant_steps NAME: steps 2 and 3 with the kernels of a variant.
variant_steps() {
    local title step=2
    while read -r title; do
        stage "$1-step-$step" 25 0 env KYKLOS_CUDA_SCENARIO="$title" "$here/cuda" || return
        step=$((step + 1))
    done <"$files/steps.txt"
    [ $step = 4 ]
}
# program NUMBER: every call that a variant is timed with, by the kernels of the program.
program() {
    local words line=0
    while read -r words; do
        line=$((line + 1))
        # shellcheck disable=SC2086
        stage "program-$1-$line" 30 6 "$k" bench --device cuda:0 "${amount[@]}" $words
    done < <(calls "$variants"/*.txt)
}
# calls FILE…: different ones only.
calls() {
    local small=
    [ "$short" = 0 ] || small='s/--shape [0-9]*,[0-9]*,[0-9]*,[0-9]*,/--shape 1,128,2,2,/'
    sed "$small" "$@" | sort -u
}

# All but the guard.
wait_for_stages() {
    local job
    for job in $(jobs -p); do
        [ "$job" = "$guard" ] || wait "$job"
    done
}
