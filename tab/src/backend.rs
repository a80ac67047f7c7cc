//! The device of a tab, as the host sees it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};
use kyklos::backend::{
    Attend, Backend, Control, Device, DeviceClass, DeviceInfo, Elements, Extent, Layout, Operand, State,
    StateMut, StateShape,
};
use kyklos::{AttentionProblem, BiasKind, Dtype, Error, Result, TileShape};

use crate::encode::{extent_of, runs_of};
use crate::frame::Frame;
use crate::link::{Link, one_line};
use crate::protocol::{self, AttendStep, BufferId, Command, DeviceFacts, Limits, WireElements, wide};

/// A browser tab as a device. Commands go to the tab in the order of the calls, and nothing waits
/// for it but downloads, attend steps and [`Backend::wait`].
///
/// Keys and values that the tab has got from here are kept here too, as long as the device does not
/// change them, so that a rank passes them on without asking the tab for them.
#[derive(Debug)]
pub struct TabBackend {
    link: Arc<Link>,
    info: DeviceInfo,
    head_dims: [Vec<u16>; 3],
    limits: Limits,
    allocated_bytes: Arc<AtomicU64>,
}

impl From<TabBackend> for Device {
    // In line it would bring the backend into each crate that calls it.
    #[inline(never)]
    fn from(backend: TabBackend) -> Self {
        Self::new(backend)
    }
}

/// Memory in a tab.
#[derive(Clone)]
pub struct TabBuffer {
    memory: Arc<Memory>,
    /// The contents, where no command has changed them.
    host: Option<Bytes>,
}

struct Memory {
    id: BufferId,
    bytes: u64,
    link: Arc<Link>,
    allocated_bytes: Arc<AtomicU64>,
}

impl TabBackend {
    pub(crate) fn new(link: Arc<Link>, facts: DeviceFacts) -> Self {
        let DeviceFacts { name, driver, kernel, is_software, head_dims, limits } = facts;
        let info = DeviceInfo {
            backend: "tab",
            name: one_line(&name),
            driver: one_line(&driver),
            class: if is_software { DeviceClass::SoftwareGpu } else { DeviceClass::OtherGpu },
            kernel: one_line(&kernel),
        };
        Self { link, info, head_dims, limits, allocated_bytes: Arc::default() }
    }

    /// Accounts for a buffer, and names it.
    fn memory(&self, label: &str, bytes: usize) -> Result<Arc<Memory>> {
        let (asked_bytes, Limits { buffer_bytes, total_bytes, .. }) = (wide(bytes), self.limits);
        let refused = |allowed_bytes| Error::OutOfMemory {
            device: self.info.name.clone(),
            what: label.to_owned(),
            asked_bytes,
            allowed_bytes,
        };
        if asked_bytes > buffer_bytes {
            return Err(refused(buffer_bytes));
        }
        let before = self.allocated_bytes.fetch_add(asked_bytes, Ordering::Relaxed);
        let memory = Memory {
            id: self.link.new_buffer(),
            bytes: asked_bytes,
            link: self.link.clone(),
            allocated_bytes: self.allocated_bytes.clone(),
        };
        let free = total_bytes.saturating_sub(before);
        if asked_bytes > free {
            return Err(refused(free));
        }
        Ok(Arc::new(memory))
    }
}

impl Drop for TabBackend {
    fn drop(&mut self) {
        self.link.bye();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.allocated_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        // An ended connection has no buffers.
        let _ = self.link.tell(Command::Free { id: self.id });
    }
}

impl TabBuffer {
    fn id(&self) -> BufferId {
        self.memory.id
    }

    /// For a command that changes it.
    fn changed(&mut self) -> BufferId {
        self.host = None;
        self.memory.id
    }
}

impl fmt::Debug for TabBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TabBuffer").field("id", &self.memory.id).field("bytes", &self.memory.bytes).finish()
    }
}

impl Backend for TabBackend {
    type Buffer = TabBuffer;
    type Download = BoxFuture<'static, Result<Bytes>>;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        let dims =
            Dtype::ALL.iter().position(|one| *one == dtype).map_or(&[][..], |index| &self.head_dims[index]);
        if u16::try_from(head_dim).is_ok_and(|dim| dims.contains(&dim)) {
            return Ok(());
        }
        Err(Error::request(
            format!(
                "the device of the tab, {}, has no kernel for {dtype} with head dim {head_dim}",
                self.info.name
            ),
            "use another element type or head dim, or another device",
        ))
    }

    fn most_state_bytes(&self) -> Option<u64> {
        self.limits.state_bytes
    }

    /// Any: the tab makes its own tiles.
    fn tile_shape(&self, _: &AttentionProblem, _: StateShape) -> TileShape {
        TileShape { q_rows: 64, kv_cols: 64 }
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<TabBuffer> {
        self.link.check()?;
        let memory = self.memory(label, bytes)?;
        self.link.tell(Command::Alloc { id: memory.id, label: label.to_owned(), bytes: memory.bytes })?;
        Ok(TabBuffer { memory, host: None })
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<TabBuffer> {
        self.link.check()?;
        let memory = self.memory(label, data.len())?;
        let message = Command::Upload { id: memory.id, label: label.to_owned() };
        self.link.tell(Frame { message, data: data.clone() })?;
        Ok(TabBuffer { memory, host: Some(data) })
    }

    fn write(&self, buffer: &mut TabBuffer, offset: usize, data: &[u8]) -> Result<()> {
        let message = Command::Write { id: buffer.changed(), offset: wide(offset) };
        self.link.tell(Frame { message, data: Bytes::copy_from_slice(data) })
    }

    fn share(&self, buffer: &mut TabBuffer) -> TabBuffer {
        buffer.clone()
    }

    fn release_idle(&self) {
        // An ended connection keeps nothing.
        let _ = self.link.tell(Command::ReleaseIdle);
    }

    fn download(&self, buffer: &mut TabBuffer, range: Range<usize>) -> Self::Download {
        if let Some(host) = &buffer.host {
            return ready(self.link.check().map(|()| host.slice(range))).boxed();
        }
        let (id, [start, end]) = (buffer.id(), [range.start, range.end].map(wide));
        let asked = self.link.ask(end - start, |request| Command::Download { request, id, start, end });
        let link = self.link.clone();
        // The memory stays until the bytes are there.
        let memory = buffer.memory.clone();
        async move {
            let bytes = link.answer(asked?, None).await;
            drop(memory);
            bytes
        }
        .boxed()
    }

    fn reset_state(&self, state: &mut StateMut<'_, TabBuffer>) -> Result<()> {
        self.link.tell(Command::ResetState(changed(state)))
    }

    async fn attend(&self, args: Attend<'_, TabBuffer>, control: &Control) -> Result<()> {
        let operand = |Operand { buffer, layout }: Operand<'_, TabBuffer>| (buffer.id(), layout.into());
        let Attend { mut state, work, .. } = args;
        let step = AttendStep {
            dtype: args.dtype.into(),
            scale: args.scale,
            softcap: args.softcap,
            q: operand(args.q),
            k: operand(args.k),
            v: operand(args.v),
            kv_head_of: args.kv_head_of.to_vec(),
            key_runs: runs_of(&work.kv_positions),
            rows: work
                .classes
                .iter()
                .map(|class| class.rows.iter().map(|row| (row.lo, row.hi)).collect())
                .collect(),
            bias: args.bias.map(|bias| (bias.kind == BiasKind::Mask, bias.buffer.id(), bias.layout.into())),
            fixed_order: args.fixed_order,
            inference: args.inference,
            state: changed(&mut state),
        };
        let asked = self.link.ask(0, |request| Command::Attend { request, step: Box::new(step) })?;
        let answer = self.link.answer(asked, Some(control)).await;
        if matches!(answer, Err(Error::Cancelled)) {
            self.link.tell(Command::Cancel { up_to: asked.request })?;
        }
        answer.map(|_| ())
    }

    fn merge(&self, into: &mut StateMut<'_, TabBuffer>, from: &State<'_, TabBuffer>) -> Result<()> {
        self.link.tell(Command::Merge { into: changed(into), from: read(from) })
    }

    fn finalize(
        &self,
        state: &State<'_, TabBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut TabBuffer,
        lse: &mut TabBuffer,
    ) -> Result<()> {
        let (o, lse) = (o.changed(), lse.changed());
        self.link.tell(Command::Finalize {
            state: read(state),
            sinks: sinks.to_vec(),
            dtype: dtype.into(),
            o,
            lse,
        })
    }

    fn repack(
        &self,
        from: (&TabBuffer, Layout),
        into: (&mut TabBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.link.tell(Command::Repack {
            from: (from.0.id(), from.1.into()),
            into: (into.0.changed(), into.1.into()),
            extent: extent_of(extent),
        })
    }

    fn convert(
        &self,
        from: Elements<&TabBuffer>,
        into: Elements<&mut TabBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut TabBuffer>,
    ) -> Result<()> {
        self.link.tell(Command::Convert {
            from: WireElements::of(from, TabBuffer::id),
            into: WireElements::of(into, TabBuffer::changed),
            shape: shape.map(wide),
            overflow: overflow.map(TabBuffer::changed),
        })
    }

    async fn wait(&self) -> Result<()> {
        let asked = self.link.ask(0, |request| Command::Wait { request })?;
        self.link.answer(asked, None).await.map(|_| ())
    }
}

fn read(state: &State<'_, TabBuffer>) -> protocol::State {
    protocol::State::new(state.a.id(), state.ml.id(), state.shape)
}

fn changed(state: &mut StateMut<'_, TabBuffer>) -> protocol::State {
    protocol::State::new(state.a.changed(), state.ml.changed(), state.shape)
}
