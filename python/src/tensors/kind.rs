//! Types of elements.

use dlpark::ffi::{DLDataType, DLDataTypeCode};
use kyklos::Dtype;

/// The type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Number(Dtype),
    /// One byte each.
    Bool,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(dtype) => dtype.fmt(f),
            Self::Bool => f.write_str("bool"),
        }
    }
}

impl Kind {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.bytes(),
            Self::Bool => 1,
        }
    }

    pub(super) fn of(dtype: DLDataType) -> Option<Self> {
        Some(match dtype {
            DLDataType::F32 => Self::Number(Dtype::F32),
            DLDataType::F16 => Self::Number(Dtype::F16),
            DLDataType::BF16 => Self::Number(Dtype::Bf16),
            DLDataType::BOOL => Self::Bool,
            _ => return None,
        })
    }
}

/// A type of DLPack that calls do not take, as NumPy names it.
pub(super) fn type_in_words(DLDataType { code, bits, lanes }: DLDataType) -> String {
    let kind = match code {
        DLDataTypeCode::INT => "int",
        DLDataTypeCode::UINT => "uint",
        DLDataTypeCode::FLOAT => "float",
        DLDataTypeCode::COMPLEX => "complex",
        other => return format!("DLPack type {} with {bits} bits in {lanes} lanes", other.0),
    };
    if lanes == 1 { format!("{kind}{bits}") } else { format!("{lanes} lanes of {kind}{bits}") }
}
