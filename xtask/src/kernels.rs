//! The inner loops of the CPU kernels keep their sums in registers, in the machine code of a
//! program.
//!
//! Whether the compiler keeps a sum in memory depends on the code around a loop, and costs half of
//! the speed without any other sign.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// A loop of at least this many multiply-adds, without other arithmetic or calls, is an inner loop
/// of a kernel: 6 × 2 sums, or 8 × 3.
const MULTIPLY_ADDS: usize = 12;

/// What the loops of polynomials and masks have besides, and loops that call other functions.
const OTHERS: [&str; 10] =
    ["vadd", "vsub", "vmul", "vmax", "vmin", "vcmp", "vpadd", "vpsub", "vpcmp", "call"];

/// The loops that any program with the CPU backend has, by instruction and registers: scores and
/// weighted sum of the forward pass; with products of bf16 also dK and dV.
const LOOPS: [(&str, &str, usize); 3] =
    [("vfmadd", "%ymm", 2), ("vfmadd", "%zmm", 2), ("vdpbf16ps", "%zmm", 3)];

/// Reads `program` with `objdump` (binutils, which every C compiler on Linux brings).
pub(crate) fn check(program: &str) -> Vec<String> {
    if !cfg!(target_arch = "x86_64") {
        println!("not checked: the machine code is not that of x86-64");
        return Vec::new();
    }
    let arguments = ["--disassemble", "--demangle", "--no-show-raw-insn", program];
    let mut objdump = match Command::new("objdump").args(arguments).stdout(Stdio::piped()).spawn() {
        Ok(objdump) => objdump,
        Err(error) => return vec![format!("objdump {program}: {error}")],
    };
    let output = objdump.stdout.take().map(BufReader::new);
    let lines = output.into_iter().flat_map(|output| output.lines().map_while(Result::ok));
    let (counts, mut faults) = inspect(lines);
    match objdump.wait() {
        Ok(status) if status.success() => {}
        Ok(status) => faults.push(format!("objdump {program}: {status}")),
        Err(error) => faults.push(format!("objdump {program}: {error}")),
    }
    for ((instruction, register, least), found) in LOOPS.into_iter().zip(counts) {
        if found < least {
            faults.push(format!(
                "{program}: {found} inner loops of {instruction} with {register} were found, at least {least} are \
                 expected: is it a release build with the CPU backend?"
            ));
        }
        println!("{found} inner loops of {instruction} with {register}");
    }
    faults
}

/// Numbers of inner loops for each of [`LOOPS`], and the faults.
fn inspect(lines: impl Iterator<Item = String>) -> ([usize; LOOPS.len()], Vec<String>) {
    let (mut counts, mut faults) = ([0; LOOPS.len()], Vec::new());
    let mut name = String::new();
    let mut function = Vec::new();
    for line in lines.chain(std::iter::once("0 <end>:".to_owned())) {
        if let Some(next) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
            inspect_function(&name, &function, &mut counts, &mut faults);
            next.1.clone_into(&mut name);
            function.clear();
        } else if let Some(instruction) = Instruction::parse(&line) {
            function.push(instruction);
        }
    }
    (counts, faults)
}

struct Instruction {
    address: u64,
    text: String,
}

impl Instruction {
    fn parse(line: &str) -> Option<Self> {
        let (address, text) = line.trim_start().split_once(":\t")?;
        Some(Self { address: u64::from_str_radix(address, 16).ok()?, text: text.to_owned() })
    }

    /// Where it jumps to, if it is a jump.
    fn target(&self) -> Option<u64> {
        let mut words = self.text.strip_prefix('j')?.split_whitespace();
        u64::from_str_radix(words.nth(1)?, 16).ok()
    }

    fn multiplies_and_adds(&self) -> bool {
        self.text.starts_with("vfmadd") || self.text.starts_with("vdpbf16ps")
    }
}

fn inspect_function(
    name: &str,
    function: &[Instruction],
    counts: &mut [usize; LOOPS.len()],
    faults: &mut Vec<String>,
) {
    let mut end_of_last = None;
    for (end, jump) in function.iter().enumerate() {
        let start = jump.target().filter(|target| *target <= jump.address);
        let Some(start) = start.and_then(|start| function.iter().position(|i| i.address == start)) else {
            continue;
        };
        // The first jump back that ends after the start closes an inner loop; a loop around it begins
        // before that jump.
        let inner = end_of_last.is_none_or(|last| last < start);
        end_of_last = Some(end);
        let body = &function[start..=end];
        let other = |i: &Instruction| OTHERS.iter().any(|name| i.text.starts_with(name));
        if !inner
            || body.iter().any(other)
            || body.iter().filter(|i| i.multiplies_and_adds()).count() < MULTIPLY_ADDS
        {
            continue;
        }
        for ((instruction, register, _), count) in LOOPS.iter().zip(counts.iter_mut()) {
            let one = |i: &Instruction| i.text.starts_with(instruction) && i.text.contains(register);
            *count += usize::from(body.iter().any(one));
        }
        let spills = body.iter().filter(|i| i.text.contains("mm") && i.text.contains("(%rsp"));
        for spill in spills {
            faults.push(format!(
                "{name}: the inner loop at {start:x} keeps a vector in memory: {:x}: {}",
                spill.address,
                spill.text,
                start = function[start].address
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::inspect;

    fn program(inside: &str) -> impl Iterator<Item = String> {
        program_of("vfmadd231ps", inside)
    }

    fn program_of(instruction: &str, inside: &str) -> impl Iterator<Item = String> + use<> {
        let mut text = "0000000000001000 <kernel>:\n    1000:\tpush   %rbx\n".to_owned();
        for i in 0..12 {
            text += &format!("    {:x}:\t{instruction} (%rax),%zmm1,%zmm2\n", 0x1010 + i * 4);
        }
        text += inside;
        text += "    1050:\tjne    1010 <kernel+0x10>\n    1060:\tvmovups %zmm0,0x8(%rsp)\n    1070:\tjne    1000 <kernel>\n";
        text.lines().map(str::to_owned).collect::<Vec<_>>().into_iter()
    }

    #[test]
    fn a_loop_in_registers_has_no_fault_and_is_counted_once() {
        assert_eq!(inspect(program("")), ([0, 1, 0], vec![]));
        assert_eq!(inspect(program_of("vdpbf16ps", "")), ([0, 0, 1], vec![]));
    }

    #[test]
    fn a_loop_with_other_arithmetic_is_none_of_a_product_and_may_use_memory() {
        let inside = "    1044:\tvmulps %zmm3,%zmm4,%zmm5\n    1048:\tvmovups %zmm3,0x40(%rsp)\n";
        assert_eq!(inspect(program(inside)), ([0, 0, 0], vec![]));
    }

    #[test]
    fn a_sum_in_memory_is_a_fault() {
        let (_, faults) = inspect(program("    1048:\tvmovups %zmm3,0x40(%rsp)\n"));
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].contains("kernel") && faults[0].contains("1048"), "{faults:?}");
    }

    #[test]
    fn a_number_in_memory_is_none() {
        assert_eq!(inspect(program("    1048:\tmov    %rax,0x40(%rsp)\n")).1, Vec::<String>::new());
    }
}
