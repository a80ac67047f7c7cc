//! The driver API as values that clean up after themselves. Here and in `compiler.rs` is all that is unsafe.
//!
//! Bindings are cudarc's, loaded at run time; it panics where a library or a symbol is missing, so [`load`] looks for
//! all of them first, and nothing else is called before it. Every call makes its context current: which thread calls
//! does not matter.
#![expect(unsafe_code, reason = "the driver is a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use crate::devices::{Unavailable, failed};
use crate::fault::Fault;
use crate::hopper::TensorMap;

type Result<T> = std::result::Result<T, Fault>;

/// What this crate calls. All of it is in drivers since CUDA 12.
const SYMBOLS: [&str; 32] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernel",
];

/// Calls the driver; an error keeps the name of the call.
macro_rules! call {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        // SAFETY: `load` found the symbol. Handles are those of values that live, each of which destroys its own once;
        // pointers are to locals or to memory that the value owns, of the sizes that are passed.
        check(stringify!($name), unsafe { sys::$name($($argument),*) })
    };
}

/// Loads the driver, once. Says why it cannot.
pub(crate) fn load() -> std::result::Result<(), Unavailable> {
    static LOADED: OnceLock<std::result::Result<(), Unavailable>> = OnceLock::new();
    LOADED.get_or_init(try_load).clone()
}

fn try_load() -> std::result::Result<(), Unavailable> {
    // SAFETY: this loads the driver, whose initialisers do what NVIDIA has them do.
    if !unsafe { sys::is_culib_present() } {
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        let why = format!("CUDA cannot be used: {name} was not found");
        return Err(Unavailable { why, remedy: "install NVIDIA's driver" });
    }
    // SAFETY: as above; it is present.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: only asked whether it is there.
        if unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.is_err() {
            let why = format!("CUDA cannot be used: the driver has no {symbol}");
            return Err(Unavailable { why, remedy: "install a newer driver" });
        }
    }
    call!(cuInit(0)).map_err(failed)
}

/// The version of CUDA that the driver speaks, as 1000 · major + 10 · minor.
pub(crate) fn version() -> Result<u32> {
    let mut version: c_int = 0;
    call!(cuDriverGetVersion(&raw mut version))?;
    Ok(version.unsigned_abs())
}

pub(crate) fn device_count() -> Result<usize> {
    let mut count: c_int = 0;
    call!(cuDeviceGetCount(&raw mut count))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What a device says of itself.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) name: String,
    /// Compute capability, 10 · major + minor.
    pub(crate) capability: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) integrated: bool,
    pub(crate) memory_bytes: usize,
}

pub(crate) fn facts(ordinal: usize) -> Result<Facts> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = device(ordinal)?;
    let attribute = |which| -> Result<u32> {
        let mut value: c_int = 0;
        call!(cuDeviceGetAttribute(&raw mut value, which, device))?;
        Ok(value.unsigned_abs())
    };
    let mut name = [0_u8; 256];
    call!(cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 255, device))?;
    let mut memory_bytes = 0;
    call!(cuDeviceTotalMem_v2(&raw mut memory_bytes, device))?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
    let [major, minor] = [
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    Ok(Facts {
        name,
        capability: 10 * major + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        memory_bytes,
    })
}

fn device(ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    call!(cuDeviceGet(&raw mut device, c_int::try_from(ordinal).unwrap_or(c_int::MAX)))?;
    Ok(device)
}

fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let words = |ask: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = ptr::null();
        // SAFETY: the driver writes the address of a text of its own, or null.
        unsafe {
            let _ = ask(code, &raw mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let unknown = || "a code that the driver has no words for".to_owned();
    Err(Fault {
        call,
        code: code as u32,
        name: words(sys::cuGetErrorName).unwrap_or_else(|| format!("{code:?}")),
        text: words(sys::cuGetErrorString).unwrap_or_else(unknown),
    })
}

/// A handle of the driver's. The driver takes them from any thread.
#[derive(Debug)]
struct Handle<T>(*mut T);

// SAFETY: the driver API may be called from any thread, with any handle.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above, also at the same time.
unsafe impl<T> Sync for Handle<T> {}

/// A device's primary context: the one that a whole process shares.
#[derive(Debug)]
pub(crate) struct Context {
    raw: Handle<sys::CUctx_st>,
    device: sys::CUdevice,
}

impl Context {
    pub(crate) fn retain(ordinal: usize) -> Result<Arc<Self>> {
        let device = device(ordinal)?;
        let mut raw = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        Ok(Arc::new(Self { raw: Handle(raw), device }))
    }

    fn bind(&self) -> Result<()> {
        call!(cuCtxSetCurrent(self.raw.0))
    }

    /// Bytes of the device that nobody has.
    pub(crate) fn free_bytes(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok(free)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Whoever has the context still calls with it is dropped before; a failure has nobody to be told to.
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

/// Operations that the device does in order.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: Handle<sys::CUstream_st>,
    context: Arc<Context>,
}

impl Stream {
    /// A stream that does not wait for the default stream. `urgent` ones get the device first.
    pub(crate) fn new(context: &Arc<Context>, urgent: bool) -> Result<Self> {
        context.bind()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = ptr::null_mut();
        // The driver takes a priority beyond what there is for the nearest one there is.
        call!(cuStreamCreateWithPriority(&raw mut raw, flags, if urgent { -5 } else { 0 }))?;
        Ok(Self { raw: Handle(raw), context: context.clone() })
    }

    /// Later operations of this stream begin when `event` has happened.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        call!(cuStreamWaitEvent(self.raw.0, event.raw.0, 0))
    }

    /// An event that happens when everything before it is done.
    pub(crate) fn record(&self) -> Result<Event> {
        self.context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        call!(cuEventCreate(&raw mut raw, flags))?;
        let event = Event { raw: Handle(raw), context: self.context.clone() };
        call!(cuEventRecord(event.raw.0, self.raw.0))?;
        Ok(event)
    }

    /// Copies all of `from` to `into`, `at` bytes behind its beginning. The staging comes back when it was read.
    pub(crate) fn upload(&self, from: Pinned, into: &Memory, at: usize) -> Result<InFlight> {
        assert!(at + from.used <= into.bytes, "{} bytes at {at} of {}", from.used, into.bytes);
        self.context.bind()?;
        call!(cuMemcpyHtoDAsync_v2(
            into.address + at as u64,
            from.raw.0.cast_const(),
            from.used,
            self.raw.0
        ))?;
        InFlight::new(from, self.record())
    }

    /// Copies `range` of `from` into staging, which comes back when it was written.
    pub(crate) fn download(&self, from: &Memory, range: Range<usize>, into: Pinned) -> Result<InFlight> {
        assert!(range.end <= from.bytes && range.len() == into.used, "{range:?} of {}", from.bytes);
        self.context.bind()?;
        call!(cuMemcpyDtoHAsync_v2(into.raw.0, from.address + range.start as u64, into.used, self.raw.0))?;
        InFlight::new(into, self.record())
    }

    /// Launches a kernel over `grid` blocks of `threads`, with `shared_bytes` of dynamic shared memory, on arguments that
    /// are one struct. What a kernel does with a wrong address is an error of the device, not of this process: it has no
    /// way to the host's memory but the staging, which no kernel is given.
    pub(crate) fn launch(
        &self,
        function: &Function,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        arguments: &[u8],
    ) -> Result<()> {
        self.context.bind()?;
        // The driver copies them before it returns, and writes to neither.
        let mut pointers = [arguments.as_ptr().cast_mut().cast::<c_void>()];
        let [x, y, z] = grid;
        call!(cuLaunchKernel(
            function.raw.0,
            x,
            y,
            z,
            threads,
            1,
            1,
            shared_bytes,
            self.raw.0,
            pointers.as_mut_ptr(),
            ptr::null_mut(),
        ))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuStreamDestroy_v2(self.raw.0));
        }
    }
}

/// A point in the order of a stream.
#[derive(Debug)]
pub(crate) struct Event {
    raw: Handle<sys::CUevent_st>,
    context: Arc<Context>,
}

impl Event {
    /// Whether it has happened.
    pub(crate) fn happened(&self) -> Result<bool> {
        self.context.bind()?;
        match call!(cuEventQuery(self.raw.0)) {
            Ok(()) => Ok(true),
            Err(fault) if fault.code == sys::CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
            Err(fault) => Err(fault),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuEventDestroy_v2(self.raw.0));
        }
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
    context: Arc<Context>,
}

impl Memory {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, bytes))?;
        Ok(Self { address, bytes, context: context.clone() })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    /// The device must be done with it.
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuMemFree_v2(self.address));
        }
    }
}

/// Memory of the host that the device copies from and to by itself.
#[derive(Debug)]
pub(crate) struct Pinned {
    raw: Handle<c_void>,
    bytes: usize,
    /// How many of them are being used.
    used: usize,
    context: Arc<Context>,
}

impl Pinned {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        // Portable: pinned for every context of the process.
        call!(cuMemHostAlloc(&raw mut raw, bytes, sys::CU_MEMHOSTALLOC_PORTABLE))?;
        // SAFETY: it is of that many bytes; from here on all are initialised.
        unsafe { ptr::write_bytes(raw.cast::<u8>(), 0, bytes) };
        Ok(Self { raw: Handle(raw), bytes, used: bytes, context: context.clone() })
    }

    /// Bytes that it has.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes
    }

    /// Has the first `bytes` used from now on.
    pub(crate) fn using(mut self, bytes: usize) -> Self {
        assert!(bytes <= self.bytes, "{bytes} of {} bytes of staging", self.bytes);
        self.used = bytes;
        self
    }

    /// The bytes in use.
    pub(crate) fn contents(&self) -> &[u8] {
        // SAFETY: initialised when it was made. While the device writes to it only an `InFlight` has it.
        unsafe { std::slice::from_raw_parts(self.raw.0.cast::<u8>().cast_const(), self.used) }
    }

    /// The bytes in use, to be changed.
    pub(crate) fn contents_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.raw.0.cast::<u8>(), self.used) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuMemFreeHost(self.raw.0));
        }
    }
}

/// Staging that a copy is under way to or from.
///
/// Dropped before it has landed, its memory is never freed: the device may still write to it.
#[derive(Debug)]
pub(crate) struct InFlight {
    staging: ManuallyDrop<Pinned>,
    event: Arc<Event>,
}

impl InFlight {
    /// Staging whose copy was submitted. Where no event could be recorded nobody can know when it lands.
    fn new(staging: Pinned, event: Result<Event>) -> Result<Self> {
        let staging = ManuallyDrop::new(staging);
        Ok(Self { staging, event: Arc::new(event?) })
    }

    pub(crate) fn event(&self) -> &Arc<Event> {
        &self.event
    }

    /// The staging, when the copy is done.
    pub(crate) fn land(self) -> Result<Option<Pinned>> {
        Ok(self.event.happened()?.then(|| ManuallyDrop::into_inner(self.staging)))
    }
}

/// A tensor as TMA knows it, of the one that `map` describes. The driver reads nothing of the tensor itself.
pub(crate) fn encode(map: &TensorMap) -> Result<TensorMap> {
    use sys::CUtensorMapDataType_enum as Type;
    let data_type = match map.data_type {
        TensorMap::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let mut encoded = sys::CUtensorMap { opaque: [0; 16] };
    call!(cuTensorMapEncodeTiled(
        &raw mut encoded,
        data_type,
        map.rank,
        ptr::without_provenance_mut(usize::try_from(map.data).expect("an address")),
        map.extent.as_ptr(),
        map.stride.as_ptr(),
        map.box_extent.as_ptr(),
        [1; 5].as_ptr(),
        sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
        sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
        sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ))?;
    Ok(bytemuck::cast(encoded.opaque))
}

/// Kernels that are loaded.
#[derive(Debug)]
pub(crate) struct Module {
    raw: Handle<sys::CUmod_st>,
    context: Arc<Context>,
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    raw: Handle<sys::CUfunc_st>,
    /// Keeps the code loaded.
    _module: Arc<Module>,
}

impl Module {
    /// Loads a cubin, or PTX that ends with a zero byte, which the driver compiles.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        use sys::CUjit_option_enum as Option;
        context.bind()?;
        let mut log = vec![0_u8; 4096];
        let mut options = [Option::CU_JIT_ERROR_LOG_BUFFER, Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len() - 1)];
        let mut raw = ptr::null_mut();
        call!(cuModuleLoadDataEx(
            &raw mut raw,
            image.as_ptr().cast::<c_void>(),
            2,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        ))
        .map_err(|fault| {
            let said = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            let text = if said.is_empty() { fault.text } else { format!("{}: {}", fault.text, said.trim()) };
            Fault { text, ..fault }
        })?;
        Ok(Arc::new(Self { raw: Handle(raw), context: context.clone() }))
    }

    /// A kernel, with leave for this much dynamic shared memory of a block.
    pub(crate) fn function(self: &Arc<Self>, name: &str, shared_bytes: u32) -> Result<Function> {
        self.context.bind()?;
        let name = CString::new(name).expect("names of kernels have no zero byte");
        let mut raw = ptr::null_mut();
        call!(cuModuleGetFunction(&raw mut raw, self.raw.0, name.as_ptr()))?;
        if shared_bytes > 48 * 1024 {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
            call!(cuFuncSetAttribute(raw, attribute, bytes))?;
        }
        Ok(Function { raw: Handle(raw), _module: self.clone() })
    }
}

impl Drop for Module {
    /// The device must be done with it.
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuModuleUnload(self.raw.0));
        }
    }
}
