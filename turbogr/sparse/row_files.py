"""Rows of sharded tables on disk: every row once, in one global order, through torch.distributed.checkpoint.

The global order is EmbeddingTable's row space, so that each saved tensor is the one an unsharded table holds: whatever the
sharding, any other can read its part, and `torch.distributed.checkpoint.format_utils` can convert a folder.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from turbogr.sparse.sharding import Piece

CHUNK_BYTES = 64 * 2**20
"""Rows are sent, written and read in portions of about this size, so that none needs another copy of its part."""


def chunked(parts: Iterable[Piece], row_bytes: int) -> Iterator[Piece]:
    """The same rows in portions of at most CHUNK_BYTES, but of one row at least."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for piece in parts:
        for done in range(0, len(piece.rows), step):
            yield Piece(piece.member, piece.rows[done : done + step], piece.first + done)


def portion(tensor: Tensor, piece: Piece) -> Tensor:
    """The piece's rows in a member's tensor, a view."""
    return tensor[piece.first : piece.first + len(piece.rows)]


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row."""
    return tensor.shape[1:].numel() * tensor.element_size()


def write_rows(
    folder: Path,
    tensors: Mapping[str, Tensor],
    parts: Sequence[Piece],
    num_rows: int,
    group: distributed.ProcessGroup,
    copy: tuple[int, int] = (0, 1),
) -> None:
    """Writes the rows of all ranks of `group` into one folder; all of them call it together.

    Args:
        folder: where; visible to every rank.
        tensors: key -> this rank's part, [its rows, ...].
        parts: the member's pieces, `Sharding.pieces`; the same for every tensor.
        num_rows: of the row space.
        group: of the ranks that write, with a back end for the CPU.
        copy: (c, n) where n ranks hold equal parts, and this is the c-th: each writes its share of the portions.

    Raises:
        torch.distributed.checkpoint.CheckpointException: on every rank, if one of them failed, or if the parts leave rows out
            or overlap.
    """
    planner = _Writer({key: list(chunked(parts, row_bytes(t)))[copy[0] :: copy[1]] for key, t in tensors.items()}, num_rows)
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), planner=planner, process_group=group)


def read_rows(folder: Path, tensors: Mapping[str, Tensor], parts: Sequence[Piece]) -> None:
    """Reads a part's rows in place; calls no collective.

    Args:
        folder: what `write_rows` wrote.
        tensors: key -> the part to be filled, [its rows, ...].
        parts: as in `write_rows`.

    Raises:
        OSError: if files are absent or damaged.
    """
    planner = _Reader({key: list(chunked(parts, row_bytes(tensor))) for key, tensor in tensors.items()})
    with _damage(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)


def saved_rows(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Key -> shape and dtype of every tensor that `write_rows` wrote.

    Raises:
        OSError: if the folder's table of contents is absent or damaged.
    """
    with _damage(folder):
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: (m.size, m.properties.dtype) for key, m in saved.items() if isinstance(m, TensorStorageMetadata)}


def read_all_rows(folder: Path) -> dict[str, Tensor]:
    """Every tensor that `write_rows` wrote, in full, on the CPU.

    Raises:
        OSError: as in `read_rows`.
    """
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in saved_rows(folder).items()}
    for key, tensor in tensors.items():
        read_rows(folder, {key: tensor}, [Piece(0, range(len(tensor)), 0)])
    return tensors


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Whatever a folder's damage makes PyTorch raise is an OSError that names the folder."""
    try:
        yield
    except CheckpointException as error:  # no Exception, but a BaseException: nobody would catch it
        (cause, _), *_ = error.failures.values()
        raise OSError(f"{folder}: {type(cause).__name__}: {cause}") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
        raise OSError(f"{folder}/.metadata: {type(error).__name__}: {error}") from error


class _Writer(DefaultSavePlanner):
    """Names every portion by its place in the row space.

    DTensor's Shard(0) would say the same of equal blocks, but not of several tables behind one another, each cut by itself.
    """

    def __init__(self, portions: Mapping[str, Sequence[Piece]], num_rows: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.portions, self.num_rows = portions, num_rows

    def create_local_plan(self) -> SavePlan:
        """This rank's portions."""
        items = []
        for key, portions in self.portions.items():
            tensor = self.state_dict[key]
            for piece in portions:
                chunk = _chunk(piece, tensor)
                data = TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(tensor), torch.Size([self.num_rows, *tensor.shape[1:]])
                )
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The portion's rows."""
        return _find(self.state_dict[index.fqn], self.portions[index.fqn], index)


class _Reader(DefaultLoadPlanner):
    """Reads what overlaps this part, portion by portion."""

    def __init__(self, portions: Mapping[str, Sequence[Piece]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.portions = portions

    def create_local_plan(self) -> LoadPlan:
        """What is read from which saved portion."""
        assert self.metadata is not None
        items = []
        for key, portions in self.portions.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, saved, [_chunk(p, self.state_dict[key]) for p in portions])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the portion's rows go."""
        return _find(self.state_dict[index.fqn], self.portions[index.fqn], index)


def _chunk(piece: Piece, tensor: Tensor) -> ChunkStorageMetadata:
    rest = tensor.shape[1:]
    return ChunkStorageMetadata(torch.Size([piece.rows.start, *(0 for _ in rest)]), torch.Size([len(piece.rows), *rest]))


def _find(tensor: Tensor, portions: Sequence[Piece], index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return next(portion(tensor, piece) for piece in portions if piece.rows.start == index.offset[0])
