"""The rows of an image or a video that a rank has, and what ranks tell each other of theirs.

Tensors are ``[..., rows, columns]``. At each scale of a VAE a rank has rows in the same proportion to those of the other ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from ..._errors import RequestError
from ..._group import Group
from ..._models.telling import agreed
from ..._rows import gather, send
from .._keys import same_dim


class Band:
    """The rows of this rank in one call of a VAE.

    :param counts: rows of each rank in the input of the call.
    :param place: beginning of the labels of its calls.
    """

    def __init__(self, group: Group, counts: Sequence[int], place: str) -> None:
        self.group, self.counts, self._place = group, list(counts), place
        self._calls: Counter[str] = Counter()

    def _label(self, what: str) -> str:
        self._calls[what] += 1
        return f"{self._place}, {what} {self._calls[what]}"

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole input, a view."""
        return x.narrow(-2, sum(self.counts[: self.group.rank]), self.counts[self.group.rank])

    def rows(self, own: int) -> list[int]:
        """The rows of each rank, where this one has ``own``.

        :raises RequestError: they are not in the proportion of the input.
        """
        mine = self.counts[self.group.rank]
        if any(count * own % mine for count in self.counts):
            raise RequestError(
                f"{own} rows of rank {self.group.rank} come of {mine}: its layers do not keep the proportion of the rows; {ALONE}"
            )
        return [count * own // mine for count in self.counts]

    def borders(self, x: torch.Tensor, above: int, below: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``above`` rows of the rank before, and ``below`` rows of the rank behind. ``None`` at the edge of the image.

        :param x: the rows of this rank, of which it sends the first and the last ones.
        :raises RequestError: on all ranks, if a rank has fewer rows than its neighbour wants.
        """
        rank, last = self.group.rank, self.group.size - 1
        if not last:
            return None, None
        counts = self.rows(x.shape[-2])
        if min(counts) < max(above, below):
            raise agreed(
                counts.index(min(counts)),
                f"a layer of the VAE needs {max(above, below)} rows of its neighbours, and the ranks have {counts} rows: "
                "use fewer ranks, shares that differ less, or a larger image",
            )
        # What rank r sends up has the positions from ends[2 * r] on, what it sends down those from ends[2 * r + 1] on.
        sent = [(below if r else 0, above if r < last else 0) for r in range(last + 1)]
        ends = [0, *accumulate(count for pair in sent for count in pair)]
        ranges = list(pairwise(ends))
        up, down = ranges[0::2], ranges[1::2]
        kept = [[up[r], down[r]] for r in range(last + 1)]
        wanted = [[*down[max(0, r - 1) : r], *up[r + 1 : r + 2]] for r in range(last + 1)]
        rows = x.movedim(-2, 0)
        own = torch.cat([rows[: sent[rank][0]], rows[rows.shape[0] - sent[rank][1] :]])
        flat = own.reshape(1, own.shape[0], math.prod(own.shape[1:]))
        received = send(self.group, flat, kept, wanted, self._label("rows")).reshape(-1, *rows.shape[1:]).movedim(0, -2)
        first = above if rank else 0
        return (
            received.narrow(-2, 0, first) if rank else None,
            received.narrow(-2, first, received.shape[-2] - first) if rank < last else None,
        )

    def moments(self, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance over the rows of all ranks, of those over this rank's rows. float64, on the CPU."""
        own = torch.stack([mean, var]).to("cpu", torch.float32)
        of_all = gather(self.group, own.reshape(1, 1, -1), self._label("moments"))[0].double().reshape(-1, *own.shape)
        parts = torch.tensor(self.counts, dtype=torch.float64) / sum(self.counts)
        parts = parts.reshape(-1, *[1] * mean.dim())
        means, variances = of_all.unbind(1)
        whole = (parts * means).sum(0)
        return whole, (parts * (variances + (means - whole) ** 2)).sum(0)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention from this rank's queries to the keys of all ranks. ``[batch, heads, tokens, dim]``."""
        states = same_dim(self.group, *(x.transpose(1, 2) for x in (q, k, v)))
        o, _ = self.group.attend(*states, layout="bshd", scale=scale, inference=True, label=self._label("attention"))
        return o.transpose(1, 2)[..., : v.shape[-1]].to(q.device)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        total = sum(self.rows(x.shape[-2]))
        rows = x.movedim(-2, 0)
        found = gather(self.group, rows.reshape(1, rows.shape[0], math.prod(rows.shape[1:])), self._label("output"))
        if found.shape[1] != total:
            raise RequestError(
                f"the ranks have {found.shape[1]} rows of the result, and not {total}: its layers do not keep their proportion; {ALONE}"
            )
        return found.reshape(-1, *rows.shape[1:]).movedim(0, -2).contiguous()


#: What else to do with such a VAE.
ALONE = "run it whole on each rank"
