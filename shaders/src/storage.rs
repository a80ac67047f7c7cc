//! How elements are stored.

/// Storage type of q, k, v and o. 16-bit elements are packed in pairs into u32 words; arithmetic is
/// f32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

/// Which elements of a tensor in 8-bit codes share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// Some tokens of a channel.
    Channels,
    /// The elements of one head of one token.
    Rows,
}

impl Scales {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Channels, Self::Rows];

    /// Name in labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Channels => "channels",
            Self::Rows => "rows",
        }
    }
}

impl Storage {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Elements that [`Kernel::Convert`](crate::Kernel::Convert) takes together.
    pub const CONVERTED_TOGETHER: u32 = 8;

    /// Name in labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Elements in a 16-byte unit, in which q, k, v are addressed.
    pub const fn unit_elements(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 8,
        }
    }

    /// Element type of a storage binding of such units.
    pub(crate) const fn unit_type(self) -> &'static str {
        match self {
            Self::F32 => "vec4<f32>",
            Self::F16 | Self::Bf16 => "vec4<u32>",
        }
    }

    /// Chunks of 4 elements in a unit.
    pub(crate) const fn unit_chunks(self) -> u32 {
        self.unit_elements() / 4
    }

    /// Units in a head.
    pub(crate) const fn units(self, head_dim: u32) -> u32 {
        head_dim / self.unit_elements()
    }
}
