//! How large a problem may be.

use crate::error::{Error, Result};
use crate::problem::AttentionProblem;

impl AttentionProblem {
    /// Refuses more than numbers can count, or than a call would ever get through.
    pub(super) fn check_size(&self) -> Result<()> {
        let &Self { batch, q_len, kv_len, q_heads, head_dim, q_offset, .. } = self;
        let positions = u64::from(q_len) + u64::from(q_offset);
        if positions.max(u64::from(kv_len)) > u64::from(MAX_POSITION) {
            return Err(Error::request(
                format!("the sequence reaches position {}", positions.max(u64::from(kv_len))),
                format!("positions stay below {MAX_POSITION}"),
            ));
        }
        let elements =
            u128::from(batch) * u128::from(q_len.max(kv_len)) * u128::from(q_heads) * u128::from(head_dim);
        if elements > MAX_ELEMENTS {
            return Err(Error::request(
                format!("a tensor of this shape has {elements} elements"),
                format!(
                    "one tensor holds at most {MAX_ELEMENTS} elements; use fewer tokens, heads or batch entries"
                ),
            ));
        }
        if elements == 0 && batch > MAX_EMPTY_BATCH {
            return Err(Error::request(
                format!("{batch} batch entries without tokens"),
                format!("use at most {MAX_EMPTY_BATCH}, or tokens"),
            ));
        }
        Ok(())
    }
}

/// Kernels get positions as u32, and compare them with values that are larger by one.
const MAX_POSITION: u32 = 1 << 31;
/// So that byte counts of f32 state fit 63 bits with room to add them up.
const MAX_ELEMENTS: u128 = 1 << 56;
/// Each entry takes time, and without tokens no memory sets a limit.
const MAX_EMPTY_BATCH: u32 = 1 << 24;
