//! What the two ends say to each other.

use kyklos::backend::{Extent, Layout, StateShape};
use kyklos::{BiasKind, Dtype};
use serde::{Deserialize, Serialize};

/// Raised with every change of these types. Both ends must have the same.
pub const VERSION: u32 = 3;

/// Names a buffer of the device; never used twice.
pub(crate) type BufferId = u64;

/// Pairs a request with its reply; grows.
pub(crate) type RequestId = u64;

/// The first frame of a tab.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) version: u32,
    /// From the link that the tab was opened with.
    pub(crate) token: String,
    pub(crate) device: DeviceFacts,
}

/// The device of a tab, as far as the host must know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DeviceFacts {
    pub(crate) name: String,
    pub(crate) driver: String,
    pub(crate) kernel: String,
    pub(crate) is_software: bool,
    /// For each of [`Dtype::ALL`], the head dims for which there is a kernel.
    pub(crate) head_dims: [Vec<u16>; 3],
    pub(crate) limits: Limits,
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Of the largest buffer.
    pub buffer_bytes: u64,
    /// Of all buffers together.
    pub total_bytes: u64,
    /// Of the sums of a running state, as `Backend::most_state_bytes`.
    pub state_bytes: Option<u64>,
}

/// From the host to the tab. Data, where there is any, follows the header of the frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Command {
    /// The tab is let in.
    Welcome,
    /// The tab is not let in, or the work has ended.
    End {
        reason: String,
    },
    /// Answered at once, also while the device works.
    Ping,
    /// Requests up to this one end soon.
    Cancel {
        up_to: RequestId,
    },
    Alloc {
        id: BufferId,
        label: String,
        bytes: u64,
    },
    /// A new buffer that holds the data.
    Upload {
        id: BufferId,
        label: String,
    },
    /// Overwrites a part with the data.
    Write {
        id: BufferId,
        offset: u64,
    },
    Free {
        id: BufferId,
    },
    /// Frees memory that the backend keeps for later.
    ReleaseIdle,
    Download {
        request: RequestId,
        id: BufferId,
        start: u64,
        end: u64,
    },
    ResetState(State),
    Attend {
        request: RequestId,
        step: Box<AttendStep>,
    },
    Merge {
        into: State,
        from: State,
    },
    Finalize {
        state: State,
        sinks: Vec<f32>,
        dtype: WireDtype,
        o: BufferId,
        lse: BufferId,
    },
    Repack {
        from: (BufferId, WireLayout),
        into: (BufferId, WireLayout),
        extent: [u64; 4],
    },
    Convert {
        from: WireElements,
        into: WireElements,
        shape: [u64; 4],
        overflow: Option<BufferId>,
    },
    Wait {
        request: RequestId,
    },
}

/// From the tab to the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Hello(Box<Hello>),
    /// The tab is there: answers a ping, and tells that data arrives.
    Pong,
    /// The bytes of a download follow.
    Downloaded {
        request: RequestId,
    },
    /// An attend step was submitted, or the device has ended its work.
    Done {
        request: RequestId,
    },
    /// Pieces of attend steps that are done, since the start.
    Pieces {
        done: u64,
    },
    /// The device or the page failed: nothing more is done.
    Failed {
        reason: String,
    },
}

/// A running state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) a: BufferId,
    pub(crate) ml: BufferId,
    /// Batch entries, rows, heads, elements of a head.
    pub(crate) shape: [u64; 4],
}

/// The arguments of an attend step. Tiles are not sent: the tab makes those of its own kernel from
/// the rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AttendStep {
    pub(crate) dtype: WireDtype,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) q: (BufferId, WireLayout),
    pub(crate) k: (BufferId, WireLayout),
    pub(crate) v: (BufferId, WireLayout),
    pub(crate) kv_head_of: Vec<u32>,
    /// Consecutive positions of the keys: first, count.
    pub(crate) key_runs: Vec<(u32, u32)>,
    /// For each class of the mask, the interval of positions that each row sees.
    pub(crate) rows: Vec<Vec<(u32, u32)>>,
    pub(crate) bias: Option<(bool, BufferId, WireLayout)>,
    pub(crate) fixed_order: bool,
    pub(crate) inference: bool,
    pub(crate) state: State,
}

/// Index in [`Dtype::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireDtype(u8);

/// Offset, strides of batch entries, rows and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireLayout([u64; 4]);

/// A dense tensor in one of its forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WireElements {
    Stored { id: BufferId, first: u64, dtype: WireDtype },
    Coded { codes: BufferId, scales: BufferId, by_channel: bool },
}

impl From<Dtype> for WireDtype {
    fn from(dtype: Dtype) -> Self {
        let index = Dtype::ALL.iter().position(|one| *one == dtype).unwrap_or_default();
        Self(u8::try_from(index).unwrap_or_default())
    }
}

impl WireDtype {
    pub(crate) fn get(self) -> Option<Dtype> {
        Dtype::ALL.get(usize::from(self.0)).copied()
    }
}

impl From<Layout> for WireLayout {
    fn from(Layout { offset, batch_stride, row_stride, head_stride }: Layout) -> Self {
        Self([offset, batch_stride, row_stride, head_stride].map(wide))
    }
}

impl WireLayout {
    /// None beyond the address space of this end.
    pub(crate) fn get(self) -> Option<Layout> {
        let [offset, batch_stride, row_stride, head_stride] = narrow_all(self.0)?;
        Some(Layout { offset, batch_stride, row_stride, head_stride })
    }
}

impl State {
    pub(crate) fn shape(&self) -> Option<StateShape> {
        let [batch, rows, heads, dim] = narrow_all(self.shape)?;
        Some(StateShape { batch, rows, heads, dim })
    }
}

/// The extent that travelled.
pub(crate) fn extent(extent: [u64; 4]) -> Option<Extent> {
    let [batch, rows, heads, row_bytes] = narrow_all(extent)?;
    Some(Extent { batch, rows, heads, row_bytes })
}

pub(crate) fn bias_kind(is_mask: bool) -> BiasKind {
    if is_mask { BiasKind::Mask } else { BiasKind::Additive }
}

pub(crate) fn wide(n: usize) -> u64 {
    n as u64
}

pub(crate) fn narrow_all<const N: usize>(numbers: [u64; N]) -> Option<[usize; N]> {
    let mut all = [0; N];
    for (into, from) in all.iter_mut().zip(numbers) {
        *into = usize::try_from(from).ok()?;
    }
    Some(all)
}
