//! Memory of a caller as a buffer, and the order between a caller's streams and this device.

use std::any::Any;
use std::sync::{Arc, Mutex};

use kyklos::{Error, Result};

use super::allocation::Allocation;
use super::memory_pool::{CudaBuffer, TakeBack};
use crate::device::dependencies::AccessRecord;
use crate::device::open_device::{OpenDevice, Resources};
use crate::driver::{CallerStream, DeviceMemory, DriverError, PointsTo, StreamState};

/// Addresses of tensors are multiples of this many bytes: kernels read 16 bytes at a time.
const ALIGNMENT: u64 = 16;

impl OpenDevice {
    /// A caller's memory as a buffer that is only read. With a stream, everything that reads it
    /// waits for what the stream has been given so far. `owner` is dropped when the device no
    /// longer reads the memory.
    pub(crate) fn adopt(
        &self,
        address: u64,
        bytes: usize,
        written_by: Option<&CallerStream>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<CudaBuffer> {
        let resources = &self.resources;
        resources.status.check()?;
        self.require_memory(address, bytes)?;
        let written = written_by
            .map(|stream| {
                self.require_usable(stream)?;
                stream.record(&resources.context).map_err(|error| self.error(ORDER, &error))
            })
            .transpose()?;
        let memory = DeviceMemory::of_caller(&resources.context, address, bytes, owner);
        let accesses = Mutex::new(AccessRecord::written_by_caller(written.map(Arc::new)));
        let home = Arc::new(Returns(resources.clone()));
        Ok(CudaBuffer::new(Allocation { memory, accesses }, bytes, home))
    }

    /// A stream for a caller.
    pub(crate) fn new_caller_stream(&self) -> Result<CallerStream> {
        self.resources.status.check()?;
        CallerStream::owned(&self.resources.context)
            .map_err(|error| self.error("create a stream for a caller", &error))
    }

    /// What `then` is given from now on begins after what `first` has been given so far.
    pub(crate) fn order_streams(&self, first: &CallerStream, then: &CallerStream) -> Result<()> {
        self.resources.status.check()?;
        self.require_usable(first)?;
        self.require_usable(then)?;
        let event = first.record(&self.resources.context);
        event.and_then(|event| then.wait(&event)).map_err(|error| self.error(ORDER, &error))
    }

    /// What `stream` is given from now on begins after the last write to `buffer`.
    pub(crate) fn make_wait(&self, stream: &CallerStream, buffer: &CudaBuffer) -> Result<()> {
        self.resources.status.check()?;
        self.require_usable(stream)?;
        let Some(event) = self.resources.submitter.last_write(buffer)? else { return Ok(()) };
        stream.wait(&event).map_err(|error| self.error(ORDER, &error))
    }

    /// The memory of `buffer` is not written before what `stream` has been given so far is done.
    pub(crate) fn keep_for(&self, stream: &CallerStream, buffer: &CudaBuffer) -> Result<()> {
        self.resources.status.check()?;
        self.require_usable(stream)?;
        let read = stream.record(&self.resources.context).map_err(|error| self.error(ORDER, &error))?;
        buffer.allocation().accesses().record_caller_read(Arc::new(read));
        Ok(())
    }

    /// Refuses an address that kernels of this device cannot read, and more bytes than are
    /// allocated there.
    fn require_memory(&self, address: u64, bytes: usize) -> Result<()> {
        let context = &self.resources.context;
        let failed = |error: DriverError| self.error("look at a pointer", &error);
        match context.points_to(address).map_err(failed)? {
            PointsTo::Nothing => {
                return Err(Error::request(
                    format!("the address {address:#x}, which the driver does not know"),
                    "give device memory; for memory of the host, use Tensor::new",
                ));
            }
            PointsTo::Host => {
                return Err(Error::request(
                    format!("the address {address:#x}, which is memory of the host"),
                    "give device memory, or the elements by Tensor::new",
                ));
            }
            PointsTo::Device { ordinal, .. } if ordinal != context.ordinal() => {
                return Err(Error::request(
                    format!("the address {address:#x} of cuda:{ordinal} for cuda:{}", context.ordinal()),
                    "open the device that has the memory",
                ));
            }
            PointsTo::Device { here: false, .. } => {
                return Err(Error::request(
                    format!("the address {address:#x}, which belongs to another context"),
                    "allocate it in the device's primary context",
                ));
            }
            PointsTo::Device { .. } => {}
        }
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Error::request(
                format!("the address {address:#x}, which is no multiple of {ALIGNMENT}"),
                "begin tensors at a multiple of 16 bytes: kernels read 16 bytes at a time",
            ));
        }
        let end = address.checked_add(bytes as u64);
        let mut known = address;
        // Allocators that map memory piece by piece put several mappings behind one another.
        while end.is_none_or(|end| known < end) {
            match context.allocation_of(known).map_err(failed)? {
                Some(mapping) if mapping.end > known => known = mapping.end,
                // The driver does not tell how long this kind of memory is.
                None if known == address && end.is_some() => return Ok(()),
                _ => {
                    return Err(Error::request(
                        format!(
                            "{bytes} bytes at the address {address:#x}, where {} are allocated",
                            known - address
                        ),
                        "give the bytes that the allocation has from this address on",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Refuses a stream whose events cannot order operations of this device.
    fn require_usable(&self, stream: &CallerStream) -> Result<()> {
        match stream.state(&self.resources.context).map_err(|error| self.error(ORDER, &error))? {
            StreamState::Usable => Ok(()),
            StreamState::Elsewhere => Err(Error::request(
                format!("a stream that is not of the primary context of {}", self.resources.status.device()),
                "use a stream of the primary context of the device that has the tensor",
            )),
            StreamState::Capturing => Err(Error::request(
                "a stream that captures a CUDA graph",
                "end the capture first: ranks exchange messages, which a graph cannot repeat",
            )),
        }
    }
}

/// Words for an error of the driver.
const ORDER: &str = "order a caller's stream";

/// Drops a caller's memory when no device reads it any more.
#[derive(Debug)]
struct Returns(Arc<Resources>);

impl TakeBack for Returns {
    /// A caller's memory does not count against the limit.
    fn left_by_ranks(&self, _: u64) {}

    fn left_by_messages(&self, _: u64) {}

    fn take_back(self: Arc<Self>, allocation: Allocation) {
        let (resources, pool) = (self.0.clone(), self.0.pool.clone());
        // So that the other thread drops the last one.
        drop(self);
        // An error is kept: it is returned by every later operation on the buffers that the launches were
        // to write.
        let submit = move || drop(resources.submitter.flush());
        pool.callers().free(allocation, Some(Box::new(submit)));
    }
}
