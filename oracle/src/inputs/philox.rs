//! Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3" (SC 2011). It is a keyed bijection of 128-bit counters. So each number of a sequence
//! is computed without the numbers before it.

/// The 128 random bits that belong to `counter` under `key`, least significant word first.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        [c0, c1, c2, c3] = [high(p1) ^ c1 ^ k0, p1 as u32, high(p0) ^ c3 ^ k1, p0 as u32];
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

fn high(product: u64) -> u32 {
    (product >> 32) as u32
}

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Key increments: the golden ratio and √3 − 1, as fractions of 2³².
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_answers_of_random123_come_out() {
        // From the file `kat_vectors` of the Random123 distribution.
        let vectors = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in vectors {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }
}
