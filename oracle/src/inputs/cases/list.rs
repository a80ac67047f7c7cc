//! The cases of [`super::cases`], grouped by their difficulty.

use super::Case;
use crate::oracle::{OracleMask, OracleTerm};

pub(super) fn bias() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    let valid = |lengths: &[u64]| OracleTerm::Valid(lengths.to_vec());
    vec![
        Case::new("mask tensor", [1, 65, 65], [4, 2, 32], full()).mask_tensor(1, 1),
        Case::new("mask tensor for each head, causal", [2, 33, 33], [6, 2, 16], causal()).mask_tensor(2, 6),
        Case::new("mask tensor, fewer queries", [2, 31, 65], [3, 1, 64], causal())
            .q_offset(20)
            .mask_tensor(2, 1),
        Case::new("bias for each head", [1, 33, 33], [4, 2, 32], full()).bias(1, 4),
        Case::new(
            "bias for each batch entry, causal and padded",
            [3, 33, 33],
            [2, 1, 16],
            causal().and(valid(&[33, 20, 0])),
        )
        .bias(3, 1),
        Case::new("bias, softcap and sinks", [1, 65, 65], [4, 1, 64], causal())
            .scaled(3.0)
            .softcap(2.0)
            .sinks(2.0)
            .bias(1, 1),
        Case::new("bias, one query over many keys", [2, 1, 300], [8, 2, 64], full()).bias(2, 8),
        Case::new("mask tensor, two queries over many keys", [1, 2, 270], [4, 2, 32], full())
            .mask_tensor(1, 4),
        Case::new("mask tensor that empties tiles", [1, 45, 270], [2, 1, 16], full()).mask_tensor(1, 2),
        Case::new("bias that empties tiles", [1, 45, 270], [2, 2, 16], causal()).q_offset(225).bias(1, 1),
        Case::new("large negative bias that empties tiles", [1, 45, 270], [2, 2, 16], full())
            .bias(1, 1)
            .stand_ins(),
        Case::new("large negative bias, one query over many keys", [2, 1, 300], [8, 2, 64], full())
            .bias(2, 8)
            .stand_ins(),
        Case::new("NaN that a mask tensor hides", [1, 65, 65], [4, 2, 16], full())
            .mask_tensor(1, 4)
            .poisoned(0, 40, 0, f32::NAN)
            .poisoned(0, 64, 1, f32::INFINITY),
        Case::new("NaN that a bias hides", [1, 65, 65], [2, 1, 32], causal()).bias(1, 1).poisoned(
            0,
            33,
            0,
            f32::NAN,
        ),
    ]
}

/// Attention bias tensors whose row all queries share.
pub(super) fn shared_rows() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    vec![
        Case::new("key mask for each batch entry", [3, 33, 65], [4, 2, 32], full()).key_mask(3, 1),
        Case::new("key mask for each head, causal", [2, 33, 33], [6, 2, 16], causal()).key_mask(1, 6),
        Case::new("key mask for each entry and head, fewer queries", [2, 31, 65], [3, 1, 64], causal())
            .q_offset(20)
            .key_mask(2, 3),
        Case::new("bias over keys for each entry and head", [2, 33, 33], [4, 2, 32], causal()).key_bias(2, 4),
        Case::new("bias over keys, softcap and sinks", [3, 65, 65], [4, 1, 64], causal())
            .scaled(3.0)
            .softcap(2.0)
            .sinks(2.0)
            .key_bias(3, 1),
        Case::new("bias over an odd number of keys", [1, 45, 31], [2, 1, 16], full()).key_bias(1, 2),
        Case::new("key mask, one query over many keys", [2, 1, 300], [8, 2, 64], full()).key_mask(2, 1),
        Case::new("bias over keys, two queries over many keys", [3, 2, 270], [4, 2, 32], full())
            .key_bias(3, 4),
        Case::new("NaN that a key mask hides", [2, 65, 65], [4, 2, 16], full())
            .key_mask(2, 1)
            .poisoned(0, 50, 0, f32::NAN)
            .poisoned(1, 5, 1, f32::INFINITY),
        Case::new("NaN that a bias over keys hides", [2, 65, 65], [2, 1, 32], causal())
            .key_bias(2, 1)
            .poisoned(0, 50, 0, f32::NAN),
    ]
}

pub(super) fn sizes() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    vec![
        Case::new("one query, one key", [1, 1, 1], [1, 1, 8], full()),
        Case::new("one token, causal, grouped", [2, 1, 1], [4, 2, 16], causal()),
        Case::new("seven rows", [1, 7, 7], [2, 2, 16], causal()),
        Case::new("one row short of a tile", [1, 31, 31], [4, 2, 32], causal()),
        Case::new("one row beyond a tile", [2, 33, 33], [4, 4, 64], full()),
        Case::new("one row beyond two tiles", [1, 65, 65], [4, 1, 64], causal()),
        Case::new("two rows beyond four tiles", [1, 130, 130], [2, 1, 32], causal()),
        Case::new("three batch entries", [3, 33, 31], [2, 1, 16], full()),
        Case::new("eight query heads to a key head", [1, 33, 33], [8, 1, 16], causal()),
        Case::new("groups of eight", [1, 7, 31], [16, 2, 8], full()),
        Case::new("three heads, odd over any split", [1, 31, 31], [3, 3, 16], causal()),
        Case::new("six query heads in groups of two", [1, 33, 33], [6, 3, 16], causal()),
        Case::new("head dim 72", [1, 33, 33], [2, 1, 72], causal()),
        Case::new("head dim 80", [1, 31, 33], [2, 2, 80], full()),
        Case::new("head dim 96", [1, 33, 31], [2, 1, 96], causal()),
        Case::new("head dim 128", [1, 65, 65], [2, 1, 128], causal()),
        Case::new("head dim 256", [1, 33, 33], [2, 1, 256], causal()),
        Case::new("one query over many keys", [2, 1, 130], [8, 2, 64], full()),
        Case::new("more queries than keys", [1, 130, 7], [2, 2, 32], full()),
    ]
}

pub(super) fn masks() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    let window = |left, right| OracleTerm::Window { left, right };
    let documents = |ends: &[u64]| OracleTerm::Documents(ends.to_vec());
    let valid = |lengths: &[u64]| OracleTerm::Valid(lengths.to_vec());
    vec![
        Case::new("window on both sides", [1, 65, 65], [2, 1, 32], full().and(window(5, 3))),
        Case::new("window to the left", [1, 65, 65], [2, 1, 32], full().and(window(7, 0))),
        Case::new("window to the right", [1, 65, 65], [2, 1, 32], full().and(window(0, 9))),
        Case::new("window without left bound", [1, 33, 33], [2, 2, 16], full().and(window(-1, 4))),
        Case::new("window without right bound", [1, 33, 33], [2, 2, 16], full().and(window(4, -1))),
        Case::new("window of the key itself", [1, 33, 33], [2, 1, 16], full().and(window(0, 0))),
        Case::new("causal window wider than a tile", [1, 130, 130], [2, 1, 32], causal().and(window(40, -1))),
        Case::new("documents", [1, 65, 65], [4, 2, 32], full().and(documents(&[0, 1, 20, 33, 65]))),
        Case::new("causal documents", [2, 65, 65], [2, 1, 32], causal().and(documents(&[0, 31, 33, 64, 65]))),
        Case::new("an empty document", [1, 31, 31], [2, 1, 16], full().and(documents(&[0, 12, 12, 31]))),
        Case::new("one valid length", [2, 33, 33], [2, 2, 32], full().and(valid(&[19]))),
        Case::new("a valid length for each entry", [3, 33, 65], [2, 1, 32], full().and(valid(&[65, 1, 34]))),
        Case::new("an entry without a valid key", [3, 31, 33], [4, 2, 16], full().and(valid(&[33, 0, 17]))),
        Case::new("causal with valid lengths", [2, 33, 33], [2, 1, 16], causal().and(valid(&[12, 33]))),
        Case::new(
            "all masks at once",
            [2, 65, 65],
            [4, 2, 32],
            causal().and(window(9, -1)).and(documents(&[0, 24, 40, 65])).and(valid(&[60, 33])),
        ),
        Case::new("decoding into a cache with room", [2, 1, 130], [8, 2, 64], causal().and(window(60, -1)))
            .q_offset(99),
        Case::new(
            "slices: two runs of keys for a row",
            [1, 65, 65],
            [4, 2, 32],
            full().and(slices(&["0..65x0..7", "0..40x20..33", "40..65x30..61/causal"])),
        ),
        Case::new(
            "slices of every part",
            [2, 65, 65],
            [2, 1, 16],
            full().and(slices(&[
                "0..20x5..40/inverse",
                "10..50x33..60/both",
                "20..65x0..30/causal",
                "3..4x0..65",
            ])),
        ),
        Case::new(
            "slices that share a prefix, padded",
            [2, 33, 65],
            [6, 2, 32],
            causal().and(slices(&["0..50x0..12", "32..45x32..45", "45..65x45..65"])).and(valid(&[65, 50])),
        )
        .q_offset(32),
        Case::new(
            "slices, one query over many keys",
            [1, 1, 300],
            [8, 2, 64],
            full().and(slices(&["0..1x0..20", "0..1x70..131", "0..1x210..297"])),
        ),
        Case::new("a chunk after a cache", [1, 33, 65], [4, 2, 32], causal()).q_offset(32),
        Case::new("offset into the middle", [1, 31, 130], [2, 1, 32], causal()).q_offset(50),
        Case::new("offset in documents", [1, 31, 65], [2, 1, 32], full().and(documents(&[0, 40, 65])))
            .q_offset(30),
        Case::new("rows beyond the keys of a window", [1, 33, 31], [2, 1, 16], full().and(window(3, 3)))
            .q_offset(12),
        Case::new("no row sees a key", [1, 7, 33], [2, 1, 16], full().and(window(2, 2))).q_offset(100),
    ]
}

/// One mask for each batch entry.
pub(super) fn entries() -> Vec<Case> {
    let causal = OracleMask::causal;
    let each = |masks: &str| masks.parse::<OracleMask>().expect("masks of entries");
    vec![
        Case::new(
            "documents of each entry",
            [2, 65, 65],
            [4, 2, 32],
            each("documents:0,7,33,65//documents:0,40,65"),
        ),
        Case::new(
            "causal documents of each entry",
            [3, 130, 130],
            [2, 1, 32],
            each("documents:0,31,64,130//full//documents:0,1,100,130").and(OracleTerm::Causal),
        ),
        Case::new(
            "slices of each entry: other numbers of runs for a row",
            [2, 65, 65],
            [4, 2, 32],
            each("slices:0..65x0..7,0..40x20..33,40..65x30..61/causal//slices:0..65x5..60,9..40x61..64"),
        ),
        Case::new(
            "another kind of mask for each entry, one without a key",
            [3, 33, 65],
            [6, 2, 32],
            each("window:9,3//valid:0//slices:32..65x10..40/inverse,40..65x50..65"),
        )
        .q_offset(32),
        Case::new(
            "masks of entries, a length for each, softcap and sinks",
            [2, 33, 33],
            [2, 1, 16],
            causal()
                .and(OracleTerm::Valid(vec![30, 17]))
                .and(OracleTerm::Entries(vec![each("documents:0,12,33"), each("window:6,-1")])),
        )
        .scaled(3.0)
        .softcap(2.0)
        .sinks(1.0),
        Case::new(
            "one query over many keys, documents of each entry",
            [2, 1, 300],
            [8, 2, 64],
            each("documents:0,70,220,300//documents:0,150,300"),
        )
        .q_offset(200),
        Case::new(
            "one query over the slices of each entry",
            [2, 1, 300],
            [8, 2, 32],
            each("slices:0..1x0..20,0..1x70..131,0..1x210..297//slices:0..1x40..90"),
        ),
        Case::new(
            "masks of entries and a key mask",
            [2, 33, 65],
            [4, 2, 32],
            each("causal//documents:0,40,65"),
        )
        .q_offset(20)
        .key_mask(2, 1),
        Case::new(
            "masks of entries and a bias for each head",
            [2, 31, 31],
            [3, 1, 64],
            each("causal//window:4,9"),
        )
        .bias(2, 3),
        Case::new(
            "NaN in the document of another entry",
            [2, 65, 65],
            [4, 2, 16],
            each("documents:0,20,65//documents:0,50,65"),
        )
        .poisoned(0, 10, 0, f32::NAN)
        .poisoned(1, 60, 1, f32::INFINITY),
    ]
}

pub(super) fn scores() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    let valid = |lengths: &[u64]| OracleTerm::Valid(lengths.to_vec());
    vec![
        Case::new("thirty times the usual scores", [1, 65, 65], [2, 1, 64], full()).scaled(30.0),
        Case::new("thirty times the usual scores, causal", [1, 130, 130], [4, 2, 32], causal()).scaled(30.0),
        Case::new("logits of a million", [1, 47, 47], [4, 2, 32], causal()).scaled(1e5),
        Case::new("logits of a million, few queries", [2, 3, 65], [2, 1, 16], full()).scaled(1e5),
        Case::new("negative scale", [1, 33, 33], [2, 1, 32], causal()).scaled(-1.0),
        Case::new("scale zero", [1, 33, 33], [2, 1, 32], causal()).scaled(0.0),
        Case::new("softcap", [1, 65, 65], [4, 2, 32], causal()).scaled(3.0).softcap(1.5),
        Case::new("softcap on extreme scores", [1, 33, 33], [2, 1, 64], full()).scaled(30.0).softcap(20.0),
        Case::new("sinks, causal", [2, 33, 33], [6, 2, 32], causal()).sinks(1.0),
        Case::new("sinks where rows see nothing", [2, 31, 33], [4, 2, 16], full().and(valid(&[33, 0])))
            .sinks(0.0),
        Case::new("sinks above all scores", [1, 65, 65], [3, 1, 64], full()).sinks(5.0),
        Case::new("sinks below extreme scores", [1, 33, 33], [2, 2, 32], causal()).scaled(10.0).sinks(4.0),
        Case::new("sinks, one query over many keys", [1, 1, 130], [8, 2, 64], full()).sinks(3.0),
    ]
}

/// Slices in the notation of the command line.
fn slices(texts: &[&str]) -> OracleTerm {
    let mask: OracleMask = format!("slices:{}", texts.join(",")).parse().expect("slices");
    mask.terms.into_iter().next().expect("one term")
}

/// Poison is in one key head only. With grouped heads, rows of the other key head must not change.
pub(super) fn poison() -> Vec<Case> {
    let valid = |lengths: &[u64]| OracleMask::full().and(OracleTerm::Valid(lengths.to_vec()));
    let documents = OracleMask::full().and(OracleTerm::Documents(vec![0, 20, 33]));
    let window = OracleMask::full().and(OracleTerm::Window { left: 4, right: 2 });
    vec![
        Case::new("NaN in padding", [2, 33, 33], [4, 2, 32], valid(&[19, 30]))
            .poisoned(0, 19, 0, f32::NAN)
            .poisoned(0, 32, 1, f32::NAN)
            .poisoned(1, 30, 1, f32::NAN),
        Case::new("infinity in padding", [2, 33, 33], [2, 1, 32], valid(&[32, 1]))
            .poisoned(0, 32, 0, f32::INFINITY)
            .poisoned(1, 1, 0, f32::NEG_INFINITY)
            .poisoned(1, 17, 0, f32::INFINITY),
        Case::new("NaN where no key is valid", [2, 7, 7], [2, 1, 16], valid(&[7, 0])).poisoned(
            1,
            0,
            0,
            f32::NAN,
        ),
        Case::new("NaN in the last key, causal", [1, 65, 65], [4, 2, 32], OracleMask::causal()).poisoned(
            0,
            64,
            1,
            f32::NAN,
        ),
        Case::new("infinity in the middle, causal", [1, 65, 65], [2, 1, 32], OracleMask::causal()).poisoned(
            0,
            40,
            0,
            f32::INFINITY,
        ),
        Case::new("NaN in one document", [1, 33, 33], [2, 1, 16], documents).poisoned(0, 19, 0, f32::NAN),
        Case::new("NaN that leaves the window", [1, 65, 65], [4, 2, 16], window)
            .poisoned(0, 32, 0, f32::NAN)
            .poisoned(0, 0, 1, f32::NEG_INFINITY),
        Case::new(
            "NaN between the slices of a row",
            [1, 65, 65],
            [4, 2, 16],
            OracleMask::full().and(slices(&["0..65x0..20", "0..30x40..65", "50..65x20..26"])),
        )
        .poisoned(0, 30, 0, f32::NAN)
        .poisoned(0, 23, 1, f32::INFINITY),
    ]
}
