#!/usr/bin/env bash
# A round on a machine with an NVIDIA GPU, without Rust and without a network, in the folder that tests/gpu/pack.sh packed:
#   round.sh --first [--short] [RESULTS]   at most 5.5 minutes: facts; all kernels of CUDA and wgpu, held to the oracle; times of the most
#                                          important calls, beside PyTorch's; groups of unlike devices; tensors of PyTorch in place
#   round.sh --rest [--short] [RESULTS]    at most 6 minutes, what --first leaves out: whole runs, other shapes and types, the kernels for
#                                          older GPUs, tuning; at the end compute-sanitizer
#   round.sh --torch [--short] [RESULTS]   at most 5 minutes: PyTorch as a device: the contract of backends on its GPU, tensors in place, times
#   round.sh --variants FOLDER [RESULTS]   at most 6 minutes: the kernels of variants.sh, one after the other
# --short: small shapes and long limits, for the fake driver and software Vulkan.
# RESULTS (default: results-first and so on, beside round.sh) gets all.txt, which grows, README.md with all tables, and RESULTS.tgz with
# the output of every stage. Each stage prints "right" or "WRONG"; one that does not end is ended at its limit, and the others still run.
# After a hang, or a wrong result of a kernel for Hopper, the others run with KYKLOS_CUDA_WGMMA=off: with the kernels for sm_80; after
# another hang without CUDA. What is not there (a Vulkan loader, PyTorch, ncu) is named, and its stages are left out. Exit code 0: no
# stage went wrong.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-} short=0 variants=
case "$name" in
    --first) name=first total=320 && shift ;;
    --rest) name=rest total=350 && shift ;;
    --torch) name=torch total=300 && shift ;;
    --variants) name=variants total=350 variants=$(cd "${2:?a folder}" && pwd) && shift 2 ;;
    *) name=usage total=0 && set -- "${1:---usage}" ;;
esac
[ "${1:-}" = --short ] && short=1 total=1500 && shift
# shellcheck source=tests/gpu/stages.sh
. "$here/stages.sh"
# shellcheck source=tests/gpu/vulkan.sh
. "$here/vulkan.sh"
# shellcheck source=tests/gpu/page.sh
. "$here/page.sh"
begin "${1:-$here/results-$name}"
k=$here/kyklos
# The steps are small too where this is set.
[ $short = 0 ] || { slow=4 && export KYKLOS_FAKE_CUDA=${KYKLOS_FAKE_CUDA-}; }
echo all >"$files/kernels"
find_vulkan

# PyTorch: its first import reads gigabytes from the disk, beside the first stages.
pytorch() {
    local quiet=1 advice=1
    stage pytorch 100 1 python3 -c 'import torch, sys
if not torch.cuda.is_available(): sys.exit("PyTorch without CUDA")
print("PyTorch", torch.__version__)' || true
    quiet=0
    if has_pytorch; then
        say "pytorch: right, $(pytorch_line)"
    else
        sed -i 's/^pytorch [^ ]*/pytorch missing/' "$files/status"
        say "pytorch: not there, $(pytorch_line)"
    fi
}
has_pytorch() { grep -q '^pytorch right' "$files/status"; }

# A stage that uses CUDA kernels.
on_cuda() {
    local before code=0
    before=$(cat "$files/kernels")
    [ "$before" != none ] || { missing "$1" "no CUDA device, or its kernels hung"; return 1; }
    [ "$before" = all ] || local -x KYKLOS_CUDA_WGMMA=off
    stage "$@" || code=$?
    if [ "$code" = 124 ]; then
        if [ "$before" = all ]; then give_up older; else give_up none; fi
    fi
    return "$code"
}
give_up() {
    echo "$1" >"$files/kernels"
    case "$1" in
        older) say "from here on without the kernels for Hopper: KYKLOS_CUDA_WGMMA=off" ;;
        none) say "from here on without CUDA" ;;
    esac
}

# The first steps are scenarios of the test program `cuda`, which here finds the real driver.
steps() {
    local step=0 title
    while read -r title; do
        step=$((step + 1))
        say "$title"
        # A hang ends after 10 s, with an error that names the kernel. More time is for the oracle on a slow processor.
        on_cuda "step-$step" 25 1 env KYKLOS_CUDA_SCENARIO="$title" "$here/cuda"
        # Nothing can be loaded.
        [ "$step" != 1 ] || grep -q '^step-1 right' "$files/status" || give_up none
    done < <(timeout 10 "$here/cuda" --list 2>"$files/steps.txt" | sed -n 's/^\(step [0-9].*\): test$/\1/p')
    [ "$step" -gt 0 ] || { say "steps: WRONG, $here/cuda does not run" && echo "steps WRONG 0 counts" >>"$files/status"; }
    if [ "$(cat "$files/kernels")" = all ] && grep -q '^step-[23458] \(WRONG\|hang\)' "$files/status"; then give_up older; fi
}

# suite NAME SECONDS BACKEND: the suite of all backends on one of them; with --short three claims of it.
suite() {
    local runner=stage claim claims='downloads the bytes|merges two states|encodes int8'
    case "$3" in cuda*) runner=on_cuda ;; esac
    if ! "$here/backends" --list >"$files/$1-claims.txt" 2>&1; then
        stage "$1" 10 15 "$here/backends" --list
    elif ! grep -q "^$3" "$files/$1-claims.txt"; then
        missing "$1" "the device has no such kernel"
    elif [ "$short" = 0 ]; then
        $runner "$1" "$2" 1 "$here/backends" "$3"
    else
        while read -r claim; do
            $runner "$1-$((++claims_run))" "$2" 0 "$here/backends" --exact "$claim"
        done < <(sed -n 's/: test$//p' "$files/$1-claims.txt" | grep "^$3" | grep -E "$claims")
    fi
}
claims_run=0

# bench NAME SECONDS OPTION…: on CUDA, in bf16 if no type is named.
bench() {
    local stage=bench-$1 limit=$2 dtype=(--dtype bf16) words
    shift 2
    words=$(($(grep -o -- '--shape' <<<"$*" | wc -l) * 2 + 2))
    case "$*" in *--dtype*) dtype=() ;; esac
    on_cuda "$stage" "$limit" "$words" "$k" bench --device cuda:0 "${amount[@]}" ${dtype[@]+"${dtype[@]}"} "$@"
}
bench_wgpu() {
    local stage=wgpu-$1 limit=$2 lines=$3
    shift 3
    stage "$stage" "$limit" "$lines" "$k" bench --device "$wgpu" "${amount[@]}" "$@"
}

# group NAME OPTION…: one group of CPU cores, the GPU by Vulkan and the GPU by CUDA.
group() {
    local stage=group-$1 devices=cpu runner=stage
    shift
    [ -z "$wgpu" ] || devices+=,$wgpu
    [ "$(cat "$files/kernels")" = none ] || { devices+=,cuda:0 && runner=on_cuda; }
    [ "$devices" != cpu ] || { missing "$stage" "there is no GPU"; return; }
    $runner "$stage" 25 0 "$k" attend --device "$devices" --mesh "1x$(tr ',' '\n' <<<"$devices" | wc -l)" --mask causal --dtype f16 --verify --json "$@"
}

# PyTorch's own attention, in one process.
peers() {
    has_pytorch || { missing "peers-$1" "no PyTorch with CUDA"; return; }
    stage "peers-$1" "$2" 60 env PYTHONPATH="$here/site" python3 "$here/gpu_attention.py" "$1"
}

# Tensors of PyTorch where they are.
in_place() {
    has_pytorch || { missing in-place "no PyTorch with CUDA"; return; }
    [ -e "$here/site/kyklos" ] || { missing in-place "the pack has no Python package"; return; }
    on_cuda in-place 45 8 env PYTHONPATH="$here/site" python3 "$here/in_place.py"
}

# PyTorch as a device of Kyklos.
torch_device() {
    local on=cuda
    if [ "$short" = 1 ]; then
        on=cpu
    elif ! has_pytorch; then
        # It is what this round is for.
        say "torch-device: WRONG, no PyTorch with CUDA"
        echo "torch-device WRONG 0 counts" >>"$files/status"
        return
    fi
    stage torch-claims 100 99 env PYTHONPATH="$here/site" python3 "$here/torch_device.py" claims "${on/cuda/cuda:0}"
    stage torch-messages 60 15 env PYTHONPATH="$here/site" python3 "$here/torch_device.py" messages "${on/cuda/cuda:0}"
    stage torch-in-place 45 12 env PYTHONPATH="$here/site" python3 "$here/in_place.py" "torch:$on"
    stage torch-times 80 20 env PYTHONPATH="$here/site" python3 "$here/torch_device.py" times "${on/cuda/cuda:0}"
}

profile() {
    local advice=1 kernel=hopper
    command -v ncu >/dev/null || { missing "ncu-$1" "it is not there"; return; }
    [ "$(cat "$files/kernels")" = all ] || kernel='attend|backward'
    # A call has three launches of the kernel or fewer; the first ones are of calls that warm up.
    on_cuda "ncu-$1" 40 0 env KYKLOS_CUDA_GRAPHS=off ncu --clock-control none --set full -k "regex:$kernel" --launch-skip 6 --launch-count 1 \
        -f -o "$files/$1" "$k" bench --device cuda:0 --dtype bf16 --repeat 9 "${@:2}" &&
        ncu --import "$files/$1.ncu-rep" --page details >"$files/ncu-$1.txt" 2>&1 &&
        say "$(grep -E 'Duration|Registers Per|Tensor|Issued|No Eligible|stall|L2 Hit|Bank' "$files/ncu-$1.txt" | cut -c 1-160 | head -n 24)"
}

# shellcheck source=tests/gpu/rounds.sh
. "$here/rounds.sh"
"round_$name"
finish
