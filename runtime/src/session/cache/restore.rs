//! Keys that were lost with their ranks, appended again.

use bytes::Bytes;
use kyklos_transport::Vote;

use super::KvCache;
use super::plans::{full, len, ranges};
use crate::error::{Error, Result};
use crate::session::Session;
use crate::tensor::Tensor;

/// The hash under which ranks vote on keys that replace missing ones.
const RESTORED: [u8; 32] = *b"restore: kyklos cache, release 1";

impl Session {
    /// Appends the keys and values of the tokens that are [`missing`](KvCache::missing), in this
    /// order. All ranks pass the same ones; the cache keeps each on one rank. Blocks.
    ///
    /// # Errors
    /// As [`Self::attend_cached`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn restore(&mut self, cache: &mut KvCache, k: &Tensor, v: &Tensor) -> Result<()> {
        pollster::block_on(self.restore_async(cache, k, v))
    }

    /// [`Self::restore`] as a future.
    ///
    /// # Errors
    /// As [`Self::restore`].
    pub async fn restore_async(&mut self, cache: &mut KvCache, k: &Tensor, v: &Tensor) -> Result<()> {
        let mut holdings = cache.holdings.clone();
        let prepared = self.fits(cache).and_then(|()| cache.upload([k, v])).and_then(|new| {
            let missing = len(cache.missing());
            if new.count != missing {
                return Err(Error::request(
                    format!("{} keys for {missing} missing tokens", new.count),
                    "give one key for each position of KvCache::missing",
                ));
            }
            let own =
                holdings.share_out(missing, cache.options.block).ok_or_else(|| full(&holdings, missing))?;
            let tokens = &own[cache.rank.0 as usize];
            let rows = holdings.next_rows(cache.rank, len(tokens));
            cache.grow(rows.last().map_or(0, |rows| rows.end))?;
            Ok((new, own, rows))
        });
        let (new, own, rows) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                self.refuse(&error).await?;
                return Err(error);
            }
        };
        let note = Bytes::from([cache.digest().to_le_bytes(), cache.made.to_le_bytes()].concat());
        let notes = self.vote(Vote::Ready { plan_hash: RESTORED, note }).await?;
        self.op += 1;
        if let Some(rank) = notes.iter().position(|note| *note != notes[0]) {
            return Err(Error::request(
                format!("rank {rank} restores a cache with another record of its tokens than rank 0"),
                "restore the same cache on all ranks",
            ));
        }
        let written = cache.write(&new, &ranges(&own[cache.rank.0 as usize]), &rows);
        written.inspect_err(|error| self.end_call(error))?;
        holdings.restore(&own);
        cache.holdings = holdings;
        Ok(())
    }
}
