"""A ring of two processes: Kyklos through shared memory and over QUIC against PyTorch's ring attention over gloo, in one sitting.

Both use one compute thread per process, B 1, H 8, D 64, f32. PyTorch's ring is the private template behind its
`context_parallel`; on a CPU it has to be called directly. Rounds alternate, so that a noisy minute hits both.

With --link the processes are on two hosts, which are network namespaces joined by a link of that rate and packets of 1500 bytes.
Hosts share no memory, so there is Kyklos over QUIC and, for its cost, QUIC inside TCP. Needs no privileges where users may make namespaces.

    tests/peers/setup.sh                          once: the peers, in a virtual environment
    target/peers/bin/python tests/peers/ring.py   [--seq 4096] [--rounds 5] [--link 1gbit] [--program KYKLOS] [--out FOLDER]
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPEATS = 5
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "RAYON_NUM_THREADS": "1"}}


class OneHost:
    """Both ranks on this host."""

    address, interfaces = "127.0.0.1", ("lo", "lo")
    # What the results call them, and the options of the program.
    ways = {"shared memory": ["--shared-memory", "on"], "QUIC": ["--shared-memory", "off"]}

    def enter(self, rank):
        return []

    def start(self, program, options):
        return subprocess.Popen([program, "launch", "-n", "2", "--", *options], **PIPES)

    def end(self):
        pass


class TwoHosts:
    """A rank on each of two network namespaces: that of this process, and one that lives as long as a process in it."""

    address, interfaces = "10.77.0.1", ("near", "far")
    ways = {"QUIC": [], "QUIC, pipelined": ["--strategy", "pipelined"], "QUIC inside TCP": ["--network", "tcp"]}

    def __init__(self, program, rate):
        self.folder = tempfile.TemporaryDirectory()
        self.other = subprocess.Popen(["unshare", "--net", "--kill-child", "sleep", "infinity"])
        try:
            self.join(program, rate)
        except BaseException:
            self.end()
            raise

    def join(self, program, rate):
        here, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
        while os.readlink(f"/proc/{self.other.pid}/ns/net") == here:
            if time.monotonic() > deadline:
                sys.exit("the second network namespace did not appear within 10 s")
            time.sleep(0.02)
        run("ip link set lo up")
        run(f"ip link add near type veth peer name far netns {self.other.pid}")
        for host, name in enumerate(self.interfaces, 1):
            enter = " ".join(self.enter(host - 1))
            run(f"{enter} ip addr add 10.77.0.{host}/24 dev {name}")
            run(f"{enter} ip link set lo up")
            run(f"{enter} ip link set {name} mtu 1500 up")
            run(f"{enter} tc qdisc add dev {name} root tbf rate {rate} burst 256kb latency 10ms")
        authority = f"--authority {self.folder.name}/authority"
        run(f"{program} certs init {authority}")
        for host in (1, 2):
            run(f"{program} certs issue {authority} --host 10.77.0.{host} --output {self.folder.name}")
        ranks = "".join(f'[[ranks]]\nhost = "10.77.0.{host}"\n' for host in (1, 2))
        pathlib.Path(self.folder.name, "cluster.toml").write_text(ranks)

    def enter(self, rank):
        return ["nsenter", "--target", str(self.other.pid), "--net"] if rank == 1 else []

    def start(self, program, options):
        ranks = []
        for rank in range(2):
            where = ["--cluster", f"{self.folder.name}/cluster.toml", "--rank", str(rank),
                     "--identity", f"{self.folder.name}/host-10.77.0.{rank + 1}.pem"]
            ranks.append(subprocess.Popen([*self.enter(rank), program, options[0], *where, *options[1:]], **PIPES))
        # The second rank prints nothing but errors, which fit into a pipe.
        ranks[0].beside = ranks[1]
        return ranks[0]

    def end(self):
        self.other.kill()
        self.other.wait()
        self.folder.cleanup()


def run(command):
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stderr}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torch_rank(rank, address, interface, port, seq):
    """One of two gloo ranks; rank 0 prints {variant: (median ms, max error, rotation, times)}."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.experimental._context_parallel._attention as ring

    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2",
                      GLOO_SOCKET_IFNAME=interface)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.group.WORLD
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def attend(q, k, v, is_causal=False, **_):
        return kernel(q, k, v, 0.0, is_causal)

    torch.manual_seed(0)
    whole = [torch.randn(1, 8, seq, 64) for _ in range(3)]
    out = {}
    for name, causal, balanced in (("full", False, False), ("causal", True, True)):
        quarters = [rank, 3 - rank] if balanced else [2 * rank, 2 * rank + 1]

        def mine(tensor):
            return torch.cat([tensor.chunk(4, 2)[i] for i in quarters], 2)

        local = [mine(tensor) for tensor in whole]
        expected = mine(torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal))
        ring._cp_options.enable_load_balance = balanced
        times, best = {}, None
        for rotation in ("allgather", "alltoall"):
            ring.set_rotate_method(rotation)
            runs = []
            for _ in range(REPEATS + 2):
                dist.barrier()
                start = time.perf_counter()
                got = ring._templated_ring_attention(group, 2, attend, *local, is_causal=causal)
                dist.barrier()
                runs.append(1e3 * (time.perf_counter() - start))
            times[rotation] = runs[2:]
            error = (got[0] - expected).abs().max()
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
            median = statistics.median(runs[2:])
            if best is None or median < best[0]:
                best = (median, float(error), rotation, runs[2:])
        out[name] = best
    if rank == 0:
        print(json.dumps(out))
    dist.destroy_process_group()


def torch_round(hosts, seq):
    port, ranks = free_port(), []
    for rank in range(2):
        me = [sys.executable, __file__, "--torch-rank", str(rank), hosts.address, hosts.interfaces[rank], str(port), str(seq)]
        ranks.append(subprocess.Popen([*hosts.enter(rank), *me], **PIPES))
    ranks[0].beside = ranks[1]
    return json.loads(output(ranks[0]))


def kyklos_round(hosts, program, seq, way):
    out = {}
    for mask in ("full", "causal"):
        options = ["attend", "--shape", f"1,{seq},8,8,64", "--mask", mask, "--mesh", "1x2", "--device", "cpu",
                   "--repeat", str(REPEATS + 2), "--json", "--verify", *way]
        text = output(hosts.start(program, options))
        lines = [line[line.index("{"):] for line in text.splitlines() if "{" in line]
        report = json.loads("".join(lines)) if len(lines) == 1 else json.loads(text)
        out[mask] = (1e3 * report["wall_s"], report["max_abs_error"])
    return out


def output(process):
    """What a process prints, once it and the one beside it have ended well."""
    beside = getattr(process, "beside", None)
    try:
        text, errors = process.communicate(timeout=300)
        if process.returncode != 0:
            if beside is not None:
                beside.kill()
                errors += beside.communicate()[1]
            sys.exit(f"{' '.join(process.args)} ended with {process.returncode}:\n{errors}")
        if beside is not None and beside.wait(timeout=60) != 0:
            sys.exit(f"{' '.join(beside.args)} ended with {beside.returncode}:\n{beside.stderr.read()}")
    finally:
        for left in (process, beside):
            if left is not None and left.poll() is None:
                left.kill()
    return text


def main():
    if sys.argv[1:2] == ["--torch-rank"]:
        rank, address, interface, port, seq = sys.argv[2:]
        return torch_rank(int(rank), address, interface, int(port), int(seq))
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seq", type=int, default=4096)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--link", metavar="RATE", help="such as 1gbit: on two hosts instead of one")
    arguments.add_argument("--program")
    arguments.add_argument("--out")
    options = arguments.parse_args()
    if options.program is None:
        subprocess.run(["cargo", "build", "--release", "-p", "kyklos-cli"], cwd=ROOT, check=True)
    program = options.program or str(ROOT / "target/release/kyklos")
    if options.link and "KYKLOS_RING_INSIDE" not in os.environ:
        os.environ["KYKLOS_RING_INSIDE"] = "1"
        own = [sys.executable, __file__, *sys.argv[1:], "--program", program]
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--net", *own])
    hosts = TwoHosts(program, options.link) if options.link else OneHost()
    try:
        lines, rows = compare(hosts, program, options)
    finally:
        hosts.end()
    print("\n".join(lines))
    if options.out:
        folder = ROOT / options.out
        folder.mkdir(parents=True, exist_ok=True)
        name = f"ring_{options.seq}" + (f"_{options.link}" if options.link else "")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def compare(hosts, program, options):
    """Rounds of PyTorch and of each way of Kyklos in turns: sentences about their medians, and all of them."""
    rows = []
    for number in range(options.rounds):
        torch = torch_round(hosts, options.seq)
        ways = {name: kyklos_round(hosts, program, options.seq, way) for name, way in hosts.ways.items()}
        for mask in ("full", "causal"):
            ms, error, rotation, _ = torch[mask]
            row = {"round": number, "mask": mask, "torch_ms": ms, "torch_error": error, "torch_rotation": rotation,
                   "load": os.getloadavg()[0]}
            for name, times in ways.items():
                row[name] = {"ms": times[mask][0], "error": times[mask][1], "ratio": ms / times[mask][0]}
            rows.append(row)
            print(json.dumps(row), flush=True)
    where = f"two hosts, {options.link}, MTU 1500" if options.link else "one host"
    lines = [f"ring of 2 processes, {where}, B1 H8 D64 f32, S {options.seq}, one thread each; {options.rounds} rounds of {REPEATS}"]
    for mask in ("full", "causal"):
        mine = [row for row in rows if row["mask"] == mask]
        parts = [f"PyTorch over gloo {statistics.median(row['torch_ms'] for row in mine):.1f} ms"]
        for name in hosts.ways:
            ratios = sorted(row[name]["ratio"] for row in mine)
            ms = statistics.median(row[name]["ms"] for row in mine)
            parts.append(f"Kyklos, {name} {ms:.1f} ms, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append(f"{mask}: {'; '.join(parts)}")
    return lines, rows


if __name__ == "__main__":
    main()
