//! Refusals of helpers and of their invitations.

use super::of_program;
use crate::support::transcript_holds;

#[test]
fn helpers() {
    transcript_holds("helpers", &of_program(COMMANDS));
}

const COMMANDS: &[&str] = &[
    "help-out kyklos1.nothing",
    "help-out TOKEN --device tpu",
    "help-out TOKEN --memory much",
    "KYKLOS_JOIN=x help-out --device cpu",
    "helpers invite ../x --address studio",
    "helpers invite kitchen --address studio:29700",
    "helpers invite kitchen --port 0",
    "helpers remove kitchen",
    "KYKLOS_ANNOUNCE=no help-out",
    "helpers forecast --device tab",
    "helpers forecast --helper-speed 0",
    "helpers forecast --pairs-per-s many",
    "helpers forecast --link wifi",
    "helpers forecast --wire f4",
];
