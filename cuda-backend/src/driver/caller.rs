//! What the driver says about a caller's memory and streams.

use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::{DriverError, Result};
use super::event::Event;
use super::stream::Stream;

/// Where a caller's pointer points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PointsTo {
    /// Nothing that the driver knows: memory of the host that is not pinned, or memory that was
    /// freed.
    Nothing,
    /// Pinned memory of the host.
    Host,
    /// Memory of a device.
    Device {
        /// The device's index.
        ordinal: usize,
        /// Whether kernels in this context may use it: it belongs to this context, or to a memory
        /// pool.
        here: bool,
    },
}

impl Context {
    /// Where `address` points to.
    pub(crate) fn points_to(&self, address: u64) -> Result<PointsTo> {
        use sys::CUpointer_attribute_enum as Attribute;
        let _current = self.push()?;
        let mut kind: c_uint = 0;
        let attribute = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: this attribute is an unsigned int, and the driver writes it to `kind`, a local. It does
        // not dereference the address, and refuses one that it does not know.
        let asked = check("cuPointerGetAttribute", unsafe {
            sys::cuPointerGetAttribute((&raw mut kind).cast::<c_void>(), attribute, address)
        });
        if known(asked)?.is_none() {
            return Ok(PointsTo::Nothing);
        }
        if kind != sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as c_uint {
            return Ok(PointsTo::Host);
        }
        let mut ordinal: c_int = 0;
        let attribute = Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: as above, and this attribute is an int.
        check("cuPointerGetAttribute", unsafe {
            sys::cuPointerGetAttribute((&raw mut ordinal).cast::<c_void>(), attribute, address)
        })?;
        let mut owner: sys::CUcontext = ptr::null_mut();
        let attribute = Attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        // SAFETY: as above, and this attribute is a handle of a context.
        let asked = check("cuPointerGetAttribute", unsafe {
            sys::cuPointerGetAttribute((&raw mut owner).cast::<c_void>(), attribute, address)
        });
        // Memory of a pool, and memory that was mapped, have no context.
        let here = known(asked)?.is_none() || owner.is_null() || owner == self.raw.0;
        Ok(PointsTo::Device { ordinal: usize::try_from(ordinal).unwrap_or(usize::MAX), here })
    }

    /// The addresses of the allocation, or of the mapping, that has `address`. `None` if the driver
    /// does not tell.
    pub(crate) fn allocation_of(&self, address: u64) -> Result<Option<Range<u64>>> {
        let _current = self.push()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: this context is current. The driver writes an address and a size to two locals. It does
        // not dereference the address, and refuses one that it does not know.
        let asked = check("cuMemGetAddressRange_v2", unsafe {
            sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address)
        });
        Ok(known(asked)?.map(|()| base..base + bytes as u64))
    }
}

/// `None` if the driver does not know an address.
fn known(asked: Result<()>) -> Result<Option<()>> {
    let unknown = [sys::CUresult::CUDA_ERROR_INVALID_VALUE, sys::CUresult::CUDA_ERROR_NOT_FOUND];
    match asked {
        Ok(()) => Ok(Some(())),
        Err(DriverError { code, .. }) if unknown.iter().any(|error| *error as u32 == code) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A stream that belongs to a caller of this crate, for example PyTorch's current stream, or one
/// that a caller has by [`Self::new`].
#[derive(Debug)]
pub struct CallerStream {
    raw: Handle<sys::CUstream_st>,
    /// The stream of `raw`, if this value owns it.
    _own: Option<Stream>,
}

/// Whether a caller's stream can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamState {
    Usable,
    /// It belongs to another context.
    Elsewhere,
    /// It captures a graph: events of it cannot order anything outside of the graph.
    Capturing,
}

impl CallerStream {
    /// The stream `handle`: a `CUstream`, which is also a `cudaStream_t`. Null is the default
    /// stream of the device's primary context, `CU_STREAM_PER_THREAD` the one of the thread
    /// that uses this value.
    ///
    /// # Safety
    /// The stream exists as long as this value.
    pub unsafe fn from_raw(handle: *mut c_void) -> Self {
        Self { raw: Handle(handle.cast()), _own: None }
    }

    /// The handle: a `CUstream`, which is also a `cudaStream_t`.
    pub fn handle(&self) -> *mut c_void {
        self.raw.0.cast()
    }

    /// A stream of this process that does not synchronise with the default stream.
    pub(crate) fn owned(context: &Arc<Context>) -> Result<Self> {
        let stream = Stream::new(context, false)?;
        Ok(Self { raw: Handle(stream.raw.0), _own: Some(stream) })
    }

    pub(crate) fn state(&self, context: &Context) -> Result<StreamState> {
        let _current = context.push()?;
        let mut owner = ptr::null_mut();
        // SAFETY: the caller guarantees that the stream exists (see `from_raw`). The driver writes one
        // handle to `owner`, a local. For the default stream that is the current context.
        check("cuStreamGetCtx", unsafe { sys::cuStreamGetCtx(self.raw.0, &raw mut owner) })?;
        if owner != context.raw.0 {
            return Ok(StreamState::Elsewhere);
        }
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: as above. The driver writes one of the values of the enum to `status`, a local.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(self.raw.0, &raw mut status) })?;
        let idle = status == sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        Ok(if idle { StreamState::Usable } else { StreamState::Capturing })
    }

    /// An event that is complete when everything submitted to this stream so far is done. The
    /// stream is usable.
    pub(crate) fn record(&self, context: &Arc<Context>) -> Result<Event> {
        Event::record(context, &self.raw)
    }

    /// Operations that are submitted to this stream later begin after `event` is complete. The
    /// stream is usable.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        event.awaited_by(&self.raw)
    }
}
