//! Exact attention over a sequence that is split across ranks.
//!
//! Each rank has a [`Session`]: its endpoint in a group and its device. The ranks make the same
//! calls; each passes its own tokens, and gets the output of its own queries.
//!
//! ```
//! # #[cfg(feature = "cpu")] {
//! use kyklos::backend::Device;
//! use kyklos::local::on_threads;
//! use kyklos::{Attention, Mask, Session, Tensor, in_process_group};
//!
//! // Two ranks in this process, with 64 of 128 tokens each; 4 heads of dim 32.
//! let outputs = on_threads(in_process_group(2), |group| {
//!     let mut session = Session::new(group, Device::cpu());
//!     let x = Tensor::new([1, 64, 4, 32], vec![0.5_f32; 64 * 4 * 32])?;
//!     let output = session.attend(&Attention::new().mask(Mask::causal()), &x, &x, &x)?;
//!     output.o.to_vec::<f32>()
//! });
//! for output in outputs {
//!     assert_eq!(output?.len(), 64 * 4 * 32);
//! }
//! # }
//! # Ok::<(), kyklos::Error>(())
//! ```
//!
//! Groups over a network are in `kyklos::transport::quic`; `kyklos::launch` joins the group of a
//! launcher. Devices are in [`backend`]: cores, GPUs, and a caller's own `wgpu::Device`.
//! [`Attention`] has the options of a call, [`Session::prepare`] makes many calls after one vote.
//!
//! # Below a session
//!
//! A parallel strategy is a pure function from a problem, a mesh and a placement to a
//! [`plan::Plan`] for each rank: a list of steps over named buffers. The same plan is checked,
//! priced, explained and executed.
//!
//! ```text
//! problem + mesh + placement ── strategy ──> plan ──┬─> check     proves it over all ranks
//!                                                   ├─> simulate  prices it on described devices and links
//!                                                   ├─> explain   prints it
//!                                                   └─> exec      runs it on any Backend and Collective
//! ```
//!
//! # Begin
//!
//! In your `Cargo.toml`, or with the path of a copy of the repository, `{ path =
//! "../kyklos/runtime" }`:
//!
//! ```toml
//! [dependencies]
//! kyklos = "0.2"
//! ```
//!
//! | feature | gives | by default |
//! |---|---|---|
//! | `cpu`, `wgpu` | the devices; a program needs one of them | yes |
//! | `quic` | groups of processes: `kyklos::transport::quic` | no |
//! | `launch` | the group of a launcher, `kyklos::launch::from_env`; it brings `quic` | no |
//!
//! [`transport`] is the crate `kyklos-transport`, and `kyklos::launch` the crate `kyklos-launch`.
//! Compile with `--release`: unoptimised kernels are slow. Rust 1.89 or later.
//!
//! ```
//! use kyklos::{Attention, Mask, Session, Tensor, backend::Device, local::on_threads};
//!
//! // Two ranks on threads of this process. Each has its part of the sequence.
//! let outputs = on_threads(kyklos::in_process_group(2), |group| {
//!     let tokens = [5, 3][group.rank().0 as usize];
//!     let mut session = Session::new(group, Device::cpu());
//!     let values = Tensor::new([1, tokens, 4, 32], vec![0.5_f32; tokens * 4 * 32])?;
//!     let output = session.attend(&Attention::new().mask(Mask::causal()), &values, &values, &values)?;
//!     output.o.to_vec::<f32>()
//! });
//! assert_eq!(outputs[1].as_ref().unwrap().len(), 3 * 4 * 32);
//! # Ok::<(), kyklos::Error>(())
//! ```
//!
//! | example in `runtime/examples/` | shows | needs |
//! |---|---|---|
//! | `hello` | two ranks of one process | nothing more |
//! | `forty_layers` | many calls on one session | nothing more |
//! | `kv_cache` | a prompt, then decoding, over a cache that the ranks share | nothing more |
//! | `two_ranks_quic` | ranks over encrypted sockets | `quic` |
//! | `unlike_devices` | GPUs and the CPU in one call | nothing more |
//! | `from_launcher` | one rank in a process, started by torchrun, `mpirun`, `srun` or Kubernetes | `launch` |
//! | `scale` | what thousands of ranks would take | nothing more |
//!
//! To write a backend: [`backend`], and the crate `kyklos-backend-suite` with its device that
//! computes nothing.
//!
//! # Contract
//!
//! - **Validation.** Constructors refuse wrong requests ([`AttentionProblem::new`], [`Mesh::new`],
//!   [`Placement::new`]); [`plan::ProvedPlans`] exists only after the proof of a plan set, and
//!   executors accept nothing else. Backends and the executor trust both.
//! - **Errors** are one enum, [`Error`]; its variants say where the fault is. A refused request has
//!   a [`Remedy`].
//! - **Blocking.** Nothing here blocks on a future, except functions that say so. The executor is
//!   an `async fn` without `Send` bounds: native callers give each rank its own thread, and in a
//!   browser all ranks share one.
//! - **Shapes** are `[batch, seq, heads, dim]`; scores, softmax and running state are f32 whatever
//!   the storage type.

pub mod backend;
mod call;
mod clock;
pub mod collect;
pub mod collective;
mod error;
mod exec;
pub mod host;
#[cfg(not(target_arch = "wasm32"))]
pub mod local;
pub mod machine;
mod meter;
mod session;
mod tensor;

pub use call::{Attention, Execution, MAX_LABEL_BYTES};
pub use clock::{Clock, SystemClock};
pub use error::{Error, Result};
pub use exec::{DeviceOutput, Executor, Inputs, LoweredPlan, NoObserver, Observer, RunOptions};
pub use meter::{Meter, RankReport, Span, Timeline};
pub use session::{
    CacheOptions, CachedCalls, CallShapes, DeviceCollective, Gradients, KvCache, Output, Prepared, Saved,
    Session, SessionOptions, SharedTokens,
};
pub use tensor::{Element, Tensor};

/// The error of what makes plans: [`Error`] is made from it.
pub use kyklos_plan::Error as PlanError;
pub use kyklos_plan::{
    AttentionProblem, BiasKind, BiasTensor, BlockWork, Deal, Dtype, MAX_RANKS, Mask, MaskClass, MaskSlice,
    Mesh, Piece, PieceKind, Placement, PlacementKind, Rank, Remedy, Results, RowSpan, Run, SlicePart, Spans,
    Split, Strategy, TILE_KEYS, TOKENS_PER_SCALE, TileRun, TileShape, TokenRuns, WireFormat, deal_tokens,
    meshes_by_bytes, placed_meshes_by_bytes, plan, plan_backward, plan_backward_placed, plan_forward,
    plan_placed, plan_rows, simulate,
};

#[cfg(feature = "launch")]
pub use kyklos_launch as launch;
pub use kyklos_transport as transport;
pub use kyklos_transport::{Group, in_process_group};

/// The crates whose types are in this API: buffers of bytes, storage types, and wgpu's devices and
/// buffers.
#[cfg(feature = "wgpu")]
pub use ::wgpu;
pub use {::bytes, ::half};

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
