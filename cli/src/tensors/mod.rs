//! Tensors in files: inputs, outputs, masks and biases.

pub(crate) mod bias;
mod copy;
mod file;
mod gradient;
mod header;
mod input;
pub(crate) mod output;
mod positioned;
pub(crate) mod results;
mod sections;
mod shard;

pub(crate) use self::copy::{COPY_ID_BYTES, CopyId};
pub(crate) use self::file::InputFile;
pub(crate) use self::input::{GivenGradient, Source};
pub(crate) use self::sections::{DIGEST_BYTES, Digest};
pub(crate) use self::shard::TensorKind;
