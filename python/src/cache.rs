//! Keys and values of earlier tokens, shared by the ranks of a group.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kyklos::{CacheOptions, Dtype, Error, KvCache, Result};
use kyklos_transport::Rank;
use pyo3::prelude::*;

use crate::errors;
use crate::share::ranges;

/// This rank's part of a cache.
#[pyclass(frozen, module = "kyklos._kyklos")]
#[derive(Debug)]
pub(crate) struct Cache(Shared);

/// A cache, for the thread of the session too. `None` while
/// [`CachedCalls`](crate::steps::CachedCalls) have it.
pub(crate) type Shared = Arc<Mutex<Option<KvCache>>>;

/// The settings as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CacheSettings {
    batch: u32,
    heads: u32,
    dim: u32,
    dtype: String,
    max_bytes: Option<u64>,
    share: f64,
    window: Option<u32>,
    rollback: u32,
    block: u32,
}

impl CacheSettings {
    pub(crate) fn options(&self) -> Result<CacheOptions> {
        let dtype = match self.dtype.as_str() {
            "float32" => Dtype::F32,
            "float16" => Dtype::F16,
            "bfloat16" => Dtype::Bf16,
            other => other.parse()?,
        };
        let mut options = CacheOptions::new([self.batch, self.heads, self.dim], dtype)
            .share(self.share)
            .rollback(self.rollback)
            .block(self.block);
        if let Some(bytes) = self.max_bytes {
            options = options.max_bytes(bytes);
        }
        if let Some(keys) = self.window {
            options = options.window(keys);
        }
        Ok(options)
    }
}

impl Cache {
    pub(crate) fn new(cache: KvCache) -> Self {
        Self(Arc::new(Mutex::new(Some(cache))))
    }

    /// For the thread of the session.
    pub(crate) fn shared(&self) -> Shared {
        self.0.clone()
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut KvCache) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| lock(&self.0).as_mut().map_or_else(|| Err(in_calls()), work))
            .map_err(|error| errors::of_call(py, &error))
    }
}

pub(crate) fn lock(cache: &Shared) -> MutexGuard<'_, Option<KvCache>> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error of a cache that announced calls have.
pub(crate) fn in_calls() -> Error {
    Error::request(
        "a cache in the middle of calls that were announced for it",
        "make all of them, or close them",
    )
}

#[pymethods]
impl Cache {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |cache| Ok(cache.len() as usize))
    }

    /// Bytes of the keys and values on this rank.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |cache| Ok(cache.bytes()))
    }

    /// The tokens that `rank` holds, as half-open ranges of positions.
    fn tokens(&self, py: Python<'_>, rank: u32) -> PyResult<Vec<(u32, u32)>> {
        let tokens = self.with(py, |cache| Ok(cache.tokens(Rank(rank))))?;
        Ok(ranges(&tokens))
    }

    /// Takes back the newest tokens.
    fn truncate(&self, py: Python<'_>, len: u32) -> PyResult<()> {
        self.with(py, |cache| cache.truncate(len))
    }
}
