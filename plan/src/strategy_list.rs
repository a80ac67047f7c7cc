//! The closed list of strategies. A plan names its strategy, so this list is in a layer below the
//! plans. The steps and all other facts of each strategy are in its own file in `strategy/kinds/`.

use crate::named::named_enum;

/// Passes the list to the macro `$then`: here it becomes [`Strategy`], in `strategy/registry.rs`
/// the map to the facts.
///
/// **To add a strategy, add a line here**: variant, name, module in `strategy/kinds/`, summary. The
/// order is that of [`Strategy::ALL`]. If the plans of a strategy may equal the plans of another
/// one, it must come after that one.
macro_rules! strategies {
    ($then:ident) => {
        $then! {
            Dense, "dense", dense, "One rank does everything.";
            Ring, "ring", ring, "Keys and values go round the ring, queries stay.";
            Ulysses, "ulysses", ulysses, "An all-to-all exchanges tokens for heads: each rank attends to the whole sequence for some of the heads.";
            Unified, "unified", unified, "Ulysses inside a shard, a ring over the shards. Takes any mesh.";
            Chunked, "chunked", chunked, "As unified, with heads in chunks: the next chunk travels while this one is attended to.";
            Bidirectional, "bidirectional", bidirectional, "As unified, with keys and values sent both ways round the ring, each half as far.";
            Pipelined, "pipelined", pipelined, "As unified, with every shard's keys and values in four parts, each sent on and attended to when it arrives.";
            TwoWay, "two-way", two_way, "As unified, with one half of every shard's keys and values sent each way round the ring.";
            Line, "line", line, "As unified, with keys and values sent both ways to the ends of the line: no link joins the last shard to the first.";
            Gather, "gather", gather, "As unified, with keys and values sent straight to every shard that sees them.";
            PassQ, "pass-q", pass_q, "As unified, with queries sent to the keys, and running states sent back.";
            Tree, "tree", tree, "As pass-q, with queries handed on along a tree, and running states merged on the way back.";
            Relay, "relay", relay, "As unified, with KV heads that several ranks of a shard need sent between shards once, in pieces.";
        }
    };
}
pub(crate) use strategies;

macro_rules! define_strategy {
    ($($list:tt)*) => {
        named_enum! {
            /// How the work is shared among the ranks.
            Strategy, "strategy": $($list)*
        }
    };
}
strategies!(define_strategy);
