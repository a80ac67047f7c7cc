//! The strategies: a file each, with its steps and all other facts about it.

pub(super) mod bidirectional;
pub(super) mod chunked;
pub(super) mod dense;
pub(super) mod gather;
pub(super) mod line;
pub(super) mod pass_q;
pub(super) mod pipelined;
pub(super) mod relay;
pub(super) mod ring;
pub(super) mod tree;
pub(super) mod two_way;
pub(super) mod ulysses;
pub(super) mod unified;
