//! Refusals of masks: their texts, and numbers that do not fit the keys or the batch entries.

use kyklos::Mask;

use super::{of_calls, of_program};
use crate::support::transcript_holds;

const COMMANDS: &[&str] = &[
    "ATTEND --mask casual",
    "ATTEND --mask bias",
    "ATTEND --mask window:1",
    "ATTEND --mask documents:8,64",
    "ATTEND --mask documents:0,0",
    "ATTEND --mask documents:0,32",
    "ATTEND --mask valid:65",
    "attend --shape 2,64,8,2,64 --mask valid:1,2,3",
    "attend --shape 2,64,8,2,64 --mask valid:1,2+valid:1,2,3",
    "attend --shape 3,64,8,2,64 --mask causal//full",
    "attend --shape 2,64,8,2,64 --mask causal//valid:3,4",
    "attend --shape 2,64,8,2,64 --mask documents:0,64//documents:0,32",
    "ATTEND --mask slices:0..8x0..65",
    "ATTEND --mask slices:8..0x0..4",
    "ATTEND --mask slices:8x4",
];

#[test]
fn masks() {
    let two: Mask = "causal//full".parse().unwrap();
    let calls = of_calls([
        ("Mask::per_entry with an empty list", Mask::per_entry(Vec::new()).unwrap_err()),
        (
            "Mask::and of masks for 2 and for 3 batch entries",
            two.and(Mask::key_padding(vec![1, 2, 3])).unwrap_err(),
        ),
    ]);
    transcript_holds("masks", &(of_program(COMMANDS) + &calls));
}
