//! A driver's statistics in the words of the table.

use crate::device::Compiled;
use crate::isa;
use crate::table::Numbers;

/// The driver's names for each number: AMD, NVIDIA, Apple and Intel, Adreno. The first that is
/// there counts.
const SPILLS: [&str; 4] = ["Spilled VGPRs", "Spills to memory", "Spills", "STP Count"];
const SCRATCH: [&str; 4] = ["Scratch size", "SLM size", "Scratch", "Scratch Memory Size"];
const REGISTERS: [&str; 5] = ["VGPRs", "Number of GPRs", "GPRs", "Max live registers", "Registers used"];
const OCCUPANCY: [&str; 4] = ["Subgroups per SIMD", "Max warps/SM", "Threads", "Max Waves Per Core"];
const CODE: [&str; 1] = ["Code size"];

/// The line of the table.
///
/// # Errors
/// A number that the driver no longer gives.
pub(crate) fn numbers(compiled: &Compiled) -> Result<Numbers, String> {
    let find = |names: &[&str]| {
        // Statistics are counts.
        names.iter().find_map(|name| compiled.statistics.get(*name)).map(|value| *value as u64)
    };
    let get = |names: &[&str]| {
        find(names).ok_or_else(|| {
            let given: Vec<_> = compiled.statistics.keys().map(String::as_str).collect();
            format!("the driver gives none of {}: it gives {}", names.join(", "), given.join(", "))
        })
    };
    let inner = compiled.texts.get("Assembly").and_then(|text| isa::inner_loops(text));
    let listing = ["Assembly", "NAK assembly"].iter().find_map(|title| compiled.texts.get(*title));
    let matrix = listing.and_then(|text| isa::matrix_code(text));
    Ok(Numbers {
        spills: get(&SPILLS)?,
        scratch: find(&SCRATCH).unwrap_or(0),
        registers: get(&REGISTERS)?,
        occupancy: find(&OCCUPANCY).unwrap_or(u64::from(compiled.subgroup_size)),
        code: get(&CODE)?,
        per_multiply_add: inner.map(|inner| inner.instructions),
        shared_bytes: inner.map(|inner| inner.shared_bytes),
        matrix: matrix.map(|matrix| matrix.instructions),
        narrow: matrix.map(|matrix| matrix.narrow_reads),
    })
}
