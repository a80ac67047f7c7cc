//! Elements with strides, copied one after the other at the speed of memory. Strides are in elements, 0 where an axis repeats.

/// Elements of one side of a square in which exchanged axes are copied.
const SIDE: usize = 16;

/// An axis: its extent, and how far apart its elements are in memory and in a dense copy.
#[derive(Clone, Copy)]
struct Axis {
    extent: usize,
    stride: usize,
    step: usize,
}

/// The axes of an array. Those of extent 1 are left out, and those that follow each other in memory are one.
fn merged(shape: &[usize], strides: &[usize]) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::new();
    let mut step = 1_usize;
    for (&extent, &stride) in shape.iter().zip(strides).rev().filter(|(extent, _)| **extent != 1) {
        match axes.last_mut() {
            Some(inner) if stride == inner.extent.saturating_mul(inner.stride) => {
                inner.extent = inner.extent.saturating_mul(extent);
            }
            _ => axes.push(Axis { extent, stride, step }),
        }
        step = step.saturating_mul(extent);
    }
    axes.reverse();
    axes
}

/// Whether elements of this shape follow each other.
pub(crate) fn is_dense(shape: &[usize], strides: &[usize]) -> bool {
    shape.contains(&0) || matches!(merged(shape, strides)[..], [] | [Axis { stride: 1, .. }])
}

/// Calls `each` with the places of the elements of these axes in memory and in the copy, in order.
fn walk(axes: &[Axis], [from, to]: [usize; 2], each: &mut impl FnMut([usize; 2])) {
    match axes {
        [] => each([from, to]),
        [Axis { extent, stride, step }, inner @ ..] => {
            (0..*extent).for_each(|i| walk(inner, [from + i * stride, to + i * step], each));
        }
    }
}

/// Appends the elements of `N` bytes in the order of the axes.
pub(crate) fn copy<const N: usize>(memory: &[u8], shape: &[usize], strides: &[usize], dense: &mut Vec<u8>) {
    if shape.contains(&0) {
        return;
    }
    let axes = merged(shape, strides);
    let (elements, _) = memory.as_chunks::<N>();
    match axes[..] {
        [] => dense.extend_from_slice(&memory[..N]),
        [ref outer @ .., Axis { extent, stride: 1, .. }] => walk(outer, [0, 0], &mut |[from, _]| {
            dense.extend_from_slice(&memory[from * N..(from + extent) * N]);
        }),
        [ref outer @ .., Axis { extent, stride, .. }] if outer.iter().all(|axis| axis.stride != 1) => {
            let mut row = vec![[0; N]; extent];
            walk(outer, [0, 0], &mut |[from, _]| {
                match stride {
                    0 => row.fill(elements[from]),
                    _ => {
                        let apart = elements[from..].chunks(stride);
                        row.iter_mut().zip(apart).for_each(|(to, apart)| *to = apart[0]);
                    }
                }
                dense.extend_from_slice(row.as_flattened());
            });
        }
        _ => exchange(elements, axes, dense),
    }
}

/// [`copy`] where another axis than the last one has neighbours in memory: in squares, so that lines of the cache are used whole.
fn exchange<const N: usize>(elements: &[[u8; N]], mut axes: Vec<Axis>, dense: &mut Vec<u8>) {
    let (Some(near), Some(last)) = (axes.iter().position(|axis| axis.stride == 1), axes.pop()) else {
        return;
    };
    let near = axes.remove(near);
    let begin = dense.len();
    let total: usize = axes.iter().chain([&near, &last]).map(|axis| axis.extent).product();
    dense.resize(begin + N * total, 0);
    let (copies, _) = dense[begin..].as_chunks_mut::<N>();
    walk(&axes, [0, 0], &mut |[from, to]| {
        for line in (0..near.extent).step_by(SIDE) {
            let height = SIDE.min(near.extent - line);
            for column in (0..last.extent).step_by(SIDE) {
                let width = SIDE.min(last.extent - column);
                let mut square = [[[0; N]; SIDE]; SIDE];
                for (i, row) in square.iter_mut().enumerate().take(width) {
                    let first = from + line + (column + i) * last.stride;
                    row[..height].copy_from_slice(&elements[first..first + height]);
                }
                for i in 0..height {
                    let first = to + (line + i) * near.step + column;
                    let row: [[u8; N]; SIDE] = std::array::from_fn(|j| square[j][i]);
                    copies[first..first + width].copy_from_slice(&row[..width]);
                }
            }
        }
    });
}

/// The bools of dense rows of `keys` bytes as bits, each row in whole words of 32.
pub(crate) fn pack(bools: &[u8], keys: usize) -> Vec<u8> {
    let mut words = Vec::with_capacity(bools.len().div_ceil(keys.max(1)) * keys.div_ceil(32) * 4);
    for row in bools.chunks(keys.max(1)) {
        let (whole, rest) = row.as_chunks::<32>();
        words.extend(whole.iter().flat_map(|bools| word(bools).to_ne_bytes()));
        if !rest.is_empty() {
            let mut last = [0; 32];
            last[..rest.len()].copy_from_slice(rest);
            words.extend(word(&last).to_ne_bytes());
        }
    }
    words
}

/// One bit for each byte that is not 0, the first one lowest.
fn word(bools: &[u8; 32]) -> u32 {
    const LOW: u64 = 0x7F7F_7F7F_7F7F_7F7F;
    let (eights, _) = bools.as_chunks::<8>();
    eights.iter().enumerate().fold(0, |word, (index, eight)| {
        let bytes = u64::from_le_bytes(*eight);
        let ones = (((bytes & LOW) + LOW) | bytes) >> 7 & !LOW >> 7;
        // Byte i times 2^(56 − 7i) is bit 56 + i.
        let bits = ones.wrapping_mul(0x0102_0408_1020_4080) >> 56;
        word | (bits as u32) << (8 * index)
    })
}

/// Dense rows of `bytes` bytes, each with `padding` zeros after it.
pub(crate) fn pad(rows: &[u8], bytes: usize, padding: usize) -> Vec<u8> {
    let mut padded = Vec::with_capacity(rows.len() + rows.len().div_ceil(bytes.max(1)) * padding);
    for row in rows.chunks(bytes.max(1)) {
        padded.extend_from_slice(row);
        padded.resize(padded.len() + padding, 0);
    }
    padded
}
