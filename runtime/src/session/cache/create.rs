//! Making a cache: the ranks agree on its settings, and learn each other's limits.

use bytes::Bytes;
use kyklos_transport::Vote;
use serde::{Deserialize, Serialize};

use super::{CacheOptions, Holdings, KvCache};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::session::Session;

/// The hash under which ranks vote on a new cache.
const CACHES: [u8; 32] = *b"cache: a kyklos key/value cache.";

/// One rank's settings, as they travel.
#[derive(Debug, Serialize, Deserialize)]
struct Facts {
    /// Version of these facts.
    version: u32,
    op: u64,
    /// The options that must be equal on all ranks, in words.
    options: String,
    /// Most tokens of this rank.
    most: u32,
    share: f64,
}

impl Session {
    /// An empty cache over the ranks of the group. All ranks make it at the same place in their
    /// calls. Blocks.
    ///
    /// # Errors
    /// [`Error::Request`] when an option is out of range, or ranks use other options: on all ranks.
    /// Others as [`Self::attend`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn kv_cache(&mut self, options: CacheOptions) -> Result<KvCache> {
        pollster::block_on(self.kv_cache_async(options))
    }

    /// [`Self::kv_cache`] as a future.
    ///
    /// # Errors
    /// As [`Self::kv_cache`].
    pub async fn kv_cache_async(&mut self, options: CacheOptions) -> Result<KvCache> {
        let prepared = options.checked().and_then(|()| {
            self.device.supports(options.dtype, options.dim as usize)?;
            Ok([self.device.alloc("cached keys", 0)?, self.device.alloc("cached values", 0)?])
        });
        let tensors = match prepared {
            Ok(tensors) => tensors,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let (most, share) = (options.most_tokens(), options.share);
        let facts = Facts { version: 1, op: self.op, options: options.to_string(), most, share };
        let note =
            Bytes::from(serde_json::to_vec(&facts).expect("plain data without maps always serialises"));
        let notes = self.vote(Vote::Ready { plan_hash: CACHES, note }).await?;
        self.op += 1;
        let mut all: Vec<Facts> = Vec::with_capacity(notes.len());
        for (rank, note) in notes.iter().enumerate() {
            let facts: Facts = serde_json::from_slice(note).map_err(|_| {
                Error::request(
                    format!("rank {rank} describes its cache in a form that this release does not know"),
                    "use the same release on all ranks",
                )
            })?;
            if let Some(first) = all.first() {
                let same = (first.version, first.op) == (facts.version, facts.op);
                if !same || first.options != facts.options {
                    return Err(Error::request(
                        format!(
                            "rank {rank} makes {} as call {} of its session, rank 0 {} as call {}",
                            facts.options, facts.op, first.options, first.op
                        ),
                        "make the same cache on all ranks, at the same place in their calls",
                    ));
                }
            }
            all.push(facts);
        }
        if all.iter().all(|facts| facts.share == 0.0) {
            return Err(Error::request(
                "a cache in which each rank has a share of 0",
                "give some rank a share",
            ));
        }
        let holdings = Holdings::new(all.iter().map(|facts| (facts.most, facts.share)));
        let (device, rank) = (self.device.clone(), self.rank());
        Ok(KvCache { options, device, rank, made: self.op - 1, holdings, tensors: Some(tensors), rows: 0 })
    }
}
