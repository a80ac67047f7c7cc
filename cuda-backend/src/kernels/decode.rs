//! Split-KV decoding: which query heads share a tile, and into how many parts the keys are split.

use kyklos::Dtype;

use crate::{AttendKernel, HeadPack, PACKED_ROWS};

/// Blocks per multiprocessor, so that one computes while another one waits for memory.
const BLOCKS_EACH: u64 = 2;

/// Smallest part, in tiles of keys: to write and merge the state of a part costs about as much as
/// to read one tile.
const TILES_EACH: u32 = 4;

/// Runs of consecutive query heads with the same KV head, `kv_head_of[head]`, of at most
/// [`PACKED_ROWS`] heads each.
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

/// The number of parts into which the `kv_tiles` tiles of keys of each query tile are split, on a
/// device with so many `multiprocessors`, for `groups` query tiles (of all packs and batch entries)
/// of `rows` rows each. 1: a split gains nothing.
pub fn decode_parts(dtype: Dtype, groups: u64, rows: u32, kv_tiles: u32, multiprocessors: u32) -> u32 {
    let most = kv_tiles / TILES_EACH;
    // For eight parts, because a block may compute several.
    let blocks = groups * u64::from(AttendKernel::tile_blocks(dtype, rows, 8));
    let wanted = 8 * BLOCKS_EACH * u64::from(multiprocessors) / blocks.max(1);
    let parts = u32::try_from(wanted).unwrap_or(u32::MAX).min(most).max(1);
    // The smallest number of parts with the same longest part.
    kv_tiles.max(1).div_ceil(kv_tiles.max(1).div_ceil(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_are_the_groups_of_kv_heads_split_where_a_tile_is_full() {
        let pack = |first, count| HeadPack { first, count };
        assert_eq!(head_packs(&[0, 1, 2]), [pack(0, 1), pack(1, 1), pack(2, 1)]);
        // The heads of a rank may begin in the middle of a group.
        assert_eq!(head_packs(&[0, 0, 1, 1, 1, 0]), [pack(0, 2), pack(2, 3), pack(5, 1)]);
        assert_eq!(head_packs(&[7; 130]), [pack(0, 64), pack(64, 64), pack(128, 2)]);
    }

    #[test]
    fn parts_fill_the_device_and_are_no_smaller_than_their_state_is_worth() {
        let parts = |groups, tiles| decode_parts(Dtype::Bf16, groups, 4, tiles, 132);
        // 8 KV heads, 131072 keys in tiles of 64: 33 parts of at most 63 tiles take_within_budget 132
        // multiprocessors twice.
        assert_eq!(parts(8, 2048), 33);
        // In f32 a block computes two parts of four rows.
        assert_eq!(decode_parts(Dtype::F32, 8, 4, 4096, 132), 66);
        // A full device gains nothing, and few keys are not split.
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
