"""What the machine code of a kernel shows, as nvdisasm prints it: registers, setmaxnreg, memory of threads, reads in flight.

These are facts that ptxas does not report. `faults` compares them with what the kernels count on.
"""

import re
from collections import deque
from dataclasses import dataclass

# The prefix of kernels for Hopper, and the instructions that their machine code must have.
HOPPER, INSTRUCTIONS = "hopper_", ["HGMMA", "UTMALDG"]
# Threads of the producer of these kernels, which gives registers away.
PRODUCER = 128
# Registers of a multiprocessor. A thread gets a multiple of 8.
REGISTERS = 65536
# {registers of a thread at the start: threads of the consumers}, for two and for three consumers.
CONSUMERS = {REGISTERS // (PRODUCER + consumers) // 8 * 8: consumers for consumers in (256, 384)}
ENTRY = max(CONSUMERS)

# The attention kernels for Hopper. While the values of a tile are multiplied, at least a quarter of the exponentials of the next one
# must be computed, and a tile with mask tests may have 1.5 times the instructions of one without.
FORWARD = re.compile(r"hopper(?:_wide)?_b?f16_\d+$")
OVERLAPPED, TESTED = 0.25, 1.5

# Kernels whose reads of a state must be in flight together: as many reads of two elements as `Rows::READS` of rows.h says, or of
# four as `Parts::AT_ONCE` of state.h.
MERGES = re.compile(r"(?:attend|hopper)_b?f16_(\d+)$")
PARTS, PARTS_AT_ONCE = "merge_parts", 8

LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", flags=re.MULTILINE)


@dataclass
class Instruction:
    condition: str | None
    name: str
    operands: str

    def registers(self):
        return [int(n) for n in re.findall(r"\bR(\d+)\b", self.operands)]

    def target(self):
        found = re.search(r"`\(([^)]+)\)", self.operands)
        return found and found.group(1)


@dataclass
class Code:
    """The instructions of a kernel, and the index of the instruction behind each label."""

    instructions: list
    labels: dict

    @staticmethod
    def of(text):
        instructions, labels = [], {}
        for line in text.splitlines():
            if label := re.match(r"^(\.L\w+):", line):
                labels[label.group(1)] = len(instructions)
            elif found := LINE.match(line):
                instructions.append(Instruction(found.group(1), found.group(2), found.group(3).strip()))
        return Code(instructions, labels)

    def named(self, *prefixes):
        return [n for n, instruction in enumerate(self.instructions) if instruction.name.startswith(prefixes)]

    def next(self, at):
        """The instructions that may follow the one at an index."""
        here = self.instructions[at]
        # A target is where the instruction jumps to, or where BSSY says that divergent threads meet again.
        after = [self.labels[here.target()]] if here.target() in self.labels else []
        jumps_always = here.name.startswith(("BRA", "EXIT", "RET", "BRX", "JMP")) and here.condition is None
        # A branch may have its condition among the operands, or be taken by diverging threads only.
        if not jumps_always or re.match(r"\s*!?U?P\d", here.operands) or here.name.startswith(("BRA.DIV", "BRA.CONV")):
            after.append(at + 1)
        return [one for one in after if one < len(self.instructions)]

    def reached_from(self, start):
        """All instructions that may run after `start`, and itself."""
        reached, ahead = set(), [start]
        while ahead:
            at = ahead.pop()
            if at not in reached:
                reached.add(at)
                ahead += self.next(at)
        return sorted(reached)

    def path(self, start, ends):
        """The shortest path from behind `start` to the first of `ends`, with both of its ends counted once; None without one. Softcaps,
        negative scales and other rare cases are longer paths."""
        before, ahead = {}, deque([start])
        while ahead:
            at = ahead.popleft()
            # BSSY names the place where threads meet, it does not jump there.
            after = [at + 1] if self.instructions[at].name.startswith("BSSY") else self.next(at)
            for one in after:
                if one in before:
                    continue
                before[one] = at
                if one in ends:
                    found = [one]
                    while before[found[-1]] != start:
                        found.append(before[found[-1]])
                    return found[::-1]
                ahead.append(one)
        return None

    def most_register(self, indices):
        return max((n for index in indices for n in self.instructions[index].registers()), default=-1)

    def reads_in_flight(self, name, words):
        """The most reads by `name`, of `words` registers each, that are issued before the result of one of them is used."""
        most, pending = 0, set()
        # Where a jump ends. Most labels only name a place.
        borders = {self.labels.get(instruction.target()) for instruction in self.instructions}
        count = 0
        for at, here in enumerate(self.instructions):
            registers = here.registers()
            if at in borders or here.name.startswith(("BRA", "BAR", "EXIT", "BSYNC", "WARPSYNC")):
                pending, count = set(), 0
            elif here.name.startswith(name):
                # The first register is written, the others are the address.
                if pending & set(registers[1:]):
                    pending, count = set(), 0
                pending |= set(range(registers[0], registers[0] + words))
                count += 1
                most = max(most, count)
            elif pending & set(registers):
                pending, count = set(), 0
        return most


def kernels(text):
    """{kernel: its code} from the output of nvdisasm."""
    parts = re.split(r"^\.text\.(\w+):", text, flags=re.MULTILINE)
    return {name: Code.of(code) for name, code in zip(parts[1::2], parts[2::2])}


def number(instruction):
    """The last constant of an instruction."""
    return int(re.findall(r"\b0x[0-9a-f]+\b", instruction.operands)[-1], 16)


def faults(name, code, entry):
    """Messages about a kernel that starts with `entry` registers per thread, as ptxas reports them."""
    found = []
    if code.named("LDL", "STL"):
        found.append(f"{name}: reads or writes memory of a thread (LDL, STL); registers must do")
    if merge := MERGES.match(name):
        wanted = int(merge.group(1)) // 8
        wanted = wanted if wanted <= 16 else wanted // 2
        if (most := code.reads_in_flight("LDG.E.64", 2)) < wanted:
            found.append(f"{name}: {most} reads of the state are in flight at a time, {wanted} must be")
    if name == PARTS and (most := code.reads_in_flight("LDG.E.128", 4)) < PARTS_AT_ONCE:
        found.append(f"{name}: {most} reads of parts are in flight at a time, {PARTS_AT_ONCE} must be")
    return found + (faults_of_hopper(name, code, entry) if name.startswith(HOPPER) else [])


def faults_of_hopper(name, code, entry):
    found = [f"{name}: no {word} in its machine code" for word in INSTRUCTIONS if not code.named(word)]
    if entry not in CONSUMERS:
        choices = " or ".join(str(registers) for registers in CONSUMERS)
        return [*found, f"{name}: begins with {entry} registers, setmaxnreg counts on {choices}"]
    consumers = CONSUMERS[entry]
    changes = code.named("USETMAXREG")
    fewer, more = code.named("USETMAXREG.DEALLOC"), code.named("USETMAXREG.TRY_ALLOC")
    if len(changes) != 2 or len(fewer) != 1 or len(more) != 1:
        return [*found, f"{name}: {len(changes)} USETMAXREG, one that releases and one that takes are needed"]
    kept, taken = (number(code.instructions[at]) for at in (*fewer, *more))
    if PRODUCER * kept + consumers * taken > (PRODUCER + consumers) * entry:
        found.append(f"{name}: {kept} and {taken} registers are more than its block has")
    for who, at, limit in ("producer", fewer[0], kept), ("consumers", more[0], taken):
        reached = code.reached_from(at)
        if len([one for one in reached if one in changes]) != 1:
            found.append(f"{name}: the code of the {who} has another USETMAXREG")
        if (most := code.most_register(reached)) >= limit:
            found.append(f"{name}: R{most} in the code of the {who}, which has {limit} registers")
    if FORWARD.match(name):
        tile, missing = Tile.of(code)
        found += [f"{name}: {missing}"] if missing else [f"{name}: {fault}" for fault in tile.faults()]
    return found


@dataclass
class Tile:
    """What a consumer of an attention kernel for Hopper computes for a tile of keys, in its loop."""

    keys: int
    exponentials: int
    """Those between the wait for the scores and that for the values of the previous tile."""
    full: int
    """Instructions of a tile without mask tests."""
    tested: int | None
    """Instructions of one with them; None if the loop has none."""

    @staticmethod
    def of(code):
        """The tile, or why there is none."""
        waits = {later: [at for at in code.named("WARPGROUP.DEPBAR") if number(code.instructions[at]) == later] for later in (0, 1)}
        if len(waits[1]) != 1:
            return None, f"{len(waits[1])} waits for scores alone, one is needed"
        start = waits[1][0]
        full, overlap = code.path(start, {start}), code.path(start, set(waits[0]))
        if not full or not overlap:
            return None, "no loop over tiles"
        # Positions of keys are read two at a time, from shared memory.
        there = code.path(start, set(code.named("LDS.64")))
        back = there and code.path(there[-1], {start})
        products = [code.instructions[at] for at in full if code.instructions[at].name.startswith("HGMMA")]
        keys = {int(re.match(r"HGMMA\.64x(\d+)x16", one.name)[1]) for one in products if ".tnspB" not in one.operands}
        if len(keys) != 1:
            return None, f"products of queries with {sorted(keys)} keys in the loop over tiles"
        exponentials = sum(code.instructions[at].name.startswith("MUFU.EX2") for at in overlap)
        return Tile(keys.pop(), exponentials, len(full), len(there) + len(back) if back else None), None

    def faults(self):
        found = []
        if self.exponentials < (least := self.keys * OVERLAPPED):
            found.append(f"{self.exponentials} exponentials overlap with the product of values, {least:.0f} must")
        if self.tested is None:
            found.append("no tile with mask tests in the loop over tiles")
        elif self.tested > (most := self.full * TESTED):
            found.append(f"{self.tested} instructions of a tile with mask tests, {most:.0f} may be")
        return found
