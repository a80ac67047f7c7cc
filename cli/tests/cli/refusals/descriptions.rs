//! Refusals of the descriptions of devices and links for `--hardware`.

use super::of_program;
use crate::support::transcript_holds;

#[test]
fn descriptions() {
    transcript_holds("descriptions", &of_program(COMMANDS));
}

const COMMANDS: &[&str] = &[
    "EXPLAIN DIR/none.toml",
    "plan --explain --shape 1,64,8,2,64",
    "plan --shape 1,64,8,2,64 --probe",
    "plan --explain --shape 1,64,8,2,64 --measure 1",
    "plan --explain --shape 1,64,8,2,64 --probe --hardware x",
    "plan --explain --shape 1,64,8,2,64 --rank 0 --hardware DIR/hw",
    "plan --explain --shape 1,64,8,2,64 --probe --ranks 65",
    "EXPLAIN DIR/hw-syntax",
    "EXPLAIN DIR/hw-long",
    "EXPLAIN DIR/hw-no-device",
    "EXPLAIN DIR/hw-no-hosts",
    "EXPLAIN DIR/hw-twice",
    "EXPLAIN DIR/hw-staging",
    "EXPLAIN DIR/hw-unified",
    "EXPLAIN DIR/hw-tiles",
    "EXPLAIN DIR/hw-no-rate",
    "EXPLAIN DIR/hw-rate-dim",
    "EXPLAIN DIR/hw-zero-link",
    "EXPLAIN DIR/hw-negative",
    "EXPLAIN DIR/hw-between-unknown",
    "EXPLAIN DIR/hw-between-self",
    "EXPLAIN DIR/hw-unjoined",
    "EXPLAIN DIR/hw-no-inside",
    "EXPLAIN DIR/hw-place-device",
    "EXPLAIN DIR/hw-place-count",
    "EXPLAIN DIR/hw --dtype bf16",
    "plan --explain --shape 1,65536,8,2,64 --ranks 1024 --mesh 1x1024 --strategy line --placement contiguous --hardware DIR/hw-large",
    "plan --explain --shape 1,64,8,2,64 --ranks 3 --hardware DIR/hw",
];
