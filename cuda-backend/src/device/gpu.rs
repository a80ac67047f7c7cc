//! A device that is open: its context, streams, memory and kernels.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytemuck::Pod;
use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::{Error, Result};

use crate::backend::CudaOptions;
use crate::device::dependencies::{End, Lane};
use crate::device::event_poller::Watch;
use crate::device::graph_cache::Graphs;
use crate::device::memory_pool::{CudaBuffer, Pool};
use crate::device::staging::Staging;
use crate::device::status::Health;
use crate::driver::{self, Context, Event, Fault, Function, Module, Stream};

/// What a backend and everything that it has made share.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) health: Arc<Health>,
    pub(crate) pool: Arc<Pool>,
    staging: Arc<Staging>,
    streams: [Stream; Lane::COUNT],
    functions: Mutex<HashMap<String, Arc<Function>>>,
    module: Arc<Module>,
    /// Operations are submitted one at a time, so that marks are set in the order of the streams.
    submitting: Mutex<Submitting>,
}

/// A launch of a kernel: which one, and how many threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

#[derive(Debug)]
struct Submitting {
    held: Held,
    graphs: Graphs,
}

/// Launches that will be submitted together.
#[derive(Debug, Default)]
struct Held {
    launches: Vec<driver::Launch>,
    /// What the first of them will wait for, all of it submitted: none of it can be waiting for them.
    waits: Vec<Arc<Event>>,
    end: Arc<End>,
}

/// Launches that are held back at most.
const MOST_HELD: usize = 16;

impl Gpu {
    pub(crate) fn open(
        context: &Arc<Context>,
        health: Arc<Health>,
        image: &[u8],
        device_bytes: usize,
        options: &CudaOptions,
    ) -> Result<Arc<Self>> {
        let fault = |operation: &str| {
            let (health, operation) = (health.clone(), operation.to_owned());
            move |fault: Fault| health.error(&operation, &fault)
        };
        // Copies are short and somebody waits for them: they come first.
        let stream = |urgent| Stream::new(context, urgent).map_err(fault("make a stream"));
        Ok(Arc::new(Self {
            pool: Pool::new(context, &health, device_bytes, options.max_memory_bytes, options.stuck_after),
            staging: Staging::new(context, &health),
            streams: [stream(false)?, stream(true)?, stream(true)?],
            functions: Mutex::default(),
            module: Module::load(context, image).map_err(fault("load the kernels"))?,
            submitting: Mutex::new(Submitting {
                held: Held::default(),
                graphs: Graphs::new(context, options.graphs),
            }),
            health,
        }))
    }

    /// Memory of the device.
    pub(crate) fn buffer(&self, label: &str, bytes: usize) -> Result<CudaBuffer> {
        self.pool.buffer(label, bytes, || {
            // Whoever has what was to be written is told of a fault.
            let _ = self.submit_held(&mut self.submitting());
        })
    }

    /// Submits a copy to its lane, behind what it has to wait for. `work` submits it and records its event.
    fn copy<T>(
        &self,
        lane: Lane,
        operation: &str,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
        work: impl FnOnce(&Stream) -> Result<(T, Arc<Event>), Fault>,
    ) -> Result<T> {
        self.health.check()?;
        let mut submitting = self.submitting();
        let waits = waits(lane, reads, writes)?;
        if waits.iter().any(|end| end.is_held()) {
            self.submit_held(&mut submitting)?;
        }
        let stream = &self.streams[lane as usize];
        let submit = || {
            waits.iter().filter_map(|end| end.event()).try_for_each(|event| stream.wait(event))?;
            work(stream)
        };
        let (made, event) = submit().map_err(|fault| self.health.error(operation, &fault))?;
        mark(lane, &End::of(event), reads, writes);
        Ok(made)
    }

    /// Launches a kernel, after those that are held back. The event is its end.
    pub(crate) fn launch<A: Pod>(
        &self,
        launch: Launch<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<Arc<Event>> {
        let mut submitting = self.submitting();
        self.add(&mut submitting.held, launch, bytemuck::bytes_of(arguments), reads, writes)?;
        self.submit_held(&mut submitting)
    }

    /// Holds a launch back until the next one, or until somebody needs its end. For what is of no use by itself: nobody may
    /// be kept waiting. A fault is then an error of whoever comes next, and of whoever needs what was to be written.
    pub(crate) fn hold<A: Pod>(
        &self,
        launch: Launch<'_>,
        arguments: &A,
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        let mut submitting = self.submitting();
        self.add(&mut submitting.held, launch, bytemuck::bytes_of(arguments), reads, writes)?;
        if submitting.held.launches.len() == MOST_HELD {
            self.submit_held(&mut submitting)?;
        }
        Ok(())
    }

    fn add(
        &self,
        held: &mut Held,
        launch: Launch<'_>,
        arguments: &[u8],
        reads: &[&CudaBuffer],
        writes: &[&CudaBuffer],
    ) -> Result<()> {
        self.health.check()?;
        let Launch { kernel, grid, threads, shared_bytes } = launch;
        let function = self.function(kernel, shared_bytes)?;
        let waits = waits(Lane::Compute, reads, writes)?;
        held.waits.extend(waits.iter().filter_map(|end| end.event().cloned()));
        mark(Lane::Compute, &held.end, reads, writes);
        let arguments = arguments.to_vec();
        held.launches.push(driver::Launch { function, grid, threads, shared_bytes, arguments });
        Ok(())
    }

    /// Submits what is held back. The event is the end of everything in the lane of kernels.
    fn submit_held(&self, submitting: &mut Submitting) -> Result<Arc<Event>> {
        let Submitting { held, graphs } = submitting;
        let Held { launches, waits, end } = std::mem::take(held);
        let stream = &self.streams[Lane::Compute as usize];
        let waiting = waits.iter().try_for_each(|event| stream.wait(event));
        let submitted = waiting
            .map_err(|fault| ("order kernels behind copies".to_owned(), fault))
            .and_then(|()| graphs.submit(stream, launches))
            .map_err(|(operation, fault)| self.health.error(&operation, &fault));
        // What went before a fault is on its way.
        let event =
            stream.record().map_err(|fault| self.health.error("record an event", &fault)).map(Arc::new);
        let failure = submitted.as_ref().err().or(event.as_ref().err()).cloned();
        end.submitted(event.as_ref().ok().cloned(), failure);
        submitted.and(event)
    }

    fn submitting(&self) -> MutexGuard<'_, Submitting> {
        self.submitting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn function(&self, name: &str, shared_bytes: u32) -> Result<Arc<Function>> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let found = self.module.function(name, shared_bytes);
        let function =
            Arc::new(found.map_err(|fault| self.health.error(&format!("find kernel {name}"), &fault))?);
        functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }

    /// A new buffer that holds `data`.
    pub(crate) fn upload(&self, watch: &Watch, label: &str, data: &[u8]) -> Result<CudaBuffer> {
        let buffer = self.buffer(label, data.len())?;
        self.write(watch, label, &buffer, 0, data)?;
        Ok(buffer)
    }

    /// Overwrites part of a buffer.
    pub(crate) fn write(
        &self,
        watch: &Watch,
        label: &str,
        buffer: &CudaBuffer,
        offset: usize,
        data: &[u8],
    ) -> Result<()> {
        self.health.check()?;
        if offset.checked_add(data.len()).is_none_or(|end| end > buffer.bytes()) {
            return Err(Error::request(
                format!("a write of {} bytes at byte {offset} of a buffer of {}", data.len(), buffer.bytes()),
                "write within the buffer",
            ));
        }
        if data.is_empty() {
            return Ok(());
        }
        let mut staging = self.staging.take(label, data.len())?;
        staging.contents_mut().copy_from_slice(data);
        let flight =
            self.copy(Lane::Up, &format!("copy {label} to the device"), &[], &[buffer], |stream| {
                let flight = stream.upload(staging, &buffer.block().memory, offset)?;
                let event = flight.event().clone();
                Ok((flight, event))
            })?;
        let home = self.staging.clone();
        watch.when(Lane::Up, flight.event().clone(), move |result| {
            if let (Ok(()), Ok(Some(staging))) = (result, flight.land()) {
                home.put(staging);
            }
        });
        Ok(())
    }

    /// Starts copying `range` of a buffer to the host.
    pub(crate) fn download(
        &self,
        watch: &Watch,
        buffer: &CudaBuffer,
        range: Range<usize>,
    ) -> Result<oneshot::Receiver<Result<Bytes>>> {
        self.health.check()?;
        if range.start > range.end || range.end > buffer.bytes() {
            return Err(Error::request(
                format!("bytes {range:?} of a buffer of {}", buffer.bytes()),
                "download what the buffer has",
            ));
        }
        let (sender, receiver) = oneshot::channel();
        if range.is_empty() {
            let _ = sender.send(Ok(Bytes::new()));
            return Ok(receiver);
        }
        let staging = self.staging.take("a download", range.len())?;
        let flight = self.copy(Lane::Down, "copy to the host", &[buffer], &[], |stream| {
            let flight = stream.download(&buffer.block().memory, range, staging)?;
            let event = flight.event().clone();
            Ok((flight, event))
        })?;
        let (home, health) = (self.staging.clone(), self.health.clone());
        watch.when(Lane::Down, flight.event().clone(), move |result| {
            let landed = result.and_then(|()| match flight.land() {
                Ok(Some(staging)) => Ok(home.lend(staging)),
                Ok(None) => Err(health.device_error("copy to the host", "an event did not stay happened")),
                Err(fault) => Err(health.error("copy to the host", &fault)),
            });
            // Nobody waits any more: fine.
            let _ = sender.send(landed);
        });
        Ok(receiver)
    }

    /// Ends, for each lane, when everything submitted to it so far is done.
    pub(crate) fn all_done(&self, watch: &Watch) -> Result<Vec<oneshot::Receiver<Result<()>>>> {
        let end = |lane| {
            let (sender, receiver) = oneshot::channel();
            watch.when(lane, self.end(lane)?, move |result| {
                let _ = sender.send(result);
            });
            Ok(receiver)
        };
        Lane::ALL.into_iter().map(end).collect()
    }

    /// Lives until everything submitted so far is done.
    pub(crate) fn keep_until_done(self: Arc<Self>, watch: &Watch) {
        for lane in Lane::ALL {
            // Where what was held back is refused now, nobody is left to hear of it, but it has an end.
            if let Ok(event) = self.end(lane).or_else(|_| self.end(lane)) {
                let gpu = self.clone();
                watch.when(lane, event, move |result| {
                    if result.is_err() {
                        // As of a device that was lost before.
                        std::mem::forget(gpu);
                    }
                });
            }
        }
    }

    /// The end of everything in a lane so far.
    fn end(&self, lane: Lane) -> Result<Arc<Event>> {
        self.health.check()?;
        if lane == Lane::Compute {
            return self.submit_held(&mut self.submitting());
        }
        self.copy(lane, "wait for the device", &[], &[], |stream| {
            let event = Arc::new(stream.record()?);
            Ok((event.clone(), event))
        })
    }
}

/// What an operation on these buffers has to wait for, each once.
///
/// # Errors
/// Why one of them does not hold what was to be written there.
fn waits(lane: Lane, reads: &[&CudaBuffer], writes: &[&CudaBuffer]) -> Result<Vec<Arc<End>>> {
    let mut all: Vec<Arc<End>> = Vec::new();
    let mut wait = |end: &Arc<End>| {
        if !all.iter().any(|other| Arc::ptr_eq(other, end)) {
            all.push(end.clone());
        }
    };
    for buffer in reads {
        let marks = buffer.block().marks();
        marks.failure().map_or(Ok(()), |error| Err(error.clone()))?;
        marks.before_reading(lane).for_each(&mut wait);
    }
    for buffer in writes {
        let marks = buffer.block().marks();
        marks.failure().map_or(Ok(()), |error| Err(error.clone()))?;
        marks.before_writing(lane).for_each(&mut wait);
    }
    Ok(all)
}

fn mark(lane: Lane, end: &Arc<End>, reads: &[&CudaBuffer], writes: &[&CudaBuffer]) {
    for buffer in reads {
        buffer.block().marks().was_read(lane, end);
    }
    for buffer in writes {
        buffer.block().marks().was_written(lane, end);
    }
}

/// When an event of the compute lane happens; nothing if the device is lost before.
pub(crate) fn moment(watch: &Watch, event: Arc<Event>) -> oneshot::Receiver<Instant> {
    let (sender, receiver) = oneshot::channel();
    watch.when(Lane::Compute, event, move |result| {
        if result.is_ok() {
            let _ = sender.send(Instant::now());
        }
    });
    receiver
}
