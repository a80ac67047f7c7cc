//! Brings results of all ranks to rank 0, in bounded pieces: the output, or gradients.
//!
//! A piece is a range of tokens of one batch entry: its rows of each tensor travel as the parts of
//! one message. Rank 0 takes the pieces in one fixed order, the first of every rank, then the
//! second of every rank and so on, and has at most `IN_FLIGHT` of them in memory, so no rank waits
//! until all others are done. The bytes are not plan payload and are counted apart.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::{Posted, Rank, Tag, Taken, Transport};

use crate::error::{Error, Result};
use kyklos_plan::Placement;

/// Tensors `[batch, tokens, …]` of each rank's own tokens.
#[derive(Clone, Debug)]
pub struct RowTensors<'a> {
    /// The owners of the tokens.
    pub placement: &'a Placement,
    /// Batch entries.
    pub batch: u32,
    /// Bytes of one token, of each tensor.
    pub row_bytes: Vec<usize>,
}

/// Rows of one batch entry of one rank's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The rank whose rows these are.
    pub rank: Rank,
    /// The batch entry.
    pub batch: u32,
    /// List positions in the rank's own tokens.
    pub tokens: Range<usize>,
    /// Of each tensor, `[tokens, …]`.
    pub rows: Vec<Bytes>,
}

impl RowTensors<'_> {
    /// Sends this rank's tensors to rank 0, as operation `op`. Returns the bytes sent.
    ///
    /// # Errors
    /// [`Error::Transport`].
    pub async fn send(
        &self,
        transport: &dyn Transport,
        op: u64,
        tensors: &[&Bytes],
        deadline: Duration,
    ) -> Result<u64> {
        let mut outstanding: VecDeque<Posted<Taken>> = VecDeque::new();
        let mut sent = 0;
        for (message, piece) in (0..).zip(self.pieces(transport.rank())) {
            if outstanding.len() == IN_FLIGHT
                && let Some(oldest) = outstanding.pop_front()
            {
                oldest.await?;
            }
            let parts = self.cut(&piece, tensors);
            sent += parts.iter().map(|part| part.len() as u64).sum::<u64>();
            outstanding.push_back(transport.post_send(Rank(0), Tag { op, message }, parts, deadline));
        }
        for posted in outstanding {
            posted.await?;
        }
        Ok(sent)
    }

    /// Receives the tensors of all ranks on rank 0, whose own ones are `tensors`; `sink` gets every
    /// piece once.
    ///
    /// # Errors
    /// [`Error::Transport`], and the errors of `sink`.
    pub async fn receive<E: From<Error>>(
        &self,
        transport: &dyn Transport,
        op: u64,
        tensors: &[&Bytes],
        deadline: Duration,
        mut sink: impl FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        for piece in self.pieces(Rank(0)) {
            let rows = self.cut(&piece, tensors);
            sink(piece.with(rows))?;
        }
        let size = transport.size();
        let mut ranks: Vec<_> =
            (1..size).map(Rank).map(|rank| (rank, (0..).zip(self.pieces(rank)))).collect();
        let mut outstanding: VecDeque<(Cut, Posted<Vec<Bytes>>)> = VecDeque::new();
        while !ranks.is_empty() {
            let mut still = Vec::with_capacity(ranks.len());
            for (rank, mut rest) in ranks {
                let Some((message, piece)) = rest.next() else {
                    continue;
                };
                if outstanding.len() == IN_FLIGHT
                    && let Some((piece, posted)) = outstanding.pop_front()
                {
                    sink(piece.with(posted.await.map_err(Error::from)?))?;
                }
                let sizes: Vec<usize> =
                    self.row_bytes.iter().map(|bytes| piece.tokens.len() * bytes).collect();
                let posted = transport.post_recv(rank, Tag { op, message }, &sizes, deadline);
                outstanding.push_back((piece, posted));
                still.push((rank, rest));
            }
            ranks = still;
        }
        for (piece, posted) in outstanding {
            sink(piece.with(posted.await.map_err(Error::from)?))?;
        }
        Ok(())
    }

    /// The pieces of a rank's tensors, in order.
    fn pieces(&self, rank: Rank) -> impl Iterator<Item = Cut> + use<> {
        let owned = self.placement.of_rank(rank).len();
        let step = (PIECE_BYTES / self.row_bytes.iter().sum::<usize>().max(1)).max(1);
        (0..self.batch).flat_map(move |batch| {
            (0..owned).step_by(step).map(move |start| Cut {
                rank,
                batch,
                tokens: start..(start + step).min(owned),
                owned,
            })
        })
    }

    fn cut(&self, piece: &Cut, tensors: &[&Bytes]) -> Vec<Bytes> {
        let first = piece.batch as usize * piece.owned;
        let rows = first + piece.tokens.start..first + piece.tokens.end;
        let cut = |(tensor, bytes): (&&Bytes, &usize)| tensor.slice(rows.start * bytes..rows.end * bytes);
        tensors.iter().zip(&self.row_bytes).map(cut).collect()
    }
}

/// The rows of a piece.
struct Cut {
    rank: Rank,
    batch: u32,
    tokens: Range<usize>,
    /// Tokens that the rank owns.
    owned: usize,
}

impl Cut {
    fn with(self, rows: Vec<Bytes>) -> Piece {
        Piece { rank: self.rank, batch: self.batch, tokens: self.tokens, rows }
    }
}

/// Most bytes of a piece, unless one token alone has more.
const PIECE_BYTES: usize = 8 << 20;
/// The most pieces in flight at once.
const IN_FLIGHT: usize = 3;

#[cfg(test)]
mod tests {
    use kyklos_transport::in_process_group;

    use super::*;
    use kyklos_plan::{Mesh, PlacementKind, Split};

    #[test]
    fn every_row_of_every_rank_arrives_once_and_no_piece_is_large() {
        let split = Split::Tokens(vec![300, 800, 0]);
        let mesh = Mesh::new(1, 3).unwrap();
        let placement = Placement::new(PlacementKind::Striped, mesh, 1100, &split).unwrap();
        let tensors = RowTensors { placement: &placement, batch: 2, row_bytes: vec![8 * 512 * 4, 8 * 4] };
        // Every byte of a row encodes its rank and its row.
        let output = |rank: u32| {
            let rows = 2 * placement.of_rank(Rank(rank)).len();
            let fill = |bytes: usize| -> Bytes {
                (0..rows)
                    .flat_map(|row| std::iter::repeat_n((row * 3 + rank as usize) as u8, bytes))
                    .collect::<Vec<u8>>()
                    .into()
            };
            (fill(8 * 512 * 4), fill(8 * 4))
        };
        let mut group = in_process_group(3).into_iter();
        let first = group.next().unwrap();
        let wait = Duration::from_secs(20);
        let mut seen = vec![0; 3];
        std::thread::scope(|scope| {
            for transport in group {
                let (tensors, (o, lse)) = (&tensors, output(transport.rank().0));
                scope.spawn(move || {
                    let sent = pollster::block_on(tensors.send(&*transport, 7, &[&o, &lse], wait)).unwrap();
                    assert_eq!(sent, (o.len() + lse.len()) as u64);
                    pollster::block_on(transport.close(wait)).unwrap();
                });
            }
            let (o, lse) = output(0);
            pollster::block_on(tensors.receive(&*first, 7, &[&o, &lse], wait, |piece| {
                let [o, lse] = &piece.rows[..] else { panic!("two tensors") };
                assert!(o.len() + lse.len() <= PIECE_BYTES);
                let owned = placement.of_rank(piece.rank).len();
                for (index, token) in piece.tokens.clone().enumerate() {
                    let row = piece.batch as usize * owned + token;
                    let byte = (row * 3 + piece.rank.0 as usize) as u8;
                    assert!(o[index * 16_384..(index + 1) * 16_384].iter().all(|b| *b == byte));
                    assert!(lse[index * 32..(index + 1) * 32].iter().all(|b| *b == byte));
                }
                seen[piece.rank.0 as usize] += piece.tokens.len();
                Ok::<(), Error>(())
            }))
            .unwrap();
        });
        assert_eq!(seen, [600, 1600, 0]);
    }
}
