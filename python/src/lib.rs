//! The extension module of the Python package `kyklos`: groups, calls and caches over DLPack
//! arrays. The Python code of the package (`python/kyklos/`) has the public API and its
//! documentation; this module is what it is made of.

mod backward;
mod cache;
mod call;
mod collective;
mod devices;
mod errors;
mod forming;
mod group;
mod helpers;
mod plans;
mod share;
mod spare;
mod steps;
#[cfg(feature = "suite")]
mod suite;
mod tensors;
mod torch_device;
mod worker;

use pyo3::prelude::*;

#[pymodule]
mod _kyklos {
    #[pymodule_export]
    use crate::cache::Cache;
    #[pymodule_export]
    use crate::call::Call;
    #[pymodule_export]
    use crate::devices::devices;
    #[pymodule_export]
    use crate::forming::{free_port, identities, local, of_launcher, with_identity};
    #[pymodule_export]
    use crate::group::Group;
    #[pymodule_export]
    use crate::helpers::{Flight, Owner, SharedCall, help_out};
    #[pymodule_export]
    use crate::plans::{choices, plan};
    #[pymodule_export]
    use crate::steps::CachedCalls;
    #[cfg(feature = "suite")]
    #[pymodule_export]
    use crate::suite::{check, claims};
    #[pymodule_export]
    use crate::tensors::outputs::Array;

    /// The release of the package, which is that of the crates.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name in Python")]
    const version: &str = env!("CARGO_PKG_VERSION");
}
