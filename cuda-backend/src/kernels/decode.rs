//! Decoding: how heads lie together, and into how many parts the keys are cut. Pure functions of the call and the device.

use kyklos::Dtype;

use crate::{AttendKernel, HeadPack, PACKED_ROWS};

/// Blocks that a multiprocessor is to have at a time, so that while one waits for memory another one computes.
const BLOCKS_EACH: u64 = 2;

/// Fewest tiles of keys for a part: a state costs about as much to write and to merge as a tile to read.
const TILES_EACH: u32 = 4;

/// Runs of query heads with the same KV head, `kv_head_of[head]`, of at most [`PACKED_ROWS`] heads.
pub fn head_packs(kv_head_of: &[u32]) -> Vec<HeadPack> {
    let mut packs = Vec::new();
    let mut first = 0;
    for group in kv_head_of.chunk_by(|a, b| a == b) {
        for part in group.chunks(PACKED_ROWS as usize) {
            let count = u32::try_from(part.len()).expect("at most PACKED_ROWS");
            packs.push(HeadPack { first, count });
            first += count;
        }
    }
    packs
}

/// Parts into which the `kv_tiles` tiles of keys of each query tile are cut on a device of `multiprocessors`, for `groups`
/// query tiles (of all packs and batch entries) of so many rows. 1: cutting would gain nothing.
pub fn decode_parts(dtype: Dtype, groups: u64, rows: u32, kv_tiles: u32, multiprocessors: u32) -> u32 {
    let most = kv_tiles / TILES_EACH;
    // Of eight parts, for a block may have several.
    let blocks = groups * u64::from(AttendKernel::tile_blocks(dtype, rows, 8));
    let wanted = 8 * BLOCKS_EACH * u64::from(multiprocessors) / blocks.max(1);
    let parts = u32::try_from(wanted).unwrap_or(u32::MAX).min(most).max(1);
    // As few as give the longest part the same length.
    kv_tiles.max(1).div_ceil(kv_tiles.max(1).div_ceil(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_are_the_groups_of_kv_heads_cut_where_a_tile_is_full() {
        let pack = |first, count| HeadPack { first, count };
        assert_eq!(head_packs(&[0, 1, 2]), [pack(0, 1), pack(1, 1), pack(2, 1)]);
        // A rank may begin in the middle of a group.
        assert_eq!(head_packs(&[0, 0, 1, 1, 1, 0]), [pack(0, 2), pack(2, 3), pack(5, 1)]);
        assert_eq!(head_packs(&[7; 130]), [pack(0, 64), pack(64, 64), pack(128, 2)]);
    }

    #[test]
    fn a_device_is_filled_by_parts_that_are_worth_their_state() {
        let parts = |groups, tiles| decode_parts(Dtype::Bf16, groups, 4, tiles, 132);
        // 8 KV heads, 131072 keys in tiles of 64: 33 parts of at most 63 tiles take_within_budget 132 multiprocessors twice.
        assert_eq!(parts(8, 2048), 33);
        // In f32 a block has two parts of four rows.
        assert_eq!(decode_parts(Dtype::F32, 8, 4, 4096, 132), 66);
        // A full device gains nothing, nor do few keys.
        assert_eq!((parts(264, 2048), decode_parts(Dtype::F32, 264, 8, 2048, 132)), (1, 1));
        assert_eq!((parts(1, 7), parts(1, 8)), (1, 2));
        assert_eq!((parts(1, 0), parts(0, 1)), (1, 1));
        for tiles in 1..200 {
            for groups in [1, 3, 40, 1000] {
                let parts = parts(groups, tiles);
                let what = format!("{tiles} tiles, {groups} groups: {parts}");
                assert!(u64::from(parts) * groups <= 264.max(groups), "{what}");
                assert!(parts == 1 || tiles / parts >= TILES_EACH, "{what}");
                // One part fewer would make the longest one longer.
                assert!(parts == 1 || tiles.div_ceil(parts - 1) > tiles.div_ceil(parts), "{what}");
            }
        }
    }
}
