//! The elements of a tensor in its memory.

use crate::error::{Error, Result};

/// The elements of a tensor in its memory, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) shape: [usize; 4],
    pub(super) strides: [usize; 4],
    pub(super) first: usize,
}

impl View {
    pub(super) fn dense(shape: [usize; 4]) -> Self {
        let [_, tokens, heads, dim] = shape;
        Self { shape, strides: [tokens * heads * dim, heads * dim, dim, 1], first: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn is_dense(&self) -> bool {
        let dense = Self::dense(self.shape);
        // The stride of an extent of 1 has no meaning.
        self.len() == 0
            || (0..4).all(|axis| self.shape[axis] == 1 || self.strides[axis] == dense.strides[axis])
    }

    /// One past the last element in memory; 0 without elements.
    pub(super) fn reach(&self) -> usize {
        let last = |(extent, stride): (&usize, &usize)| (extent - 1) * stride;
        if self.len() == 0 {
            0
        } else {
            self.first + self.shape.iter().zip(&self.strides).map(last).sum::<usize>() + 1
        }
    }

    /// Whether it is not dense, and has at least half of the elements up to its last one.
    pub(super) fn is_close(&self) -> bool {
        !(self.is_dense() && self.first == 0) && self.reach() <= 2 * self.len()
    }

    /// Refuses elements that are outside of `elements`, share memory, or are apart inside a head.
    pub(super) fn fits(&self, elements: usize) -> Result<()> {
        let refuse = |what: String| {
            let Self { shape, strides, first } = self;
            Err(Error::request(
                format!("a tensor of shape {shape:?} with strides {strides:?} from element {first}: {what}"),
                "give each element its own place in memory, and the elements of a head one after the other",
            ))
        };
        if self.shape.iter().try_fold(1, |elements: usize, extent| elements.checked_mul(*extent)).is_none() {
            return refuse("it has more elements than memory can hold".to_owned());
        }
        if self.len() == 0 {
            return Ok(());
        }
        if self.shape[3] > 1 && self.strides[3] != 1 {
            return refuse("the elements of a head are not adjacent".to_owned());
        }
        let reach = self.shape.iter().zip(&self.strides).try_fold(self.first, |sum, (extent, stride)| {
            sum.checked_add((extent - 1).checked_mul(*stride)?)
        });
        if reach.is_none_or(|last| last >= elements) {
            return refuse(format!("it reaches beyond its memory of {elements} elements"));
        }
        let mut axes: Vec<(usize, usize)> = self.strides.into_iter().zip(self.shape).collect();
        axes.retain(|(_, extent)| *extent > 1);
        axes.sort_unstable();
        if axes.windows(2).any(|pair| pair[1].0 < pair[0].0 * pair[0].1)
            || axes.iter().any(|axis| axis.0 == 0)
        {
            return refuse("elements share memory".to_owned());
        }
        Ok(())
    }
}
