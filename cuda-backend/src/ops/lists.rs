//! Several arrays in one upload.

use bytemuck::Pod;

/// Arrays one behind the other, each on a 16-byte boundary.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    pub(crate) bytes: Vec<u8>,
}

impl Lists {
    /// Adds an array and returns its offset in bytes.
    pub(crate) fn append<T: Pod>(&mut self, array: &[T]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let offset = self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytemuck::cast_slice(array));
        offset
    }
}
