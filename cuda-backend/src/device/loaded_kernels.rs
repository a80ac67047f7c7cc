//! The kernels of a device, found by name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kyklos::{Error, Result};

use super::status::DeviceStatus;
use crate::driver::{Context, Function, Module};
use crate::images::{Image, Replacement};

/// The module of the image, and that of the kernels that replace some of it.
#[derive(Debug)]
pub(crate) struct LoadedKernels {
    status: Arc<DeviceStatus>,
    module: Arc<Module>,
    /// Names of kernels, and the module that has them.
    replaced: Option<(Vec<String>, Arc<Module>)>,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

impl LoadedKernels {
    /// Loads both modules. `device` says what the device is, for a replacement that it does not
    /// run.
    ///
    /// # Errors
    /// [`Error::Request`] if the driver refuses the replacement, [`Error::Device`] if it refuses
    /// the image.
    pub(crate) fn load(
        context: &Arc<Context>,
        status: &Arc<DeviceStatus>,
        image: &Image,
        replacement: Option<Replacement>,
        device: &str,
    ) -> Result<Self> {
        let load = |bytes: &[u8]| Module::load(context, bytes);
        let replaced = replacement.map(|Replacement { bytes, name, architecture, kernels }| {
            let module = load(&bytes).map_err(|error| {
                let what = format!("the kernels of {name}, which are for sm_{architecture}");
                // Another error would only follow from one that ends the context.
                if error.ends_context() {
                    return status.error(&format!("load {what}"), &error);
                }
                Error::request(
                    format!("{device} does not load {what}: {error}"),
                    format!("compile them for the device, as the others are: {}", image.origin),
                )
            })?;
            Ok::<_, Error>((kernels, module))
        });
        Ok(Self {
            status: status.clone(),
            replaced: replaced.transpose()?,
            module: load(&image.bytes).map_err(|error| status.error("load the kernels", &error))?,
            functions: Mutex::default(),
        })
    }

    /// The kernel `name`, allowed to use `shared_bytes` of dynamic shared memory per block.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(super) fn function(&self, name: &str, shared_bytes: u32) -> Result<Arc<Function>> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let replaced =
            self.replaced.as_ref().filter(|(names, _)| names.iter().any(|replaced| replaced == name));
        let module = replaced.map_or(&self.module, |(_, module)| module);
        let found = module.function(name, shared_bytes);
        let function =
            Arc::new(found.map_err(|error| self.status.error(&format!("find kernel {name}"), &error))?);
        functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}
