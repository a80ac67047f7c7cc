"""What the machine code of a kernel shows, as nvdisasm prints it: registers, setmaxnreg, memory of threads, reads in flight.

These are facts that ptxas does not report. `faults` compares them with what the kernels count on.
"""

import re
from dataclasses import dataclass

# The prefix of kernels for Hopper, and the instructions that their machine code must have.
HOPPER, INSTRUCTIONS = "hopper_", ["HGMMA", "UTMALDG"]
# Threads of a block of these kernels: those of the producer, which gives registers away, and those of the consumers.
PRODUCER, CONSUMERS = 128, 256
# Registers of a multiprocessor. A thread gets a multiple of 8.
REGISTERS = 65536
ENTRY = REGISTERS // (PRODUCER + CONSUMERS) // 8 * 8

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

    def reached_from(self, start):
        """All instructions that may run after `start`, and itself."""
        reached, ahead = set(), [start]
        while ahead:
            at = ahead.pop()
            if at in reached or at >= len(self.instructions):
                continue
            reached.add(at)
            here = self.instructions[at]
            # A target is where the instruction jumps to, or where BSSY says that divergent threads meet again.
            if here.target() in self.labels:
                ahead.append(self.labels[here.target()])
            ends = here.name.startswith(("BRA", "EXIT", "RET", "BRX", "JMP")) and here.condition is None
            if not (ends and not (here.name.startswith("BRA") and re.match(r"\s*!?U?P\d", here.operands))):
                ahead.append(at + 1)
        return sorted(reached)

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
    if entry != ENTRY:
        found.append(f"{name}: begins with {entry} registers, setmaxnreg counts on {ENTRY}")
    changes = code.named("USETMAXREG")
    fewer, more = code.named("USETMAXREG.DEALLOC"), code.named("USETMAXREG.TRY_ALLOC")
    if len(changes) != 2 or len(fewer) != 1 or len(more) != 1:
        return [*found, f"{name}: {len(changes)} USETMAXREG, one that releases and one that takes are needed"]
    kept, taken = (number(code.instructions[at]) for at in (*fewer, *more))
    if PRODUCER * kept + CONSUMERS * taken > (PRODUCER + CONSUMERS) * entry:
        found.append(f"{name}: {kept} and {taken} registers are more than its block has")
    for who, at, limit in ("producer", fewer[0], kept), ("consumers", more[0], taken):
        reached = code.reached_from(at)
        if len([one for one in reached if one in changes]) != 1:
            found.append(f"{name}: the code of the {who} has another USETMAXREG")
        if (most := code.most_register(reached)) >= limit:
            found.append(f"{name}: R{most} in the code of the {who}, which has {limit} registers")
    return found
