"""Compares the machine code of every kernel, as NVIDIA's compilers make it for every architecture, with its budgets.

    check.py TOOLKIT NVRTC_12 IMAGES [--bless]
    check.py TOOLKIT --smoke
    check.py TOOLKIT --control

TOOLKIT is a folder with bin/, include/, lib/ and nvvm/, as in the wheels. NVRTC_12 is the folder of libnvrtc.so.12. IMAGES is the folder in which build.rs left the
cubins of nvcc for all of ARCHITECTURES and the output of the compilers; a warning there is a fault. NVRTC, which gets the
sources from memory and has no include folder, compiles here, for the oldest and the newest architecture, only some of the
attention kernels: it has the same optimiser, and a test of the crate gives its front end all kernels for the newest. NVRTC of CUDA
12, for drivers that do not load what CUDA 13 makes, compiles the kernels for Hopper.
Registers are compared with budgets.txt, but not those of CUDA 12, and the instructions of a tile by nvcc with tiles.txt. Faults are: spills and stack, wgmma products that the compiler
serialised, setmaxnreg that it ignored, and what machine_code.py finds.
The registers of a kernel with setmaxnreg are counted in its machine code, because ptxas reports those at its start.
--smoke leaves out the images of nvcc and NVRTC of CUDA 12. --bless writes both tables. --control compiles kernels with each of these faults, and succeeds only if all are found.
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine_code
from machine_code import FORWARD, HOPPER

CRATE = Path(__file__).resolve().parents[2]
KERNELS = CRATE / "kernels"
BUDGETS = Path(__file__).with_name("budgets.txt")
# The instructions of a tile in the attention kernels for Hopper, as nvcc makes them. NVRTC makes up to a fifth more.
TILES_FILE = Path(__file__).with_name("tiles.txt")

# {real architecture: the virtual one that its code comes from}.
ARCHITECTURES = {real: line.split()[0] for line in (CRATE / "architectures.txt").read_text().splitlines()
                 if not line.startswith("#") for real in line.split()[1:]}
# The tensor-core kernels that NVRTC compiles here, besides all small kernels; the lines of kernels.cu that instantiate tensor-core
# kernels; the names of those kernels.
HOPPER_ONLY = ("hopper_bf16", "hopper_wide_bf16", "hopper_keys_bf16", "hopper_queries_bf16")
NVRTC = {"sm_80": ("attend_bf16",), "sm_90a": HOPPER_ONLY}
# The same for NVRTC of CUDA 12.
NVRTC_12 = {"sm_90a": HOPPER_ONLY}
TILES = re.compile(rb"^([A-Z_]+)_DIMS\(\w+, (\w+)\)$", flags=re.MULTILINE)
TILE_NAMES = re.compile(r"(attend|decode|hopper|hopper_wide|hopper_keys|hopper_queries|backward_queries|backward_keys|backward_bias)_b?f16_")
OPTIONS = ["--std=c++17"]

# Messages of ptxas about serialised products (C7510 and others), an inserted wait (C7517) and ignored setmaxnreg (C7508).
LOSSES = re.compile(r"\(C75\d\d\) Potential Performance Loss.*|\(C7517\).*")

# 256 live floats, and an array with an index that is not known at compile time: neither fits into registers.
CONTROL = """
#include "ptx.h"
struct ControlArguments { float *data; u32 n; };
KERNEL(control, ControlArguments, 1024) {
    float x[256], unused;
    UNROLL for (int i = 0; i < 256; i++) x[i] = args.data[i * 1024 + thread_x()];
    for (u32 k = 0; k < args.n; k++) {
        UNROLL for (int i = 0; i < 256; i++) x[i] = fused(x[(i + 1) % 256], x[i], x[(i + 7) % 256]);
    }
    float y[64];
    for (u32 k = 0; k < args.n; k++) y[k * 7 % 64] = x[3] + k;
    UNROLL for (int i = 0; i < 256; i++) args.data[i * 1024 + thread_x()] = x[i] + y[(args.n + i) % 64];
}
"""

# Accumulators that are used between products; no launch bounds, so that ptxas ignores setmaxnreg.
HOPPER_CONTROL = """
#include "ptx_hopper.h"
struct ControlArguments { float *data; u64 a, b; u32 n; };
KERNEL(hopper_control, ControlArguments, 128) {
    float c[16][4] = {};
    wgmma_fence();
    for (u32 i = 0; i < args.n; i++) {
        Wgmma<Bf16, 128>::shared(c, args.a + i, args.b, true);
        wgmma_commit();
        c[i % 16][0] += args.data[i];
    }
    wgmma_wait<0>();
    for (int i = 0; i < 64; i++) args.data[i * 128 + thread_x()] = c[i / 4][i % 4];
}
extern "C" __global__ void hopper_unbounded(float *data) {
    registers_more<240>();
    data[thread_x()] = 1.0f;
}
"""

# Each kernel but the first has one fault that only machine code shows: other registers at the start than setmaxnreg counts on, a third setmaxnreg,
# more registers than the block has, a producer with more than it keeps, and reads of a state or of parts that wait for each other.
CODE_CONTROL = """
#include "ptx_hopper.h"
#include "logits.h"
struct ControlArguments { float *data; u32 n; };
// Uses `live` registers at a time.
template <int live> DEVICE void use(const ControlArguments &args, u32 step) {
    float x[live];
    UNROLL for (int i = 0; i < live; i++) x[i] = args.data[i * 384 + thread_x() + step];
    for (u32 k = 0; k < args.n; k++)
        UNROLL for (int i = 0; i < live; i++) x[i] = fused(x[(i + 1) % live], x[i], x[(i + 7) % live]);
    UNROLL for (int i = 0; i < live; i++) args.data[i * 384 + thread_x() + step] = x[i];
}
#define CONTROL(name, threads, kept, taken, producer, consumers) \
    KERNEL(name, ControlArguments, threads, 1) { \
        if (warp_uniform(thread_x() / 128) == 0) { registers_fewer<kept>(); producer; } \
        else { registers_more<taken>(); consumers; } \
    }
CONTROL(hopper_right, 384, 24, 240, , use<8>(args, 0))
CONTROL(hopper_entry, 256, 24, 240, , use<8>(args, 0))
CONTROL(hopper_third, 384, 24, 240, , use<8>(args, 0); registers_fewer<200>(); use<8>(args, 1))
CONTROL(hopper_pool, 384, 40, 240, , use<8>(args, 0))
KERNEL(attend_bf16_64, ControlArguments, 256, 1) {
    for (int j = 0; j < 8; j++) {
        if (8 * j >= args.n) break;
        Pair &pair = pair_at(args.data + 8 * j + 2 * thread_x());
        pair = {pair.x * 2.0f, pair.y * 2.0f};
    }
}
KERNEL(merge_parts, ControlArguments, 256, 1) {
    ROLLED for (u32 n = 0; n < args.n; n++) {
        Four &four = four_at(args.data + 4 * thread_x() + 1024 * n), twice = four;
        UNROLL for (int k = 0; k < 4; k++) twice.x[k] *= 2.0f;
        four = twice;
    }
}
"""


def run(command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def usage(text):
    """{kernel: (registers, stack bytes, spilled bytes)} from the output of ptxas."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        ).groups()
        registers = re.search(r"Used (\d+) registers", part).group(1)
        found[name] = (int(registers), int(stack), int(stores) + int(loads))
    return found


def losses(text):
    return [words.group(0) for words in LOSSES.finditer(text)]


def nvcc(toolkit, source, virtual, real, out):
    """As build.rs, for the controls. Returns the output of nvcc, the output of ptxas, and the path of the cubin."""
    ptx, cubin = out / f"{source.stem}.ptx", out / f"{source.stem}.cubin"
    command = [toolkit / "bin/nvcc", *OPTIONS, "-O3", "-ptx", "-arch", virtual, "-o", ptx]
    warnings = run([*command, f"-I{KERNELS / 'cuda'}", f"-I{KERNELS}", source])
    return warnings, run([toolkit / "bin/nvcc", "-cubin", "-Xptxas", "-v", "-arch", real, "-o", cubin, ptx]), cubin


def with_code(toolkit, text, cubin):
    """{kernel: (registers, stack bytes, spilled bytes)}, messages about other faults, and {kernel: what it computes for a tile}."""
    table, faults, tiles = usage(text), losses(text), {}
    for name, code in machine_code.kernels(run([toolkit / "bin/nvdisasm", "--print-code", cubin])).items():
        entry, *spilled = table[name]
        faults += machine_code.faults(name, code, entry)
        if name.startswith(HOPPER):
            table[name] = (1 + code.most_register(range(len(code.instructions))), *spilled)
        if FORWARD.match(name):
            tiles[name] = machine_code.Tile.of(code)[0]
    return table, faults, {name: tile for name, tile in tiles.items() if tile}


def included_as(header):
    """The name by which the kernels include a header."""
    return header.relative_to(KERNELS).as_posix().removeprefix("cuda/")


def nvrtc(folder, real, kept, out):
    """Compiles with the NVRTC in a folder, in a process of its own. Prints the output of its ptxas and writes the cubin to `out`."""
    library = ctypes.CDLL(str(next(folder.glob("libnvrtc.so.1*"))))
    headers = sorted(KERNELS.rglob("*.h"))
    texts = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])
    names = (ctypes.c_char_p * len(headers))(*[included_as(header).encode() for header in headers])
    program = ctypes.c_void_p()
    source = TILES.sub(lambda line: line[0] if b"_".join(line.groups()).lower().decode() in kept else b"",
                       (KERNELS / "kernels.cu").read_bytes())
    made = library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", len(headers), texts, names)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    # As src/images/nvrtc.rs.
    parallel = ["--split-compile=0"] if major.value >= 13 else []
    options = [f"--gpu-architecture={real}", *OPTIONS, *parallel, "--ptxas-options=-v"]
    words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = made or library.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    print(log.value.decode())
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    out.write_bytes(cubin.raw)
    return failed


def warned(name, text):
    """A message if a compiler warned."""
    return [f"{name}: {text.strip()}"] if text.strip() else []


def judge(found, budgets):
    """Messages about the kernels of one compilation."""
    faults = []
    for name, (registers, stack, spilled) in sorted(found.items()):
        if stack or spilled:
            faults.append(f"{name}: {stack} bytes of stack, {spilled} bytes spilled; registers must do")
        if name not in budgets:
            faults.append(f"{name}: no budget; --bless writes one")
        elif registers > budgets[name]:
            faults.append(f"{name}: {registers} registers, {budgets[name]} in budgets.txt; --bless if that is meant")
    return faults + [f"{name}: has a budget and was not compiled" for name in sorted(budgets.keys() - found.keys())]


def judge_tiles(found, ceilings):
    """Messages about the kernels of one compilation that need more instructions for a tile than the table allows."""
    faults = []
    for name, tile in sorted(found.items()):
        for which, count, most in zip(("a full tile", "a tile with mask tests"), (tile.full, tile.tested or 0), ceilings.get(name, (0, 0))):
            if count > most:
                faults.append(f"{name}: {count} instructions for {which}, {most} in tiles.txt; --bless if that is meant")
    return faults


def read_tiles():
    """{kernel: instructions of a full tile, and of one with mask tests}."""
    rows = [line.split() for line in TILES_FILE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (int(full), int(tested)) for name, _, _, full, tested in rows[1:]}


def read_budgets():
    rows = [line.split() for line in BUDGETS.read_text().splitlines() if line and not line.startswith("#")]
    architectures = rows[0][1:]
    return {arch: {row[0]: int(row[1 + i]) for row in rows[1:] if row[1 + i] != "-"}
            for i, arch in enumerate(architectures)}


def bless(tables, tiles):
    rows = [f"{name:<24}{tile.keys:>8}{tile.exponentials:>14}{tile.full:>8}{tile.tested:>8}\n" for name, tile in sorted(tiles.items())]
    TILES_FILE.write_text(
        "# The loop over tiles of the attention kernels for Hopper, written by scripts/check/cuda.sh --bless: keys of a tile,\n"
        "# exponentials that overlap with the product of values, instructions of a full tile and of one with mask tests.\n"
        f"{'kernel':<24}{'keys':>8}{'exponentials':>14}{'full':>8}{'tested':>8}\n" + "".join(rows))
    lines = ["# Registers that each kernel may use, by architecture. Written by scripts/check/cuda.sh --bless."]
    lines.append(f"{'kernel':<24}" + "".join(f"{arch:>8}" for arch in ARCHITECTURES))
    for name in sorted({name for table in tables.values() for name in table}):
        registers = [str(table[name][0]) if name in table else "-" for table in tables.values()]
        lines.append(f"{name:<24}" + "".join(f"{number:>8}" for number in registers))
    BUDGETS.write_text("\n".join(lines) + "\n")


def code_faults(text):
    """Messages about the machine code of `hopper_right`, with a fault in each of its parts that no compiler makes."""
    right = re.search(r"^\.text\.hopper_right:.*?(?=^\.text\.|\Z)", text, flags=re.MULTILINE | re.DOTALL)[0]
    faults = lambda text: [fault for name, code in machine_code.kernels(text).items()
                           for fault in machine_code.faults(name, code, machine_code.ENTRY)]
    if wrong := [fault for fault in faults(right) if "HGMMA" not in fault and "UTMALDG" not in fault]:
        sys.exit(f"hopper_right is refused as it is: {wrong}")
    after = lambda what, line: re.sub(rf"(USETMAXREG\.{what}.*;)", rf"\1\n /*ffff*/ {line} ;", right)
    # The label from which on the consumers try to take registers.
    label = re.findall(r"^(\.L\w+):", right[:right.index("USETMAXREG.TRY_ALLOC")], flags=re.MULTILINE)[-1]
    others = after("DEALLOC", "MOV R24, RZ"), after("TRY_ALLOC", "MOV R240, RZ"), after("DEALLOC", f"BRA `({label})")
    return [fault for other in others for fault in faults(other)]


def overlap_faults(toolkit, out):
    """Messages about a kernel that lets the compiler move the wait for values above the softmax, and about slow tiles."""
    changed = out / "changed"
    changed.mkdir(exist_ok=True)
    for header in KERNELS.glob("*.h"):
        text = header.read_text()
        if header.name == "attend_hopper.h":
            assert text.count("not_before(mine") == 1, "the control has no place in attend_hopper.h"
            text = re.sub(r"not_before\(mine.*\n", "\n", text)
        (changed / header.name).write_text(text)
    source = changed / "hoisted.cu"
    source.write_text("""#include "attend_hopper.h"
        KERNEL(hopper_bf16_64, HopperArguments, (Hopper<Bf16, 64, 128, 3>::THREADS), 1) { Hopper<Bf16, 64, 128, 3>(args).run(); }""")
    _, text, cubin = nvcc(toolkit, source, "compute_90a", "sm_90a", out)
    _, faults, tiles = with_code(toolkit, text, cubin)
    slow = machine_code.Tile(keys=128, exponentials=64, full=400, tested=601)
    return faults + slow.faults() + judge_tiles(tiles, {name: (tile.full // 2, tile.tested) for name, tile in tiles.items()})


def control(toolkit, out):
    """Compiles the controls. Returns a message about faults that were not found, or 0."""
    source, hopper, code = out / "control.cu", out / "hopper_control.cu", out / "code_control.cu"
    source.write_text(CONTROL)
    hopper.write_text(HOPPER_CONTROL)
    code.write_text(CODE_CONTROL)
    warnings, text, cubin = nvcc(toolkit, source, "compute_80", "sm_80", out)
    found, faults, _ = with_code(toolkit, text, cubin)
    (registers, stack, spilled) = found["control"]
    faults += [*judge(found, {"other": 1}), *judge({"control": (registers, 0, 0)}, {"control": registers - 1}), *warned("control", warnings)]
    for other in hopper, code:
        _, text, cubin = nvcc(toolkit, other, "compute_90a", "sm_90a", out)
        faults += with_code(toolkit, text, cubin)[1]
    faults += code_faults(run([toolkit / "bin/nvdisasm", "--print-code", cubin]))
    faults += overlap_faults(toolkit, out)
    wanted = ["\"unused\" was declared", "bytes of stack", "bytes spilled", "no budget", "was not compiled", f"{registers - 1} in budgets.txt",
              "control: reads or writes memory of a thread", "are serialized", "warpgroup.wait is injected", "setmaxnreg",
              "hopper_unbounded: no HGMMA", "hopper_control: no UTMALDG", "hopper_entry: begins with", "hopper_third: 3 USETMAXREG",
              "hopper_pool: 40 and 240 registers are more", "hopper_right: R24 in the code of the producer",
              "hopper_right: R240 in the code of the consumers", "hopper_right: the code of the producer has another",
              "attend_bf16_64: 1 reads of the state", "merge_parts: 1 reads of parts",
              "exponentials overlap with the product of values, 32 must", "601 instructions of a tile with mask tests", "in tiles.txt"]
    missed = [words for words in wanted if not any(words in fault for fault in faults)]
    missed += [] if stack and spilled else ["a spill"]
    if missed:
        return f"the controls are not refused for {missed}: {faults}\n{text}"
    print(f"control: refused, as it must be, for {len(faults)} reasons ({stack} bytes of stack, {spilled} spilled)")
    return 0


def main():
    if sys.argv[1] == "nvrtc":
        return nvrtc(Path(sys.argv[2]), sys.argv[3], sys.argv[4].split(","), Path(sys.argv[5]))
    toolkit, options = Path(sys.argv[1]), sys.argv[2:]
    out = toolkit.parent / "out"
    out.mkdir(exist_ok=True)
    if "--control" in options:
        return control(toolkit, out)

    start = time.monotonic()
    smoke = "--smoke" in options
    nvrtc_12, images = (None, None) if smoke else map(Path, options[:2])
    by_nvcc, by_nvrtc_12 = ({}, {}) if smoke else (ARCHITECTURES, NVRTC_12)

    def at_run_time(title, folder, real, kept):
        cubin = out / f"{title.replace(' ', '-')}.cubin"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        said = run([sys.executable, __file__, "nvrtc", folder, real, ",".join(kept), cubin], env=environment)
        return with_code(toolkit, said, cubin)

    jobs = [(f"{real} by NVRTC", toolkit / "lib", real, kept) for real, kept in NVRTC.items()]
    jobs += [(f"{real} by NVRTC 12", nvrtc_12, real, kept) for real, kept in by_nvrtc_12.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {job[0]: pool.submit(at_run_time, *job) for job in jobs}
        compiled = {real: with_code(toolkit, (images / f"{real}.log").read_text(), images / f"{real}.cubin")
                    for real in by_nvcc}
        compiled |= {title: job.result() for title, job in running.items()}
    tables = {real: compiled[real][0] for real in by_nvcc}
    if "--bless" in options:
        bless(tables, compiled["sm_90a"][2])
    budgets, ceilings = read_budgets(), read_tiles()
    for real, kept in NVRTC.items():
        budgets[f"{real} by NVRTC"] = {name: most for name, most in budgets[real].items()
                                       if name.startswith(kept) or not TILE_NAMES.match(name)}
    # Another compiler may use other registers; those that it has not are spilled.
    for real in by_nvrtc_12:
        budgets[f"{real} by NVRTC 12"] = dict.fromkeys(budgets[f"{real} by NVRTC"], 255)
    faults = [f"{name}: {fault}" for name, (table, others, _) in compiled.items()
              for fault in others + judge(table, budgets[name])]
    if "sm_90a" in compiled:
        faults += judge_tiles(compiled["sm_90a"][2], ceilings)
    faults += [fault for virtual in dict.fromkeys(by_nvcc.values())
               for fault in warned(virtual, (images / f"{virtual}.log").read_text())]
    for fault in faults:
        print(fault, file=sys.stderr)
    kernels = len(set().union(*(table for table, *_ in compiled.values())))
    print(f"{kernels} kernels for {', '.join(compiled)}: {len(faults)} faults, {time.monotonic() - start:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
