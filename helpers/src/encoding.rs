//! The bytes of a tensor between owner and helper.

use bytes::Bytes;
use kyklos::backend::{Backend, Device, Elements, Scales};
use kyklos::{Dtype, Error, Result, TOKENS_PER_SCALE, Tensor, WireFormat};

/// How tensors of one type travel: in a [`WireFormat`], coded and decoded on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Encoding {
    dtype: Dtype,
    wire: WireFormat,
}

/// What a tensor is, which decides which of its elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Keys: the elements of a channel are alike.
    Keys,
    /// Queries, values and results: the elements of a token's head are alike.
    Rows,
    /// Gradients, which may be of any size: f16 would make small ones zero.
    Gradients,
}

impl Role {
    fn scales(self) -> Scales {
        match self {
            Self::Keys => Scales::Channels,
            Self::Rows | Self::Gradients => Scales::Rows,
        }
    }
}

impl Encoding {
    /// # Errors
    /// [`Error::Request`] for bf16 tensors as f16, whose range is smaller.
    pub(crate) fn new(dtype: Dtype, wire: WireFormat) -> Result<Self> {
        let wire = match (wire, dtype) {
            (WireFormat::F16, Dtype::F16) => WireFormat::Same,
            (WireFormat::F16, Dtype::Bf16) => {
                return Err(Error::request(
                    "bf16 tensors as f16 on the wire",
                    "send them as they are, or as int8",
                ));
            }
            _ => wire,
        };
        Ok(Self { dtype, wire })
    }

    /// The same tensors as they are.
    pub(crate) fn plain(self) -> Self {
        Self { wire: WireFormat::Same, ..self }
    }

    /// The form of such a tensor.
    fn wire(self, role: Role) -> WireFormat {
        match (role, self.wire) {
            (Role::Gradients, WireFormat::F16) => WireFormat::Same,
            (_, wire) => wire,
        }
    }

    /// What results may differ by, beside rounding of the kernels: of a row whose largest element
    /// is `largest`, in an element `value`.
    pub(crate) fn rounding(self, value: f32, largest: f32, role: Role) -> f32 {
        match self.wire(role) {
            WireFormat::Same => 0.0,
            // Half a step of 11 bits, and of the least number.
            WireFormat::F16 => value.abs() / 2048.0 + 3e-8,
            // Half a step of 127, and what a division may be off by.
            WireFormat::Int8 => largest / 250.0,
        }
    }

    /// Bytes of each part of a message with a tensor of `shape`.
    pub(crate) fn part_bytes(self, shape: [usize; 4], role: Role) -> Vec<usize> {
        let [batch, tokens, heads, dim] = shape;
        let elements = batch * tokens * heads * dim;
        match self.wire(role) {
            WireFormat::Same => vec![elements * self.dtype.bytes()],
            WireFormat::F16 => vec![elements * Dtype::F16.bytes()],
            WireFormat::Int8 => {
                let scales = match role {
                    Role::Keys => batch * tokens.div_ceil(TOKENS_PER_SCALE) * heads * dim,
                    Role::Rows | Role::Gradients => batch * tokens * heads,
                };
                vec![elements, scales * 4]
            }
        }
    }

    /// The parts of a message with `tensor`, which is dense or in host memory.
    ///
    /// # Errors
    /// [`Error::Request`] for a finite element that f16 cannot hold; of the device.
    pub(crate) fn encode(self, device: &Device, tensor: &Tensor, role: Role) -> Result<Vec<Bytes>> {
        let shape = tensor.shape();
        if self.wire(role) == WireFormat::Same || shape.contains(&0) {
            let parts = self.part_bytes(shape, role).len();
            let mut all = vec![pollster::block_on(tensor.bytes())?];
            all.resize(parts, Bytes::new());
            return Ok(all);
        }
        let data = pollster::block_on(tensor.bytes())?;
        let buffer = device.upload("a tensor to send", data)?;
        let from = Elements::Stored { buffer: &buffer, first: 0, dtype: self.dtype };
        let part_bytes = self.part_bytes(shape, role);
        let mut coded = Vec::new();
        for bytes in &part_bytes {
            coded.push(device.alloc("a tensor to send", *bytes)?);
        }
        let mut overflow = device.alloc("overflow", OVERFLOW_BYTES)?;
        device.clear(&mut overflow)?;
        match &mut coded[..] {
            [buffer] => {
                let into = Elements::Stored { buffer, first: 0, dtype: Dtype::F16 };
                device.convert(from, into, shape, Some(&mut overflow))?;
            }
            [codes, scales] => {
                let into = Elements::Coded { codes, scales, of: role.scales() };
                device.convert(from, into, shape, None)?;
            }
            _ => unreachable!("a tensor has one part or two"),
        }
        if self.wire(role) == WireFormat::F16 {
            let word = pollster::block_on(device.download(&mut overflow, 0..4))?;
            if word.iter().any(|byte| *byte != 0) {
                return Err(Error::request(
                    "a finite element of at least 65520, which f16 cannot hold",
                    "send the tensors as they are, or as int8",
                ));
            }
        }
        let downloads = coded.iter_mut().zip(part_bytes);
        downloads.map(|(buffer, bytes)| pollster::block_on(device.download(buffer, 0..bytes))).collect()
    }

    /// The tensor of `shape` that these parts hold; on the device where they were coded, else in
    /// host memory.
    ///
    /// # Errors
    /// Of the device. The parts have the sizes of [`Self::part_bytes`].
    pub(crate) fn decode(
        self,
        device: &Device,
        mut parts: Vec<Bytes>,
        shape: [usize; 4],
        role: Role,
    ) -> Result<Tensor> {
        if self.wire(role) == WireFormat::Same || shape.contains(&0) {
            parts.truncate(1);
            return Tensor::from_bytes(shape, self.dtype, parts.pop().unwrap_or_default());
        }
        let elements: usize = shape.iter().product();
        let coded: Result<Vec<_>> =
            parts.into_iter().map(|part| device.upload("a received tensor", part)).collect();
        let coded = coded?;
        let mut buffer = device.alloc("a received tensor", elements * self.dtype.bytes())?;
        let into = Elements::Stored { buffer: &mut buffer, first: 0, dtype: self.dtype };
        let from = match &coded[..] {
            [buffer] => Elements::Stored { buffer, first: 0, dtype: Dtype::F16 },
            [codes, scales] => Elements::Coded { codes, scales, of: role.scales() },
            _ => unreachable!("a tensor has one part or two"),
        };
        device.convert(from, into, shape, None)?;
        let [batch, tokens, heads, dim] = shape;
        let strides = [tokens * heads * dim, heads * dim, dim, 1];
        debug_assert_eq!(batch * strides[0], elements);
        Tensor::from_buffer(shape, strides, self.dtype, device, buffer, elements)
    }
}

/// As [`Backend::convert`] wants it.
const OVERFLOW_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic values of about normal size, some larger.
    fn values(count: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7919 % 2003) as f32 / 1001.5 - 1.0) * if i % 97 == 0 { 20.0 } else { 1.0 })
            .collect()
    }

    #[test]
    fn a_tensor_comes_back_as_its_format_allows() {
        let device = Device::cpu();
        let shape = [2, 70, 3, 16];
        let data = values(shape.iter().product());
        let tensor = Tensor::new(shape, data.clone()).unwrap();
        for (wire, most) in [(WireFormat::Same, 0.0), (WireFormat::F16, 0.01), (WireFormat::Int8, 0.09)] {
            for role in [Role::Keys, Role::Rows] {
                let encoding = Encoding::new(Dtype::F32, wire).unwrap();
                let parts = encoding.encode(&device, &tensor, role).unwrap();
                let sizes: Vec<usize> = parts.iter().map(Bytes::len).collect();
                assert_eq!(sizes, encoding.part_bytes(shape, role));
                let back = encoding.decode(&device, parts, shape, role).unwrap().to_vec::<f32>().unwrap();
                let error = data.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error <= most, "{wire} {role:?}: {error}");
                assert!(wire == WireFormat::Same || error > 0.0, "{wire} rounds");
            }
        }
    }

    #[test]
    fn what_f16_cannot_hold_is_refused_and_infinities_are_not() {
        let device = Device::cpu();
        let encoding = Encoding::new(Dtype::F32, WireFormat::F16).unwrap();
        let tensor = |value| Tensor::new([1, 1, 1, 8], vec![value; 8]).unwrap();
        assert!(encoding.encode(&device, &tensor(65520.0), Role::Rows).unwrap_err().is_request());
        assert!(encoding.encode(&device, &tensor(f32::INFINITY), Role::Rows).is_ok());
        assert!(encoding.encode(&device, &tensor(65519.0), Role::Rows).is_ok());
    }

    #[test]
    fn every_type_and_format_and_no_elements_at_all() {
        let device = Device::cpu();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for wire in WireFormat::ALL {
                let encoding = Encoding::new(dtype, wire);
                assert_eq!(encoding.is_err(), (dtype, wire) == (Dtype::Bf16, WireFormat::F16));
                let Ok(encoding) = encoding else { continue };
                for shape in [[1, 3, 2, 8], [1, 0, 2, 8], [0, 3, 2, 8]] {
                    for role in [Role::Keys, Role::Rows, Role::Gradients] {
                        let bytes = shape.iter().product::<usize>() * dtype.bytes();
                        let tensor = Tensor::from_bytes(shape, dtype, vec![0; bytes].into()).unwrap();
                        let parts = encoding.encode(&device, &tensor, role).unwrap();
                        let sizes: Vec<usize> = parts.iter().map(Bytes::len).collect();
                        assert_eq!(sizes, encoding.part_bytes(shape, role));
                        let back = encoding.decode(&device, parts, shape, role).unwrap();
                        assert_eq!(pollster::block_on(back.bytes()).unwrap(), vec![0; bytes]);
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_of_any_size_keep_it_in_f16_messages() {
        let device = Device::cpu();
        let encoding = Encoding::new(Dtype::F32, WireFormat::F16).unwrap();
        let tensor = Tensor::new([1, 1, 1, 8], vec![1e-20_f32; 8]).unwrap();
        let parts = encoding.encode(&device, &tensor, Role::Gradients).unwrap();
        let back = encoding.decode(&device, parts, [1, 1, 1, 8], Role::Gradients).unwrap();
        assert_eq!(back.to_vec::<f32>().unwrap(), [1e-20; 8]);
    }
}
