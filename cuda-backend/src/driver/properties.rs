//! The devices of this machine and their properties.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys;

use super::call::check;
use super::error::Result;

pub(crate) fn device_count() -> Result<usize> {
    let mut count: c_int = 0;
    // SAFETY: the driver writes one int to `count`, a local. The call needs no context.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Properties of a device, as the driver reports them.
#[derive(Clone, Debug)]
pub(crate) struct DeviceProperties {
    pub(crate) name: String,
    /// Compute capability, 10 · major + minor.
    pub(crate) capability: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) integrated: bool,
    pub(crate) memory_bytes: usize,
}

pub(crate) fn properties(ordinal: usize) -> Result<DeviceProperties> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = device(ordinal)?;
    let attribute = |which| -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: `device` comes from cuDeviceGet. The driver writes one int to `value`, a local.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok(value.unsigned_abs())
    };
    let mut name = [0_u8; 256];
    // SAFETY: the driver writes at most 255 bytes, the last of them zero, to `name`, which has 256.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 255, device)
    })?;
    let mut memory_bytes = 0;
    // SAFETY: `device` comes from cuDeviceGet. The driver writes one size to `memory_bytes`, a local.
    check("cuDeviceTotalMem_v2", unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) })?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
    let [major, minor] = [
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    Ok(DeviceProperties {
        name,
        capability: 10 * major + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        memory_bytes,
    })
}

pub(super) fn device(ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: the driver refuses an ordinal that it does not have. It writes one int to `device`, a
    // local.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
    Ok(device)
}
