//! Tensors in files: inputs, outputs, and the tensors of masks and biases.

pub(crate) mod input;
pub(crate) mod output;
pub(crate) mod pairs;
mod positioned;
