//! Calls of `attend`: their operands, their work lists, and how they are cut into dispatches.

pub(super) mod attend;
pub(super) mod decode;
pub(super) mod operands;
pub(super) mod work;
