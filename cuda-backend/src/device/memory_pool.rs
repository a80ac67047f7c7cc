//! Memory of the device, counted and kept.
//!
//! What a buffer gives back is kept for the next one of its size: freeing memory makes the driver wait for the whole
//! device, and a ring asks for the same sizes over and over. It is given back when there is no other memory left, and beyond
//! a quarter of the device, for others want memory too.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kyklos::{Error, Result};

use super::dependencies::Marks;
use super::status::Health;
use crate::driver::{Context, Fault, Memory};

/// The memory of one backend.
#[derive(Debug)]
pub(crate) struct Pool {
    context: Arc<Context>,
    health: Arc<Health>,
    most_bytes: u64,
    most_kept_bytes: u64,
    stuck_after: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Held by buffers.
    held_bytes: u64,
    /// What was given back longest ago comes first.
    kept: Vec<Block>,
}

impl State {
    fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(Block::bytes).sum()
    }
}

/// Memory, and what was done with it.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) memory: Memory,
    pub(crate) marks: Mutex<Marks>,
}

impl Block {
    pub(crate) fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

/// Linear memory on a CUDA device.
#[derive(Debug)]
pub struct CudaBuffer {
    /// Until it is dropped.
    block: Option<Block>,
    /// As asked for; the memory itself is a little larger.
    bytes: usize,
    pool: Arc<Pool>,
}

impl CudaBuffer {
    pub(crate) fn block(&self) -> &Block {
        self.block.as_ref().expect("taken by drop only")
    }

    pub(crate) fn address(&self) -> u64 {
        self.block().memory.address()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.pool.keep(block);
        }
    }
}

impl Pool {
    pub(crate) fn new(
        context: &Arc<Context>,
        health: &Arc<Health>,
        device_bytes: usize,
        most_bytes: Option<u64>,
        stuck_after: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            health: health.clone(),
            most_bytes: most_bytes.unwrap_or(u64::MAX),
            most_kept_bytes: device_bytes as u64 / 4,
            stuck_after,
            state: Mutex::default(),
        })
    }

    /// A buffer with unspecified contents. `submit_held` submits what is held back, for nothing that is can come to an end.
    pub(crate) fn buffer(
        self: &Arc<Self>,
        label: &str,
        bytes: usize,
        submit_held: impl Fn(),
    ) -> Result<CudaBuffer> {
        self.health.check()?;
        let refusal = |allowed_bytes| Error::OutOfMemory {
            device: self.health.device().to_owned(),
            what: label.to_owned(),
            asked_bytes: bytes as u64,
            allowed_bytes,
        };
        let fault = |fault: Fault| self.health.error(&format!("allocate {label}"), &fault);
        let mut state = self.lock();
        let left = self.most_bytes - state.held_bytes;
        let size = size_class(bytes).filter(|size| *size as u64 <= left);
        let kept = size.map(|size| idle(&mut state, size)).transpose().map_err(fault)?.flatten();
        let block = match kept {
            Some(block) => block,
            None => {
                let free = self.context.free_bytes().map_err(fault)? as u64;
                let allowed = left.min(free + state.kept_bytes());
                let size = size.filter(|size| *size as u64 <= allowed).ok_or_else(|| refusal(allowed))?;
                match self.make(&mut state, size, free, submit_held).map_err(fault)? {
                    Some(block) => block,
                    // The driver had less than it said, or in pieces.
                    None => return Err(refusal(self.context.free_bytes().map_err(fault)? as u64)),
                }
            }
        };
        block.marks().forget_failure();
        state.held_bytes += block.bytes();
        Ok(CudaBuffer { block: Some(block), bytes, pool: self.clone() })
    }

    /// `size` new bytes, or kept ones that the device still uses, or new ones in the place of kept ones of other sizes.
    fn make(
        &self,
        state: &mut State,
        size: usize,
        free: u64,
        submit_held: impl Fn(),
    ) -> Result<Option<Block>, Fault> {
        if size as u64 <= free
            && let Some(block) = self.fresh(size)?
        {
            return Ok(Some(block));
        }
        submit_held();
        if let Some(index) = state.kept.iter().position(|block| block.memory.bytes() == size) {
            return Ok(Some(state.kept.remove(index)));
        }
        // The one place where a caller waits for the device: there is no memory but what it is still using.
        let start = Instant::now();
        while !state.kept.is_empty() && start.elapsed() < self.stuck_after {
            let mut still = Vec::new();
            for block in state.kept.drain(..) {
                if !block.marks().idle()? {
                    still.push(block);
                }
            }
            state.kept = still;
            if let Some(block) = self.fresh(size)? {
                return Ok(Some(block));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        self.fresh(size)
    }

    fn fresh(&self, size: usize) -> Result<Option<Block>, Fault> {
        match Memory::new(&self.context, size) {
            Ok(memory) => Ok(Some(Block { memory, marks: Mutex::default() })),
            Err(fault) if fault.is_out_of_memory() => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    fn keep(&self, block: Block) {
        let mut state = self.lock();
        state.held_bytes -= block.bytes();
        state.kept.push(block);
        while state.kept_bytes() > self.most_kept_bytes {
            // Of a broken device nothing is freed.
            let idle = |block: &Block| block.marks().idle().unwrap_or(false);
            let Some(index) = state.kept.iter().position(idle) else { break };
            drop(state.kept.remove(index));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kept memory of this size that the device is done with.
fn idle(state: &mut State, size: usize) -> Result<Option<Block>, Fault> {
    for (index, block) in state.kept.iter().enumerate() {
        if block.memory.bytes() == size && block.marks().idle()? {
            return Ok(Some(state.kept.remove(index)));
        }
    }
    Ok(None)
}

/// What is allocated for so many bytes: an eighth more at most, so that sizes which are nearly the same serve each
/// other. Nothing beyond what an address space has.
pub(crate) fn size_class(bytes: usize) -> Option<usize> {
    let step = (bytes.max(1).checked_next_power_of_two()? / 16).max(512);
    bytes.max(1).checked_next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_by_an_eighth_at_most() {
        assert_eq!(size_class(0), Some(512));
        assert_eq!(size_class(513), Some(1024));
        for bytes in [4097, 100_000, 1 << 20, (1 << 30) + 1] {
            let size = size_class(bytes).unwrap();
            assert!(size >= bytes && size <= bytes + bytes / 8 + 512, "{bytes}: {size}");
            assert_eq!(size_class(size), Some(size), "{bytes}");
        }
        assert_eq!(size_class(usize::MAX), None);
    }
}
