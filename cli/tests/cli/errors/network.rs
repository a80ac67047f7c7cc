//! Refusals of options of the network between ranks.

use super::Group;

pub(super) const NETWORK: Group = Group {
    title: "The network between ranks",
    about: "Settings of the links, checked before the first connection.",
    entries: &[
        ("@ --ranks 2 --link-mtu 9000", "In-process ranks send no packets."),
        ("@ --ranks 2 --transport quic --link-mtu 1200", "Every link carries larger packets."),
        ("@ --ranks 2 --transport quic --network tcp --link-mtu 9000", "TCP chooses its own packet size."),
        ("@ --ranks 2 --transport quic --congestion bbr", "There are two algorithms."),
        ("@ --ranks 2 --transport quic --congestion fixed:9MB", "Bytes are counted in powers of two."),
        (
            "@ --ranks 2 --transport quic --link-mtu 9000 --congestion fixed:64KiB",
            "The window must hold several packets.",
        ),
        ("launch -n 2 -- @ --congestion fixed:5GiB", "The window is for one link."),
        ("@ --ranks 4 --transport quic --net-memory 20MiB", "Every connection needs a part of the memory."),
        ("@ --ranks 2 --lanes 2", "In-process ranks have no lanes."),
        ("@ --ranks 2 --shared-memory off", "In-process ranks hand their messages over."),
        ("launch -n 2 -- @ --lanes 17", "Each lane is a port and a thread of every rank."),
    ],
};
