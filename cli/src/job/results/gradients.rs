//! The gradients of a job: rank 0 verifies and collects them.

use bytes::Bytes;
use kyklos::Placement;
use kyklos::collect::RowTensors;
use kyklos_transport::Rank;

use crate::failure::{Failure, Result};
use crate::job::call::Job;
use crate::messages::Messages;
use crate::tensors::output::{GradientRows, OutputFile};
use crate::tensors::results::HostGradients;
use crate::verify::{GradientVerdict, HeadGradients};

/// What a rank has computed in the backward pass.
pub(in crate::job) struct Backward {
    pub(in crate::job) gradients: HostGradients,
    pub(in crate::job) wall_ns: u64,
}

impl Job {
    /// The part of ranks other than 0: send the own part of the gradients of the sinks, and with
    /// `--verify` the gradients of the head that is verified.
    pub(in crate::job) fn send_for_verification(
        &self,
        messages: &Messages<'_>,
        Backward { gradients, .. }: &Backward,
    ) -> Result<()> {
        if !gradients.d_sinks_part.is_empty() {
            let part = Bytes::copy_from_slice(bytemuck::cast_slice(&gradients.d_sinks_part));
            messages.send(Rank(0), D_SINKS, part)?;
        }
        let Some(sample) = &self.sample else { return Ok(()) };
        let owners = self.owners_of_key_rows()?;
        let [of_queries, of_keys] = self.rows_of_head(&owners);
        let HeadGradients { dq, dk, dv } = sample.head_of(sample.verified_head(), gradients);
        let [dk, dv] = [dk, dv].map(|rows| self.own_rows(&rows, of_keys.row_bytes[0]));
        for (rows, op, tensors) in [(of_queries, HEAD_DQ, &[&dq][..]), (of_keys, HEAD_DKV, &[&dk, &dv][..])] {
            let op = self.operations() + op;
            pollster::block_on(rows.send(messages.transport, op, tensors, messages.deadline))?;
        }
        Ok(())
    }

    /// The part of rank 0: the gradients of the sinks, and with `--verify` the comparison with the
    /// oracle.
    pub(in crate::job) fn verify_gradients(
        &self,
        messages: &Messages<'_>,
        Backward { gradients, .. }: &Backward,
    ) -> Result<(Option<GradientVerdict>, Vec<f64>)> {
        let mut d_sinks = gradients.d_sinks_part.clone();
        if !d_sinks.is_empty() {
            for rank in (1..messages.transport.size()).map(Rank) {
                let part = messages.recv(rank, D_SINKS, d_sinks.len() * 8)?;
                for (sum, number) in d_sinks.iter_mut().zip(part.as_chunks::<8>().0) {
                    *sum += f64::from_ne_bytes(*number);
                }
            }
        }
        let Some(sample) = &self.sample else { return Ok((None, d_sinks)) };
        self.watch.phase(Some("verifying the gradients"));
        let HeadGradients { dq, dk, dv } = sample.head_of(sample.verified_head(), gradients);
        let owners = self.owners_of_key_rows()?;
        let [of_queries, of_keys] = self.rows_of_head(&owners);
        let problem = &self.set().problem;
        let dq = self.whole(messages, &of_queries, HEAD_DQ, (problem.q_len, &[&dq]))?;
        let dkv = self.whole(messages, &of_keys, HEAD_DKV, (problem.kv_len, &[&dk, &dv]))?;
        let [dq] = <[Bytes; 1]>::try_from(dq).map_err(|_| Failure::run("one tensor of queries"))?;
        let [dk, dv] = <[Bytes; 2]>::try_from(dkv).map_err(|_| Failure::run("two tensors of keys"))?;
        let head = HeadGradients { dq, dk, dv };
        let verdict = sample.judge_head(sample.verified_head(), &head, &d_sinks, self.set())?;
        Ok((Some(verdict), d_sinks))
    }

    /// Sends the gradients to rank 0.
    pub(in crate::job) fn send_gradients(
        &self,
        messages: &Messages<'_>,
        Backward { gradients, .. }: &Backward,
    ) -> Result<()> {
        let owners = self.owners_of_key_rows()?;
        let ((of_queries, dq), (of_keys, [dk, dv])) = self.rows_of_gradients(&owners, gradients);
        let [dk, dv] = [dk, dv].map(|rows| self.own_rows(rows, of_keys.row_bytes[0]));
        for (rows, op, tensors) in [(of_queries, DQ, &[dq][..]), (of_keys, DKV, &[&dk, &dv][..])] {
            let op = self.operations() + op;
            pollster::block_on(rows.send(messages.transport, op, tensors, messages.deadline))?;
        }
        Ok(())
    }

    /// Writes the gradients of all ranks to `file`. Returns the bytes that other ranks sent.
    pub(in crate::job) fn receive_gradients(
        &self,
        messages: &Messages<'_>,
        Backward { gradients, .. }: &Backward,
        file: &OutputFile,
    ) -> Result<u64> {
        let mut received = 0;
        let owners = self.owners_of_key_rows()?;
        let ((of_queries, dq), (of_keys, of_kv)) = self.rows_of_gradients(&owners, gradients);
        for (rows, op, tensors) in [(of_queries, DQ, &[dq][..]), (of_keys, DKV, &of_kv[..])] {
            let of = if op == DQ { GradientRows::OfQueries } else { GradientRows::OfKeys };
            let op = self.operations() + op;
            let sink = |piece: kyklos::collect::Piece| {
                if piece.rank.0 != 0 {
                    received += piece.rows.iter().map(|rows| rows.len() as u64).sum::<u64>();
                }
                file.write_gradients(of, rows.placement, &piece)
            };
            let all = rows.receive::<Failure>(messages.transport, op, tensors, messages.deadline, sink);
            pollster::block_on(all)?;
        }
        Ok(received)
    }

    /// The tensors of all ranks, `[batch, tokens, …]` of the whole sequence of `tokens` tokens.
    pub(in crate::job) fn whole(
        &self,
        messages: &Messages<'_>,
        rows: &RowTensors<'_>,
        op: u64,
        (tokens, tensors): (u32, &[&Bytes]),
    ) -> Result<Vec<Bytes>> {
        let size = |row: &usize| rows.batch as usize * tokens as usize * row;
        let mut whole: Vec<Vec<u8>> = rows.row_bytes.iter().map(|row| vec![0; size(row)]).collect();
        let sink = |piece: kyklos::collect::Piece| {
            let positions = rows.placement.of_rank(piece.rank).slice(piece.tokens.clone());
            let first = piece.batch as usize * tokens as usize;
            for ((whole, part), bytes) in whole.iter_mut().zip(&piece.rows).zip(&rows.row_bytes) {
                for (row, position) in part.chunks_exact(*bytes).zip(positions.iter()) {
                    let at = (first + position as usize) * bytes;
                    whole[at..at + bytes].copy_from_slice(row);
                }
            }
            Ok(())
        };
        let op = self.operations() + op;
        pollster::block_on(rows.receive::<Failure>(
            messages.transport,
            op,
            tensors,
            messages.deadline,
            sink,
        ))?;
        Ok(whole.into_iter().map(Bytes::from).collect())
    }

    /// The rows of dq, and of dk and dv.
    fn rows_of_gradients<'a>(
        &'a self,
        owners: &'a Placement,
        HostGradients { dq, dk, dv, .. }: &'a HostGradients,
    ) -> ((RowTensors<'a>, &'a Bytes), (RowTensors<'a>, [&'a Bytes; 2])) {
        let problem = &self.set().problem;
        let [of_queries, of_keys] = self.rows_of(owners, problem.q_heads, problem.kv_heads);
        ((of_queries, dq), (of_keys, [dk, dv]))
    }

    /// The rows of the head that is verified: one key/value head, and the query heads that read it.
    fn rows_of_head<'a>(&'a self, owners: &'a Placement) -> [RowTensors<'a>; 2] {
        self.rows_of(owners, self.set().problem.group(), 1)
    }

    fn rows_of<'a>(&'a self, owners: &'a Placement, q_heads: u32, kv_heads: u32) -> [RowTensors<'a>; 2] {
        let (set, problem) = (self.set(), &self.set().problem);
        let row = |heads: u32| heads as usize * problem.head_dim as usize * problem.dtype.bytes();
        let batch = problem.batch;
        [
            RowTensors { placement: &set.q_placement, batch, row_bytes: vec![row(q_heads)] },
            RowTensors { placement: owners, batch, row_bytes: vec![row(kv_heads); 2] },
        ]
    }

    /// The ranks that give the rows of dk and dv: the owners of the keys. All ranks have the same
    /// rows for keys that every rank holds, and rank 0 gives them.
    fn owners_of_key_rows(&self) -> Result<Placement> {
        let (keys, ranks) = (&self.set().kv_placement, self.set().mesh.size());
        let rows = |rank| match rank {
            0 => keys.held_by(Rank(0)),
            rank => keys.of_rank(Rank(rank)).clone(),
        };
        Ok(Placement::explicit(self.set().mesh, keys.total(), 0..0, (0..ranks).map(rows).collect())?)
    }

    /// The rows of a rank's own keys, of rows of `row_bytes` that begin in each batch entry with
    /// those of keys that every rank holds.
    fn own_rows(&self, rows: &Bytes, row_bytes: usize) -> Bytes {
        let (batch, everywhere) = (self.set().problem.batch as usize, self.set().problem.replicated.len());
        if everywhere == 0 {
            return rows.clone();
        }
        let entries = rows.chunks(rows.len() / batch);
        entries.flat_map(|entry| &entry[everywhere * row_bytes..]).copied().collect()
    }
}

/// A rank's part of the gradients of the sinks, f64.
const D_SINKS: u32 = 4;
/// Operations after the runs, beside that of reports and that of the output.
const DQ: u64 = 2;
const DKV: u64 = 3;
const HEAD_DQ: u64 = 4;
const HEAD_DKV: u64 = 5;
/// Of the timelines of the backward pass.
pub(in crate::job) const BACKWARD_ROWS: u64 = 6;
