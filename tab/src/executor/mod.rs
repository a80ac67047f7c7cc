//! The end in the tab: carries out what the host asks of the device.

mod buffers;
mod inbox;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures_channel::mpsc::{UnboundedSender, unbounded};
use futures_util::future::{LocalBoxFuture, join, poll_fn};
use futures_util::{FutureExt, StreamExt};
use kyklos::backend::{Attend, Backend, BiasInput, Control, DeviceClass, Elements, Operand, Scales};
use kyklos::{AttentionProblem, BiasTensor, BlockWork, Dtype, Error, Mask, RowSpan};

use self::buffers::Buffers;
use self::inbox::Commands;
pub use self::inbox::Inbox;
use crate::frame::Frame;
use crate::protocol::{
    AttendStep, Command, DeviceFacts, Hello, Limits, Reply, RequestId, VERSION, WireElements, bias_kind,
    extent,
};

/// Gives bytes to the stream to the host, in order.
pub type ToHost = Rc<dyn Fn(Bytes)>;

/// Makes `backend` the device of a rank. `token` is from the link of the host, `send` writes to the
/// stream. Bytes that arrive on the stream go into the inbox. The future does the work; it ends
/// with the reason of the host why there is no more, or with what failed here.
pub fn execute<B: Backend + 'static>(
    backend: B,
    limits: Limits,
    token: &str,
    send: ToHost,
) -> (Inbox, LocalBoxFuture<'static, Result<String, String>>) {
    let replies = Replies(send);
    let device = facts_of(&backend, limits);
    replies.send(Reply::Hello(Box::new(Hello { version: VERSION, token: token.to_owned(), device })));
    let cancelled = Rc::new(Cancelled::default());
    let (inbox, commands) = Inbox::new(replies.clone(), cancelled.clone(), limits.buffer_bytes);
    let work = async move {
        let (downloads, more) = unbounded();
        let mut executor = Executor {
            backend,
            buffers: Buffers::default(),
            replies: replies.clone(),
            pieces: Cell::new(0),
            cancelled,
            downloads,
        };
        let work = async {
            let result = executor.run(commands).await;
            executor.downloads.close_channel();
            result
        };
        // Downloads end while later commands are carried out.
        let downloads =
            Box::pin(more.for_each_concurrent(None, |download: LocalBoxFuture<'static, ()>| download));
        let (result, ()) = join(work, downloads).await;
        if let Err(reason) = &result {
            replies.send(Reply::Failed { reason: reason.clone() });
        }
        result
    };
    (inbox, work.boxed_local())
}

/// The stream to the host.
#[derive(Clone)]
struct Replies(ToHost);

impl Replies {
    fn send(&self, reply: impl Into<Frame<Reply>>) {
        for part in reply.into().encode() {
            if !part.is_empty() {
                (self.0)(part);
            }
        }
    }
}

/// Up to which request the host wants no more, and the flag of the one that runs.
#[derive(Debug, Default)]
struct Cancelled {
    up_to: Cell<RequestId>,
    running: RefCell<Option<(RequestId, Arc<AtomicBool>)>>,
}

impl Cancelled {
    fn cancel(&self, up_to: RequestId) {
        self.up_to.set(self.up_to.get().max(up_to));
        if let Some((request, flag)) = &*self.running.borrow()
            && *request <= up_to
        {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

struct Executor<B: Backend> {
    backend: B,
    buffers: Buffers<B::Buffer>,
    replies: Replies,
    /// Pieces done in all steps before.
    pieces: Cell<u64>,
    cancelled: Rc<Cancelled>,
    downloads: UnboundedSender<LocalBoxFuture<'static, ()>>,
}

impl<B: Backend + 'static> Executor<B> {
    /// Ends with the reason that the host gives, or with what failed.
    async fn run(&mut self, mut commands: Commands) -> Result<String, String> {
        while let Some(frame) = commands.next().await {
            let Frame { message, data } = frame?;
            if let Command::End { reason } = message {
                return Ok(reason);
            }
            self.carry_out(message, data).await?;
        }
        Err("the connection to the host has ended".to_owned())
    }

    async fn carry_out(&mut self, command: Command, data: Bytes) -> Result<(), String> {
        let Self { backend, buffers, replies, .. } = self;
        match command {
            Command::Welcome | Command::End { .. } | Command::Ping | Command::Cancel { .. } => {}
            Command::Alloc { id, label, bytes } => {
                let bytes = usize::try_from(bytes).map_err(|_| format!("a buffer of {bytes} bytes"))?;
                buffers.put(id, backend.alloc(&label, bytes).map_err(words)?);
            }
            Command::Upload { id, label } => buffers.put(id, backend.upload(&label, data).map_err(words)?),
            Command::Write { id, offset } => {
                let offset = usize::try_from(offset).map_err(|_| format!("a write at byte {offset}"))?;
                backend.write(buffers.get_mut(id)?, offset, &data).map_err(words)?;
            }
            Command::Free { id } => drop(buffers.take(id)?),
            Command::ReleaseIdle => backend.release_idle(),
            Command::Download { request, id, start, end } => {
                let range = [start, end].map(usize::try_from);
                let [Ok(start), Ok(end)] = range else { return Err(format!("a download up to byte {end}")) };
                let download = backend.download(buffers.get_mut(id)?, start..end);
                let replies = replies.clone();
                let ended = async move {
                    replies.send(match download.await {
                        Ok(data) => Frame { message: Reply::Downloaded { request }, data },
                        Err(error) => Reply::Failed { reason: words(error) }.into(),
                    });
                };
                // The receiver lives as long as this executor.
                let _ = self.downloads.unbounded_send(ended.boxed_local());
            }
            Command::ResetState(state) => {
                buffers.with_state(state, |_, mut state| backend.reset_state(&mut state).map_err(words))?;
            }
            Command::Attend { request, step } => self.attend(request, *step).await?,
            Command::Merge { into, from } => buffers.with_state(into, |buffers, mut into| {
                backend.merge(&mut into, &buffers.state(from)?).map_err(words)
            })?,
            Command::Finalize { state, sinks, dtype, o, lse } => {
                let dtype = dtype.get().ok_or(NOT_KNOWN)?;
                buffers.with_two([o, lse], |buffers, [o, lse]| {
                    backend.finalize(&buffers.state(state)?, &sinks, dtype, o, lse).map_err(words)
                })?;
            }
            Command::Repack { from, into, extent: size } => {
                let (Some(read), Some(written), Some(size)) = (from.1.get(), into.1.get(), extent(size))
                else {
                    return Err(NOT_KNOWN.to_owned());
                };
                buffers.with_one(into.0, |buffers, into| {
                    backend.repack((buffers.get(from.0)?, read), (into, written), size).map_err(words)
                })?;
            }
            Command::Convert { from, into, shape, overflow } => self.convert(from, into, shape, overflow)?,
            Command::Wait { request } => {
                backend.wait().await.map_err(words)?;
                replies.send(Reply::Done { request });
            }
        }
        Ok(())
    }

    async fn attend(&mut self, request: RequestId, step: AttendStep) -> Result<(), String> {
        let Self { backend, buffers, replies, pieces, cancelled, .. } = self;
        if request > cancelled.up_to.get() {
            let flag = Arc::new(AtomicBool::new(false));
            cancelled.running.replace(Some((request, flag.clone())));
            let control = Control::new(flag);
            let before = pieces.get();
            let result = {
                let mut attend = Box::pin(attend(backend, buffers, step, &control));
                poll_fn(|context| {
                    let result = attend.as_mut().poll(context);
                    let done = before + control.pieces_done();
                    if pieces.replace(done) != done {
                        replies.send(Reply::Pieces { done });
                    }
                    result
                })
                .await
            };
            cancelled.running.replace(None);
            result?;
        }
        replies.send(Reply::Done { request });
        Ok(())
    }

    fn convert(
        &mut self,
        from: WireElements,
        into: WireElements,
        shape: [u64; 4],
        overflow: Option<u64>,
    ) -> Result<(), String> {
        let mut word = overflow.map(|id| self.buffers.take(id)).transpose()?;
        let converted = self.convert_elements(from, into, shape, word.as_mut());
        overflow.into_iter().zip(word).for_each(|(id, word)| self.buffers.put(id, word));
        converted
    }

    fn convert_elements(
        &mut self,
        from: WireElements,
        into: WireElements,
        shape: [u64; 4],
        overflow: Option<&mut B::Buffer>,
    ) -> Result<(), String> {
        let Self { backend, buffers, .. } = self;
        let shape = crate::protocol::narrow_all(shape).ok_or(NOT_KNOWN)?;
        let of = |by_channel| if by_channel { Scales::Channels } else { Scales::Rows };
        let read = |buffers: &Buffers<B::Buffer>, into: Elements<&mut B::Buffer>| {
            let from = match from {
                WireElements::Stored { id, first, dtype } => Elements::Stored {
                    buffer: buffers.get(id)?,
                    first: narrow(first)?,
                    dtype: dtype.get().ok_or(NOT_KNOWN)?,
                },
                WireElements::Coded { codes, scales, by_channel } => Elements::Coded {
                    codes: buffers.get(codes)?,
                    scales: buffers.get(scales)?,
                    of: of(by_channel),
                },
            };
            if matches!((&from, &into), (Elements::Coded { .. }, Elements::Coded { .. })) {
                return Err("codes from codes".to_owned());
            }
            backend.convert(from, into, shape, overflow).map_err(words)
        };
        match into {
            WireElements::Stored { id, first, dtype } => {
                let (first, dtype) = (narrow(first)?, dtype.get().ok_or(NOT_KNOWN)?);
                buffers
                    .with_one(id, |buffers, buffer| read(buffers, Elements::Stored { buffer, first, dtype }))
            }
            WireElements::Coded { codes, scales, by_channel } => {
                buffers.with_two([codes, scales], |buffers, [codes, scales]| {
                    read(buffers, Elements::Coded { codes, scales, of: of(by_channel) })
                })
            }
        }
    }
}

/// One attend step. Cancelled steps are no failure: the host knows.
async fn attend<B: Backend>(
    backend: &B,
    buffers: &mut Buffers<B::Buffer>,
    step: AttendStep,
    control: &Control,
) -> Result<(), String> {
    let [mut a, mut ml] = [buffers.take(step.state.a)?, buffers.take(step.state.ml)?];
    let result = async {
        let shape = step.state.shape().ok_or(NOT_KNOWN)?;
        let dtype = step.dtype.get().ok_or(NOT_KNOWN)?;
        let operand = |(id, layout): (u64, crate::protocol::WireLayout)| -> Result<_, String> {
            Ok(Operand { buffer: buffers.get(id)?, layout: layout.get().ok_or(NOT_KNOWN)? })
        };
        let bias = match step.bias {
            None => None,
            Some((is_mask, id, layout)) => {
                let Operand { buffer, layout } = operand((id, layout))?;
                Some(BiasInput { kind: bias_kind(is_mask), buffer, layout })
            }
        };
        let work = work_of(backend, &step, dtype)?;
        let args = Attend {
            dtype,
            scale: step.scale,
            softcap: step.softcap,
            q: operand(step.q)?,
            k: operand(step.k)?,
            v: operand(step.v)?,
            kv_head_of: &step.kv_head_of,
            work: &work,
            bias,
            fixed_order: step.fixed_order,
            inference: step.inference,
            state: kyklos::backend::StateMut { a: &mut a, ml: &mut ml, shape },
        };
        match backend.attend(args, control).await {
            Ok(()) | Err(Error::Cancelled) => Ok(()),
            Err(error) => Err(words(error)),
        }
    };
    let result = result.await;
    buffers.put(step.state.a, a);
    buffers.put(step.state.ml, ml);
    result
}

/// The mask of a step in the tiles of this device.
fn work_of<B: Backend>(backend: &B, step: &AttendStep, dtype: Dtype) -> Result<BlockWork, String> {
    let shape = step.state.shape().ok_or(NOT_KNOWN)?;
    let [batch, rows, heads, dim] = step.state.shape.map(u32::try_from);
    let (Ok(batch), Ok(rows), Ok(heads), Ok(dim)) = (batch, rows, heads, dim) else {
        return Err(NOT_KNOWN.to_owned());
    };
    let kinds = step.rows.len();
    if kinds != 1 && kinds != shape.batch || step.rows.iter().any(|class| class.len() != shape.rows) {
        return Err("a mask of other rows than the step".to_owned());
    }
    if step.kv_head_of.len() != shape.heads {
        return Err("a step whose heads do not fit its state".to_owned());
    }
    // Tiles depend on what the tensors are, not on what they are a part of.
    let problem = AttentionProblem::new([batch, rows.max(1), heads, heads, dim], dtype, Mask::full())
        .and_then(|problem| problem.with_fixed_order(step.fixed_order))
        .and_then(|problem| {
            let bias = |(is_mask, _, _)| BiasTensor {
                kind: bias_kind(is_mask),
                batch: 1,
                heads: 1,
                shared_rows: false,
            };
            problem.with_bias(step.bias.map(bias))
        })
        .map_err(|error| error.to_string())?;
    let keys: u64 = step.key_runs.iter().map(|(_, count)| u64::from(*count)).sum();
    if keys > u64::from(u32::MAX)
        || step.key_runs.iter().any(|(first, count)| first.checked_add(*count).is_none())
    {
        return Err("keys beyond 32 bits".to_owned());
    }
    let positions = step.key_runs.iter().flat_map(|(first, count)| *first..first + count).collect();
    let spans = |class: &Vec<(u32, u32)>| class.iter().map(|(lo, hi)| RowSpan { lo: *lo, hi: *hi }).collect();
    let rows = step.rows.iter().map(spans).collect();
    Ok(BlockWork::of_rows(positions, rows, backend.tile_shape(&problem, shape), step.fixed_order))
}

fn facts_of<B: Backend>(backend: &B, limits: Limits) -> DeviceFacts {
    let info = backend.info();
    let dims = |dtype| {
        (1..=MOST_HEAD_DIM).filter(|dim| backend.supports(dtype, usize::from(*dim)).is_ok()).collect()
    };
    DeviceFacts {
        name: info.name.clone(),
        driver: info.driver.clone(),
        kernel: info.kernel.clone(),
        is_software: matches!(info.class, DeviceClass::SoftwareGpu | DeviceClass::Cpu),
        head_dims: Dtype::ALL.map(dims),
        limits,
    }
}

fn narrow(n: u64) -> Result<usize, String> {
    usize::try_from(n).map_err(|_| NOT_KNOWN.to_owned())
}

#[expect(clippy::needless_pass_by_value, reason = "it maps errors")]
fn words(error: Error) -> String {
    error.to_string()
}

/// A command that no host of this release sends.
const NOT_KNOWN: &str = "a command that this release does not know";
/// Longer heads are not asked for.
const MOST_HEAD_DIM: u16 = 1024;
