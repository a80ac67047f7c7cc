//! Arrays at the boundary: their axes, types and places, copies in and out.

pub(super) mod arrays;
pub(super) mod axes;
pub(super) mod inputs;
mod kind;
pub(super) mod outputs;
pub(super) mod place;
pub(super) mod strided;
mod torch;
