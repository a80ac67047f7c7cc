//! Shares of described devices and links.

use super::*;
use kyklos::{Dtype, Mask};

fn shape(kv_heads: u32, tokens: u32) -> Shape {
    let dtype = Dtype::F16;
    Shape { batch: 1, q_len: tokens, kv_len: tokens, q_heads: kv_heads, kv_heads, head_dim: 128, dtype }
}

fn owner() -> OwnerSpeed {
    let device = DeviceSpeed { pairs_per_s: 8e10, step_s: 1e-4 };
    OwnerSpeed { device, alone_pairs_per_s: 8e10, copies_bytes_per_s: 1e12 }
}

fn helper(pairs_per_s: f64, bytes_per_s: f64) -> HelperSpeed {
    let link = LinkSpeed { up_bytes_per_s: bytes_per_s, down_bytes_per_s: bytes_per_s, hop_s: 1e-4 };
    let device = DeviceSpeed { pairs_per_s, step_s: 1e-4 };
    HelperSpeed { device, link, memory_bytes: None, slowness: 1.0 }
}

/// Every row of every head is computed once.
fn check_cover(forecast: &Forecast, shape: &Shape) {
    let mut seen = vec![0_u32; (shape.kv_heads * shape.q_len) as usize];
    let shares = forecast.shares.iter().flat_map(|share| &share.parts);
    for part in forecast.own.iter().chain(shares) {
        for head in part.kv_heads.clone() {
            for row in part.rows.clone() {
                seen[(head * shape.q_len + row) as usize] += 1;
            }
        }
    }
    assert!(seen.iter().all(|count| *count == 1), "{forecast:?}");
}

#[test]
fn shares_follow_speeds_and_cover_the_call() {
    for (kv_heads, tokens, mask) in [
        (40, 8192, Mask::full()),
        (1, 10_000, Mask::causal()),
        (3, 1000, Mask::causal()),
        (2, 64, Mask::full()),
    ] {
        let (shape, call) = (shape(kv_heads, tokens), Call { mask, ..Call::default() });
        let cuts = Cuts::new(&call, &shape, 2).unwrap();
        for helpers in [vec![], vec![helper(8e10, 1e11)], vec![helper(4e10, 1e11), helper(8e10, 1e11)]] {
            let forecast = cuts.forecast(&owner(), &helpers);
            check_cover(&forecast, &shape);
            assert!(forecast.total_s <= forecast.alone_s);
        }
    }
    let (shape, call) = (shape(40, 32_768), Call::default());
    let cuts = Cuts::new(&call, &shape, 1).unwrap();
    let equal = cuts.forecast(&owner(), &[helper(8e10, 1e11)]);
    assert!((equal.shares[0].fraction - 0.5).abs() < 0.04 && equal.gain() > 1.85, "{equal:?}");
    let third = cuts.forecast(&owner(), &[helper(4e10, 1e11)]);
    assert!((third.shares[0].fraction - 1.0 / 3.0).abs() < 0.04, "{third:?}");
}

#[test]
fn no_block_of_rows_is_short() {
    for length in (0..3000).chain([6401, 9217, 12_801, 1 << 20, u32::MAX - 64]) {
        for most in [1, 2, 3, 5, 16, 36] {
            let blocks = cut(64..64 + length, most);
            let ends = blocks.iter().map(|rows| rows.end);
            assert!(blocks.iter().map(|rows| rows.start).eq([64].into_iter().chain(ends).take(blocks.len())));
            assert!(
                blocks.len() <= most as usize && blocks.last().is_some_and(|rows| rows.end == 64 + length)
            );
            let least = LEAST_ROWS - ROWS;
            assert!(
                blocks.len() == 1 || blocks.iter().all(|rows| rows.end - rows.start > least),
                "{blocks:?}"
            );
        }
    }
}

#[test]
fn a_helper_that_does_not_pay_is_left_out() {
    let (shape, call) = (shape(40, 8192), Call::default());
    let cuts = Cuts::new(&call, &shape, 2).unwrap();
    // A slow link, a slow device, and no memory.
    for useless in
        [helper(8e10, 1e7), helper(1e9, 1e11), HelperSpeed { memory_bytes: Some(1000), ..helper(8e10, 1e11) }]
    {
        let forecast = cuts.forecast(&owner(), &[useless]);
        assert!(forecast.shares.is_empty() && forecast.gain() == 1.0, "{forecast:?}");
        let both = cuts.forecast(&owner(), &[useless, helper(8e10, 1e11)]);
        assert_eq!(both.shares.iter().map(|share| share.helper).collect::<Vec<_>>(), [1]);
    }
}

#[test]
fn a_helper_that_slows_the_owner_down_as_much_as_it_helps_is_left_out() {
    let (shape, call) = (shape(40, 8192), Call::default());
    let cuts = Cuts::new(&call, &shape, 1).unwrap();
    // Two on the cores of one machine: each has half of them while both compute.
    let owner = OwnerSpeed { device: DeviceSpeed { pairs_per_s: 4e10, step_s: 0.0 }, ..owner() };
    let forecast = cuts.forecast(&owner, &[helper(4e10, 1e11)]);
    assert!(forecast.shares.is_empty(), "{forecast:?}");
}

#[test]
fn less_memory_means_smaller_pieces() {
    let (shape, call) = (shape(40, 8192), Call::default());
    let cuts = Cuts::new(&call, &shape, 1).unwrap();
    let head_bytes = 4 * 8192 * 128 * 2;
    let small = HelperSpeed { memory_bytes: Some(2 * 2 * head_bytes * 2), ..helper(8e10, 1e11) };
    let forecast = cuts.forecast(&owner(), &[small]);
    assert!(forecast.shares[0].parts.iter().all(|part| part.kv_heads.len() <= 2), "{forecast:?}");
}

#[test]
fn gradients_are_cut_into_whole_heads() {
    let (shape, call) = (shape(3, 4096), Call { gradients: true, ..Call::default() });
    let cuts = Cuts::new(&call, &shape, 1).unwrap();
    let forecast = cuts.forecast(&owner(), &[helper(8e10, 1e11)]);
    check_cover(&forecast, &shape);
    assert!(forecast.shares[0].parts.iter().all(|part| part.rows == (0..4096)), "{forecast:?}");
}

#[test]
fn slow_links_pay_for_long_sequences_only() {
    // 2.5 GbE, equal devices: pairs grow with the square of tokens, bytes with tokens.
    let gain = |tokens| {
        let shape = shape(40, tokens);
        Cuts::new(&Call::default(), &shape, 1).unwrap().forecast(&owner(), &[helper(8e10, 2.8e8)]).gain()
    };
    let gains = [4096, 16_384, 65_536, 262_144].map(gain);
    assert!(gains.is_sorted() && gains[0] == 1.0 && gains[3] > 1.7, "{gains:?}");
}
