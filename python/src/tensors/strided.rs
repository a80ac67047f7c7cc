//! Elements with strides, copied one after the other at the speed of memory. Strides are in
//! elements, 0 where an axis repeats.

use bytemuck::Pod;
use bytes::Bytes;

use crate::spare;

/// Elements that are collected before they are appended.
const PART: usize = 1024;
/// Elements of one side of a square in which exchanged axes are copied.
const SIDE: usize = 16;
/// Lines of squares that are copied before the next columns: their pages stay in the table of the
/// processor.
const LINES: usize = 8 * SIDE;

/// An axis: its extent, and how far apart its elements are in memory and in a dense copy.
#[derive(Clone, Copy)]
struct Axis {
    extent: usize,
    stride: usize,
    step: usize,
}

/// The axes of an array. Those of extent 1 are left out, and those that follow each other in memory
/// are one.
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

/// Appends the elements in the order of the axes. The memory begins where a `T` may.
pub(crate) fn copy<T: Pod>(memory: &[u8], shape: &[usize], strides: &[usize], dense: &mut Vec<u8>) {
    if shape.contains(&0) {
        return;
    }
    let axes = merged(shape, strides);
    let elements: &[T] = bytemuck::cast_slice(memory);
    match axes[..] {
        [] => dense.extend_from_slice(bytemuck::bytes_of(&elements[0])),
        [ref outer @ .., Axis { extent, stride: 1, .. }] => walk(outer, [0, 0], &mut |[from, _]| {
            dense.extend_from_slice(bytemuck::cast_slice(&elements[from..from + extent]));
        }),
        [ref outer @ .., Axis { extent, stride, .. }] if outer.iter().all(|axis| axis.stride != 1) => {
            let mut part = [T::zeroed(); PART];
            walk(outer, [0, 0], &mut |[from, _]| {
                for begin in (0..extent).step_by(PART) {
                    let part = &mut part[..PART.min(extent - begin)];
                    let elements = &elements[from + begin * stride..];
                    match stride {
                        0 => part.fill(elements[0]),
                        _ => part.iter_mut().enumerate().for_each(|(i, to)| *to = elements[i * stride]),
                    }
                    dense.extend_from_slice(bytemuck::cast_slice(part));
                }
            });
        }
        _ => exchange(elements, axes, dense),
    }
}

/// [`copy`] where another axis than the last one has neighbours in memory: in squares, so that
/// lines of the cache are used whole.
fn exchange<T: Pod>(elements: &[T], mut axes: Vec<Axis>, dense: &mut Vec<u8>) {
    let (Some(near), Some(last)) = (axes.iter().position(|axis| axis.stride == 1), axes.pop()) else {
        return;
    };
    let near = axes.remove(near);
    let begin = dense.len();
    let total: usize = axes.iter().chain([&near, &last]).map(|axis| axis.extent).product();
    dense.resize(begin + size_of::<T>() * total, 0);
    let copies = &mut dense[begin..];
    walk(&axes, [0, 0], &mut |[from, to]| {
        for lines in (0..near.extent).step_by(LINES) {
            for column in (0..last.extent).step_by(SIDE) {
                let width = SIDE.min(last.extent - column);
                for line in (lines..near.extent.min(lines + LINES)).step_by(SIDE) {
                    let height = SIDE.min(near.extent - line);
                    let mut square = [[T::zeroed(); SIDE]; SIDE];
                    for (i, row) in square.iter_mut().enumerate().take(width) {
                        let first = from + line + (column + i) * last.stride;
                        row[..height].copy_from_slice(&elements[first..first + height]);
                    }
                    (0..height).for_each(|i| {
                        let first = (to + (line + i) * near.step + column) * size_of::<T>();
                        let row: [T; SIDE] = std::array::from_fn(|j| square[j][i]);
                        let row: &[u8] = bytemuck::cast_slice(&row[..width]);
                        copies[first..first + row.len()].copy_from_slice(row);
                    });
                }
            }
        }
    });
}

/// Calls `each` with the bytes of every row of elements of `size` bytes; those of a row follow each
/// other.
fn rows(memory: &[u8], size: usize, shape: &[usize], strides: &[usize], each: &mut impl FnMut(&[u8])) {
    let Some((keys, outer)) = shape.split_last().filter(|_| !shape.contains(&0)) else { return };
    walk(&merged(outer, &strides[..outer.len()]), [0, 0], &mut |[from, _]| {
        each(&memory[from * size..(from + keys) * size]);
    });
}

/// The bytes of rows of `row` bytes over these axes, which may repeat: more than memory holds where
/// there is no such number.
fn total(row: usize, outer: &[usize]) -> usize {
    outer.iter().fold(row, |bytes, extent| bytes.saturating_mul(*extent))
}

/// Bools, of which those of a row follow each other, as bits: each row in whole words of 32, the
/// first bool in the lowest bit.
pub(crate) fn pack(memory: &[u8], shape: &[usize], strides: &[usize]) -> Option<Bytes> {
    let (keys, outer) = shape.split_last()?;
    spare::filled(total(keys.div_ceil(32) * 4, outer), |words| {
        rows(memory, 1, shape, strides, &mut |row| {
            let (whole, rest) = row.as_chunks::<32>();
            for bools in whole {
                words.extend_from_slice(&word(bools).to_ne_bytes());
            }
            if !rest.is_empty() {
                let mut last = [0; 32];
                last[..rest.len()].copy_from_slice(rest);
                words.extend_from_slice(&word(&last).to_ne_bytes());
            }
        });
    })
}

/// Elements of `size` bytes, of which those of a row follow each other: each row with zeros up to a
/// whole word of 4 bytes.
pub(crate) fn pad(memory: &[u8], size: usize, shape: &[usize], strides: &[usize]) -> Option<Bytes> {
    let (keys, outer) = shape.split_last()?;
    let padding = (keys * size).next_multiple_of(4) - keys * size;
    spare::filled(total(keys * size + padding, outer), |padded| {
        rows(memory, size, shape, strides, &mut |row| {
            padded.extend_from_slice(row);
            padded.resize(padded.len() + padding, 0);
        });
    })
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
