//! The shares of one call while helpers compute them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::{Error, Result, Tensor};
use kyklos_transport::Posted;

use super::{OWNER, Owner, Request, piece_tags};
use crate::call::{Call, Part, Shape};
use crate::encoding::{Encoding, Role};
use crate::forecast::{Forecast, Share};
use crate::message::{
    HELPER, STATUS_BYTES, Status, Work, keys_shape, queries_shape, result_role, result_shapes,
};
use crate::owner::HelperState;
use crate::wait::wait_until;

/// The tensors of one part, dense and in host memory.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Its rows and heads of q: `[batch, rows, query heads, dim]`.
    pub q: Tensor,
    /// Its heads of k and v, `[batch, kv_len, heads, dim]`: of the first part of its heads in a
    /// share, and none for the parts after it that have the same heads.
    pub keys: Option<[Tensor; 2]>,
    /// For gradients: shaped as q.
    pub d_o: Option<Tensor>,
}

/// What helpers returned of one call: for each share, for each of its parts, the output `[batch,
/// rows, query heads, dim]`, or the gradients of q, k and v; none for what is missing, which the
/// caller computes.
pub type Results = Vec<Vec<(Part, Option<Vec<Tensor>>)>>;

/// The shares of one call, which helpers compute.
#[derive(Debug)]
pub struct Flight {
    call: Call,
    shape: Shape,
    forecast: Forecast,
    began: Instant,
    sent: Vec<Sent>,
    /// While there is this, its helpers get no share of another call.
    token: Arc<()>,
}

impl Flight {
    /// Waits for the results, not much longer than was forecast. It needs no owner meanwhile.
    /// Blocks.
    pub fn land(self) -> Landed {
        let Self { call, shape, forecast, began, sent, token } = self;
        let mut shares = Vec::new();
        for Sent { number, name, share, inputs, answers } in sent {
            let slack = (forecast.alone_s * PATIENCE_OF_ALONE).clamp(LEAST_SLACK_S, MOST_SLACK_S);
            let patience = forecast.total_s.max(share.end_s) * PATIENCE + slack;
            let until = (began + Duration::from_secs_f64(patience.min(MOST_PATIENCE_S)))
                .max(Instant::now() + Duration::from_secs_f64(LEAST_PATIENCE_S));
            let outcome = answers.map(|answers| received(&call, &shape, &share, answers, until));
            let seconds = began.elapsed().as_secs_f64();
            shares.push(LandedShare { number, name, share, inputs, outcome, seconds });
        }
        Landed { call, shape, forecast, shares, token }
    }
}

/// A call whose helpers have returned their results, or have been given up.
#[derive(Debug)]
pub struct Landed {
    pub(super) call: Call,
    pub(super) shape: Shape,
    pub(super) forecast: Forecast,
    pub(super) shares: Vec<LandedShare>,
    pub(super) token: Arc<()>,
}

#[derive(Debug)]
pub(super) struct LandedShare {
    pub(super) number: u64,
    pub(super) name: String,
    pub(super) share: Share,
    pub(super) inputs: Vec<Inputs>,
    /// None: the helper was not there.
    pub(super) outcome: Option<Outcome>,
    /// Since the beginning of the call.
    pub(super) seconds: f64,
}

/// The share of one helper.
#[derive(Debug)]
struct Sent {
    number: u64,
    name: String,
    share: Share,
    inputs: Vec<Inputs>,
    /// None: the helper was not there.
    answers: Option<Vec<Answer>>,
}

/// The messages of a piece from the helper.
#[derive(Debug)]
struct Answer {
    status: Posted<Vec<Bytes>>,
    results: Posted<Vec<Bytes>>,
}

/// What came of a share.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) results: Vec<Option<Vec<Tensor>>>,
    pub(super) computing_s: f64,
    /// Why parts are missing.
    pub(super) fault: Option<Fault>,
    /// Whether the owner waited for the last part.
    pub(super) waited: bool,
}

#[derive(Debug)]
pub(super) enum Fault {
    /// The helper said so.
    Refused(String),
    Late,
    Lost(String),
}

impl Owner {
    /// Sends the shares of a call to the helpers: `inputs` has those of each part of each share of
    /// `forecast`, which is of [`Self::decide`]. `copying` is how long it took to make them.
    ///
    /// # Errors
    /// [`Error::Request`] for tensors of other shapes, and for elements that the wire format
    /// cannot hold: then nothing has been sent.
    pub fn begin(
        &mut self,
        call: &Call,
        shape: &Shape,
        forecast: Forecast,
        inputs: Vec<Vec<Inputs>>,
        copying: Duration,
    ) -> Result<Flight> {
        let began = Instant::now();
        call.problem(shape)?;
        call.check_bias_rows(shape)?;
        let encoding = Encoding::new(shape.dtype, call.wire)?;
        let device = Device::cpu();
        let deadline_ms = deadline(&forecast);
        check_inputs(call, shape, &forecast, &inputs)?;
        let mut prepared = Vec::new();
        for (share, inputs) in forecast.shares.iter().zip(&inputs) {
            let work = Work::new(call, shape, &share.parts, deadline_ms);
            prepared.push((messages(call, shape, encoding, &device, share, &work, inputs)?, work));
        }
        let bytes: u64 = forecast.shares.iter().map(|share| share.bytes[0]).sum();
        self.learn_copies(bytes, copying + began.elapsed());
        let (mut sent, token) = (Vec::new(), Arc::new(()));
        for ((share, inputs), (messages, work)) in forecast.shares.iter().zip(inputs).zip(prepared) {
            let Some(link) = self.links.iter_mut().find(|link| link.number == share.helper) else {
                // It has gone since, or is being measured: the caller computes its share.
                let (number, name) = (share.helper, String::new());
                sent.push(Sent { number, name, share: share.clone(), inputs, answers: None });
                continue;
            };
            let deadline = Duration::from_millis(deadline_ms);
            let op = link.request(&Request::Attend(work.clone()));
            let mut answers = Vec::new();
            for (index, (piece, parts)) in work.pieces.iter().zip(messages).enumerate() {
                let [there, status, results] = piece_tags(op, index);
                // What comes of a message shows in the answer to it.
                drop(link.group.post_send(HELPER, there, parts, deadline));
                let bytes = work.result_bytes(piece)?;
                answers.push(Answer {
                    status: link.group.post_recv(HELPER, status, &[STATUS_BYTES], deadline),
                    results: link.group.post_recv(HELPER, results, &bytes, deadline),
                });
            }
            let (number, name) = (link.number, link.name.clone());
            self.working.insert(number, Arc::downgrade(&token));
            let status = self.status_of(&name);
            status.state = HelperState::Working;
            status.sent(share);
            sent.push(Sent { number, name, share: share.clone(), inputs, answers: Some(answers) });
        }
        Ok(Flight { call: call.clone(), shape: *shape, forecast, began, sent, token })
    }

    #[expect(clippy::cast_precision_loss, reason = "bytes, to a few digits")]
    fn learn_copies(&mut self, bytes: u64, took: Duration) {
        let seconds = took.as_secs_f64();
        if bytes > 1 << 20 && seconds > 0.0 {
            self.copies_bytes_per_s = (self.copies_bytes_per_s * bytes as f64 / seconds).sqrt();
        }
    }
}

/// Refuses tensors that are not those of the parts.
fn check_inputs(call: &Call, shape: &Shape, forecast: &Forecast, inputs: &[Vec<Inputs>]) -> Result<()> {
    let counts: Vec<usize> = inputs.iter().map(Vec::len).collect();
    let wanted: Vec<usize> = forecast.shares.iter().map(|share| share.parts.len()).collect();
    if counts != wanted {
        return Err(Error::request(
            format!("tensors for {counts:?} parts, the shares have {wanted:?}"),
            "give those of each part of each share",
        ));
    }
    let parts = forecast.shares.iter().flat_map(|share| &share.parts);
    for (part, inputs) in parts.zip(inputs.iter().flatten()) {
        let of = part.shape(shape);
        let queries = [Some(&inputs.q), inputs.d_o.as_ref()].into_iter().flatten();
        let keys = inputs.keys.iter().flatten();
        let given = queries
            .map(|tensor| (tensor, queries_shape(&of)))
            .chain(keys.map(|tensor| (tensor, keys_shape(&of))));
        for (tensor, wanted) in given {
            if (tensor.shape(), tensor.dtype()) != (wanted, of.dtype) {
                return Err(Error::request(
                    format!(
                        "a tensor of shape {:?} in {}, for {wanted:?} in {}",
                        tensor.shape(),
                        tensor.dtype(),
                        of.dtype
                    ),
                    "give the rows and heads of the part",
                ));
            }
        }
        if inputs.d_o.is_some() != call.gradients {
            return Err(Error::request(
                "gradients without that of the output, or the other way",
                "give both or none",
            ));
        }
    }
    Ok(())
}

/// The messages of a share.
fn messages(
    call: &Call,
    shape: &Shape,
    encoding: Encoding,
    device: &Device,
    share: &Share,
    work: &Work,
    inputs: &[Inputs],
) -> Result<Vec<Vec<Bytes>>> {
    let mut messages = Vec::new();
    for ((part, piece), inputs) in share.parts.iter().zip(&work.pieces).zip(inputs) {
        let mut parts = encoding.encode(device, &inputs.q, Role::Rows)?;
        if piece.new_keys {
            let Some([k, v]) = &inputs.keys else {
                return Err(Error::request(
                    "a part without its keys",
                    "give them with the first part of its heads",
                ));
            };
            parts.extend(encoding.encode(device, k, Role::Keys)?);
            parts.extend(encoding.encode(device, v, Role::Rows)?);
        }
        if let Some((_, rows)) = part.call(call, shape).bias {
            parts.push(rows);
        }
        if let Some(d_o) = &inputs.d_o {
            parts.extend(encoding.encode(device, d_o, Role::Gradients)?);
        }
        let sizes: Vec<usize> = parts.iter().map(Bytes::len).collect();
        let wanted = work.input_bytes(piece)?;
        if sizes != wanted {
            return Err(Error::request(
                format!("a part whose tensors have {sizes:?} bytes, its shape needs {wanted:?}"),
                "give the rows and heads of the part",
            ));
        }
        messages.push(parts);
    }
    Ok(messages)
}

/// Waits for the results of a share.
fn received(call: &Call, shape: &Shape, share: &Share, answers: Vec<Answer>, until: Instant) -> Outcome {
    let device = Device::cpu();
    let mut outcome = Outcome { results: Vec::new(), computing_s: 0.0, fault: None, waited: false };
    let Ok(encoding) = Encoding::new(shape.dtype, call.wire) else {
        unreachable!("the call has begun with it")
    };
    for (part, Answer { mut status, mut results }) in share.parts.iter().zip(answers) {
        let arrived = if outcome.fault.is_some() {
            None
        } else {
            let began = Instant::now();
            let arrived = arrived(&mut status, &mut results, until);
            outcome.waited |= began.elapsed() > WAITED;
            match arrived {
                Ok((status, parts)) => {
                    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a call")]
                    let seconds = status.compute_ns as f64 / 1e9;
                    outcome.computing_s += seconds;
                    Some(parts)
                }
                Err(fault) => {
                    outcome.fault = Some(fault);
                    None
                }
            }
        };
        let decoded = arrived.and_then(|parts| {
            let mut parts = parts.into_iter();
            let shapes = result_shapes(&part.shape(shape), call.gradients);
            debug_assert!(!call.gradients || shapes[1] == keys_shape(&part.shape(shape)));
            let tensor = |of: [usize; 4]| {
                let role = result_role(call.gradients);
                let count = encoding.part_bytes(of, role).len();
                encoding.decode(&device, parts.by_ref().take(count).collect(), of, role)?.copied()
            };
            shapes.into_iter().map(tensor).collect::<Result<Vec<_>>>().ok()
        });
        if decoded.is_none() && outcome.fault.is_none() {
            outcome.fault = Some(Fault::Lost("its results cannot be read".to_owned()));
        }
        outcome.results.push(decoded);
    }
    outcome
}

fn arrived(
    status: &mut Posted<Vec<Bytes>>,
    results: &mut Posted<Vec<Bytes>>,
    until: Instant,
) -> std::result::Result<(Status, Vec<Bytes>), Fault> {
    let lost = |error: kyklos_transport::TransportError| match error {
        kyklos_transport::TransportError::Deadline { .. } => Fault::Late,
        error => Fault::Lost(error.to_string()),
    };
    let status = wait_until(status, until).ok_or(Fault::Late)?.map_err(lost)?;
    let status = Status::from_bytes(&status.concat());
    if let Some(text) = status.fault {
        return Err(Fault::Refused(text));
    }
    let results = wait_until(results, until).ok_or(Fault::Late)?.map_err(lost)?;
    Ok((status, results))
}

/// Milliseconds that a message of the call may take.
fn deadline(forecast: &Forecast) -> u64 {
    let seconds = (forecast.total_s.max(forecast.alone_s) * 4.0 + 10.0).min(3600.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "10 to 3600 s")]
    let milliseconds = (seconds * 1e3) as u64;
    milliseconds
}

/// A helper that takes longer than so many times the forecast is not waited for.
const PATIENCE: f64 = 1.5;
/// Beside it, so much of the call alone, within these bounds.
const PATIENCE_OF_ALONE: f64 = 0.25;
const LEAST_SLACK_S: f64 = 0.005;
const MOST_SLACK_S: f64 = 0.05;
const LEAST_PATIENCE_S: f64 = 0.02;
const MOST_PATIENCE_S: f64 = 3600.0;
/// Results that were there already take less.
const WAITED: Duration = Duration::from_micros(200);

const _: () = assert!(OWNER.0 == 0);
