//! Submits copies and launches to the streams of a device, in an order that keeps buffers right.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use kyklos::Result;

use super::dependencies::{Completion, StreamKind};
use super::graph_cache::GraphCache;
use super::memory_pool::CudaBuffer;
use super::status::DeviceStatus;
use crate::driver::{self, Context, DriverError, Event, Function, Module, Stream};

/// The streams and kernels of a device.
#[derive(Debug)]
pub(super) struct Submitter {
    status: Arc<DeviceStatus>,
    streams: [Stream; StreamKind::COUNT],
    functions: Mutex<HashMap<String, Arc<Function>>>,
    module: Arc<Module>,
    /// Operations are submitted one at a time, so that accesses are set in the order of the streams.
    submitting: Mutex<SubmitterState>,
}

/// A launch of a kernel: which one, and how many threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchConfig<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

#[derive(Debug)]
struct SubmitterState {
    batch: LaunchBatch,
    graphs: GraphCache,
}

/// Launches that will be submitted together.
#[derive(Debug, Default)]
struct LaunchBatch {
    launches: Vec<driver::Launch>,
    /// What the first of them will wait for, all of it submitted: none of it can be waiting for them.
    waits: Vec<Arc<Event>>,
    end: Arc<Completion>,
}

/// Launches that are held back at most.
const MAX_BATCH_LAUNCHES: usize = 16;

impl Submitter {
    pub(super) fn new(
        context: &Arc<Context>,
        status: &Arc<DeviceStatus>,
        image: &[u8],
        graphs: bool,
    ) -> Result<Self> {
        let error = |operation: &'static str| move |error: DriverError| status.error(operation, &error);
        // Copies are short and somebody waits for them: they come first.
        let stream = |urgent| Stream::new(context, urgent).map_err(error("make a stream"));
        Ok(Self {
            status: status.clone(),
            streams: [stream(false)?, stream(true)?, stream(true)?],
            functions: Mutex::default(),
            module: Module::load(context, image).map_err(error("load the kernels"))?,
            submitting: Mutex::new(SubmitterState {
                batch: LaunchBatch::default(),
                graphs: GraphCache::new(context, graphs),
            }),
        })
    }

    /// Submits a copy to its kind, behind what it has to wait for. `work` submits it and records its event.
    pub(super) fn copy<T>(
        &self,
        kind: StreamKind,
        operation: &str,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
        work: impl FnOnce(&Stream) -> Result<(T, Arc<Event>), DriverError>,
    ) -> Result<T> {
        self.status.check()?;
        let mut submitting = self.submitting();
        let waits = waits(kind, reads, writes)?;
        if waits.iter().any(|end| end.is_held()) {
            self.submit_batch(&mut submitting)?;
        }
        let stream = &self.streams[kind as usize];
        let submit = || {
            waits.iter().filter_map(|end| end.event()).try_for_each(|event| stream.wait(event))?;
            work(stream)
        };
        let (made, event) = submit().map_err(|error| self.status.error(operation, &error))?;
        mark(kind, &Completion::of(event), reads, writes);
        Ok(made)
    }

    /// Launches a kernel, after those that are held back. The event is its end.
    pub(super) fn launch<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        let mut submitting = self.submitting();
        self.add(&mut submitting.batch, launch, bytemuck::bytes_of(arguments), reads, writes)?;
        self.submit_batch(&mut submitting)
    }

    /// Holds a launch back until the next one, or until somebody needs its end. For what is of no use by itself: nobody may
    /// be kept waiting. A error is then an error of whoever comes next, and of whoever needs what was to be written.
    pub(super) fn launch_deferred<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        let mut submitting = self.submitting();
        self.add(&mut submitting.batch, launch, bytemuck::bytes_of(arguments), reads, writes)?;
        if submitting.batch.launches.len() == MAX_BATCH_LAUNCHES {
            self.submit_batch(&mut submitting)?;
        }
        Ok(())
    }

    fn add(
        &self,
        batch: &mut LaunchBatch,
        launch: LaunchConfig<'_>,
        arguments: &[u8],
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        self.status.check()?;
        let LaunchConfig { kernel, grid, threads, shared_bytes } = launch;
        let function = self.function(kernel, shared_bytes)?;
        let waits = waits(StreamKind::Compute, reads, writes)?;
        batch.waits.extend(waits.iter().filter_map(|end| end.event().cloned()));
        mark(StreamKind::Compute, &batch.end, reads, writes);
        let arguments = arguments.to_vec();
        batch.launches.push(driver::Launch { function, grid, threads, shared_bytes, arguments });
        Ok(())
    }

    /// Submits what is held back. The event is the end of everything in the kind of kernels.
    fn submit_batch(&self, submitting: &mut SubmitterState) -> Result<Arc<Event>> {
        let SubmitterState { batch, graphs } = submitting;
        let LaunchBatch { launches, waits, end } = std::mem::take(batch);
        let stream = &self.streams[StreamKind::Compute as usize];
        let waiting = waits.iter().try_for_each(|event| stream.wait(event));
        let submitted = waiting
            .map_err(|error| ("order kernels behind copies".to_owned(), error))
            .and_then(|()| graphs.submit(stream, launches))
            .map_err(|(operation, error)| self.status.error(&operation, &error));
        // What went before a error is on its way.
        let event =
            stream.record().map_err(|error| self.status.error("record an event", &error)).map(Arc::new);
        let failure = submitted.as_ref().err().or(event.as_ref().err()).cloned();
        end.submitted(event.as_ref().ok().cloned(), failure);
        submitted.and(event)
    }

    fn submitting(&self) -> MutexGuard<'_, SubmitterState> {
        self.submitting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn function(&self, name: &str, shared_bytes: u32) -> Result<Arc<Function>> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let found = self.module.function(name, shared_bytes);
        let function =
            Arc::new(found.map_err(|error| self.status.error(&format!("find kernel {name}"), &error))?);
        functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }

    /// The end of everything in a kind so far.
    pub(super) fn end(&self, kind: StreamKind) -> Result<Arc<Event>> {
        self.status.check()?;
        if kind == StreamKind::Compute {
            return self.submit_batch(&mut self.submitting());
        }
        self.copy(kind, "wait for the device", &[], &[], |stream| {
            let event = Arc::new(stream.record()?);
            Ok((event.clone(), event))
        })
    }

    /// Submits what is held back.
    pub(super) fn flush(&self) -> Result<()> {
        self.submit_batch(&mut self.submitting()).map(drop)
    }
}

/// What an operation on these buffers has to wait for, each once.
///
/// # Errors
/// Why one of them does not hold what was to be written there.
fn waits(kind: StreamKind, reads: &[&CudaBuffer], writes: &[&CudaBuffer]) -> Result<Vec<Arc<Completion>>> {
    let mut all: Vec<Arc<Completion>> = Vec::new();
    let mut wait = |end: &Arc<Completion>| {
        if !all.iter().any(|other| Arc::ptr_eq(other, end)) {
            all.push(end.clone());
        }
    };
    for buffer in reads {
        let accesses = buffer.allocation().accesses();
        accesses.failure().map_or(Ok(()), |error| Err(error.clone()))?;
        accesses.awaited_by_read(kind).for_each(&mut wait);
    }
    for buffer in writes {
        let accesses = buffer.allocation().accesses();
        accesses.failure().map_or(Ok(()), |error| Err(error.clone()))?;
        accesses.awaited_by_write(kind).for_each(&mut wait);
    }
    Ok(all)
}

fn mark(kind: StreamKind, end: &Arc<Completion>, reads: &[&CudaBuffer], writes: &[&CudaBuffer]) {
    for buffer in reads {
        buffer.allocation().accesses().record_read(kind, end);
    }
    for buffer in writes {
        buffer.allocation().accesses().record_write(kind, end);
    }
}
