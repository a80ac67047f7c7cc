//! Which launches are submitted as a graph: those that came together before, to the last byte of their arguments.
//!
//! A graph costs more to make than its launches save at a time, so that one is made when a sequence comes for the second
//! time. Decoding comes back to the same addresses: memory is kept by its size.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Graph, Launch, Stream};

/// Sequences that are remembered at most: several for each layer of a large model. Those that came last stay.
const MOST: usize = 256;

/// The sequences that came, and the graphs of those that came again.
#[derive(Debug)]
pub(crate) struct GraphCache {
    context: Arc<Context>,
    most: usize,
    /// Sequences that came so far.
    count: u64,
    met: HashMap<Vec<Launch>, Met>,
}

#[derive(Debug)]
struct Met {
    /// When it came last, counted in sequences.
    last: u64,
    graph: Option<Graph>,
}

/// A call that failed, and what it was to do.
pub(crate) type Failed = (String, DriverError);

impl GraphCache {
    /// Without `enabled` no graph is ever made.
    pub(crate) fn new(context: &Arc<Context>, enabled: bool) -> Self {
        let most = if enabled { MOST } else { 0 };
        Self { context: context.clone(), most, count: 0, met: HashMap::new() }
    }

    /// Submits launches, one after the other or as a graph. After an error those before the one that it names may have been
    /// submitted.
    pub(crate) fn submit(&mut self, stream: &Stream, launches: Vec<Launch>) -> Result<(), Failed> {
        if launches.len() < 2 || self.most == 0 {
            return one_by_one(stream, &launches);
        }
        self.count += 1;
        if let Some(met) = self.met.get_mut(&launches) {
            met.last = self.count;
            let graph = match &mut met.graph {
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
        if self.met.len() == self.most {
            let oldest =
                self.met.iter().min_by_key(|(_, met)| met.last).map(|(launches, _)| launches.clone());
            oldest.and_then(|oldest| self.met.remove(&oldest));
        }
        one_by_one(stream, &launches)?;
        self.met.insert(launches, Met { last: self.count, graph: None });
        Ok(())
    }
}

fn one_by_one(stream: &Stream, launches: &[Launch]) -> Result<(), Failed> {
    launches.iter().try_for_each(|launch| {
        stream.launch(launch).map_err(|error| (words("launch", std::slice::from_ref(launch)), error))
    })
}

fn words(what: &str, launches: &[Launch]) -> String {
    let names: Vec<_> = launches.iter().map(|launch| launch.function.name.as_str()).collect();
    format!("{what} {}", names.join(", "))
}
