//! Arrays of other libraries, by DLPack: without a copy where the kernels can read them.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use dlpark::AllocationDeleter;
use dlpark::ffi::{DLDevice, DLDeviceType};
use dlpark::python::{DlpackStream, ImportRequest};
use kyklos::{Dtype, Error, Result, Tensor};
use kyklos_cuda::{CallerMemory, CudaTensor, Written};
use pyo3::prelude::*;

use crate::spare;
use crate::tensors::kind::{Kind, type_in_words};
use crate::tensors::place::{Place, Ready, elsewhere};
use crate::tensors::strided;
use crate::tensors::torch::{self, TorchMemory};
use crate::torch_device::CallersTensor;

/// Elements of an array, with the strides that its library gave it.
#[derive(Clone, Debug)]
pub(crate) struct Elements {
    pub(crate) shape: Vec<usize>,
    /// In elements; 0 where an axis repeats.
    strides: Vec<usize>,
    pub(crate) kind: Kind,
    memory: Memory,
}

#[derive(Clone, Debug)]
enum Memory {
    Host(Bytes),
    /// Of the rank's GPU.
    Gpu(Arc<GpuMemory>),
    /// Of the rank's device of PyTorch.
    Torch(Arc<TorchMemory>),
}

/// Shows when the memory of imported arrays is no longer in use: each array holds a clone.
#[derive(Debug)]
pub(crate) struct Loan(Sender<()>);

/// Memory of another library, until it is dropped.
struct Borrowed {
    first: *const u8,
    bytes: usize,
    _owner: AllocationDeleter,
    _loan: Sender<()>,
}

impl std::fmt::Debug for Borrowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:p}", self.bytes, self.first)
    }
}

/// Borrowed memory of the host.
struct HostMemory(Borrowed);

/// Borrowed memory of a GPU. It is given back on a thread of its own: the library may wait for the
/// interpreter's lock, and the thread of the device that drops this must not.
#[derive(Debug)]
struct GpuMemory(Option<Borrowed>);

impl Drop for GpuMemory {
    fn drop(&mut self) {
        static GIVING_BACK: OnceLock<Sender<Borrowed>> = OnceLock::new();
        let sender = GIVING_BACK.get_or_init(|| {
            let (sender, borrowed) = channel::<Borrowed>();
            // Without the thread there is no receiver, and `send` below gives the memory back here.
            let _ = std::thread::Builder::new()
                .name("kyklos-arrays".to_owned())
                .spawn(move || borrowed.into_iter().for_each(drop));
            sender
        });
        if let Some(borrowed) = self.0.take() {
            drop(sender.send(borrowed));
        }
    }
}

// SAFETY: the memory is only read, and its owner is released by a callback that may run on any
// thread.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl AsRef<[u8]> for HostMemory {
    fn as_ref(&self) -> &[u8] {
        let Self(Borrowed { first, bytes, .. }) = self;
        if *bytes == 0 {
            return &[];
        }
        // SAFETY: DLPack's contract: the elements that shape and strides reach are readable until the owner
        // is released. That no other thread writes to them during the call is the caller's part,
        // which the documentation of a call says.
        unsafe { std::slice::from_raw_parts(*first, *bytes) }
    }
}

impl Loan {
    /// A loan, and what ends when nothing of it is in use.
    pub(crate) fn new() -> (Self, Receiver<()>) {
        let (sender, receiver) = channel();
        (Self(sender), receiver)
    }
}

impl Elements {
    /// The array `object`, called `name` in errors, in host memory or where `place` reads it;
    /// without one, in host memory. Nothing is copied.
    pub(crate) fn import(
        name: &str,
        object: &Bound<'_, PyAny>,
        loan: &Loan,
        place: Option<&Place>,
    ) -> Result<Self> {
        if let Some(place) = place
            && let Some((memory, of)) =
                torch::adopt(place.device(), object, &loan.0).map_err(|error| named(name, error))?
        {
            let CallersTensor { shape, strides, dtype } = of;
            return Ok(Self { shape, strides, kind: Kind::Number(dtype), memory: Memory::Torch(memory) });
        }
        let type_name =
            || object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
        let refuse = |mismatch: String, remedy: &str| Err(Error::request(mismatch, remedy));
        let check = |device: DLDevice| match place {
            _ if device.device_type == DLDeviceType::CPU => Ok(()),
            Some(place) => place.check(name, device),
            None => Err(elsewhere(name, device)),
        };
        let mut ready = None;
        let request = ImportRequest::new(object.as_borrowed());
        if let Ok(request) = &request
            && let Ok(device) = request.device()
        {
            check(device)?;
            if device.device_type != DLDeviceType::CPU {
                ready = place.map(Place::ready).transpose()?;
            }
        }
        let stream = ready.as_ref().map(|ready: &Ready<'_>| ready as &dyn DlpackStream);
        let imported = match request.and_then(|request| request.import(stream, None)) {
            Ok(imported) => imported,
            Err(error) => {
                return refuse(
                    format!(
                        "{name} is a {} that does not give its elements by DLPack ({error})",
                        type_name()
                    ),
                    "pass an array of NumPy or a tensor of PyTorch (detached, where it requires a gradient)",
                );
            }
        };
        let faulty =
            |error: dlpark::tensor::Error| Error::request(format!("{name}: {error}"), "pass a dense array");
        let tensor = imported.validate().map_err(faulty)?;
        let on_gpu = tensor.device().device_type != DLDeviceType::CPU;
        if on_gpu && ready.is_none() {
            check(tensor.device())?;
            return refuse(
                format!("{name} is a capsule of DLPack with an array of a GPU"),
                "pass the array itself, whose library then orders its streams",
            );
        }
        let Some(kind) = Kind::of(tensor.dtype()) else {
            return refuse(
                format!("{name} has elements of {}", type_in_words(tensor.dtype())),
                "use float32, float16 or bfloat16, and bool for masks",
            );
        };
        let extents = |values: &[i64]| -> Option<Vec<usize>> {
            values.iter().map(|value| usize::try_from(*value).ok()).collect()
        };
        let strides = tensor.strides_or_compact().map_err(faulty)?;
        let (Some(shape), Some(strides)) = (extents(tensor.shape()), extents(&strides)) else {
            return refuse(
                format!("{name} has a negative stride"),
                "copy it, as with numpy.ascontiguousarray",
            );
        };
        let elements = if shape.contains(&0) {
            Some(0)
        } else {
            let last = shape.iter().zip(&strides).try_fold(0_usize, |sum, (extent, stride)| {
                sum.checked_add((extent - 1).checked_mul(*stride)?)
            });
            last.and_then(|last| last.checked_add(1))
        };
        let Some(bytes) = elements.and_then(|elements| elements.checked_mul(kind.bytes())) else {
            return refuse(format!("{name} reaches beyond the memory of a process"), "pass a dense array");
        };
        let first = if bytes == 0 {
            std::ptr::null()
        } else {
            // SAFETY: the tensor has elements, so its pointer is inside of its allocation.
            unsafe { tensor.offset_bytes_ptr() }.map_err(faulty)?
        };
        if !(first as usize).is_multiple_of(kind.bytes()) {
            return refuse(
                format!("the elements of {name} begin at address {first:p}"),
                "align them to their size: copy the array",
            );
        }
        let borrowed = Borrowed { first, bytes, _owner: imported.into_deleter(), _loan: loan.0.clone() };
        let memory = if on_gpu {
            Memory::Gpu(Arc::new(GpuMemory(Some(borrowed))))
        } else {
            Memory::Host(Bytes::from_owner(HostMemory(borrowed)))
        };
        Ok(Self { shape, strides, kind, memory })
    }

    pub(crate) fn is_on_device(&self) -> bool {
        !matches!(self.memory, Memory::Host(_))
    }

    /// The tensor of an array of four axes: tokens before heads, or after them with `heads_first`.
    /// `place` is that of the import.
    pub(crate) fn tensor(&self, name: &str, heads_first: bool, place: &Place) -> Result<Tensor> {
        let Kind::Number(dtype) = self.kind else {
            return Err(Error::request(
                format!("{name} has elements of bool"),
                "use float32, float16 or bfloat16",
            ));
        };
        let (Ok(shape), Ok(strides)) =
            (<[usize; 4]>::try_from(&self.shape[..]), <[usize; 4]>::try_from(&self.strides[..]))
        else {
            return Err(Error::request(
                format!("{name} has the shape {:?}", self.shape),
                "give it four axes",
            ));
        };
        let tensor = match &self.memory {
            Memory::Host(_) if heads_first => {
                let tokens_first = self.clone().with_middle_axes_exchanged();
                let [batch, heads, tokens, dim] = shape;
                return Tensor::from_bytes([batch, tokens, heads, dim], dtype, tokens_first.dense(name)?);
            }
            Memory::Host(_) => Tensor::from_bytes(shape, dtype, self.dense(name)?)?,
            Memory::Gpu(memory) => {
                gpu_tensor(shape, strides, dtype, memory, place).map_err(|error| named(name, error))?
            }
            Memory::Torch(memory) => torch::tensor(shape, strides, dtype, memory, place.device())
                .map_err(|error| named(name, error))?,
        };
        Ok(if heads_first { tensor.swap_tokens_and_heads() } else { tensor })
    }

    /// The elements one after the other, in the order of the axes: without a copy where they are so
    /// in memory.
    pub(crate) fn dense(&self, name: &str) -> Result<Bytes> {
        match &self.memory {
            Memory::Host(memory) if strided::is_dense(&self.shape, &self.strides) => Ok(memory.clone()),
            _ => self.copy(name),
        }
    }

    /// The same elements in memory of their own, dense.
    pub(crate) fn copied(&self, name: &str) -> Result<Self> {
        let mut strides = vec![1; self.shape.len()];
        for axis in (1..self.shape.len()).rev() {
            strides[axis - 1] = strides[axis] * self.shape[axis];
        }
        let memory = Memory::Host(self.copy(name)?);
        Ok(Self { shape: self.shape.clone(), strides, kind: self.kind, memory })
    }

    fn copy(&self, name: &str) -> Result<Bytes> {
        let (memory, size) = (self.host(name)?, self.kind.bytes());
        let Self { shape, strides, .. } = self;
        let total = shape.iter().try_fold(size, |bytes: usize, extent| bytes.checked_mul(*extent));
        let copy = |total| {
            spare::filled(total, |dense| match size {
                1 => strided::copy::<u8>(memory, shape, strides, dense),
                2 => strided::copy::<u16>(memory, shape, strides, dense),
                _ => strided::copy::<u32>(memory, shape, strides, dense),
            })
        };
        total.and_then(copy).ok_or_else(|| self.too_large(name))
    }

    /// Rows whose last axis are keys, as kernels read those of a mask or a bias:
    /// [`BiasKind`](kyklos::BiasKind).
    pub(crate) fn rows(&self, name: &str) -> Result<Bytes> {
        let keys = self.shape.last().copied().unwrap_or(1);
        let size = self.kind.bytes();
        if self.kind != Kind::Bool && (keys * size).is_multiple_of(4) {
            return self.dense(name);
        }
        if keys > 1 && self.strides.last().is_some_and(|stride| *stride != 1) {
            return self.copied(name)?.rows(name);
        }
        let memory = self.host(name)?;
        let packed = match self.kind {
            Kind::Bool => strided::pack(memory, &self.shape, &self.strides),
            Kind::Number(_) => strided::pad(memory, size, &self.shape, &self.strides),
        };
        packed.ok_or_else(|| self.too_large(name))
    }

    fn host(&self, name: &str) -> Result<&Bytes> {
        match &self.memory {
            Memory::Host(memory) => Ok(memory),
            Memory::Gpu(_) | Memory::Torch(_) => {
                Err(Error::request(format!("{name} is on a GPU"), "move it to host memory"))
            }
        }
    }

    /// Repeated axes may stand for more elements than there is memory.
    fn too_large(&self, name: &str) -> Error {
        Error::request(
            format!("{name} of shape {:?} repeats elements, and there is no memory for a copy", self.shape),
            "pass fewer tokens",
        )
    }

    /// The tensor of one number or of a pair for each row: tokens before heads, or after them with
    /// `heads_first`.
    pub(crate) fn numbers(mut self, name: &str, heads_first: bool, place: &Place) -> Result<Tensor> {
        if self.shape.len() == 3 {
            self.shape.push(1);
            self.strides.push(1);
        }
        self.tensor(name, heads_first, place)
    }

    /// The same elements with axes 1 and 2 exchanged.
    pub(crate) fn with_middle_axes_exchanged(mut self) -> Self {
        self.shape.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }
}

/// An error about the array `name`.
fn named(name: &str, error: Error) -> Error {
    match error {
        Error::Request { mismatch, remedy } => {
            Error::Request { mismatch: format!("{name}: {mismatch}"), remedy }
        }
        other => other,
    }
}

/// Elements in the memory of another library on the GPU of `place`. That library has made its
/// stream for Kyklos wait.
fn gpu_tensor(
    shape: [usize; 4],
    strides: [usize; 4],
    dtype: Dtype,
    memory: &Arc<GpuMemory>,
    place: &Place,
) -> Result<Tensor> {
    let Ready { device, stream } = place.ready()?;
    let at = memory.0.as_ref().map_or(CallerMemory { address: 0, bytes: 0 }, |borrowed| CallerMemory {
        address: borrowed.first.expose_provenance() as u64,
        bytes: borrowed.bytes,
    });
    // SAFETY: DLPack's contract: the owner keeps the memory, and its library has ordered what writes to
    // it before `stream`. That nobody else writes to it during the call is the caller's part, which
    // the documentation of a call says; the call returns when the owner was dropped.
    unsafe { Tensor::from_cuda(shape, strides, dtype, device, at, Written::By(stream), memory.clone()) }
}
