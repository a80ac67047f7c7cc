//! How elements are stored, and how WGSL reads and writes them without any extension.

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

    /// Functions `chunk_0(unit)` and, for 16-bit types, `chunk_1(unit)`: 4 elements as `vec4<f32>`.
    pub(crate) const fn unpack_functions(self) -> &'static str {
        match self {
            Self::F32 => "fn chunk_0(unit: vec4<f32>) -> vec4<f32> { return unit; }",
            Self::F16 => {
                "fn chunk_0(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y));
}
fn chunk_1(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w));
}"
            }
            Self::Bf16 => {
                "fn pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
fn chunk_0(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.x), pair(unit.y)); }
fn chunk_1(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.z), pair(unit.w)); }"
            }
        }
    }

    /// Functions `texel_0(texel)` and, for 16-bit types, `texel_1(texel)`: the same for a unit read
    /// as four words.
    pub(crate) const fn texel_functions(self) -> &'static str {
        match self {
            Self::F32 => "fn texel_0(texel: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(texel); }",
            Self::F16 | Self::Bf16 => {
                "fn texel_0(texel: vec4<u32>) -> vec4<f32> { return chunk_0(texel); }
fn texel_1(texel: vec4<u32>) -> vec4<f32> { return chunk_1(texel); }"
            }
        }
    }

    /// For 16-bit types, `rounded(x)`: the bits of x rounded to nearest, ties to even.
    /// `pack2x16float` may truncate, and promises nothing for values that overflow.
    pub(crate) const fn round_function(self) -> &'static str {
        match self {
            Self::F32 => "",
            Self::F16 => {
                "fn rounded(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) { return sign | 0x7e00u; }
    if (magnitude >= 0x477ff000u) { return sign | 0x7c00u; }
    if (magnitude >= 0x38800000u) {
        return sign | ((magnitude + 0xfffu + ((magnitude >> 13u) & 1u) - 0x38000000u) >> 13u);
    }
    // Below the normal numbers: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
    return sign | (bitcast<u32>(bitcast<f32>(magnitude) + 0.5f) - 0x3f000000u);
}"
            }
            Self::Bf16 => {
                "fn rounded(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}"
            }
        }
    }
}
