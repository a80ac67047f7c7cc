//! Refusals of `kyklos bench strategies`.

use super::Group;

pub(super) const BENCHES: Group = Group {
    title: "A bench of strategies",
    about: "Cells that do not fit are no refusals of the command: they are listed with the reason.",
    entries: &[
        ("bench strategies --output DIR/new --shape 1,64,8,2,64", "The batch entries are given apart."),
        (
            "bench strategies --output DIR/new --ranks 300",
            "Ranks of one process are threads; for more ranks use more processes.",
        ),
        (
            "bench strategies --output DIR/new --ranks 2 --rank 0",
            "Either one process has all ranks, or each has one.",
        ),
        ("bench strategies --output DIR/new --rejoin", "A bench goes on in a new group, not in the old one."),
        ("bench strategies --output DIR/cells --device cpu", "Times of unlike groups do not compare."),
        ("bench strategies --output DIR/no-cells --device cpu", "The file was not written by this command."),
        ("launch -n 2 -- bench strategies --output DIR/new --ranks 2", "Every process is one rank already."),
        (
            "launch -n 2 -- bench strategies --output DIR/new --transport in-process",
            "Channels join threads of one process.",
        ),
    ],
};
