//! A communicator: one rank's end of a group of ranks in NCCL.
#![expect(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::error::NcclError;
use super::library::{Code, Config, Nccl, RawCommunicator, UniqueId};
use crate::driver::{Context, DriverError, Stream};

const IN_PROGRESS: Code = 7;
/// `NCCL_CONFIG_UNDEF_INT`: NCCL's own choice.
const UNDEFINED: c_int = c_int::MIN;
/// `ncclInt8`.
const BYTES: c_int = 0;

/// A communicator that blocks no call: what a call begins is done when [`Self::is_ready`] says so.
/// It must not be dropped but destroyed or aborted; a dropped one stays in NCCL until the process
/// ends.
#[derive(Debug)]
pub(super) struct Communicator {
    nccl: &'static Nccl,
    raw: Handle,
    context: Arc<Context>,
}

/// A pointer that only NCCL dereferences.
#[derive(Debug)]
struct Handle(RawCommunicator);

// SAFETY: NCCL takes a communicator from any thread, one at a time. The handle is not copied, and
// `Communicator` is not `Sync`.
unsafe impl Send for Handle {}

/// Bytes that go to a peer, or come from it, in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// On the device of the communicator.
    pub(super) address: u64,
    /// Not 0.
    pub(super) bytes: usize,
    /// Its number in the communicator; not that of this rank.
    pub(super) peer: u32,
}

/// How many blocks of threads NCCL's kernels may have: each takes a multiprocessor from the
/// attention. `None`: NCCL's choice.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Blocks {
    pub(super) least: Option<u16>,
    pub(super) most: Option<u16>,
}

/// Why a call of NCCL failed.
#[derive(Debug)]
pub(super) enum Fault {
    Nccl(NcclError),
    Driver(DriverError),
}

impl From<NcclError> for Fault {
    fn from(error: NcclError) -> Self {
        Self::Nccl(error)
    }
}

impl From<DriverError> for Fault {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl Communicator {
    /// Begins to make a communicator of `ranks` ranks with the name `id`. This rank is number
    /// `rank`, with the device of `context`.
    pub(super) fn begin(
        nccl: &'static Nccl,
        context: &Arc<Context>,
        id: &UniqueId,
        [rank, ranks]: [u32; 2],
        blocks: Blocks,
    ) -> Result<Self, Fault> {
        let limit = |blocks: Option<u16>| blocks.map_or(UNDEFINED, c_int::from);
        let config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: limit(blocks.least),
            max_ctas: limit(blocks.most),
            net_name: ptr::null(),
            split_share: UNDEFINED,
        };
        let mut raw = ptr::null_mut();
        let _current = context.push()?;
        // SAFETY: NCCL declares the function with this type. It writes one handle to `raw`, a local, and
        // has read `id` and `config` when it returns. The primary context of a device is current,
        // which is the device that NCCL takes.
        let code = unsafe {
            (nccl.functions.init)(&raw mut raw, signed(ranks), *id, signed(rank), &raw const config)
        };
        let made = Self { nccl, raw: Handle(raw), context: context.clone() };
        if let Err(error) = began(nccl, "ncclCommInitRankConfig", code) {
            if !made.raw.0.is_null() {
                made.abort();
            }
            return Err(error.into());
        }
        Ok(made)
    }

    /// Whether everything that was begun is done: the communicator is made, the last exchange is in
    /// its stream, or the communicator is finalized.
    ///
    /// # Errors
    /// Also an error that NCCL has found since, for example that the process of another rank has
    /// ended.
    pub(super) fn is_ready(&self) -> Result<bool, Fault> {
        let call = "ncclCommGetAsyncError";
        let mut state: c_int = 0;
        let _current = self.context.push()?;
        // SAFETY: NCCL declares the function with this type. The communicator exists until `self` is gone,
        // `&self` is on one thread, and NCCL writes one int to `state`, a local.
        let code = unsafe { (self.nccl.functions.async_error)(self.raw.0, &raw mut state) };
        self.nccl.check(call, code)?;
        if state == IN_PROGRESS {
            return Ok(false);
        }
        self.nccl.check(call, state)?;
        Ok(true)
    }

    /// Begins to bring an exchange into `stream`; all its parts move side by side. Parts of one
    /// pair of ranks meet in their order. Must be ready. Memory that is not device memory of
    /// these sizes is an error of the device: the host never dereferences it.
    pub(super) fn exchange(&self, stream: &Stream, sends: &[Part], recvs: &[Part]) -> Result<(), Fault> {
        let functions = &self.nccl.functions;
        let _current = self.context.push()?;
        // SAFETY: NCCL declares the function with this type. It has no arguments.
        self.nccl.check("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let send = |part: &Part| {
            let memory = address(part).cast_const();
            // SAFETY: NCCL declares the function with this type. Communicator and stream exist, and both are
            // of the current context's device. NCCL does not dereference the address on the host.
            let code = unsafe {
                (functions.send)(memory, part.bytes, BYTES, signed(part.peer), self.raw.0, stream.handle())
            };
            began(self.nccl, "ncclSend", code)
        };
        let recv = |part: &Part| {
            let memory = address(part);
            // SAFETY: as above.
            let code = unsafe {
                (functions.recv)(memory, part.bytes, BYTES, signed(part.peer), self.raw.0, stream.handle())
            };
            began(self.nccl, "ncclRecv", code)
        };
        let added = recvs.iter().try_for_each(recv).and_then(|()| sends.iter().try_for_each(send));
        // A group that was started is ended, also after an error.
        // SAFETY: as for ncclGroupStart.
        let ended = began(self.nccl, "ncclGroupEnd", unsafe { (functions.group_end)() });
        Ok(added.and(ended)?)
    }

    /// Begins to finish all exchanges. Must be ready; afterwards, when it is ready again, it can be
    /// destroyed.
    pub(super) fn finalize(&self) -> Result<(), Fault> {
        let _current = self.context.push()?;
        // SAFETY: NCCL declares the function with this type, and the communicator exists.
        Ok(began(self.nccl, "ncclCommFinalize", unsafe { (self.nccl.functions.finalize)(self.raw.0) })?)
    }

    /// Frees a communicator that is finalized.
    pub(super) fn destroy(self) {
        // An error has no receiver: nothing can be done about it.
        if let Ok(_current) = self.context.push() {
            // SAFETY: NCCL declares the function with this type. The communicator exists, and nothing uses
            // the handle after this.
            let _ = unsafe { (self.nccl.functions.destroy)(self.raw.0) };
        }
    }

    /// Ends everything that is under way, at any time, and frees the communicator. NCCL may take a
    /// while for it.
    pub(super) fn abort(self) {
        // An error has no receiver. A context that is destroyed cannot become current; NCCL is told
        // nonetheless.
        let _current = self.context.push();
        // SAFETY: as in `destroy`.
        let _ = unsafe { (self.nccl.functions.abort)(self.raw.0) };
    }
}

/// `Ok` also if the call has begun something that is not done yet.
fn began(nccl: &Nccl, call: &'static str, code: Code) -> Result<(), NcclError> {
    if code == IN_PROGRESS { Ok(()) } else { nccl.check(call, code) }
}

/// A device address, as NCCL takes it.
fn address(part: &Part) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(part.address).unwrap_or(0))
}

fn signed(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}
