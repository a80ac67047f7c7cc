//! Tensors in device memory of a caller, and the device memory of tensors.
#![expect(unsafe_code, reason = "only the caller knows how long its memory lives")]

use kyklos::backend::{Backend, Device, DeviceBuffer};
use kyklos::{Dtype, Error, Result, Tensor};

use crate::backend::CudaBackend;
use crate::device::CudaBuffer;
use crate::driver::CallerStream;

/// Device memory of a caller: of `cuMemAlloc`, `cudaMalloc`, a memory pool or mapped memory, in the
/// device's primary context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerMemory {
    /// The address on the device, a multiple of 16: a `CUdeviceptr`, or the value of a pointer of
    /// the runtime API.
    pub address: u64,
    /// Bytes from this address on that a tensor may use.
    pub bytes: usize,
}

/// When the elements of a caller's tensor are in its memory.
#[derive(Clone, Copy, Debug)]
pub enum Written<'a> {
    /// Now: the host has waited for what writes them, or the host wrote them itself.
    Already,
    /// When everything that this stream has been given so far is done. The device waits for it, the
    /// host does not. If that takes longer than
    /// [`CudaOptions::stuck_after`](crate::CudaOptions::stuck_after) after the first use of the
    /// tensor, the device counts as lost.
    By(&'a CallerStream),
}

/// Tensors in device memory of a caller, and the device memory of tensors: how PyTorch, candle or a
/// program with kernels of its own gives tensors to Kyklos and takes its results, without a copy
/// through the host. Implemented for [`Tensor`].
///
/// The device is the primary context of a GPU, which the runtime API, PyTorch and candle use too.
/// No function of this crate changes the context that is current on the caller's thread. While a
/// stream captures a CUDA graph in the mode for the whole process (PyTorch's default), the driver
/// may refuse what this crate does meanwhile, and end the capture: do not capture during calls.
/// **This has run on a fake driver only, never on a GPU.**
///
/// ```no_run
/// use std::ffi::c_void;
/// use std::sync::Arc;
///
/// use kyklos::backend::Device;
/// use kyklos::{Attention, Dtype, Mask, Result, Session, Tensor};
/// use kyklos_cuda::{CallerMemory, CallerStream, CudaBackend, CudaTensor, Written};
///
/// /// A tensor of the caller: a handle that keeps it allocated, and its address.
/// struct Mine {
///     storage: Arc<dyn Send + Sync>,
///     address: u64,
/// }
///
/// fn layer(session: &mut Session, device: &Device, qkv: [Mine; 3], stream: *mut c_void) -> Result<()> {
///     // SAFETY: the stream lives longer than this function.
///     let stream = unsafe { CallerStream::from_raw(stream) };
///     let (shape, strides) = ([1, 4096, 8, 128], [4096 * 8 * 128, 8 * 128, 128, 1]);
///     let tensor = |Mine { storage, address }: Mine| {
///         let memory = CallerMemory { address, bytes: 4096 * 8 * 128 * 2 };
///         // SAFETY: `storage` keeps the memory, and nothing writes to it before `storage` is dropped.
///         unsafe {
///             Tensor::from_cuda(shape, strides, Dtype::Bf16, device, memory, Written::By(&stream), storage)
///         }
///     };
///     let [q, k, v] = qkv.map(tensor);
///     let out = session.attend(&Attention::new().mask(Mask::causal()), &q?, &k?, &v?)?;
///     out.o.make_wait(&stream)?;
///     let address = out.o.cuda_address().expect("outputs are dense");
///     // Launch kernels on `stream` that read `address`, then:
///     out.o.keep_for(&stream)?;
///     Ok(())
/// }
///
/// let device = Device::new(CudaBackend::new(0)?);
/// # Ok::<(), kyklos::Error>(())
/// ```
pub trait CudaTensor: Sized {
    /// The elements `[batch, tokens, heads, dim]` in a caller's memory, with `strides` in elements.
    /// `device` is one of [`CudaBackend`].
    ///
    /// - **Copies.** Dense elements are read where they are. Others are copied into dense memory on
    ///   the device at each call that uses them; their strides are multiples of 4 bytes.
    /// - **`owner`** keeps the memory allocated: a handle of the caller's tensor, or an `Arc` of
    ///   its storage. It is dropped when no tensor refers to the memory and the device has done all
    ///   reads of it; also other ranks of this process may read it, after the call of this rank has
    ///   returned. It is dropped on a thread of this crate; its `Drop` does not call Kyklos. One
    ///   that blocks delays the other owners of memory of this device, and its closing. If the
    ///   device is lost, it is never dropped. After an error of this function, and for a tensor
    ///   without elements, it is dropped at once.
    ///
    /// # Errors
    /// [`Error::Request`] before anything is read: if the address is not memory of this device in
    /// its primary context or a memory pool, or is not aligned; if the allocation is shorter
    /// than `memory`, as far as the driver tells; if elements are outside of `memory` or share
    /// memory; if `device` is no CUDA device; if the stream is of another context, or captures a
    /// graph. [`Error::Device`] if the driver fails.
    ///
    /// # Safety
    /// - Until `owner` is dropped, the memory stays allocated.
    /// - Until then nothing writes to it, except what the stream of [`Written::By`] was given
    ///   before this call. A stream may write to it earlier if three things happened before: all
    ///   calls that use the tensor returned, on all ranks of this process; every tensor that refers
    ///   to the memory was dropped; and [`Device::wait`](kyklos::backend::Backend::wait) returned,
    ///   or [`make_wait`](Self::make_wait) with this stream for an output of the last of these
    ///   calls on each rank.
    unsafe fn from_cuda(
        shape: [usize; 4],
        strides: [usize; 4],
        dtype: Dtype,
        device: &Device,
        memory: CallerMemory,
        written: Written<'_>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self>;

    /// The address of the elements on the device. They are dense, and their memory is valid while
    /// this tensor or a clone of it lives. `None` if they are not on a CUDA device or not
    /// dense.
    ///
    /// Only what [`make_wait`](Self::make_wait) has ordered behind the computation of the elements
    /// may read them, and nothing may write to them.
    fn cuda_address(&self) -> Option<u64>;

    /// What `stream` is given from now on begins when the elements are there. The host does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Request`] if the elements are not on a CUDA device, if the stream is of another
    /// context, or captures a graph. [`Error::Device`], also for a failure of what computes the
    /// elements.
    fn make_wait(&self, stream: &CallerStream) -> Result<()>;

    /// After the last tensor of this memory is dropped, the memory is used for something else only
    /// when everything that `stream` has been given so far is done. Call this after the last
    /// operation that reads the elements, and before dropping the tensor. The host does not
    /// wait. It has no effect on memory of a caller, which is not used for something else.
    ///
    /// # Errors
    /// As [`make_wait`](Self::make_wait).
    fn keep_for(&self, stream: &CallerStream) -> Result<()>;
}

impl CudaTensor for Tensor {
    unsafe fn from_cuda(
        shape: [usize; 4],
        strides: [usize; 4],
        dtype: Dtype,
        device: &Device,
        memory: CallerMemory,
        written: Written<'_>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let Some(backend) = device.backend::<CudaBackend>() else {
            return Err(Error::request(
                format!("memory of a CUDA device for {}", device.info().name),
                "use a device of CudaBackend",
            ));
        };
        if shape.contains(&0) {
            // The address of an empty tensor has no meaning.
            let nothing = DeviceBuffer::new(backend.alloc("an empty tensor", 0)?);
            return Self::from_buffer(shape, strides, dtype, device, nothing, 0);
        }
        // The stride of an extent of 1 has no meaning.
        let strides = std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { strides[axis] });
        let CallerMemory { address, bytes } = memory;
        let stream = match written {
            Written::Already => None,
            Written::By(stream) => Some(stream),
        };
        let buffer = DeviceBuffer::new(backend.device.adopt(address, bytes, stream, Box::new(owner))?);
        let tensor = Self::from_buffer(shape, strides, dtype, device, buffer, bytes / dtype.bytes())?;
        let copied = [shape[3], strides[0], strides[1], strides[2]];
        let words = |elements: &usize| (elements * dtype.bytes()).is_multiple_of(4);
        if !tensor.is_dense() && !copied.iter().all(words) {
            return Err(Error::request(
                format!("a tensor of shape {shape:?} in {dtype} with strides {strides:?}"),
                "keep rows and strides on 4-byte boundaries, or give dense elements",
            ));
        }
        Ok(tensor)
    }

    fn cuda_address(&self) -> Option<u64> {
        self.is_dense().then(|| self.with_buffer(CudaBuffer::address))?
    }

    fn make_wait(&self, stream: &CallerStream) -> Result<()> {
        on_cuda(self, |backend, buffer| backend.device.make_wait(stream, buffer))
    }

    fn keep_for(&self, stream: &CallerStream) -> Result<()> {
        on_cuda(self, |backend, buffer| backend.device.keep_for(stream, buffer))
    }
}

impl CallerStream {
    /// A new stream of `device`, for a caller that has none at hand: what it is made to wait for
    /// orders [`Written::By`] tensors. It does not synchronise with the default stream.
    ///
    /// # Errors
    /// [`Error::Request`] if `device` is no CUDA device, [`Error::Device`] if the driver fails.
    pub fn new(device: &Device) -> Result<Self> {
        of_cuda(device)?.device.new_caller_stream()
    }

    /// What this stream is given from now on begins when everything that `other` has been given so
    /// far is done. Both are of `device`. The host does not wait.
    ///
    /// # Errors
    /// As [`CudaTensor::make_wait`].
    pub fn wait_for(&self, other: &Self, device: &Device) -> Result<()> {
        of_cuda(device)?.device.order_streams(other, self)
    }
}

fn of_cuda(device: &Device) -> Result<&CudaBackend> {
    device.backend().ok_or_else(|| {
        Error::request(format!("a CUDA stream for {}", device.info().name), "use a device of CudaBackend")
    })
}

fn on_cuda(tensor: &Tensor, order: impl FnOnce(&CudaBackend, &CudaBuffer) -> Result<()>) -> Result<()> {
    let backend = tensor.device().and_then(|device| device.backend::<CudaBackend>());
    let ordered = backend.and_then(|backend| tensor.with_buffer(|buffer| order(backend, buffer)));
    ordered.unwrap_or_else(|| {
        Err(Error::request(
            "a CUDA stream for a tensor that is not on a CUDA device",
            "use a device of CudaBackend",
        ))
    })
}
