//! The instructions in f32 arithmetic.

use half::bf16;

use super::{SIDE, Tiles, holds_tile};

#[derive(Default)]
pub(super) struct Registers([[[f32; SIDE]; SIDE]; 8]);

impl Tiles for Registers {
    fn zero<const T: usize>(&mut self) {
        self.0[T] = Default::default();
    }

    fn load<const T: usize>(&mut self, from: &[f32], stride: usize) {
        assert!(holds_tile(from.len(), stride));
        for (row, from) in self.0[T].iter_mut().zip(from.chunks(stride)) {
            row.copy_from_slice(&from[..SIDE]);
        }
    }

    fn store<const T: usize>(&self, into: &mut [f32], stride: usize) {
        assert!(holds_tile(into.len(), stride));
        for (row, into) in self.0[T].iter().zip(into.chunks_mut(stride)) {
            into[..SIDE].copy_from_slice(row);
        }
    }

    fn add_product<const C: usize, const A: usize, const B: usize>(&mut self) {
        let elements = |word: f32| {
            let [low, high]: [u16; 2] = bytemuck::cast(word);
            [low, high].map(|bits| bf16::from_bits(bits).to_f32())
        };
        for row in 0..SIDE {
            for word in 0..SIDE {
                let a = elements(self.0[A][row][word]);
                for column in 0..SIDE {
                    let b = elements(self.0[B][word][column]);
                    let sum = &mut self.0[C][row][column];
                    *sum = a[1].mul_add(b[1], a[0].mul_add(b[0], *sum));
                }
            }
        }
    }
}
