//! Brings the output of all ranks to rank 0, in bounded pieces.
//!
//! A piece is a range of tokens of one batch entry: its rows of o and of lse travel as the two parts of one message.
//! Rank 0 takes the pieces in one fixed order, the first of every rank, then the second of every rank and so on, and
//! has at most `IN_FLIGHT` of them in memory, so no rank waits until all others are done. The bytes are not plan payload
//! and are counted apart.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::{Posted, Rank, Tag, Taken, Transport};

use crate::plan::World;
use crate::{Error, Result};

/// Rows of one batch entry of one rank's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputPiece {
    /// The rank whose rows these are.
    pub rank: Rank,
    /// The batch entry.
    pub batch: u32,
    /// List positions in the rank's own tokens.
    pub tokens: Range<usize>,
    /// `[tokens, heads, dim]` in the problem's dtype.
    pub o: Bytes,
    /// f32 `[tokens, heads]`.
    pub lse: Bytes,
}

/// Sends this rank's output `o` `[batch, tokens, heads, dim]` and `lse` `[batch, tokens, heads]` to rank 0, as
/// operation `op`. Returns the bytes sent.
///
/// # Errors
/// [`Error::Transport`].
pub async fn send_output(
    transport: &dyn Transport,
    world: &World,
    op: u64,
    o: &Bytes,
    lse: &Bytes,
    deadline: Duration,
) -> Result<u64> {
    let mut outstanding: VecDeque<Posted<Taken>> = VecDeque::new();
    let mut sent = 0;
    for (message, piece) in (0..).zip(pieces(world, transport.rank())) {
        if outstanding.len() == IN_FLIGHT
            && let Some(oldest) = outstanding.pop_front()
        {
            oldest.await?;
        }
        let parts = piece.cut(world, o, lse);
        sent += parts.iter().map(|part| part.len() as u64).sum::<u64>();
        outstanding.push_back(transport.post_send(Rank(0), Tag { op, message }, parts, deadline));
    }
    for posted in outstanding {
        posted.await?;
    }
    Ok(sent)
}

/// Receives the output of all ranks on rank 0, whose own output is `o` and `lse`; `sink` gets every piece once.
///
/// # Errors
/// [`Error::Transport`], and the errors of `sink`.
pub async fn receive_output<E: From<Error>>(
    transport: &dyn Transport,
    world: &World,
    op: u64,
    o: &Bytes,
    lse: &Bytes,
    deadline: Duration,
    mut sink: impl FnMut(OutputPiece) -> Result<(), E>,
) -> Result<(), E> {
    for piece in pieces(world, Rank(0)) {
        let parts = piece.cut(world, o, lse);
        sink(piece.with(Rank(0), parts))?;
    }
    let mut ranks: Vec<_> =
        (1..world.mesh.world()).map(Rank).map(|rank| (rank, (0..).zip(pieces(world, rank)))).collect();
    let mut outstanding: VecDeque<(Rank, Cut, Posted<Vec<Bytes>>)> = VecDeque::new();
    while !ranks.is_empty() {
        let mut still = Vec::with_capacity(ranks.len());
        for (rank, mut rest) in ranks {
            let Some((message, piece)) = rest.next() else {
                continue;
            };
            if outstanding.len() == IN_FLIGHT
                && let Some((rank, piece, posted)) = outstanding.pop_front()
            {
                sink(piece.with(rank, posted.await.map_err(Error::from)?))?;
            }
            let (o_bytes, lse_bytes) = row_bytes(world);
            let sizes = [piece.tokens.len() * o_bytes, piece.tokens.len() * lse_bytes];
            let posted = transport.post_recv(rank, Tag { op, message }, &sizes, deadline);
            outstanding.push_back((rank, piece, posted));
            still.push((rank, rest));
        }
        ranks = still;
    }
    for (rank, piece, posted) in outstanding {
        sink(piece.with(rank, posted.await.map_err(Error::from)?))?;
    }
    Ok(())
}

/// The rows of a piece.
struct Cut {
    batch: u32,
    tokens: Range<usize>,
    /// Tokens that the rank owns.
    owned: usize,
}

impl Cut {
    fn cut(&self, world: &World, o: &Bytes, lse: &Bytes) -> Vec<Bytes> {
        let first = self.batch as usize * self.owned;
        let rows = first + self.tokens.start..first + self.tokens.end;
        let (o_bytes, lse_bytes) = row_bytes(world);
        vec![
            o.slice(rows.start * o_bytes..rows.end * o_bytes),
            lse.slice(rows.start * lse_bytes..rows.end * lse_bytes),
        ]
    }

    fn with(self, rank: Rank, parts: Vec<Bytes>) -> OutputPiece {
        let mut parts = parts.into_iter();
        OutputPiece {
            rank,
            batch: self.batch,
            tokens: self.tokens,
            o: parts.next().unwrap_or_default(),
            lse: parts.next().unwrap_or_default(),
        }
    }
}

/// The pieces of a rank's output, in order.
fn pieces(world: &World, rank: Rank) -> impl Iterator<Item = Cut> + use<> {
    let owned = world.q_placement.of_rank(rank).len();
    let (o_bytes, lse_bytes) = row_bytes(world);
    let step = (PIECE_BYTES / (o_bytes + lse_bytes)).max(1);
    (0..world.problem.batch).flat_map(move |batch| {
        (0..owned).step_by(step).map(move |start| Cut {
            batch,
            tokens: start..(start + step).min(owned),
            owned,
        })
    })
}

/// Bytes of o and of lse of one token.
fn row_bytes(world: &World) -> (usize, usize) {
    let problem = &world.problem;
    let heads = problem.q_heads as usize;
    (heads * problem.head_dim as usize * problem.dtype.bytes(), heads * 4)
}

/// Most bytes of a piece, unless one token alone has more.
const PIECE_BYTES: usize = 8 << 20;
/// The most pieces in flight at once.
const IN_FLIGHT: usize = 3;

#[cfg(test)]
mod tests {
    use kyklos_transport::in_process_group;

    use super::*;
    use crate::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_world};

    #[test]
    fn every_row_of_every_rank_arrives_once_and_no_piece_is_large() {
        let problem = AttentionProblem::new([2, 1100, 8, 8, 512], Dtype::F32, Mask::full()).unwrap();
        let split = Split::Tokens(vec![300, 800, 0]);
        let world =
            plan_world(&problem, Mesh::new(1, 3).unwrap(), PlacementKind::Striped, &split, Strategy::Ring)
                .unwrap();
        // Every byte of a row encodes its rank and its row.
        let output = |rank: u32| {
            let rows = 2 * world.q_placement.of_rank(Rank(rank)).len();
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
                let (world, (o, lse)) = (&world, output(transport.rank().0));
                scope.spawn(move || {
                    let sent =
                        pollster::block_on(send_output(&*transport, world, 7, &o, &lse, wait)).unwrap();
                    assert_eq!(sent, (o.len() + lse.len()) as u64);
                    pollster::block_on(transport.close(wait)).unwrap();
                });
            }
            let (o, lse) = output(0);
            pollster::block_on(receive_output(&*first, &world, 7, &o, &lse, wait, |piece| {
                assert!(piece.o.len() + piece.lse.len() <= PIECE_BYTES);
                let owned = world.q_placement.of_rank(piece.rank).len();
                for (index, token) in piece.tokens.clone().enumerate() {
                    let row = piece.batch as usize * owned + token;
                    let byte = (row * 3 + piece.rank.0 as usize) as u8;
                    assert!(piece.o[index * 16_384..(index + 1) * 16_384].iter().all(|b| *b == byte));
                    assert!(piece.lse[index * 32..(index + 1) * 32].iter().all(|b| *b == byte));
                }
                seen[piece.rank.0 as usize] += piece.tokens.len();
                Ok::<(), Error>(())
            }))
            .unwrap();
        });
        assert_eq!(seen, [600, 1600, 0]);
    }
}
