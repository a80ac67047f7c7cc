//! Attention of one block of queries against one block of keys, into a running state.
//!
//! For a query row with running state (m, l, a), and for each key j that it sees:
//!
//! ```text
//! x  = scale · q·k_j          (softcap c: c · tanh(x / c))
//! m' = max(m, x),  l' = l·e^(m − m') + e^(x − m'),  a' = a·e^(m − m') + e^(x − m')·v_j
//! ```
//!
//! (Milakov & Gimelshein 2018, §3.1.)
//!
//! # Bindings
//!
//! | number | name | holds |
//! |---|---|---|
//! | 0 | params | [`AttendParams`](crate::AttendParams) |
//! | 1 | q | `[batch, rows, heads, dim]`, strided, in 16-byte units |
//! | 2, 3 | k, v | the same; in the broadcast variant textures whose texels are such units (see `attend/subgroup.wgsl`) |
//! | 4 | state_a | f32 `[batch, rows, heads, dim]`, dense |
//! | 5 | state_ml | f32 `[batch, heads, rows, 2]`, dense: m and l |
//! | 6 | positions | u32: for each query head its KV head; from `keys_at` for each key its position; from `spans_at` for each class and query row the visible positions lo..hi as two words |
//! | 7 | work | u32: for each class `2·q_tiles + 1` starts; from `runs_at` the runs, two words each |
//! | 8 | bias | where the kernel reads [`BiasInput`](crate::BiasInput): `[batch, rows, heads, row]`, strided, in words or elements; columns are positions |
//!
//! # Work list
//!
//! A run is a range of keys `first..end`, `first` a multiple of the KV tile. For Q tile t of class
//! c, with `s = c·starts_class + 2t`, the runs `starts[s]..starts[s+1]` are full: every row of the
//! tile sees every key, and nothing is tested. The runs `starts[s+1]..starts[s+2]` are partial:
//! each element tests `lo <= position < hi`. A kernel that reads a bias tests in full runs as in
//! partial ones. Keys outside of all runs cost nothing. For every kernel except that of `attend/subgroup.wgsl`, a run
//! whose end is not a multiple of the KV tile must be partial.
//!
//! # NaN and infinity
//!
//! NaN and infinity pass through multiplications and additions to the rows that see them, and
//! through `weight_of`, because `exp2` may return any number for a NaN. In partial runs each
//! invisible element is replaced by selection before the kernel combines it with a number of the
//! row: its logit by [`EMPTY_M`](crate::EMPTY_M), its weight by 0, its value by 0 (0 · NaN would be
//! NaN). A row that saw no key in the whole call is not written.

pub(crate) mod matrix;
pub(crate) mod portable;
pub(crate) mod subgroup;
