//! Jobs for the emulator: buffers, launches, and the buffers to return (`emulator/main.cpp` has the
//! format).

use bytemuck::Pod;

use crate::program::Program;

/// When copies complete, and which threads run first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Timing {
    Eager,
    Late,
    Random,
}

impl Timing {
    pub(crate) const ALL: [Self; 3] = [Self::Eager, Self::Late, Self::Random];
}

/// A buffer's address on the emulated device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    bytes: u64,
}

#[derive(Default)]
pub(crate) struct Job {
    buffers: Vec<u8>,
    buffer_count: u32,
    launches: Vec<u8>,
    launch_count: u32,
    results: Vec<Buffer>,
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    /// Reads of 8 rows of 16 bytes by ldmatrix.
    pub(crate) accesses: u64,
    /// Passes over the shared-memory banks for them: as many as accesses if no two rows share a
    /// bank.
    pub(crate) passes: u64,
    /// Copies by cp.async, and boxes by TMA.
    pub(crate) copies: u64,
    /// Barriers of whole blocks.
    pub(crate) barriers: u64,
    /// wgmma instructions, one for each warpgroup.
    pub(crate) products: u64,
    /// Products of the block that has the most.
    pub(crate) busiest: u64,
}

impl Job {
    /// A buffer that holds `data`.
    pub(crate) fn upload<T: Pod>(&mut self, data: &[T]) -> Buffer {
        self.buffer(size_of_val(data), Some(bytemuck::cast_slice(data)))
    }

    /// A buffer of `bytes` in which all bits are 1, so every float is NaN.
    pub(crate) fn poisoned(&mut self, bytes: usize) -> Buffer {
        self.buffer(bytes, None)
    }

    fn buffer(&mut self, bytes: usize, data: Option<&[u8]>) -> Buffer {
        const PAGE: u64 = 4096;
        let bytes = bytes as u64;
        // The buffer ends at the end of a page, rounded to 16 bytes, so that an access behind it is a
        // fault.
        let room = bytes.next_multiple_of(16);
        let address = u64::from(16 + self.buffer_count) * (1 << 32) + room.next_multiple_of(PAGE) - room;
        self.buffers.extend(address.to_le_bytes());
        self.buffers.extend(bytes.to_le_bytes());
        self.buffers.extend(u32::from(data.is_some()).to_le_bytes());
        self.buffers.extend(data.unwrap_or_default());
        self.buffer_count += 1;
        Buffer { address, bytes }
    }

    pub(crate) fn launch(&mut self, name: &str, grid: [usize; 3], shared_bytes: u32, arguments: &impl Pod) {
        let words = |numbers: &[usize]| -> Vec<u8> {
            numbers.iter().flat_map(|n| u32::try_from(*n).unwrap().to_le_bytes()).collect()
        };
        let arguments = bytemuck::bytes_of(arguments);
        self.launches.extend(words(&[name.len()]));
        self.launches.extend(name.as_bytes());
        self.launches.extend(words(&grid));
        self.launches.extend(shared_bytes.to_le_bytes());
        self.launches.extend(words(&[arguments.len()]));
        self.launches.extend(arguments);
        self.launch_count += 1;
    }

    /// Adds a buffer to the results, which are read after all launches.
    pub(crate) fn bring(&mut self, buffer: Buffer) {
        self.results.push(buffer);
    }

    /// Runs the job. Returns the results in order and the counts, or the emulator's message.
    pub(crate) fn run(
        &self,
        program: &Program,
        timing: Timing,
        seed: u64,
    ) -> Result<(Vec<Vec<u8>>, Counts), String> {
        let mut job = Vec::new();
        job.extend((timing as u32).to_le_bytes());
        job.extend(seed.to_le_bytes());
        job.extend(self.buffer_count.to_le_bytes());
        job.extend(&self.buffers);
        job.extend(self.launch_count.to_le_bytes());
        job.extend(&self.launches);
        job.extend(u32::try_from(self.results.len()).unwrap().to_le_bytes());
        for result in &self.results {
            job.extend(result.address.to_le_bytes());
            job.extend(result.bytes.to_le_bytes());
        }
        let answer = program.run(&job)?;
        let mut rest = &answer[..];
        let mut take = |bytes: u64| {
            let (front, back) = rest.split_at(bytes as usize);
            rest = back;
            front.to_vec()
        };
        let results = self.results.iter().map(|result| take(result.bytes)).collect();
        let [accesses, passes, copies, barriers, products, busiest] =
            std::array::from_fn(|_| u64::from_le_bytes(take(8).try_into().unwrap()));
        Ok((results, Counts { accesses, passes, copies, barriers, products, busiest }))
    }
}

/// The initial contents of a buffer.
pub(crate) fn numbers<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}
