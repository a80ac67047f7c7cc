//! Collects reports, sampled rows and output on rank 0 after the computation.

use std::sync::Arc;

use bytes::Bytes;
use kyklos::RunOptions;
use kyklos::backend::Device;
use kyklos::collect::RowTensors;
use kyklos_oracle::oracle::Row;
use kyklos_transport::{Group, Rank, Transport, TransportError, Vote};

use crate::failure::{Failure, Result};
use crate::job::call::Job;
use crate::job::refusal::{REFUSE, refuse};
use crate::job::results::gradients::Backward;
use crate::job::results::report::{NOTE_BYTES, RankNote, Summary};
use crate::messages::Messages;
use crate::tensors::output::{OutputFile, OutputTarget};
use crate::tensors::results::HostOutput;
use crate::verify::{Sample, Verdict};

/// What a rank has after all reports and rows are where they belong.
#[derive(Debug)]
pub(in crate::job) struct Collected {
    /// On rank 0.
    pub(in crate::job) summary: Option<Summary>,
    /// The complete file that this rank writes, before it has its name.
    pub(in crate::job) file: Option<OutputFile>,
    /// Why the result must not be used.
    pub(in crate::job) rejected: Option<Failure>,
}

/// What a rank has computed.
pub(in crate::job) struct Results {
    pub(in crate::job) output: HostOutput,
    pub(in crate::job) wall_ns: u64,
    /// With `--grad`.
    pub(in crate::job) backward: Option<Backward>,
}

impl Job {
    /// Sends reports, sampled rows and output to rank 0.
    pub(in crate::job) fn collect(
        &self,
        transport: &Group,
        backend: &Device,
        results: &Results,
        file: Option<OutputFile>,
    ) -> Result<Collected> {
        let messages =
            Messages { transport: &**transport, op: self.operations(), deadline: self.settings.deadline };
        let Results { output, wall_ns, backward } = results;
        let mine = RankNote::new(backend.info(), &output.report, *wall_ns)
            .with_backward(backward.as_ref().map(|backward| (&backward.gradients.report, backward.wall_ns)));
        let rank = transport.rank();
        if rank.0 != 0 {
            messages.send(Rank(0), NOTE, mine.encode()?.into())?;
            if let Some(sample) = &self.sample {
                self.send_rows(&messages, sample, backend, output)?;
            }
            if let Some(backward) = backward {
                self.send_for_verification(&messages, backward)?;
                self.collect_bias_gradient(&messages, backward)?;
            }
            return match (&self.outputs.result, file) {
                (_, Some(file)) => self.write_part(&**transport, file, results, None),
                (Some(OutputTarget::Whole(_)), None) => {
                    self.watch.phase(Some("sending the output"));
                    pollster::block_on(self.rows_of_output().send(
                        messages.transport,
                        self.operations() + 1,
                        &[&output.o, &output.lse],
                        self.settings.deadline,
                    ))?;
                    if let Some(backward) = backward {
                        self.send_gradients(&messages, backward)?;
                    }
                    Ok(Collected { summary: None, file: None, rejected: None })
                }
                _ => Ok(Collected { summary: None, file: None, rejected: None }),
            };
        }

        let mut ranks = vec![mine];
        for other in (1..transport.size()).map(Rank) {
            ranks.push(RankNote::decode(&messages.recv(other, NOTE, NOTE_BYTES)?)?);
        }
        let verdict = match &self.sample {
            Some(sample) => Some(self.verify(&messages, sample, backend, output, &ranks)?),
            None => None,
        };
        let (mut gradients, d_sinks) = match backward {
            Some(backward) => self.verify_gradients(&messages, backward)?,
            None => (None, Vec::new()),
        };
        let d_bias = match backward {
            Some(backward) => self.collect_bias_gradient(&messages, backward)?,
            None => None,
        };
        if let (Some(verdict), Some(d_bias), Some(sample)) = (&mut gradients, &d_bias, &self.sample) {
            verdict.join(sample.judge_bias(d_bias, self.set())?);
        }
        let of_output = verdict.as_ref().and_then(|verdict| verdict.failure.as_ref());
        let wrong = of_output.or(gradients.as_ref().and_then(|verdict| verdict.failure.as_ref()));
        let wrong = wrong.map(|failure| Failure::run(format!("verification failed: {failure}")));
        let mut output_bytes = 0;
        let collected = match (&self.outputs.result, file) {
            (Some(OutputTarget::Parts(_)), Some(file)) => {
                self.write_part(&**transport, file, results, wrong)?
            }
            (Some(OutputTarget::Whole(_)), Some(file)) => {
                self.watch.phase(Some("writing the output"));
                pollster::block_on(self.rows_of_output().receive::<Failure>(
                    messages.transport,
                    self.operations() + 1,
                    &[&output.o, &output.lse],
                    self.settings.deadline,
                    |piece| {
                        if piece.rank.0 != 0 {
                            output_bytes += piece.rows.iter().map(|rows| rows.len() as u64).sum::<u64>();
                        }
                        file.write_piece(&self.set().q_placement, &piece)
                    },
                ))?;
                if let Some(backward) = backward {
                    output_bytes += self.receive_gradients(&messages, backward, &file)?;
                    file.write_sinks(&d_sinks)?;
                    file.write_bias_gradient(&d_bias.unwrap_or_default())?;
                }
                Collected { summary: None, file: Some(file), rejected: wrong }
            }
            _ => Collected { summary: None, file: None, rejected: wrong },
        };
        let summary = Summary {
            wall_s: ranks.iter().map(|rank| rank.wall_s).fold(0.0, f64::max),
            ranks,
            verdict,
            gradients,
            output_bytes,
        };
        Ok(Collected { summary: Some(summary), ..collected })
    }

    /// Writes this rank's part, which may have its name when all ranks have written theirs and rank
    /// 0 has found nothing `wrong`. If not, the reason is the same on every rank, in full on
    /// rank 0.
    ///
    /// # Errors
    /// When the group fails before all parts are written.
    fn write_part(
        &self,
        transport: &dyn Transport,
        file: OutputFile,
        results: &Results,
        wrong: Option<Failure>,
    ) -> Result<Collected> {
        self.watch.phase(Some("writing the output"));
        let rejected = |reason| Ok(Collected { summary: None, file: None, rejected: Some(reason) });
        if let Some(wrong) = wrong {
            refuse(transport, Failure::run("verification failed, rank 0 says how: no part is kept"));
            return rejected(wrong);
        }
        let gradients = results.backward.as_ref().map(|backward| &backward.gradients);
        if let Err(failure) = file.write_part(&results.output, gradients).and_then(|()| file.sync()) {
            return rejected(refuse(transport, self.named(transport.rank(), failure)));
        }
        let vote = Vote::ready(self.plans.hash());
        // Rank 0 votes after the verification, which may take longer than the deadline of a message.
        match pollster::block_on(transport.agree(vote, self.settings.deadline.max(REFUSE))) {
            Ok(_) => Ok(Collected { summary: None, file: Some(file), rejected: None }),
            // The group has lost a rank: --on-loss decides what follows.
            Err(error @ TransportError::Aborted { .. }) => Err(error.into()),
            Err(error) => rejected(error.into()),
        }
    }

    /// The rows of o and lse.
    fn rows_of_output(&self) -> RowTensors<'_> {
        let problem = &self.set().problem;
        let heads = problem.q_heads as usize;
        RowTensors {
            placement: &self.set().q_placement,
            batch: problem.batch,
            row_bytes: vec![heads * problem.head_dim as usize * problem.dtype.bytes(), heads * 4],
        }
    }

    /// The part of ranks other than 0 in the verification: send the own sampled rows and, if rank 0
    /// asks, all sampled rows computed alone.
    fn send_rows(
        &self,
        messages: &Messages<'_>,
        sample: &Sample,
        backend: &Device,
        output: &HostOutput,
    ) -> Result<()> {
        let tokens = self.set().q_placement.of_rank(messages.transport.rank());
        let rows = sample.extract(tokens, &output.o, &output.lse);
        if !rows.is_empty() {
            messages.send(Rank(0), ROWS, rows)?;
        }
        let asked = messages.recv(Rank(0), ALONE, 1)?;
        if asked[..] == [1] {
            self.watch.phase(Some("computing the sampled rows alone"));
            let rows = sample.dense(backend, self.set(), &sample.whole_kv()?, &self.quiet())?;
            if !rows.is_empty() {
                messages.send(Rank(0), ALONE_ROWS, rows)?;
            }
        }
        Ok(())
    }

    /// The part of rank 0: compare the rows of all ranks with the oracle, within a tolerance from
    /// the devices alone.
    fn verify(
        &self,
        messages: &Messages<'_>,
        sample: &Sample,
        backend: &Device,
        output: &HostOutput,
        ranks: &[RankNote],
    ) -> Result<Verdict> {
        self.watch.phase(Some("verifying"));
        let others = || (1..messages.transport.size()).map(Rank);
        let mut rows: Vec<Row> = Vec::new();
        for rank in std::iter::once(Rank(0)).chain(others()) {
            let ids = sample.rows_of(self.set(), rank);
            let bytes = match (rank.0, ids.len()) {
                (_, 0) => continue,
                (0, _) => sample.extract(self.set().q_placement.of_rank(rank), &output.o, &output.lse),
                (_, count) => messages.recv(rank, ROWS, sample.row_bytes(count))?,
            };
            rows.extend(sample.decode(&ids, &bytes));
        }
        // One rank of every kind of device computes alone.
        let mut seen = vec![&ranks[0].device];
        let mut asked = Vec::new();
        for (rank, note) in others().zip(&ranks[1..]) {
            let first = !seen.contains(&&note.device);
            messages.send(rank, ALONE, vec![u8::from(first)].into())?;
            if first {
                seen.push(&note.device);
                asked.push((rank, note));
            }
        }
        let kv = sample.whole_kv()?;
        let alone = sample.dense(backend, self.set(), &kv, &self.quiet())?;
        let mut dense = vec![(ranks[0].device.label(), sample.decode(sample.rows(), &alone))];
        for (rank, note) in asked {
            let bytes = match sample.row_bytes(sample.rows().len()) {
                0 => Bytes::new(),
                size => messages.recv(rank, ALONE_ROWS, size)?,
            };
            dense.push((note.device.label(), sample.decode(sample.rows(), &bytes)));
        }
        let shared =
            format!("{} on {} ranks, mesh {}", self.request.strategy, ranks.len(), self.request.mesh);
        Ok(sample.hold(rows, &dense, &sample.right_rows(&kv, self.set())?, &shared))
    }

    /// Options of runs without observers.
    fn quiet(&self) -> RunOptions {
        RunOptions { observer: Arc::new(kyklos::NoObserver), trace: false, ..self.options.clone() }
    }
}

/// A rank's [`RankNote`].
const NOTE: u32 = 0;
/// Whether a rank is asked to compute the sample alone.
const ALONE: u32 = 1;
/// The sampled rows that a rank owns.
const ROWS: u32 = 2;
/// All sampled rows, computed alone.
const ALONE_ROWS: u32 = 3;
