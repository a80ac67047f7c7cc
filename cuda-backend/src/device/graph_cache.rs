//! CUDA graphs of repeated launch sequences.
//!
//! Making a graph costs more than it saves in one submission. So a graph is made when a sequence of
//! launches comes for the second time, equal to the last byte of its arguments. Decoding repeats
//! such sequences, because the memory pool hands out the same addresses again.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Graph, Launch, Stream};

/// Sequences that are remembered: several for each layer of a large model. The least recently used
/// one is dropped.
const MAX_SEQUENCES: usize = 256;

/// Recent launch sequences, and the graphs of those that were repeated.
#[derive(Debug)]
pub(crate) struct GraphCache {
    context: Arc<Context>,
    capacity: usize,
    /// Sequences submitted so far.
    count: u64,
    sequences: HashMap<Vec<Launch>, Sequence>,
}

#[derive(Debug)]
struct Sequence {
    /// The value of `count` at the last submission.
    last_use: u64,
    graph: Option<Graph>,
}

/// The operation that failed, in words, and the driver's error.
pub(crate) type SubmitError = (String, DriverError);

impl GraphCache {
    /// If not `enabled`, every launch is submitted by itself.
    pub(crate) fn new(context: &Arc<Context>, enabled: bool) -> Self {
        let capacity = if enabled { MAX_SEQUENCES } else { 0 };
        Self { context: context.clone(), capacity, count: 0, sequences: HashMap::new() }
    }

    /// Submits launches, one by one or as a graph. After an error, the launches before the one that
    /// it names may have been submitted.
    pub(crate) fn submit(&mut self, stream: &Stream, launches: Vec<Launch>) -> Result<(), SubmitError> {
        if launches.len() < 2 || self.capacity == 0 {
            return one_by_one(stream, &launches);
        }
        self.count += 1;
        if let Some(sequence) = self.sequences.get_mut(&launches) {
            sequence.last_use = self.count;
            let graph = match &mut sequence.graph {
                Some(graph) => graph,
                none => {
                    let made = Graph::new(&self.context, &launches);
                    none.insert(made.map_err(|error| (words("make a graph of", &launches), error))?)
                }
            };
            return stream
                .launch_graph(graph)
                .map_err(|error| (words("launch a graph of", &launches), error));
        }
        if self.sequences.len() == self.capacity {
            let oldest = self
                .sequences
                .iter()
                .min_by_key(|(_, sequence)| sequence.last_use)
                .map(|(launches, _)| launches.clone());
            oldest.and_then(|oldest| self.sequences.remove(&oldest));
        }
        one_by_one(stream, &launches)?;
        self.sequences.insert(launches, Sequence { last_use: self.count, graph: None });
        Ok(())
    }
}

fn one_by_one(stream: &Stream, launches: &[Launch]) -> Result<(), SubmitError> {
    launches.iter().try_for_each(|launch| {
        stream.launch(launch).map_err(|error| (words("launch", std::slice::from_ref(launch)), error))
    })
}

fn words(what: &str, launches: &[Launch]) -> String {
    let names: Vec<_> = launches.iter().map(|launch| launch.function.name.as_str()).collect();
    format!("{what} {}", names.join(", "))
}
