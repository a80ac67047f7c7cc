//! The helper's side: computes what the owner sends.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::{Backend, Device};
use kyklos::{
    AttentionProblem, Dtype, Error, Mask, Result, Saved, Session, SystemClock, Tensor, WireFormat,
    in_process_group,
};
use kyklos_transport::{Group, Posted, Taken, Vote};

use crate::call::Call;
use crate::encoding::{Encoding, Role};
use crate::forecast::WINDOW;
use crate::message::{
    HEADER_BYTES, Hello, MAX_REQUEST_BYTES, Measured, OWNER, PROTOCOL, Piece, Request, Shape5, Status, Work,
    header_tag, keys_shape, piece_tags, queries_shape, request_tag, result_role,
};

/// What a helper has done, for whoever watches it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum HelperEvent {
    /// The owner is here.
    Joined,
    /// A share of a call.
    Served {
        /// Parts that it had.
        pieces: usize,
        /// Bytes from the owner, and back.
        bytes: [u64; 2],
        /// Time of the device.
        computing: Duration,
        /// Time for which the device waited for bytes.
        waiting: Duration,
        /// Most bytes of tensors that the share takes at a time.
        memory_bytes: u64,
    },
    /// A share that could not be computed.
    Refused(String),
}

/// Settings of a helper.
#[derive(Clone)]
pub struct HelperOptions {
    /// Bytes of tensors that it takes at a time; none: half of the machine's memory.
    pub memory_bytes: Option<u64>,
    /// Called after each event, on the thread of the helper.
    pub on_event: Arc<dyn Fn(&HelperEvent) + Send + Sync>,
}

impl Default for HelperOptions {
    fn default() -> Self {
        Self { memory_bytes: None, on_event: Arc::new(|_| ()) }
    }
}

impl fmt::Debug for HelperOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HelperOptions").field("memory_bytes", &self.memory_bytes).finish_non_exhaustive()
    }
}

/// Helps the owner of `group`, its rank 0, on `device`, until the owner needs no help any more.
/// This process is rank 1 of 2. Blocks.
///
/// ```
/// use kyklos::backend::Device;
/// use kyklos::{Session, Tensor, in_process_group};
/// use kyklos_helpers::{Call, HelperOptions, Owner, OwnerOptions, help};
///
/// let mut groups = in_process_group(2);
/// let (for_helper, for_owner) = (groups.remove(1), groups.remove(0));
/// let helper = std::thread::spawn(move || help(for_helper, &Device::cpu(), &HelperOptions::default()));
///
/// let mut owner = Owner::new(OwnerOptions::default());
/// owner.add("kitchen", for_owner)?;
/// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
/// let x = Tensor::new([1, 64, 4, 32], vec![0.5_f32; 64 * 4 * 32])?;
/// // A call as short as this one stays with the owner.
/// let o = owner.attend(&mut session, &Call::default(), &x, &x, &x)?;
/// assert_eq!(o.shape(), [1, 64, 4, 32]);
/// drop(owner);
/// helper.join().expect("a helper")?;
/// # Ok::<(), kyklos::Error>(())
/// ```
///
/// # Errors
/// [`Error::Transport`] when the owner is gone without a word, or is of another release;
/// [`Error::Device`] when the device has failed, which the owner is told.
pub fn help(group: impl Into<Group>, device: &Device, options: &HelperOptions) -> Result<()> {
    let group = group.into();
    if group.size() != 2 || group.rank() != crate::message::HELPER {
        return Err(Error::request(
            format!("a helper that is rank {} of {}", group.rank(), group.size()),
            "form a group of two, in which the owner is rank 0",
        ));
    }
    let half = || kyklos::machine::memory_bytes().map_or(UNKNOWN_MEMORY_BYTES, |bytes| bytes / 2);
    let memory_bytes = Some(options.memory_bytes.unwrap_or_else(half));
    let options = &HelperOptions { memory_bytes, ..options.clone() };
    let hello = Hello { device: device.info().name.clone(), memory_bytes };
    let note = serde_json::to_vec(&hello).unwrap_or_default().into();
    pollster::block_on(group.agree(Vote::Ready { plan_hash: PROTOCOL, note }, GREETING))?;
    (options.on_event)(&HelperEvent::Joined);
    let session = Session::new(in_process_group(1).remove(0), device.clone());
    let mut helper = Helper { group, device: device.clone(), session, options: options.clone() };
    let ended = helper.serve();
    // After an abort too: only then the owner is sure to know why.
    let left = pollster::block_on(helper.group.close(LEAVING));
    ended?;
    Ok(left?)
}

struct Helper {
    group: Group,
    device: Device,
    session: Session,
    options: HelperOptions,
}

impl Helper {
    fn serve(&mut self) -> Result<()> {
        for op in 0.. {
            let header =
                pollster::block_on(self.group.post_recv(OWNER, header_tag(op), &[HEADER_BYTES], IDLE))?;
            let length =
                header.first().and_then(|bytes| bytes[..].try_into().ok()).map_or(0, u64::from_le_bytes);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if length == 0 || length > MAX_REQUEST_BYTES {
                return Err(Error::request(
                    format!("a request of {length} bytes"),
                    format!("send at most {MAX_REQUEST_BYTES}"),
                ));
            }
            let text = pollster::block_on(self.group.post_recv(OWNER, request_tag(op), &[length], MESSAGE))?;
            match Request::from_bytes(&text.concat())? {
                Request::Echo { up, down } => self.echo(op, up, down)?,
                Request::Measure(shape) => self.measure(op, &shape)?,
                Request::Attend(work) => self.attend(op, &work)?,
                Request::Bye => return Ok(()),
            }
        }
        Ok(())
    }

    fn echo(&self, op: u64, up: u64, down: u64) -> Result<()> {
        let bytes =
            |count: u64| usize::try_from(count).ok().filter(|count| (1..=LARGEST_ECHO).contains(count));
        let (Some(up), Some(down)) = (bytes(up), bytes(down)) else {
            return Err(Error::request("an echo of so many bytes", format!("send 1 to {LARGEST_ECHO}")));
        };
        let [from, back, _] = piece_tags(op, 0);
        pollster::block_on(self.group.post_recv(OWNER, from, &[up], MESSAGE))?;
        pollster::block_on(self.group.post_send(OWNER, back, vec![vec![0; down].into()], MESSAGE))?;
        Ok(())
    }

    /// A device that cannot attend so answers with zeros. With one that has failed the helper is no
    /// help any more.
    fn measure(&self, op: u64, shape: &Shape5) -> Result<()> {
        let (measured, failed) = match self.measured(shape) {
            Ok(measured) => (measured, None),
            Err(error) => {
                (self.options.on_event)(&HelperEvent::Refused(error.to_string()));
                (Measured { pairs_per_s: 0, step_ns: 0 }, Some(error))
            }
        };
        let answer = Bytes::copy_from_slice(bytemuck::bytes_of(&measured));
        pollster::block_on(self.group.post_send(OWNER, piece_tags(op, 0)[0], vec![answer], MESSAGE))?;
        match failed {
            Some(error @ Error::Device { .. }) => Err(error),
            _ => Ok(()),
        }
    }

    fn measured(&self, shape: &Shape5) -> Result<Measured> {
        let Shape5 { dtype, head_dim, q_heads, kv_heads } = shape;
        let dtype: Dtype = dtype.parse()?;
        // Of a measurement's longest call: q, k, v and o.
        let elements = u64::from(*q_heads.max(kv_heads)).saturating_mul(u64::from(*head_dim) * 4 * 8192);
        let bytes = elements.saturating_mul(dtype.bytes() as u64);
        if self.options.memory_bytes.is_some_and(|memory| bytes > memory) {
            let what = format!("a measurement that needs {bytes} bytes");
            return Err(Error::request(what, "give the helper more memory"));
        }
        let problem = AttentionProblem::new([1, 256, *q_heads, *kv_heads, *head_dim], dtype, Mask::full())?;
        let capacity = pollster::block_on(self.device.measure(&problem, Arc::new(SystemClock::new())))?;
        Ok(Measured { pairs_per_s: capacity.pairs_per_s, step_ns: capacity.step_ns })
    }

    fn attend(&mut self, op: u64, work: &Work) -> Result<()> {
        let deadline = Duration::from_millis(work.deadline_ms.clamp(1000, 3_600_000));
        let memory_bytes = match self.accept(work) {
            Ok(holds) => holds,
            Err(error) => {
                (self.options.on_event)(&HelperEvent::Refused(error.to_string()));
                return self.refuse_all(op, work, 0, &error, deadline);
            }
        };
        let mut served = Served::default();
        let mut keys = None;
        let mut arriving: VecDeque<Posted<Vec<Bytes>>> = VecDeque::new();
        let mut leaving: VecDeque<Posted<Taken>> = VecDeque::new();
        for (index, piece) in work.pieces.iter().enumerate() {
            let began = Instant::now();
            for ahead in (index + arriving.len()..work.pieces.len()).take(WINDOW - arriving.len()) {
                let [inputs, ..] = piece_tags(op, ahead);
                let bytes = work.input_bytes(&work.pieces[ahead])?;
                arriving.push_back(self.group.post_recv(OWNER, inputs, &bytes, deadline));
            }
            let Some(inputs) = arriving.pop_front() else { break };
            let inputs = pollster::block_on(inputs)?;
            let waiting = began.elapsed();
            let began = Instant::now();
            served.bytes[0] += inputs.iter().map(|part| part.len() as u64).sum::<u64>();
            let results = self.compute(work, piece, inputs, &mut keys);
            let computing = began.elapsed();
            served.waiting += waiting;
            served.computing += computing;
            let [_, status, output] = piece_tags(op, index);
            let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            let fault = results.as_ref().err().map(ToString::to_string);
            let told = Status { fault, compute_ns: nanos(computing), waited_ns: nanos(waiting) };
            leaving.push_back(self.group.post_send(OWNER, status, vec![told.to_bytes()], deadline));
            match results {
                Ok(parts) => {
                    served.bytes[1] += parts.iter().map(|part| part.len() as u64).sum::<u64>();
                    leaving.push_back(self.group.post_send(OWNER, output, parts, deadline));
                }
                Err(error) => {
                    (self.options.on_event)(&HelperEvent::Refused(error.to_string()));
                    self.refuse_all(op, work, index + 1, &error, deadline)?;
                    // With a device that has failed it is no help any more.
                    return if matches!(error, Error::Device { .. }) { Err(error) } else { Ok(()) };
                }
            }
            while leaving.len() > 2 * WINDOW {
                self.left(leaving.pop_front())?;
            }
        }
        while !leaving.is_empty() {
            self.left(leaving.pop_front())?;
        }
        let Served { bytes, computing, waiting } = served;
        (self.options.on_event)(&HelperEvent::Served {
            pieces: work.pieces.len(),
            bytes,
            computing,
            waiting,
            memory_bytes,
        });
        Ok(())
    }

    /// Waits for a message to the owner. An owner that takes it too late has computed the piece
    /// itself.
    fn left(&self, message: Option<Posted<Taken>>) -> Result<()> {
        match message.map(pollster::block_on) {
            Some(Err(
                error @ (kyklos_transport::TransportError::Aborted { .. }
                | kyklos_transport::TransportError::Closed),
            )) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Tells the owner that the pieces from `first` on have no results.
    fn refuse_all(
        &self,
        op: u64,
        work: &Work,
        first: usize,
        error: &Error,
        deadline: Duration,
    ) -> Result<()> {
        let status = Status { fault: Some(error.to_string()), compute_ns: 0, waited_ns: 0 };
        let mut told = Vec::new();
        for index in first..work.pieces.len().min(MOST_PIECES) {
            let [_, tag, _] = piece_tags(op, index);
            told.push(self.group.post_send(OWNER, tag, vec![status.to_bytes()], deadline));
        }
        told.into_iter().try_for_each(|message| self.left(Some(message)))
    }

    /// Refuses work that is none, or does not fit. Returns the most bytes that it holds at a time.
    fn accept(&self, work: &Work) -> Result<u64> {
        if work.pieces.is_empty() || work.pieces.len() > MOST_PIECES || !work.pieces[0].new_keys {
            return Err(Error::request(
                format!("{} pieces", work.pieces.len()),
                format!("send 1 to {MOST_PIECES}, the first with its keys"),
            ));
        }
        self.device.supports(work.dtype.parse()?, work.head_dim as usize)?;
        if work.gradients {
            self.device.supports_backward(work.dtype.parse()?, work.head_dim as usize)?;
        }
        // On the device tensors are as they were before they were coded.
        let plain = &Work { wire: WireFormat::Same.name().to_owned(), ..work.clone() };
        let mut most = 0;
        for piece in &work.pieces {
            if piece.rows == 0 || work.kv_len == 0 || work.batch == 0 {
                return Err(Error::request("a piece without tokens", "leave it out"));
            }
            let (shape, call) = (work.piece_shape(piece)?, work.piece_call(piece)?);
            shape.check_state(self.device.most_state_bytes())?;
            Call { bias: None, ..call.clone() }
                .problem(&shape)?
                .with_bias(call.bias.map(|(tensor, _)| tensor))?;
            let bytes: usize = plain.input_bytes(piece)?.iter().chain(&plain.result_bytes(piece)?).sum();
            let holds = bytes as u64 * 2 * WINDOW as u64;
            if let Some(memory) = self.options.memory_bytes.filter(|most| holds > *most) {
                return Err(Error::request(
                    format!("a piece that needs {holds} bytes of this helper, which gives {memory}"),
                    "send smaller pieces, or give the helper more memory",
                ));
            }
            most = most.max(holds);
        }
        Ok(most)
    }

    /// The parts of a piece's results.
    fn compute(
        &mut self,
        work: &Work,
        piece: &Piece,
        inputs: Vec<Bytes>,
        keys: &mut Option<[Tensor; 2]>,
    ) -> Result<Vec<Bytes>> {
        let encoding = work.encoding()?;
        let (shape, mut call) = (work.piece_shape(piece)?, work.piece_call(piece)?);
        let mut inputs = Inputs { encoding, device: &self.device, parts: inputs.into_iter() };
        let (of_queries, of_keys) = (queries_shape(&shape), keys_shape(&shape));
        let q = inputs.tensor(of_queries, Role::Rows)?;
        if piece.new_keys {
            let [k, v] = [inputs.tensor(of_keys, Role::Keys)?, inputs.tensor(of_keys, Role::Rows)?];
            *keys = Some([k.to_device(&self.device)?, v.to_device(&self.device)?]);
        }
        let Some([k, v]) = keys.as_ref() else {
            return Err(Error::request("a piece without keys", "send them with the first piece"));
        };
        if let Some((_, rows)) = &mut call.bias {
            *rows = inputs.parts.next().unwrap_or_default();
        }
        let attention = call.attention();
        let output = self.session.attend(&attention, &q, k, v)?;
        let results = if work.gradients {
            let d_o = inputs.tensor(of_queries, Role::Gradients)?;
            let saved = Saved { q, k: k.clone(), v: v.clone(), o: output.o, lse: output.lse_pair };
            let gradients = self.session.backward(&attention, &saved, &d_o, None)?;
            vec![gradients.dq, gradients.dk, gradients.dv]
        } else {
            vec![output.o]
        };
        let mut parts = Vec::new();
        for tensor in results {
            parts.extend(encoding.encode(&self.device, &tensor, result_role(work.gradients))?);
        }
        Ok(parts)
    }
}

#[derive(Default)]
struct Served {
    bytes: [u64; 2],
    computing: Duration,
    waiting: Duration,
}

/// The parts of a message, tensor by tensor.
struct Inputs<'a> {
    encoding: Encoding,
    device: &'a Device,
    parts: std::vec::IntoIter<Bytes>,
}

impl Inputs<'_> {
    fn tensor(&mut self, shape: [usize; 4], role: Role) -> Result<Tensor> {
        let count = self.encoding.part_bytes(shape, role).len();
        let parts = self.parts.by_ref().take(count).collect();
        self.encoding.decode(self.device, parts, shape, role)
    }
}

/// Where it is not known.
const UNKNOWN_MEMORY_BYTES: u64 = 4 << 30;
/// For the first words of the owner.
const GREETING: Duration = Duration::from_secs(20);
/// An owner may think for long.
const IDLE: Duration = Duration::from_secs(365 * 24 * 3600);
const MESSAGE: Duration = Duration::from_secs(60);
const LEAVING: Duration = Duration::from_secs(3);
const LARGEST_ECHO: usize = 64 << 20;
/// Most pieces of a request; each takes memory before it is there.
const MOST_PIECES: usize = 4096;
