//! Decoding: how heads lie together, and into how many parts the keys are cut. Pure functions of the call and the device.

use crate::{HeadPack, PACKED_ROWS};

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

/// Parts into which the `kv_tiles` tiles of keys of each query tile are cut on a device of `multiprocessors`, where one part
/// would make `blocks` blocks (query tiles · packs · batch entries). 1: cutting would gain nothing.
pub fn decode_parts(blocks: u64, kv_tiles: u32, multiprocessors: u32) -> u32 {
    let wanted = (BLOCKS_EACH * u64::from(multiprocessors)) / blocks.max(1);
    let most = kv_tiles / TILES_EACH;
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
        // 8 KV heads, 131072 keys in tiles of 64: 33 parts of at most 63 tiles fill 132 multiprocessors twice.
        assert_eq!(decode_parts(8, 2048, 132), 33);
        // A full device gains nothing, nor do few keys.
        assert_eq!(decode_parts(264, 2048, 132), 1);
        assert_eq!((decode_parts(1, 7, 132), decode_parts(1, 8, 132)), (1, 2));
        assert_eq!((decode_parts(1, 0, 132), decode_parts(0, 1, 132)), (1, 1));
        for tiles in 1..200 {
            for blocks in [1, 3, 40, 1000] {
                let parts = decode_parts(blocks, tiles, 132);
                assert!(
                    u64::from(parts) * blocks <= 264.max(blocks),
                    "{tiles} tiles, {blocks} blocks: {parts}"
                );
                assert!(parts == 1 || tiles / parts >= TILES_EACH, "{tiles} tiles, {blocks} blocks: {parts}");
                // One part fewer would make the longest one longer.
                assert!(parts == 1 || tiles.div_ceil(parts - 1) > tiles.div_ceil(parts));
            }
        }
    }
}
