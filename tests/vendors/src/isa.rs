//! Inner loops in the machine code of AMD's GPUs, and matrix instructions in that of AMD and
//! NVIDIA.

use std::collections::BTreeMap;

/// The worst of a kernel's inner loops of products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InnerLoops {
    /// Instructions for each multiply-add. Waits and hints are not counted: they take no turn of an
    /// arithmetic unit.
    pub(crate) instructions: f64,
    /// Bytes that a lane reads from workgroup memory for each multiply-add.
    pub(crate) shared_bytes: f64,
}

/// A loop of at least this many multiply-adds that reads workgroup memory is one of the products.
const MULTIPLY_ADDS: usize = 32;

/// Reads ACO's listing: blocks begin with `BB7:`, and a loop is a branch to a block before.
pub(crate) fn inner_loops(text: &str) -> Option<InnerLoops> {
    let mut blocks: Vec<(&str, Vec<&str>)> = vec![("", Vec::new())];
    for line in text.lines().map(str::trim) {
        match line.strip_suffix(':').filter(|label| label.starts_with("BB")) {
            Some(label) => blocks.push((label, Vec::new())),
            None => {
                let code = line.split(';').next().unwrap_or_default().trim();
                if let (false, Some((_, block))) = (code.is_empty(), blocks.last_mut()) {
                    block.push(code);
                }
            }
        }
    }
    let index: BTreeMap<&str, usize> =
        blocks.iter().enumerate().map(|(at, (label, _))| (*label, at)).collect();
    let loops: Vec<(usize, usize)> = blocks
        .iter()
        .enumerate()
        .flat_map(|(end, (_, block))| block.iter().map(move |code| (end, *code)))
        .filter(|(_, code)| code.starts_with("s_branch") || code.starts_with("s_cbranch"))
        .filter_map(|(end, code)| Some((*index.get(code.split_whitespace().last()?)?, end)))
        .filter(|(start, end)| start <= end)
        .collect();
    let inner = loops.iter().filter(|(start, end)| {
        !loops.iter().any(|other| *other != (*start, *end) && other.0 >= *start && other.1 <= *end)
    });
    inner
        .filter_map(|(start, end)| counted(blocks[*start..=*end].iter().flat_map(|(_, block)| block)))
        .reduce(|worst, one| InnerLoops {
            instructions: worst.instructions.max(one.instructions),
            shared_bytes: worst.shared_bytes.max(one.shared_bytes),
        })
}

/// The instructions of a kernel that uses matrix units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MatrixCode {
    pub(crate) instructions: u64,
    /// Reads of two bytes from workgroup memory.
    pub(crate) narrow_reads: u64,
}

/// Counts them, if there are any: in ACO's listing `v_wmma_…`, in NAK's `hmma.…`.
pub(crate) fn matrix_code(text: &str) -> Option<MatrixCode> {
    let count = |starts: &[&str]| {
        let words = text.lines().filter_map(|line| line.split(';').next()).flat_map(str::split_whitespace);
        words.filter(|word| starts.iter().any(|start| word.starts_with(start))).count() as u64
    };
    let instructions = count(&["v_wmma_", "hmma."]);
    (instructions > 0).then(|| MatrixCode {
        instructions,
        narrow_reads: count(&["ds_load_u16", "ld.shared.strong.cta.u16"]),
    })
}

fn counted<'a>(code: impl Iterator<Item = &'a &'a str>) -> Option<InnerLoops> {
    let (mut multiply_adds, mut instructions, mut bytes) = (0, 0, 0);
    for name in code.filter_map(|code| code.split_whitespace().next()) {
        if name.starts_with("v_") {
            instructions += 1;
        }
        if name.starts_with("v_fma") || name.starts_with("v_mad_f") || name.starts_with("v_mac_f") {
            multiply_adds += 1;
        }
        if let Some((_, width)) = name.split_once("ds_load_").or_else(|| name.split_once("ds_read_")) {
            bytes += loaded_bytes(width);
        }
    }
    (multiply_adds >= MULTIPLY_ADDS && bytes > 0).then(|| InnerLoops {
        instructions: f64::from(instructions) / multiply_adds as f64,
        shared_bytes: f64::from(bytes) / multiply_adds as f64,
    })
}

/// Bytes of `b64`, `2addr_b32`, `read2_b64` and the like.
fn loaded_bytes(width: &str) -> u32 {
    let two = if width.contains("2addr") || width.starts_with("read2") { 2 } else { 1 };
    let bits = width.rsplit(['b', 'u', 'i']).next().and_then(|bits| bits.split('_').next());
    two * bits.and_then(|bits| bits.parse::<u32>().ok()).unwrap_or(0) / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_loop_is_counted_and_an_outer_one_is_not() {
        let body: String = (0..64).map(|n| format!("\tv_fmac_f32_e32 v{n}, v1, v2 ; 00\n")).collect();
        let text = format!(
            "BB1:\n\tv_add_f32 v1, v2, v3\nBB2:\n\tds_load_b64 v[1:2], v3 offset:8\n\tds_load_b128 v[1:4], v3\n\
             \ts_waitcnt lgkmcnt(0)\n\tv_mul_f32 v1, v1, v2\n{body}\ts_cbranch_scc0 BB2\nBB3:\n\tv_sub_f32 v1, v2, v3\n\
             \ts_branch BB1\n"
        );
        let found = inner_loops(&text);
        assert_eq!(found, Some(InnerLoops { instructions: 65.0 / 64.0, shared_bytes: 24.0 / 64.0 }));
        assert_eq!(inner_loops("BB1:\n\tv_fma_f32 v1, v2, v3, v4\n\ts_branch BB1\n"), None, "no product");
        let text =
            "\tv_wmma_f32_16x16x16_f16 v[1:4], v[5:8], v[9:12], v[1:4]\n\tds_load_u16_d16 v1, v2 ; v_wmma_\n";
        assert_eq!(matrix_code(text), Some(MatrixCode { instructions: 1, narrow_reads: 1 }));
        assert_eq!(
            matrix_code("r1..5 = hmma.m16n8k16.f32 r1..5 // x").map(|code| code.instructions),
            Some(1)
        );
        assert_eq!(matrix_code(&text.replace("v_wmma", "v_fma")), None);
        assert_eq!(loaded_bytes("2addr_b32"), 8);
        assert_eq!(loaded_bytes("u16_d16"), 2);
    }
}
