//! CUDA graphs: launches that are submitted as one.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Handle};
use super::error::Result;
use super::module::Launch;
use super::stream::Stream;

/// An executable graph of launches, each of which begins when the one before it is done.
///
/// The graph has its own copy of the arguments. The functions that it launches must stay loaded. If
/// it is dropped while the device runs it, it runs to its end, and the driver frees it then.
#[derive(Debug)]
pub(crate) struct Graph {
    raw: Handle<sys::CUgraphExec_st>,
    context: Arc<Context>,
}

impl Graph {
    pub(crate) fn new(context: &Arc<Context>, launches: &[Launch]) -> Result<Self> {
        let _current = context.push()?;
        let mut description = Description(ptr::null_mut());
        // SAFETY: the driver writes one handle to a field of a local. 0: no flags.
        check("cuGraphCreate", unsafe { sys::cuGraphCreate(&raw mut description.0, 0) })?;
        let mut previous = ptr::null_mut();
        for (index, launch) in launches.iter().enumerate() {
            let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
            let [x, y, z] = launch.grid;
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
                // The function's context.
                ctx: ptr::null_mut(),
            };
            let dependencies = [previous];
            let count = usize::from(index > 0);
            // SAFETY: the graph's handle is valid. The driver reads `count` (0 or 1) handles from
            // `dependencies`, the node that this graph got last. It reads `node` and copies the
            // kernel's only argument before it returns; `launch.arguments` has at least its size
            // (see `Launch`). It writes one handle to `previous`.
            check("cuGraphAddKernelNode_v2", unsafe {
                sys::cuGraphAddKernelNode_v2(
                    &raw mut previous,
                    description.0,
                    dependencies.as_ptr(),
                    count,
                    &raw const node,
                )
            })?;
        }
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current and the graph's handle is valid. The driver writes one handle to
        // `raw`, a local. 0: no flags.
        check("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut raw, description.0, 0)
        })?;
        Ok(Self { raw: Handle(raw), context: context.clone() })
    }
}

impl Stream {
    /// Submits all launches of a graph. `&mut`: a graph must not be used by several threads at a
    /// time.
    pub(crate) fn launch_graph(&self, graph: &mut Graph) -> Result<()> {
        let _current = self.context.push()?;
        // SAFETY: the context is current, both handles are valid, and `&mut` excludes other users of the
        // graph. The functions that it launches are loaded: `GraphCache` keeps the launches beside
        // the graph.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.raw.0, self.raw.0) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.push() {
            // SAFETY: cuGraphInstantiateWithFlags made the graph, `self` owns it, and nothing uses the handle
            // after this. The driver allows destroying a graph that is running.
            let _ = check("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.raw.0) });
        }
    }
}

/// The nodes that an executable graph is made of. It does not need them afterwards.
struct Description(sys::CUgraph);

impl Drop for Description {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: cuGraphCreate made the graph, `self` owns it, and nothing uses the handle after this.
            let _ = check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(self.0) });
        }
    }
}
