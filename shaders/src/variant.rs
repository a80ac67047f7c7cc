//! How attention is computed, for many query rows and for few.

use std::fmt;
use std::str::FromStr;

use crate::{BiasInput, Storage};

/// Who made a GPU, as far as the choice of kernels depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// 256 registers in a thread.
    Amd,
    /// 128 registers in a thread of a group of 16.
    Intel,
    /// 255 registers in a thread; fewer let more threads run.
    Nvidia,
    /// No GPU, but a driver that computes on the host's cores.
    Software,
    /// Apple, phones, and all that is not known, such as a browser's device. The kernels for it
    /// need at most 128 registers.
    Other,
}

impl Vendor {
    /// Name in labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd => "amd",
            Self::Intel => "intel",
            Self::Nvidia => "nvidia",
            Self::Software => "software",
            Self::Other => "other",
        }
    }
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttendVariant {
    /// Tiles in workgroup memory; runs within WebGPU's default limits, and without shuffles needs
    /// no feature.
    Portable {
        /// Query rows of one thread: 1, 2 or 4.
        rows_per_thread: u32,
        /// Keys of one thread: 4 or 8.
        keys_per_thread: u32,
        /// Whether the 8 threads of a row find its largest logit by shuffles, in subgroups of 8 to
        /// 64 lanes, and not through workgroup memory. The results are the same bits.
        shuffles: bool,
    },
    /// One subgroup is one workgroup, query rows lie in its lanes, keys and values are broadcast
    /// from lane to lane. Made for drivers that compute on the host's cores; needs subgroups of
    /// exactly this size.
    SubgroupBroadcast {
        /// Lanes of a subgroup.
        subgroup_size: u32,
        /// Query rows that one lane carries in registers.
        rows_per_lane: u32,
    },
    /// Products on matrix units, f16 times f16 summed in f32; needs the native extensions for that,
    /// f16 storage, and a head dim that is a multiple of the matrices' size.
    Cooperative(Matrices),
}

/// How a workgroup uses matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrices {
    /// Rows and columns of a matrix: 8 or 16.
    pub size: u32,
    /// Lanes of a subgroup: a multiple of `size`, at most its square.
    pub subgroup_size: u32,
    /// Whether a subgroup may have half as many lanes: the driver's compiler decides for each
    /// kernel, and the kernel asks when it runs. Then there are twice as many subgroups.
    pub halves: bool,
    /// Subgroups of a workgroup.
    pub subgroups: u32,
}

impl Matrices {
    /// Most subgroups that a workgroup may have.
    pub(crate) const fn most_subgroups(self) -> u32 {
        if self.halves { 2 * self.subgroups } else { self.subgroups }
    }
}

impl AttendVariant {
    /// Sizes for which the broadcast variant is made.
    pub const SUBGROUP_SIZES: [u32; 3] = [4, 8, 16];
    // The built-in choices, for calls without a measured choice: the next two functions.

    /// The portable variant for heads of `head_dim` elements on a GPU of this vendor.
    ///
    /// More rows and keys in a thread read less from workgroup memory for each product; too many
    /// spill registers. The numbers are what the vendors' compilers (Mesa's) say, in
    /// `tests/vendors/ceilings.toml`: the largest without a spill, and for NVIDIA with 16 warps
    /// up to 64 elements, 12 above; for software what runs fastest on Mesa's.
    pub const fn portable(vendor: Vendor, head_dim: u32, shuffles: bool) -> Self {
        let (rows_per_thread, keys_per_thread) = match (vendor, head_dim) {
            (Vendor::Amd | Vendor::Nvidia | Vendor::Software, 0..=128) => (4, 8),
            (Vendor::Amd | Vendor::Software, 129..=256) => (2, 8),
            (Vendor::Amd | Vendor::Software, _) => (1, 8),
            (Vendor::Nvidia, 129..=256) => (2, 4),
            (Vendor::Intel, 0..=64) => (2, 8),
            (Vendor::Intel, 65..=128) => (1, 8),
            (_, 0..=128) => (2, 4),
            (_, _) => (1, 4),
        };
        Self::Portable { rows_per_thread, keys_per_thread, shuffles }
    }

    /// The broadcast variant with the number of rows in a lane that pays off for heads of
    /// `head_dim` elements.
    pub const fn subgroup_broadcast(subgroup_size: u32, head_dim: u32) -> Self {
        // Unrolled statements grow with rows × dim; beyond some hundred, compile time and register spills
        // dominate.
        let rows_per_lane = match head_dim {
            0..=64 => 3,
            65..=128 => 2,
            _ => 1,
        };
        Self::SubgroupBroadcast { subgroup_size, rows_per_lane }
    }

    /// The portable variants that exist. With 8 rows in a thread a tile would not fit WebGPU's
    /// default workgroup memory.
    pub fn portable_choices(shuffles: bool) -> impl Iterator<Item = Self> {
        [[1, 4], [1, 8], [2, 4], [2, 8], [4, 4], [4, 8]].into_iter().map(
            move |[rows_per_thread, keys_per_thread]| Self::Portable {
                rows_per_thread,
                keys_per_thread,
                shuffles,
            },
        )
    }

    /// The broadcast variants for heads of `head_dim` elements whose unrolled text compiles in
    /// seconds.
    pub fn subgroup_broadcast_choices(subgroup_size: u32, head_dim: u32) -> impl Iterator<Item = Self> {
        (1..=4)
            .filter(move |rows| *rows == 1 || rows * head_dim <= MOST_UNROLLED)
            .map(move |rows_per_lane| Self::SubgroupBroadcast { subgroup_size, rows_per_lane })
    }

    /// Name for reports and files; [`FromStr`] reads it.
    pub fn name(self) -> String {
        match self {
            Self::Portable { rows_per_thread, keys_per_thread, shuffles } => {
                let shuffles = if shuffles { "shuffles-" } else { "" };
                format!("portable-{shuffles}{rows_per_thread}x{keys_per_thread}")
            }
            Self::SubgroupBroadcast { subgroup_size, rows_per_lane } => {
                format!("subgroup-broadcast-{subgroup_size}x{rows_per_lane}")
            }
            Self::Cooperative(Matrices { size, subgroup_size, halves, subgroups }) => {
                let half = if halves { format!("{}-", subgroup_size / 2) } else { String::new() };
                format!("cooperative-{size}x{size}-{half}{subgroup_size}x{subgroups}")
            }
        }
    }
}

impl FromStr for AttendVariant {
    type Err = UnknownVariant;

    /// Reads exactly the names that [`Self::name`] writes. Does not check whether a device has such
    /// a kernel.
    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        let unknown = || UnknownVariant { text: text.to_owned() };
        let (family, numbers) = ["portable-shuffles-", "portable-", "subgroup-broadcast-", "cooperative-"]
            .iter()
            .find_map(|family| Some((*family, text.strip_prefix(family)?)))
            .ok_or_else(unknown)?;
        let numbers: Vec<u32> = numbers
            .split(['x', '-'])
            .map(|number| number.parse().map_err(|_| unknown()))
            .collect::<Result<_, _>>()?;
        let variant = match (family, &numbers[..]) {
            ("portable-shuffles-" | "portable-", [rows, keys]) => Self::Portable {
                rows_per_thread: *rows,
                keys_per_thread: *keys,
                shuffles: family == "portable-shuffles-",
            },
            ("subgroup-broadcast-", [size, rows]) => {
                Self::SubgroupBroadcast { subgroup_size: *size, rows_per_lane: *rows }
            }
            ("cooperative-", [rows, cols, least @ .., most, subgroups]) if rows == cols => {
                Self::Cooperative(Matrices {
                    size: *rows,
                    subgroup_size: *most,
                    halves: !least.is_empty(),
                    subgroups: *subgroups,
                })
            }
            _ => return Err(unknown()),
        };
        // Signs and leading zeros parse too.
        if variant.name() == text { Ok(variant) } else { Err(unknown()) }
    }
}

/// Query rows of a lane times elements of a head beyond which the broadcast variant's text takes
/// long to compile.
const MOST_UNROLLED: u32 = 384;

/// A text that is not the name of an attention variant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVariant {
    text: String,
}

impl fmt::Display for UnknownVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "kernel `{}` is not known: use a name like portable-2x4, subgroup-broadcast-8x3 or cooperative-16x16-32x4",
            self.text
        )
    }
}

impl std::error::Error for UnknownVariant {}

/// Parameters of an attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttendKernel {
    /// How it is computed.
    pub variant: AttendVariant,
    /// Storage type of q, k, v.
    pub storage: Storage,
    /// Elements of a head: a multiple of 8 up to [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
    pub head_dim: u32,
    /// Whether logits pass c · tanh(x / c).
    pub softcap: bool,
    /// Which mask or bias tensor it reads. The matrix variant reads none.
    pub bias: BiasInput,
}

/// Extent of the tiles that an attention kernel works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Query rows of one workgroup.
    pub q_rows: u32,
    /// Keys in which its work list counts.
    pub kv_cols: u32,
}

/// How attention of few query rows is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeVariant {
    /// Keys in threads, then columns of v in threads; runs within WebGPU's default limits and needs
    /// no feature.
    Portable,
    /// One subgroup is one workgroup, keys lie in its lanes. Made for drivers that compute on the
    /// host's cores; needs subgroups of exactly this size.
    Lanes {
        /// Lanes of a subgroup.
        subgroup_size: u32,
    },
}

impl DecodeVariant {
    /// Name for reports.
    pub fn name(self) -> String {
        match self {
            Self::Portable => "portable".to_owned(),
            Self::Lanes { subgroup_size } => format!("lanes-{subgroup_size}"),
        }
    }
}

/// Parameters of a kernel for few query rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeKernel {
    /// How it is computed.
    pub variant: DecodeVariant,
    /// Storage type of q, k, v.
    pub storage: Storage,
    /// Elements of a head: a multiple of 8 up to [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
    pub head_dim: u32,
    /// Query rows, times the query heads that a workgroup takes: at most
    /// [`DecodeVariant::most_slots`].
    pub slots: u32,
    /// Whether logits pass c · tanh(x / c).
    pub softcap: bool,
    /// Which mask or bias tensor it reads. The matrix variant reads none.
    pub bias: BiasInput,
}
