//! Launches that are submitted as one.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;
use super::module::Launch;
use super::stream::Stream;

/// Launches, each of which begins when the one before it is done, ready to be submitted together.
///
/// It has arguments of its own. What functions it launches must stay loaded. Dropped while it runs it ends as if it had not
/// been: the driver frees it then.
#[derive(Debug)]
pub(crate) struct Graph {
    raw: Handle<sys::CUgraphExec_st>,
    context: Arc<Context>,
}

impl Graph {
    pub(crate) fn new(context: &Arc<Context>, launches: &[Launch]) -> Result<Self> {
        context.bind()?;
        let mut nodes = Nodes(ptr::null_mut());
        call!(cuGraphCreate(&raw mut nodes.0, 0))?;
        let mut before = ptr::null_mut();
        for (index, launch) in launches.iter().enumerate() {
            let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
            let [x, y, z] = launch.grid;
            // The driver copies the arguments before it returns. The context is that of the function.
            let node = sys::CUDA_KERNEL_NODE_PARAMS {
                func: launch.function.raw.0,
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: launch.threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: launch.shared_bytes,
                kernelParams: arguments.as_mut_ptr(),
                extra: ptr::null_mut(),
                kern: ptr::null_mut(),
                ctx: ptr::null_mut(),
            };
            let after = [before];
            let waits_for = usize::from(index > 0);
            call!(cuGraphAddKernelNode_v2(
                &raw mut before,
                nodes.0,
                after.as_ptr(),
                waits_for,
                &raw const node,
            ))?;
        }
        let mut raw = ptr::null_mut();
        call!(cuGraphInstantiateWithFlags(&raw mut raw, nodes.0, 0))?;
        Ok(Self { raw: Handle(raw), context: context.clone() })
    }
}

impl Stream {
    /// Submits all launches of a graph. Nobody else may have it meanwhile: graphs are not for several threads at a time.
    pub(crate) fn launch_graph(&self, graph: &mut Graph) -> Result<()> {
        self.context.bind()?;
        call!(cuGraphLaunch(graph.raw.0, self.raw.0))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let _ = call!(cuGraphExecDestroy(self.raw.0));
        }
    }
}

/// What a graph is made of, and does not need any more once it is made.
struct Nodes(sys::CUgraph);

impl Drop for Nodes {
    fn drop(&mut self) {
        if !self.0.is_null() {
            let _ = call!(cuGraphDestroy(self.0));
        }
    }
}
