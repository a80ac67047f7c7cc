//! Submits copies and launches to the streams of a device. Events order operations of different
//! streams that access the same buffer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::Pod;
use kyklos::Result;

use super::dependencies::{AccessRecord, Completion, StreamKind};
use super::graph_cache::GraphCache;
use super::loaded_kernels::LoadedKernels;
use super::other_devices::await_other_devices;
use super::status::DeviceStatus;
use super::unfinished_launches::UnfinishedLaunches;
use crate::device::memory::memory_pool::CudaBuffer;
use crate::driver::{self, Context, DriverError, Event, Stream};

/// The streams and kernels of a device.
#[derive(Debug)]
pub(super) struct Submitter {
    status: Arc<DeviceStatus>,
    streams: [Stream; StreamKind::COUNT],
    pub(super) kernels: LoadedKernels,
    pub(super) unfinished: Arc<UnfinishedLaunches>,
    /// Locked for each submission, so that access records and streams have the same order.
    state: Mutex<SubmitterState>,
    /// The longest wait for a copy to another device.
    stuck_after: Duration,
}

/// A kernel by name, its grid in blocks, threads and dynamic shared memory per block.
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
    /// Batches whose time is measured, since they were last asked for. `None`: none is.
    measured: Option<Vec<MeasuredBatch>>,
}

/// A batch between two events that keep the time of the device.
#[derive(Debug)]
struct MeasuredBatch {
    kernels: Vec<String>,
    begin: Event,
    end: Arc<Event>,
}

/// Launches that are submitted together later.
#[derive(Debug, Default)]
struct LaunchBatch {
    launches: Vec<driver::Launch>,
    /// Events of other streams that must be complete before the first launch. All are recorded
    /// already, so none of them can wait for this batch.
    waits: Vec<Arc<Event>>,
    completion: Arc<Completion>,
}

/// A launch that was deferred.
#[derive(Clone, Debug)]
pub(crate) struct Deferred {
    kernel: &'static str,
    arguments: Vec<u8>,
}

impl LaunchBatch {
    fn index_of(&self, deferred: &Deferred) -> Option<usize> {
        let is = |launch: &driver::Launch| {
            launch.function.name == deferred.kernel && launch.arguments == deferred.arguments
        };
        self.launches.iter().position(is)
    }
}

/// A batch of this many launches is submitted at once.
const MAX_BATCH_LAUNCHES: usize = 16;

impl Submitter {
    pub(super) fn new(
        context: &Arc<Context>,
        status: &Arc<DeviceStatus>,
        kernels: LoadedKernels,
        (graphs, stuck_after): (bool, Duration),
    ) -> Result<Self> {
        let failed = |operation: &'static str| move |error: DriverError| status.error(operation, &error);
        // Copies are short and another rank waits for them, so their streams have the higher priority.
        let stream = |urgent| Stream::new(context, urgent).map_err(failed("create a stream"));
        Ok(Self {
            status: status.clone(),
            streams: [stream(false)?, stream(true)?, stream(true)?],
            kernels,
            unfinished: Arc::default(),
            state: Mutex::new(SubmitterState {
                batch: LaunchBatch::default(),
                graphs: GraphCache::new(context, graphs),
                measured: None,
            }),
            stuck_after,
        })
    }

    /// Submits a copy to its stream, behind the operations that it depends on. `work` submits the
    /// copy and records its event.
    pub(super) fn copy<T>(
        &self,
        kind: StreamKind,
        operation: &str,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
        work: impl FnOnce(&Stream) -> Result<(T, Arc<Event>), DriverError>,
    ) -> Result<T> {
        self.status.check()?;
        await_other_devices(writes, self.stuck_after)?;
        let mut state = self.state();
        let dependencies = dependencies(Some(kind), reads, writes)?;
        if dependencies.iter().any(|completion| completion.is_pending()) {
            self.submit_batch(&mut state)?;
        }
        let stream = &self.streams[kind as usize];
        let submit = || {
            let mut events = dependencies.iter().filter_map(|completion| completion.event());
            events.try_for_each(|event| stream.wait(event))?;
            work(stream)
        };
        let (made, event) = submit().map_err(|error| self.status.error(operation, &error))?;
        record_access(kind, &Completion::of(event), reads, writes);
        Ok(made)
    }

    /// Submits the deferred launches and this one. The event is complete when the kernel is done.
    pub(super) fn launch<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        self.launch_instead_of(None, launch, arguments, reads, writes)
    }

    /// As [`Self::launch`], without the deferred launch `unwanted`, which writes what this one
    /// writes without reading it. If `unwanted` was submitted meanwhile, both run.
    pub(super) fn launch_instead_of<A: Pod>(
        &self,
        unwanted: Option<&Deferred>,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        await_other_devices(writes, self.stuck_after)?;
        let mut state = self.state();
        self.add(&mut state.batch, launch, bytemuck::bytes_of(arguments), reads, writes)?;
        // If the launch could not be added, the other one is still wanted.
        if let Some(index) = unwanted.and_then(|unwanted| state.batch.index_of(unwanted)) {
            state.batch.launches.remove(index);
        }
        self.submit_batch(&mut state)
    }

    /// The launch of `kernel` with these arguments, if it is deferred.
    pub(super) fn deferred<A: Pod>(&self, kernel: &'static str, arguments: &A) -> Option<Deferred> {
        let deferred = Deferred { kernel, arguments: bytemuck::bytes_of(arguments).to_vec() };
        self.state().batch.index_of(&deferred).map(|_| deferred)
    }

    /// Defers a launch until the next [`Self::launch`], or until another operation depends on it.
    /// For kernels whose result is only of use to a later kernel, so that the delay costs
    /// nothing. If the launch fails, the call that submits it fails, and so does every later
    /// operation on a buffer that the kernel was to write.
    pub(super) fn launch_deferred<A: Pod>(
        &self,
        launch: LaunchConfig<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        await_other_devices(writes, self.stuck_after)?;
        let mut state = self.state();
        self.add(&mut state.batch, launch, bytemuck::bytes_of(arguments), reads, writes)?;
        if state.batch.launches.len() == MAX_BATCH_LAUNCHES {
            self.submit_batch(&mut state)?;
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
        let function = self.kernels.function(kernel, shared_bytes)?;
        let dependencies = dependencies(Some(StreamKind::Compute), reads, writes)?;
        batch.waits.extend(dependencies.iter().filter_map(|completion| completion.event().cloned()));
        record_access(StreamKind::Compute, &batch.completion, reads, writes);
        let arguments = arguments.to_vec();
        batch.launches.push(driver::Launch { function, grid, threads, shared_bytes, arguments });
        Ok(())
    }

    /// Submits the deferred launches. The event is complete when everything in the compute stream
    /// so far is done.
    fn submit_batch(&self, state: &mut SubmitterState) -> Result<Arc<Event>> {
        let SubmitterState { batch, graphs, measured } = state;
        let LaunchBatch { launches, waits, completion } = std::mem::take(batch);
        let stream = &self.streams[StreamKind::Compute as usize];
        let functions: Vec<_> = launches.iter().map(|launch| launch.function.clone()).collect();
        let measures = measured.is_some() && !functions.is_empty();
        let waiting = waits.iter().try_for_each(|event| stream.wait(event));
        let mut begin = None;
        let submitted = waiting
            .and_then(|()| {
                begin = measures.then(|| stream.record_timed()).transpose()?;
                Ok(())
            })
            .map_err(|error| ("order kernels behind copies".to_owned(), error))
            .and_then(|()| graphs.submit(stream, launches))
            .map_err(|(operation, error)| self.status.error(&operation, &error));
        // Launches before one that failed are submitted, so an event is recorded after an error too.
        let event = if begin.is_some() { stream.record_timed() } else { stream.record() };
        let event = event.map_err(|error| self.status.error("record an event", &error)).map(Arc::new);
        if let (Some(measured), Some(begin), Ok(end)) = (measured, begin, &event) {
            let kernels = functions.iter().map(|function| function.name.clone()).collect();
            measured.push(MeasuredBatch { kernels, begin, end: end.clone() });
        }
        if let (Ok(event), false) = (&event, functions.is_empty()) {
            self.unfinished.record(functions, event);
        }
        let failure = submitted.as_ref().err().or(event.as_ref().err()).cloned();
        completion.set_submitted(event.as_ref().ok().cloned(), failure);
        submitted.and(event)
    }

    fn state(&self) -> MutexGuard<'_, SubmitterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event that is complete when everything submitted to a stream so far is done.
    pub(super) fn end(&self, kind: StreamKind) -> Result<Arc<Event>> {
        self.status.check()?;
        if kind == StreamKind::Compute {
            return self.submit_batch(&mut self.state());
        }
        self.copy(kind, "wait for the device", &[], &[], |stream| {
            let event = Arc::new(stream.record()?);
            Ok((event.clone(), event))
        })
    }

    /// The event of the last write to a buffer, which is submitted if it was deferred. `None`:
    /// nothing has written it.
    ///
    /// # Errors
    /// The error of that write.
    pub(super) fn last_write(&self, buffer: &CudaBuffer) -> Result<Option<Arc<Event>>> {
        let mut state = self.state();
        let write = buffer.allocation().accesses().last_write().cloned();
        if write.as_ref().is_some_and(|completion| completion.is_pending()) {
            self.submit_batch(&mut state)?;
        }
        buffer.allocation().accesses().failure().map_or(Ok(()), |error| Err(error.clone()))?;
        Ok(write.and_then(|completion| completion.event().cloned()))
    }

    /// What is submitted to `stream` from now on begins when it may read `reads` and write
    /// `writes`. The stream is not of the backend.
    pub(super) fn order(
        &self,
        stream: &Stream,
        operation: &str,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        self.status.check()?;
        await_other_devices(writes, self.stuck_after)?;
        let mut state = self.state();
        let dependencies = dependencies(None, reads, writes)?;
        if dependencies.iter().any(|completion| completion.is_pending()) {
            self.submit_batch(&mut state)?;
        }
        let mut events = dependencies.iter().filter_map(|completion| completion.event());
        events.try_for_each(|event| stream.wait(event)).map_err(|error| self.status.error(operation, &error))
    }

    /// What `stream` has been given so far reads `reads` and writes `writes`. The stream is not of
    /// the backend. The event is complete when it is done.
    pub(super) fn note(
        &self,
        stream: &Stream,
        operation: &str,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        let _state = self.state();
        let event = Arc::new(stream.record().map_err(|error| self.status.error(operation, &error))?);
        for buffer in reads {
            buffer.allocation().accesses().record_caller_read(event.clone());
        }
        for buffer in writes {
            *buffer.allocation().accesses() = AccessRecord::written_by_caller(Some(event.clone()));
        }
        Ok(event)
    }

    /// Starts or stops measuring launches, and forgets those that were measured.
    pub(super) fn measure(&self, on: bool) {
        self.state().measured = on.then(Vec::new);
    }

    /// The launches that were measured since the last call, with their times in milliseconds. All
    /// are complete.
    pub(super) fn measured(&self) -> Result<Vec<(Vec<String>, f64)>> {
        let batches = self.state().measured.as_mut().map(std::mem::take).unwrap_or_default();
        let time = |MeasuredBatch { kernels, begin, end }: MeasuredBatch| {
            let ms = begin.ms_until(&end).map_err(|error| self.status.error("measure kernels", &error))?;
            Ok((kernels, ms))
        };
        batches.into_iter().map(time).collect()
    }

    /// Submits the deferred launches.
    pub(super) fn flush(&self) -> Result<()> {
        self.submit_batch(&mut self.state()).map(drop)
    }
}

/// Operations of other streams that an operation on these buffers has to wait for, each once.
///
/// # Errors
/// The error of the last write to one of the buffers, if it failed: its contents are not what was
/// to be written.
fn dependencies(
    kind: Option<StreamKind>,
    reads: &[&CudaBuffer],
    writes: &[&CudaBuffer],
) -> Result<Vec<Arc<Completion>>> {
    let mut all: Vec<Arc<Completion>> = Vec::new();
    let mut add = |completion: &Arc<Completion>| {
        if !all.iter().any(|other| Arc::ptr_eq(other, completion)) {
            all.push(completion.clone());
        }
    };
    for buffer in reads {
        let accesses = buffer.allocation().accesses();
        accesses.failure().map_or(Ok(()), |error| Err(error.clone()))?;
        accesses.awaited_by_read(kind).for_each(&mut add);
    }
    for buffer in writes {
        let accesses = buffer.allocation().accesses();
        accesses.failure().map_or(Ok(()), |error| Err(error.clone()))?;
        accesses.awaited_by_write(kind).for_each(&mut add);
    }
    Ok(all)
}

fn record_access(
    kind: StreamKind,
    completion: &Arc<Completion>,
    reads: &[&CudaBuffer],
    writes: &[&CudaBuffer],
) {
    for buffer in reads {
        buffer.allocation().accesses().record_read(kind, completion);
    }
    for buffer in writes {
        buffer.allocation().accesses().record_write(kind, completion);
    }
}
