//! Loaded kernels, their launches, and tensor maps.

use std::ffi::{CStr, CString, c_int, c_void};
use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::{DriverError, Result};
use crate::kernels::TensorMap;

/// The driver's encoding of a tensor map for TMA. Needs no context and reads nothing of the tensor
/// itself.
pub(crate) fn encode_tensor_map(map: &TensorMap) -> Result<TensorMap> {
    use sys::CUtensorMapDataType_enum as Type;
    let data_type = match map.data_type {
        TensorMap::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    // Not the bindings' type: the driver of CUDA 13 wants an address that is a multiple of 128.
    let mut encoded = TensorMap::default();
    let data = ptr::without_provenance_mut(usize::try_from(map.data).expect("an address"));
    // SAFETY: the driver writes 128 bytes to `encoded`, a local of that size and alignment. It reads
    // `rank` extents, `rank` - 1 strides, `rank` box extents and `rank` element strides; the rank
    // is 4 (see `TensorMap::new`), and the arrays have 5, 4, 5 and 5. It stores the address of the
    // tensor and does not dereference it.
    check("cuTensorMapEncodeTiled", unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut encoded).cast::<sys::CUtensorMap>(),
            data_type,
            map.rank,
            data,
            map.extent.as_ptr(),
            map.stride.as_ptr(),
            map.box_extent.as_ptr(),
            [1; 5].as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(encoded)
}

/// Loaded kernels.
#[derive(Debug)]
pub(crate) struct Module {
    raw: Handle<sys::CUmod_st>,
    context: Arc<Context>,
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(super) raw: Handle<sys::CUfunc_st>,
    pub(crate) name: String,
    /// Keeps the code loaded.
    _module: Arc<Module>,
}

/// A launch of a kernel over `grid` blocks of `threads`, with `shared_bytes` of dynamic shared
/// memory per block.
///
/// Kernels take one struct by value. `arguments` are its bytes: the struct of
/// `kernels/arguments.rs` that belongs to the kernel, whose size the emulator's tests compare with
/// the kernel's. A wrong address in it is an error of the device: the addresses are of device
/// memory, and no kernel is given one of the host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: Vec<u8>,
}

impl Module {
    /// Loads an image: a cubin, or PTX that ends with a zero byte, which the driver compiles.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        use sys::CUjit_option_enum as Option;
        let _current = context.push()?;
        let mut log = vec![0_u8; 4096];
        let mut options = [Option::CU_JIT_ERROR_LOG_BUFFER, Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len() - 1)];
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current. The driver finds the end of the image by the ELF header or by the
        // zero byte: images come from nvcc or NVRTC, those from the cache are protected by a hash,
        // and all that the headers of a replacement name is inside (see `images::Replacement`). It
        // reads two options and their values, writes at most 4095 bytes to `log`, which has 4096,
        // and one handle to `raw`, a local.
        let loaded = check("cuModuleLoadDataEx", unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                image.as_ptr().cast::<c_void>(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        });
        loaded.map_err(|error| {
            let said = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            let text = if said.is_empty() { error.text } else { format!("{}: {}", error.text, said.trim()) };
            DriverError { text, ..error }
        })?;
        Ok(Arc::new(Self { raw: Handle(raw), context: context.clone() }))
    }

    /// The kernel `name`, allowed to use `shared_bytes` of dynamic shared memory per block.
    pub(crate) fn function(self: &Arc<Self>, name: &str, shared_bytes: u32) -> Result<Function> {
        let _current = self.context.push()?;
        let text = CString::new(name).expect("names of kernels have no zero byte");
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current and the module is loaded. `text` ends with a zero byte and lives
        // during the call. The driver writes one handle to `raw`, a local; the handle is valid
        // while the module is loaded.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut raw, self.raw.0, text.as_ptr())
        })?;
        if shared_bytes > 48 * 1024 {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
            // SAFETY: `raw` was found a moment ago in a module that is loaded. The driver refuses a value
            // that is too large.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(raw, attribute, bytes) })?;
        }
        Ok(Function { raw: Handle(raw), name: name.to_owned(), _module: self.clone() })
    }
}

/// Two functions are equal if they are the same kernel of the same module.
impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        self.raw.0 == other.raw.0
    }
}

impl Eq for Function {}

impl Hash for Function {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.raw.0.hash(hasher);
    }
}

impl Drop for Module {
    /// To be dropped when the device no longer runs its kernels.
    fn drop(&mut self) {
        if let Ok(_current) = self.context.push() {
            // SAFETY: the context is current. cuModuleLoadDataEx made the module and `self` owns it. No
            // function of it is left: each holds an `Arc` of the module.
            let _ = check("cuModuleUnload", unsafe { sys::cuModuleUnload(self.raw.0) });
        }
    }
}
