//! Submits copies and launches to the streams of a device, in an order that keeps buffers right.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use kyklos::Result;

use super::dependencies::{End, Lane};
use super::graph_cache::Graphs;
use super::memory_pool::CudaBuffer;
use super::status::Health;
use crate::driver::{self, Context, Event, Fault, Function, Module, Stream};

/// The streams and kernels of a device.
#[derive(Debug)]
pub(super) struct Submitter {
    health: Arc<Health>,
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

impl Submitter {
    pub(super) fn new(
        context: &Arc<Context>,
        health: &Arc<Health>,
        image: &[u8],
        graphs: bool,
    ) -> Result<Self> {
        let fault = |operation: &'static str| move |fault: Fault| health.error(operation, &fault);
        // Copies are short and somebody waits for them: they come first.
        let stream = |urgent| Stream::new(context, urgent).map_err(fault("make a stream"));
        Ok(Self {
            health: health.clone(),
            streams: [stream(false)?, stream(true)?, stream(true)?],
            functions: Mutex::default(),
            module: Module::load(context, image).map_err(fault("load the kernels"))?,
            submitting: Mutex::new(Submitting {
                held: Held::default(),
                graphs: Graphs::new(context, graphs),
            }),
        })
    }

    /// Submits a copy to its lane, behind what it has to wait for. `work` submits it and records its event.
    pub(super) fn copy<T>(
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
    pub(super) fn launch<A: Pod>(
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
    pub(super) fn hold<A: Pod>(
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

    /// The end of everything in a lane so far.
    pub(super) fn end(&self, lane: Lane) -> Result<Arc<Event>> {
        self.health.check()?;
        if lane == Lane::Compute {
            return self.submit_held(&mut self.submitting());
        }
        self.copy(lane, "wait for the device", &[], &[], |stream| {
            let event = Arc::new(stream.record()?);
            Ok((event.clone(), event))
        })
    }

    /// Submits what is held back.
    pub(super) fn flush(&self) -> Result<()> {
        self.submit_held(&mut self.submitting()).map(drop)
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
