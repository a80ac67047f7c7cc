"""Compiles every kernel with NVIDIA's compilers, for every architecture, and holds the machine code to its budgets.

    check.py TOOLKIT [--bless] [--control]

TOOLKIT is a folder with bin/, include/, lib/ and nvvm/, as the wheels have it. nvcc compiles for all of ARCHITECTURES
and to PTX for what is newer; NVRTC, which has no headers and gets the sources from memory, for the oldest and the newest.
Registers are compared with budgets.txt; spills and stack are faults. --bless writes the table. --control adds a
kernel that spills, uses a stack and has no budget, and succeeds only if all of that is found.
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CRATE = Path(__file__).resolve().parents[2]
KERNELS = CRATE / "kernels"
BUDGETS = Path(__file__).with_name("budgets.txt")

# Real architectures, and the virtual one that their code comes from. PTX of the first serves what is newer.
ARCHITECTURES = {"sm_80": "compute_80", "sm_86": "compute_80", "sm_89": "compute_80", "sm_90a": "compute_90a"}
NVRTC = ["sm_80", "sm_90a"]
OPTIONS = ["--std=c++17"]

# 256 floats that live at once and are indexed by what is not known: neither fits into registers.
CONTROL = """
#include "ptx.h"
struct ControlArguments { float *data; u32 n; };
KERNEL(control, ControlArguments, 1024) {
    float x[256];
    UNROLL for (int i = 0; i < 256; i++) x[i] = args.data[i * 1024 + thread_x()];
    for (u32 k = 0; k < args.n; k++) {
        UNROLL for (int i = 0; i < 256; i++) x[i] = fused(x[(i + 1) % 256], x[i], x[(i + 7) % 256]);
    }
    float y[64];
    for (u32 k = 0; k < args.n; k++) y[k * 7 % 64] = x[3] + k;
    UNROLL for (int i = 0; i < 256; i++) args.data[i * 1024 + thread_x()] = x[i] + y[(args.n + i) % 64];
}
"""


def run(command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def usage(text):
    """{kernel: (registers, stack bytes, spilled bytes)} of what ptxas says."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        ).groups()
        registers = re.search(r"Used (\d+) registers", part).group(1)
        found[name] = (int(registers), int(stack), int(stores) + int(loads))
    return found


def nvcc_ptx(toolkit, source, virtual, out):
    """Compiler warnings count as faults: there are none, and a new one is worth a look."""
    ptx = out / f"{source.stem}.{virtual}.ptx"
    command = [toolkit / "bin/nvcc", *OPTIONS, "-O3", f"-arch={virtual}", "-Werror=all-warnings", "-ptx", "-o", ptx]
    run([*command, f"-I{KERNELS / 'cuda'}", f"-I{KERNELS}", source])
    return ptx


def ptxas(toolkit, ptx, real):
    cubin = ptx.with_name(f"{ptx.stem.split('.')[0]}.{real}.cubin")
    return usage(run([toolkit / "bin/ptxas", "-v", "-O3", f"-arch={real}", "-o", cubin, ptx]))


def nvrtc(toolkit, real):
    """What run-time compilation does, in a process of its own: it prints what its ptxas says."""
    library = ctypes.CDLL(str(next((toolkit / "lib").glob("libnvrtc.so.1*"))))
    headers = [KERNELS / "cuda/ptx.h", *sorted(KERNELS.glob("*.h"))]
    texts = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])
    names = (ctypes.c_char_p * len(headers))(*[header.name.encode() for header in headers])
    program = ctypes.c_void_p()
    source = (KERNELS / "kernels.cu").read_bytes()
    made = library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", len(headers), texts, names)
    options = [f"--gpu-architecture={real}", *OPTIONS, "--ptxas-options=-v"]
    words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = made or library.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    print(log.value.decode())
    return failed


def judge(found, budgets):
    """Words for what is wrong with one compilation's kernels."""
    faults = []
    for name, (registers, stack, spilled) in sorted(found.items()):
        if stack or spilled:
            faults.append(f"{name}: {stack} bytes of stack, {spilled} bytes spilled; registers must do")
        if name not in budgets:
            faults.append(f"{name}: no budget; --bless writes one")
        elif registers > budgets[name]:
            faults.append(f"{name}: {registers} registers, {budgets[name]} in budgets.txt; --bless if that is meant")
    return faults + [f"{name}: has a budget and was not compiled" for name in sorted(budgets.keys() - found.keys())]


def read_budgets():
    rows = [line.split() for line in BUDGETS.read_text().splitlines() if line and not line.startswith("#")]
    architectures = rows[0][1:]
    return {arch: {row[0]: int(row[1 + i]) for row in rows[1:]} for i, arch in enumerate(architectures)}


def bless(tables):
    lines = ["# Registers that each kernel may use, by architecture. Written by scripts/check-cuda.sh --bless."]
    lines.append(f"{'kernel':<16}" + "".join(f"{arch:>8}" for arch in ARCHITECTURES))
    for name in sorted(next(iter(tables.values()))):
        lines.append(f"{name:<16}" + "".join(f"{tables[arch][name][0]:>8}" for arch in ARCHITECTURES))
    BUDGETS.write_text("\n".join(lines) + "\n")


def main():
    if sys.argv[1] == "nvrtc":
        return nvrtc(Path(sys.argv[2]), sys.argv[3])
    toolkit, options = Path(sys.argv[1]), sys.argv[2:]
    out = toolkit.parent / "out"
    out.mkdir(exist_ok=True)
    if "--control" in options:
        source = out / "control.cu"
        source.write_text(CONTROL)
        found = ptxas(toolkit, nvcc_ptx(toolkit, source, "compute_80", out), "sm_80")
        faults = " ".join(judge(found, {"other": 1}))
        wanted = ["bytes spilled", "no budget", "was not compiled"]
        (registers, stack, spilled) = found["control"]
        missed = [words for words in wanted if words not in faults] if stack and spilled else ["a spill"]
        over = judge({"control": (registers, 0, 0)}, {"control": registers - 1})
        if missed or not over:
            return f"the control is not refused: {faults}"
        print(f"control: refused, as it must be ({stack} bytes of stack, {spilled} spilled)")
        return 0

    start = time.monotonic()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(toolkit / "lib")}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        virtual = {name: pool.submit(nvcc_ptx, toolkit, KERNELS / "kernels.cu", name, out)
                   for name in dict.fromkeys(ARCHITECTURES.values())}
        at_run_time = {real: pool.submit(run, [sys.executable, __file__, "nvrtc", toolkit, real], env=environment)
                       for real in NVRTC}
        machine = {real: pool.submit(ptxas, toolkit, virtual[name].result(), real)
                   for real, name in ARCHITECTURES.items()}
        tables = {real: job.result() for real, job in machine.items()}
        logs = {real: usage(job.result()) for real, job in at_run_time.items()}
    if "--bless" in options:
        bless(tables)
    budgets = read_budgets()
    faults = [f"{real}: {fault}" for real, table in tables.items() for fault in judge(table, budgets[real])]
    faults += [f"{real} by NVRTC: {fault}" for real, table in logs.items() for fault in judge(table, budgets[real])]
    for fault in faults:
        print(fault, file=sys.stderr)
    kernels = len(tables["sm_80"])
    print(f"{kernels} kernels for {', '.join(tables)}, by NVRTC for {', '.join(logs)}: "
          f"{len(faults)} faults, {time.monotonic() - start:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
