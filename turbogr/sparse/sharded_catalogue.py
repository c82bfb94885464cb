"""ShardedCatalogue: ranks and recommends all items, of whose vectors each rank of a group holds a part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from turbogr.ops.catalogue_part import CataloguePart, best_of


class ShardedCatalogue:
    """The catalogue over a process group: every rank scores its own items for the users of all ranks.

    The results have the bits of one process with all vectors (`LocalCatalogue`): a score depends on its two vectors alone, and
    all else is whole numbers. Each call is a fixed series of collectives that all ranks of the group make together,
    whatever their numbers of users, zero included: sizes, queries, ids, and then the targets' scores and the counts
    (`target_ranks`) or the best keys (`top_items`). Beyond the users' own arguments, memory is one chunk of scores
    (`turbogr.ops.catalogue_part.CHUNK_BYTES`) and k keys a user of the group; the catalogue is never gathered.

    Args:
        vectors: float [len(items), D], of this rank's items; need not be normalised.
        items: rows of the catalogue that lie here, possibly none; the ranks' ranges are disjoint and cover all rows.
        num_items: V.
        group: the ranks that hold the catalogue together; its timeout is that of every collective.

    Raises:
        ValueError: if `vectors` and `items` are of different lengths.
    """

    def __init__(self, vectors: Tensor, items: range, num_items: int, group: dist.ProcessGroup) -> None:
        if len(vectors) != len(items):
            raise ValueError(f"{len(vectors)} vectors for {len(items)} items ({items})")
        self.vectors, self.items, self.num_items, self.group = vectors, items, num_items, group

    @torch.no_grad()
    def target_ranks(self, queries: Tensor, targets: Tensor, seen: Tensor | None, seen_offsets: Tensor | None) -> Tensor:
        """As in Catalogue; called by all ranks of the group together.

        Raises:
            ValueError: shapes that contradict each other.
            IndexError: a target or seen item of any rank that is not a row of the catalogue; raised on all ranks.
        """
        users, part = self._part(queries, targets, seen, seen_offsets)
        if part is None:
            return targets.new_empty(0)
        scores = part.target_scores()
        dist.all_reduce(scores, group=self.group)  # exact: all but one summand are 0
        counts = part.count_before(scores)
        dist.all_reduce(counts, group=self.group)
        mine = sum(users[: self.group.rank()])
        return part.ranks(counts)[mine : mine + len(targets)]

    @torch.no_grad()
    def top_items(self, queries: Tensor, k: int, seen: Tensor | None, seen_offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Catalogue; called by all ranks of the group together, with one k.

        Raises:
            ValueError: shapes that contradict each other, or k below 1.
            IndexError: a seen item of any rank that is not a row of the catalogue; raised on all ranks.
        """
        users, part = self._part(queries, None, seen, seen_offsets)
        if part is None:
            return queries.new_empty(0, k, dtype=torch.float32), queries.new_empty(0, k, dtype=torch.int64)
        keys = part.top_keys(k)
        mine = len(queries)
        found = keys.new_empty(len(users) * mine, k)
        dist.all_to_all_single(found, keys, [mine] * len(users), users, group=self.group)
        return best_of(found.view(len(users), mine, k).transpose(0, 1).reshape(mine, len(users) * k), k)

    def _part(
        self, queries: Tensor, targets: Tensor | None, seen: Tensor | None, seen_offsets: Tensor | None
    ) -> tuple[list[int], CataloguePart | None]:
        """The numbers of users of all ranks, and this rank's items against all of them; None where there is no user at all."""
        if seen is None or seen_offsets is None:
            seen, lengths = queries.new_empty(0, dtype=torch.int64), queries.new_zeros(len(queries), dtype=torch.int64)
        else:
            lengths = seen_offsets.diff()
        for name, ids in (("seen_offsets", lengths), ("targets", lengths if targets is None else targets)):
            # The others wait for this rank, so its own mistakes are found before anything is sent.
            if tuple(ids.shape) != (len(queries),):
                raise ValueError(f"{name} do not fit {len(queries)} queries")
        sizes = self._gather(torch.tensor([[len(queries), len(seen)]], device=queries.device), [1] * self.group.size())
        users, pairs = ([int(count) for count in column] for column in sizes.T.tolist())
        if not sum(users):
            return users, None
        queries = self._gather(queries.float(), users)
        everyone = self._gather(torch.stack([lengths, lengths if targets is None else targets], 1), users)
        seen = self._gather(seen, pairs)
        part = CataloguePart.of(
            queries,
            self.vectors,
            None if targets is None else everyone[:, 1],
            seen,
            pad(everyone[:, 0].cumsum(0), (1, 0)),
            first=self.items.start,
            num_items=self.num_items,
            cosine=True,
        )
        return users, part

    def _gather(self, own: Tensor, sizes: list[int]) -> Tensor:
        """All ranks' rows, one rank after the other; `sizes` says how many each has."""
        most = max(sizes)
        if not most:
            return own
        padded = pad(own, (0, 0) * (own.dim() - 1) + (0, most - len(own)))
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded.contiguous(), group=self.group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])
