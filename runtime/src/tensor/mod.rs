//! Tensors of a call, in host memory or on a device.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use half::{bf16, f16};

use crate::backend::{Backend, Device, DeviceBuffer, Extent, Layout};
use crate::error::{Error, Result};
use kyklos_plan::Dtype;

mod view;

use view::View;

/// `[batch, tokens, heads, dim]` elements in host memory or on a device. Cloning gives another
/// handle of the same elements.
///
/// ```
/// use kyklos::Tensor;
///
/// let q = Tensor::new([1, 2, 3, 8], vec![0.5_f32; 48])?;
/// assert_eq!(q.shape(), [1, 2, 3, 8]);
/// // Heads before tokens in memory, as `[batch, heads, tokens, dim]`: a view, without a copy.
/// let q = Tensor::new([1, 3, 2, 8], vec![0.5_f32; 48])?.swap_tokens_and_heads();
/// assert_eq!(q.shape(), [1, 2, 3, 8]);
/// # Ok::<(), kyklos::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tensor {
    dtype: Dtype,
    view: View,
    memory: Memory,
}

#[derive(Clone, Debug)]
enum Memory {
    Host(Bytes),
    Device(Device, Arc<Mutex<DeviceBuffer>>),
}

/// A type that tensors store: `f32`, [`struct@f16`] or [`struct@bf16`].
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The storage type.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}
impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Elements that [`Bytes`] can keep.
struct Kept<T>(Vec<T>);

impl<T: Element> AsRef<[u8]> for Kept<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl Tensor {
    /// Dense elements in host memory, `shape` = `[batch, tokens, heads, dim]`. No copy is made.
    ///
    /// # Errors
    /// [`Error::Request`] when `data` does not have the elements of the shape.
    pub fn new<T: Element>(shape: [usize; 4], data: Vec<T>) -> Result<Self> {
        Self::from_bytes(shape, T::DTYPE, Bytes::from_owner(Kept(data)))
    }

    /// As [`Self::new`], with a copy of `data`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_slice<T: Element>(shape: [usize; 4], data: &[T]) -> Result<Self> {
        Self::new(shape, data.to_vec())
    }

    /// As [`Self::new`], from bytes in native order.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_bytes(shape: [usize; 4], dtype: Dtype, data: Bytes) -> Result<Self> {
        let wanted = shape.iter().try_fold(dtype.bytes(), |bytes, extent| bytes.checked_mul(*extent));
        if wanted != Some(data.len()) {
            return Err(Error::request(
                format!("{} bytes for a tensor of shape {shape:?} in {dtype}", data.len()),
                "give the elements of all batch entries, tokens and heads",
            ));
        }
        Ok(Self { dtype, view: View::dense(shape), memory: Memory::Host(data) })
    }

    /// The elements in a caller's wgpu buffer, dense from its beginning, without a copy. `device`
    /// is of the same `wgpu::Device` ([`Device::from_wgpu`]). The caller does not write to the
    /// buffer while a call uses it.
    ///
    /// # Errors
    /// [`Error::Request`] if the buffer does not fit, see
    /// [`WgpuBackend::adopt`](crate::backend::wgpu::WgpuBackend::adopt).
    #[cfg(feature = "wgpu")]
    pub fn from_wgpu(shape: [usize; 4], dtype: Dtype, device: &Device, buffer: wgpu::Buffer) -> Result<Self> {
        let Some(backend) = device.backend::<crate::backend::wgpu::WgpuBackend>() else {
            return Err(Error::request(
                format!("a wgpu buffer for {}", device.info().name),
                "use a device that Device::from_wgpu made",
            ));
        };
        let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, extent| bytes.checked_mul(*extent));
        // Larger than any buffer.
        let buffer = backend.adopt(buffer, bytes.unwrap_or(usize::MAX))?;
        Ok(Self::on_device(shape, dtype, device, DeviceBuffer::new(buffer)))
    }

    /// The wgpu buffer that holds the elements, dense from its beginning; `None` if they are
    /// elsewhere or not dense. Its usages are `STORAGE`, `COPY_SRC` and `COPY_DST`, its size is
    /// rounded up.
    #[cfg(feature = "wgpu")]
    pub fn wgpu_buffer(&self) -> Option<wgpu::Buffer> {
        let raw = |buffer: &crate::backend::wgpu::WgpuBuffer| buffer.raw().clone();
        self.is_dense().then(|| self.with_buffer(raw))?
    }

    /// The elements in a buffer that a backend outside this crate has made of a caller's memory,
    /// without a copy: strides in elements, from the beginning of the buffer on, which has
    /// `elements` elements. `buffer` is of `device`, and it is only read. Elements that are not
    /// dense cost one copy on the device when they are used.
    ///
    /// # Errors
    /// As [`Self::view`].
    pub fn from_buffer(
        shape: [usize; 4],
        strides: [usize; 4],
        dtype: Dtype,
        device: &Device,
        buffer: DeviceBuffer,
        elements: usize,
    ) -> Result<Self> {
        let view = View { shape, strides, first: 0 };
        view.fits(elements)?;
        Ok(Self { view, ..Self::on_device(shape, dtype, device, buffer) })
    }

    /// What `read` makes of the device buffer that holds the elements; `None` if they are not in a
    /// `T`, which is a [`Backend::Buffer`]. The buffer may hold more than these elements, see
    /// [`Self::is_dense`].
    pub fn with_buffer<T: 'static, R>(&self, read: impl FnOnce(&T) -> R) -> Option<R> {
        let Memory::Device(_, buffer) = &self.memory else { return None };
        buffer.lock().unwrap_or_else(PoisonError::into_inner).get().map(read)
    }

    /// Whether the elements are dense and begin where their memory begins.
    pub fn is_dense(&self) -> bool {
        self.view.is_dense() && self.view.first == 0
    }

    /// `bytes` bytes of `device`, dense.
    pub(crate) fn on_device(shape: [usize; 4], dtype: Dtype, device: &Device, buffer: DeviceBuffer) -> Self {
        let memory = Memory::Device(device.clone(), Arc::new(Mutex::new(buffer)));
        Self { dtype, view: View::dense(shape), memory }
    }

    /// Other elements of the same memory: `[batch, tokens, heads, dim]` extents and strides in
    /// elements, from the element `first` of the memory on. Reading it costs one copy if the
    /// elements are not dense.
    ///
    /// # Errors
    /// [`Error::Request`] if elements are outside of the memory or share memory, or the elements of
    /// a head are not adjacent.
    pub fn view(&self, shape: [usize; 4], strides: [usize; 4], first: usize) -> Result<Self> {
        let view = View { shape, strides, first };
        let old = self.view;
        if !self.is_dense() {
            return Err(Error::request("a view of a view", "view the tensor that owns the memory"));
        }
        view.fits(old.len())?;
        Ok(Self { view, ..self.clone() })
    }

    /// The view with tokens and heads exchanged: of memory that is `[batch, heads, tokens, dim]`.
    #[must_use]
    pub fn swap_tokens_and_heads(mut self) -> Self {
        self.view.shape.swap(1, 2);
        self.view.strides.swap(1, 2);
        self
    }

    /// `[batch, tokens, heads, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.view.shape
    }

    /// Storage type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The device that holds the elements; `None` for host memory.
    pub fn device(&self) -> Option<&Device> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(device, _) => Some(device),
        }
    }

    /// The same elements on `device`, dense; shares memory if they are already there.
    ///
    /// # Errors
    /// [`Error::Request`] for elements of another device, [`Error::OutOfMemory`],
    /// [`Error::Device`].
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let buffer = self.buffer("tensor", device)?;
        Ok(Self::on_device(self.view.shape, self.dtype, device, buffer))
    }

    /// The same elements in memory of their own, dense, where they are. Memory of the host is
    /// shared if it is dense already.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn copied(&self) -> Result<Self> {
        match &self.memory {
            Memory::Host(bytes) => Self::from_bytes(self.view.shape, self.dtype, self.dense(bytes)),
            Memory::Device(device, buffer) => {
                let buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
                let copy = self.repacked("copy of a tensor", device, &buffer)?;
                Ok(Self::on_device(self.view.shape, self.dtype, device, copy))
            }
        }
    }

    /// The elements as dense bytes in host memory. Host memory that is already dense is shared.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn bytes(&self) -> Result<Bytes> {
        match &self.memory {
            Memory::Host(bytes) => Ok(self.dense(bytes)),
            // One download instead of a copy on the device before it.
            Memory::Device(device, buffer) if self.dtype == Dtype::F32 && self.view.is_close() => {
                let reach = self.view.reach() * self.dtype.bytes();
                let memory = {
                    let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
                    device.download(&mut buffer, 0..reach)
                };
                Ok(self.dense(&memory.await?))
            }
            Memory::Device(device, _) => {
                let mut buffer = self.buffer("tensor", device)?;
                device.download(&mut buffer, 0..self.view.len() * self.dtype.bytes()).await
            }
        }
    }

    /// The elements in host memory, dense. Blocks until the device has computed them.
    ///
    /// # Errors
    /// [`Error::Request`] if the tensor stores another type, [`Error::Device`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.dtype != T::DTYPE {
            return Err(Error::request(
                format!("elements of {} from a tensor of {}", T::DTYPE, self.dtype),
                "ask for the type that the tensor stores",
            ));
        }
        Ok(bytemuck::pod_collect_to_vec(&pollster::block_on(self.bytes())?))
    }

    /// A buffer on `device` with the dense elements. It is only read.
    pub(crate) fn buffer(&self, label: &str, device: &Device) -> Result<DeviceBuffer> {
        match &self.memory {
            Memory::Host(bytes) => device.upload(label, self.dense(bytes)),
            Memory::Device(own, buffer) => {
                if !own.is_same(device) {
                    return Err(Error::request(
                        format!(
                            "{label} is on {}, the session computes on {}",
                            own.info().name,
                            device.info().name
                        ),
                        "use tensors of host memory, or of the session's device; clones of one `Device` are the same \
                         device, two that were opened are not, also of one GPU",
                    ));
                }
                if self.view.len() == 0 {
                    return device.alloc(label, 0);
                }
                let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
                if self.is_dense() {
                    Ok(device.share(&mut buffer))
                } else {
                    self.repacked(label, device, &buffer)
                }
            }
        }
    }

    fn repacked(&self, label: &str, device: &Device, buffer: &DeviceBuffer) -> Result<DeviceBuffer> {
        let (View { shape: [batch, rows, heads, dim], .. }, element) = (self.view, self.dtype.bytes());
        let layout = |View { strides, first, .. }: View| Layout {
            offset: first * element,
            batch_stride: strides[0] * element,
            row_stride: strides[1] * element,
            head_stride: strides[2] * element,
        };
        let mut dense = device.alloc(label, self.view.len() * element)?;
        let extent = Extent { batch, rows, heads, row_bytes: dim * element };
        let into = layout(View::dense(self.view.shape));
        device.repack((buffer, layout(self.view)), (&mut dense, into), extent)?;
        Ok(dense)
    }

    fn dense(&self, bytes: &Bytes) -> Bytes {
        let (View { shape: [batch, tokens, heads, dim], strides, first }, element) =
            (self.view, self.dtype.bytes());
        // A view without elements may begin anywhere.
        if self.view.len() == 0 {
            return Bytes::new();
        }
        if self.view.is_dense() {
            let start = first * element;
            return bytes.slice(start..start + self.view.len() * element);
        }
        let mut dense = Vec::with_capacity(self.view.len() * element);
        for (b, s) in (0..batch).flat_map(|b| (0..tokens).map(move |s| (b, s))) {
            for h in 0..heads {
                let start = (first + b * strides[0] + s * strides[1] + h * strides[2]) * element;
                dense.extend_from_slice(&bytes[start..start + dim * element]);
            }
        }
        dense.into()
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    fn counted(elements: usize) -> Vec<f32> {
        (0..elements).map(|index| index as f32).collect()
    }

    #[test]
    fn views_read_the_elements_that_their_strides_name_on_the_host_and_on_a_device() {
        let whole = Tensor::new([2, 3, 2, 8], counted(96)).unwrap();
        let device = Device::cpu();
        for tensor in [whole.clone(), whole.to_device(&device).unwrap()] {
            assert_eq!(tensor.to_vec::<f32>().unwrap(), counted(96));
            // Tokens 1 and 2 of head 1.
            let part = tensor.view([2, 2, 1, 8], [48, 16, 8, 1], 24).unwrap();
            let wanted: Vec<f32> =
                [24, 40, 72, 88].iter().flat_map(|at| (0..8).map(move |i| (at + i) as f32)).collect();
            assert_eq!(part.to_vec::<f32>().unwrap(), wanted);
            let swapped = tensor.swap_tokens_and_heads();
            assert_eq!(swapped.shape(), [2, 2, 3, 8]);
            assert_eq!(swapped.to_vec::<f32>().unwrap()[8..16], counted(96)[16..24]);
        }
    }

    #[test]
    fn memory_that_does_not_hold_the_elements_is_refused() {
        assert!(Tensor::new([1, 2, 1, 8], counted(15)).unwrap_err().is_request());
        assert!(Tensor::new([usize::MAX, 2, 1, 8], counted(0)).unwrap_err().is_request());
        let whole = Tensor::new([1, 4, 1, 8], counted(32)).unwrap();
        for (shape, strides, first) in [
            ([1, 4, 1, 8], [32, 8, 8, 1], 1),
            ([1, 5, 1, 8], [32, 8, 8, 1], 0),
            ([1, 4, 1, 8], [32, 4, 8, 1], 0),
            ([2, 2, 1, 8], [0, 8, 8, 1], 0),
            ([1, 2, 1, 8], [32, 16, 8, 2], 0),
            ([1, 2, 1, 8], [0, usize::MAX, 8, 1], 0),
        ] {
            assert!(whole.view(shape, strides, first).unwrap_err().is_request(), "{shape:?} {strides:?}");
        }
        let none = whole.view([1, 0, 1, 8], [0, 0, 0, 0], 99).unwrap();
        assert_eq!(none.to_vec::<f32>().unwrap(), [0.0; 0], "no elements are nowhere");
        let device = Device::cpu();
        let none = whole.to_device(&device).unwrap().view([1, 0, 1, 8], [0, 0, 0, 0], 99).unwrap();
        assert_eq!(none.to_vec::<f32>().unwrap(), [0.0; 0]);
        assert!(whole.view([1 << 40, 1 << 40, 1, 8], [8, 8, 8, 1], 0).unwrap_err().is_request());
        let part = whole.view([1, 2, 1, 8], [32, 16, 8, 1], 0).unwrap();
        assert!(part.view([1, 1, 1, 8], [8, 8, 8, 1], 0).is_err());
        assert!(whole.to_vec::<f16>().unwrap_err().is_request());
        let elsewhere = whole.to_device(&Device::cpu()).unwrap();
        assert!(elsewhere.to_device(&Device::cpu()).unwrap_err().is_request());
    }
}
