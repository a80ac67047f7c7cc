//! Bytes between the ranks of one group.
//!
//! # Contract
//!
//! - A [`Transport`] belongs to one rank. It knows ranks, tags and bytes; it knows no tensors.
//! - `post_*` never blocks and starts the work at once. What it returns is a [`Posted`] completion,
//!   a future that is `Send` and needs no particular runtime to poll it.
//! - A message is a list of parts. Both sides know the number and the length of the parts
//!   beforehand, from their plan; a length that comes from the wire only confirms them and never
//!   sizes an allocation.
//! - A message is matched by (source, [`Tag`]). A send completes when the payload is no longer
//!   needed by the transport, which is at the earliest when the receiver has posted the matching
//!   receive.
//! - Before an operation the ranks vote ([`Transport::agree`]). In one round trip they learn
//!   whether all of them run the same plan, and the note of each rank.
//! - Every completion ends by the deadline of its call: with its value or with a [`TransportError`]
//!   that names the peer, the message and the bytes done.
//! - Failure is collective. The first failure that the coordinator (rank 0) sees becomes
//!   everyone's: all completions that are outstanding and all later calls end with
//!   [`TransportError::Aborted`], and the flag of [`Transport::stop_flag`] rises so that long
//!   computations can give up between two pieces.
//! - A deadline ends its own call only; the caller decides whether the operation continues, and
//!   calls [`Transport::abort`] if not.
//! - Over QUIC two detectors find a rank that blocks others: silence of its I/O, and a [`Pulse`]
//!   without a beat while others wait for it. In one process there are deadlines only.
//! - After an abort, the ranks that call [`Transport::reform`] form the next group in the same
//!   processes, renumbered in their old order. Two groups never both continue: the next group has
//!   more than half of the ranks of the last one.
//! - A rank that leaves with [`Transport::close`] is not dead: the others continue without it,
//!   unless they still need a message or a vote of it. After an abort, close too: over QUIC only
//!   then the others are sure to know of the abort.
//!
//! # Implementations
//!
//! - [`in_process_group`]: ranks as threads (or tasks) of one process; hands payload over without
//!   copying it. The reference implementation, and the only one on wasm, where nothing watches
//!   deadlines.
//! - `quic` (feature `quic`): ranks as processes, over UDP or in TCP streams, with certificates on
//!   both sides. `WIRE.md` has its bytes, `docs/adr/0004-quic-transport.md` what it does not do
//!   yet.
//!
//! One conformance suite (`tests/transport/conformance`) holds both to this contract.
//!
//! ```
//! use std::time::Duration;
//! use kyklos_transport::{Rank, Tag, in_process_group};
//!
//! let group = in_process_group(2);
//! let (tag, second) = (Tag { op: 0, message: 0 }, Duration::from_secs(1));
//! let sent = group[0].post_send(Rank(1), tag, vec!["to rank 1".into()], second);
//! let received = group[1].post_recv(Rank(0), tag, &[9], second);
//! assert_eq!(pollster::block_on(received)?, ["to rank 1"]);
//! pollster::block_on(sent)?;
//! # Ok::<(), kyklos_transport::TransportError>(())
//! ```
#![forbid(unsafe_code)]

mod ballot;
mod calls;
mod error;
mod figures;
mod in_process;
mod membership;
mod posted;
mod pulse;
#[cfg(feature = "quic")]
pub mod quic;
mod rank;
mod recorder;
pub mod regular_file;
mod spans;
mod transport;
pub mod wire;

pub use error::{Abort, AbortCause, BootstrapKind, Pending, TransportError};
pub use figures::ConnectionFigures;
pub use in_process::in_process_group;
pub use membership::{Claim, MOST_CLAIMS};
pub use posted::Posted;
pub use pulse::{Pulse, Work};
pub use rank::{MAX_NOTE_BYTES, MAX_RANKS, Progress, Rank, RefusalReason, Tag, Taken, Vote};
pub use recorder::{Event, EventKind, Outstanding, PeerRecord, Recorded, Recorder};
pub use transport::{Group, Regroup, Transport};
#[cfg(feature = "quic")]
pub use wire::harmless::harmless;
