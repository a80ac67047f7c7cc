//! Refusals of what a call writes and serves.

use super::Group;

pub(super) const OUTPUTS: Group = Group {
    title: "Output files",
    about: "",
    entries: &[
        ("@ --output /", "A folder cannot be the output file."),
        ("@ --output /dev/null", "Only a regular file is replaced."),
        ("attend --input DIR/good --output DIR/good", "The result would destroy its input."),
        ("@ --report page-{rank}.html", "Rank 0 writes one page."),
        ("@ --record DIR/good/records", "The folder cannot be created."),
        (
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 @ --metrics 127.0.0.1:65535",
            "Each rank of a host takes the next port.",
        ),
        ("@ --metrics 0.0.0.0:9000", "By default only this machine may read metrics."),
        ("@ --watch localhost:80", "A page is served at an address, not at a name."),
        (
            "@ --watch 127.0.0.1:9400 --metrics 127.0.0.1:9400",
            "Two servers cannot have one port. Each rank of a host serves its metrics at the next port.",
        ),
        ("doctor DIR/folder", "There is no record to read."),
    ],
};
