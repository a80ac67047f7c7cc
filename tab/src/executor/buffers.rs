//! Buffers by the names that the host gives them.

use std::collections::HashMap;

use kyklos::backend;

use crate::protocol::{BufferId, State};

#[derive(Debug)]
pub(super) struct Buffers<Buffer>(HashMap<BufferId, Buffer>);

impl<Buffer> Default for Buffers<Buffer> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<Buffer> Buffers<Buffer> {
    pub(super) fn put(&mut self, id: BufferId, buffer: Buffer) {
        self.0.insert(id, buffer);
    }

    pub(super) fn take(&mut self, id: BufferId) -> Result<Buffer, String> {
        self.0.remove(&id).ok_or_else(|| missing(id))
    }

    pub(super) fn get(&self, id: BufferId) -> Result<&Buffer, String> {
        self.0.get(&id).ok_or_else(|| missing(id))
    }

    pub(super) fn get_mut(&mut self, id: BufferId) -> Result<&mut Buffer, String> {
        self.0.get_mut(&id).ok_or_else(|| missing(id))
    }

    /// A state that is read.
    pub(super) fn state(&self, state: State) -> Result<backend::State<'_, Buffer>, String> {
        let shape = state.shape().ok_or_else(|| missing(state.a))?;
        Ok(backend::State { a: self.get(state.a)?, ml: self.get(state.ml)?, shape })
    }

    /// Lets `run` change one buffer and read the others.
    pub(super) fn with_one<T>(
        &mut self,
        id: BufferId,
        run: impl FnOnce(&Self, &mut Buffer) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut buffer = self.take(id)?;
        let result = run(self, &mut buffer);
        self.put(id, buffer);
        result
    }

    /// Lets `run` change two buffers and read the others.
    pub(super) fn with_two<T>(
        &mut self,
        [one, two]: [BufferId; 2],
        run: impl FnOnce(&Self, [&mut Buffer; 2]) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut buffer = self.take(one)?;
        let result = self.with_one(two, |others, two| run(others, [&mut buffer, two]));
        self.put(one, buffer);
        result
    }

    /// Lets `run` change a state and read the others.
    pub(super) fn with_state<T>(
        &mut self,
        state: State,
        run: impl FnOnce(&Self, backend::StateMut<'_, Buffer>) -> Result<T, String>,
    ) -> Result<T, String> {
        let shape = state.shape().ok_or_else(|| missing(state.a))?;
        self.with_two([state.a, state.ml], |others, [a, ml]| run(others, backend::StateMut { a, ml, shape }))
    }
}

fn missing(id: BufferId) -> String {
    format!("buffer {id} does not exist or is used twice")
}
