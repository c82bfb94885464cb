"""What a plan says, against formulas written down here and against steps that are really taken."""

from __future__ import annotations

import gc
import resource

import pytest
import torch
from _memory import allocations, retained
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from tests.data.make import write_prepared
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.stochastic_length import StochasticLength
from turbogr.dry_run import DryRun
from turbogr.errors import ConfigurationError, DataError
from turbogr.flops import causal_pairs, padded_pairs
from turbogr.losses import RetrievalLoss
from turbogr.models.backbone import Backbone
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRec
from turbogr.models.time_encoders import BucketedTime
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.planning import plan
from turbogr.sparse.optimizers import AdaGrad, RowWiseAdaGrad
from turbogr.sparse.table import EmbeddingTable

R, D, BLOCKS, HEADS, QK, V, FFN = 5, 12, 3, 2, 4, 6, 3


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("prepared"), num_users=64, num_items=500, min_len=4, max_len=40)


@pytest.fixture
def data(prepared):
    return SequenceDataModule(prepared, batch_size=9, max_length=24, num_negatives=R, num_workers=0, seed=3)


def on_meta(make, num_items=500, **options) -> GenerativeRetriever:
    with torch.device("meta"):
        return GenerativeRetriever(num_items, make(), **options)


BACKBONES = {
    "hstu": lambda **o: HSTU(D, BLOCKS, HEADS, QK, V, max_length=24, **o),
    "sasrec": lambda **o: SASRec(D, BLOCKS, HEADS, ffn_dim=FFN * D, max_length=24, **o),
    "fuxi": lambda **o: FuXi(D, BLOCKS, HEADS, QK, V, ffn_multiplier=FFN, max_length=24, **o),
    "fuxi-alpha": lambda **o: FuXi(
        D, BLOCKS, HEADS, QK, V, ffn_multiplier=FFN, max_length=24, time_encoder=BucketedTime(), **o
    ),
}


def dense_of(name: str) -> int:
    """Multiply-adds of one token in one block's matrix products."""
    if name == "hstu":  # U, V of width V and Q, K of width QK in every head; then back to D
        return D * HEADS * (2 * V + 2 * QK) + HEADS * V * D
    if name == "sasrec":
        return 4 * D * D + 2 * D * FFN * D
    return D * HEADS * (3 * V + V + 2 * QK) + 3 * HEADS * V * D + 3 * D * FFN * D


def attention_of(name: str) -> tuple[int, int]:
    """Multiply-adds of one pair of tokens in one block's attention: forward and backward."""
    qk, v = (D // HEADS, D // HEADS) if name == "sasrec" else (QK, V)
    channels = 3 if name.startswith("fuxi") else 1
    # Forward: the score, and a weight times the values in each channel. Backward: the score again, the gradients of query and
    # key from that of the score; of the weight and of the value in each channel.
    return HEADS * (qk + channels * v), HEADS * (3 * qk + channels * 2 * v)


@pytest.mark.parametrize("name", BACKBONES)
def test_operations_are_those_of_the_formulas(name, data):
    found = plan(on_meta(BACKBONES[name]), data)
    assert not found.notes
    epoch = list(data.train_dataloader())
    assert len({batch.num_tokens for batch in epoch}) > 3, "the batches differ"
    for step in found.steps.values():
        batch = next(b for b in epoch if (b.num_tokens, causal_pairs(b.offsets)) == (step.tokens, step.pairs))
        lengths = batch.lengths.tolist()
        tokens, pairs = sum(lengths), sum(i + 1 for n in lengths for i in range(n))
        forward, backward = attention_of(name)
        assert step.forward == {
            "products": 2 * BLOCKS * tokens * dense_of(name),
            "attention": 2 * BLOCKS * pairs * forward,
            "loss": 2 * 2 * tokens * (1 + R) * D,
        }
        assert step.backward == {
            "products": 4 * BLOCKS * tokens * dense_of(name),
            "attention": 2 * BLOCKS * pairs * backward,
            "loss": 2 * tokens * (1 + R) * D,
            "item table": tokens * D,
        }
        padded = len(lengths) * max(lengths)
        assert step.padded == pytest.approx(
            6 * BLOCKS * padded * dense_of(name)
            + 2 * BLOCKS * padded * max(lengths) * (forward + backward)
            + 6 * padded * (1 + R) * D
            + padded * D,
            abs=1,
        )
        assert step.padded > step.operations


def test_negatives_are_counted_for_each_choice(data):
    found = plan(on_meta(BACKBONES["hstu"]), data)
    epoch = list(data.train_dataloader())
    for step in found.steps.values():
        batch = next(b for b in epoch if (b.num_tokens, causal_pairs(b.offsets)) == (step.tokens, step.pairs))
        rows, others = set(batch.negatives.flatten().tolist()), {*batch.values.tolist(), *batch.targets.tolist()}
        assert len(rows | others) == step.distinct_rows
        assert step.negative_choices["fused"].rows == 2 * len(rows - others) * D * 4
        assert step.negative_choices["fp16"].rows == len(rows) * D * 2
        assert step.negative_choices["gathered"].rows == step.tokens * R * D * 4
        fewer = set(batch.negatives[:, : (R + 1) // 2].flatten().tolist())
        assert step.negative_choices["sharing k = 2"].rows == 2 * len(fewer - others) * D * 4
        assert step.offload_below == 0, "two segments of 100 tokens are more than all rows"
    choices = found.as_dict()["sums"]["p50"]["negatives"]
    assert choices["fp16"] == found.steps["p50"].negative_choices["fp16"].device


def test_pairs_are_those_of_the_lengths():
    offsets = torch.tensor([0, 3, 3, 4, 9])
    assert causal_pairs(offsets) == 6 + 0 + 1 + 15
    assert padded_pairs(offsets) == 4 * 25
    assert causal_pairs(torch.zeros(1, dtype=torch.int64)) == padded_pairs(torch.zeros(1, dtype=torch.int64)) == 0
    with pytest.raises(ValueError, match="fake"):
        causal_pairs(offsets.to("meta"))


def test_a_real_call_is_counted_by_the_values_of_its_offsets():
    """The same shapes, other lengths: the formulas are registered and look at values."""
    counts = []
    for offsets in ([0, 10, 20], [0, 1, 20]):
        q = torch.randn(20, 2, 3, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            jagged_hstu_attention(q, q, q, torch.tensor(offsets), scale=1.0).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [2 * 2 * pairs * (2 * 3 + 5 * 3) for pairs in (55 + 55, 1 + 190)]


@pytest.mark.parametrize("options", [{}, {"tokens_per_batch": 50}, {"stochastic_length": StochasticLength(1.8)}])
def test_data_are_those_of_an_epoch(prepared, options):
    data = SequenceDataModule(prepared, batch_size=9, max_length=24, num_negatives=R, num_workers=0, seed=3, **options)
    found = plan(on_meta(BACKBONES["hstu"]), data).data
    epoch = list(data.train_dataloader())
    tokens = torch.tensor([batch.num_tokens for batch in epoch]).double()
    lengths = torch.cat([batch.lengths for batch in epoch]).double()
    pairs = torch.tensor([causal_pairs(batch.offsets) for batch in epoch]).double()
    assert (found.users, found.steps, found.tokens) == (len(lengths), len(epoch), int(tokens.sum()))
    for spread, values in ((found.history, lengths), (found.batch_tokens, tokens), (found.batch_pairs, pairs)):
        assert spread.mean == pytest.approx(float(values.mean()))
        assert (spread.p50, spread.p99) == pytest.approx(values.quantile(torch.tensor([0.5, 0.99]).double()).tolist())
        assert spread.most == values.max()
    assert lengths.max() == 24, "longer histories are cut"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("rematerialise", [False, True])
@pytest.mark.parametrize("name", ["hstu", "sasrec", "fuxi"])
def test_bytes_are_those_of_a_real_step(name, rematerialise, precision, data):
    step = plan(on_meta(lambda: BACKBONES[name](rematerialise=rematerialise)), data, precision).steps["p99"]
    model = GenerativeRetriever(500, BACKBONES[name](rematerialise=rematerialise))
    model.log = lambda *_, **__: None  # there is no trainer
    batch = next(b for b in data.train_dataloader() if causal_pairs(b.offsets) == step.pairs)

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            return model.training_step(batch, 0)

    def forget():
        model.zero_grad()
        model.embeddings.discard_gradients()
        gc.collect()  # what is freed while we count must be the step's own

    forward().backward()  # kernels are loaded
    forget()
    real = retained(forward)
    # A rematerialised block also keeps the state of PyTorch's generator, which no operator allocates.
    states = BLOCKS * torch.get_rng_state().nbytes * rematerialise
    assert sum(step.kept.values()) == real - states
    forget()
    most = allocations(lambda: forward().backward())[1] - states
    if precision == "32-true":
        assert step.most_bytes == pytest.approx(most, rel=0.02)
    else:  # operators convert to float32 inside
        assert 0.5 * most < step.most_bytes < 1.02 * most


FEATURED = {"author": ("item", 30), "tab": ("event", 7), "is_like": ("event", 3)}


@pytest.fixture(scope="module")
def featured(tmp_path_factory):
    path = write_prepared(tmp_path_factory.mktemp("featured"), 64, 500, 4, 40, features=FEATURED)
    return SequenceDataModule(path, batch_size=9, max_length=24, num_negatives=R, num_workers=0, seed=3)


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_features_are_counted(combine, featured):
    options = {"features": featured.features, "combine": combine}
    found = plan(on_meta(BACKBONES["hstu"], **options), featured)
    assert not found.notes
    assert found.model.tables == {"items": 500, "author": 30, "tab": 7, "is_like": 3}
    assert (found.model.table_rows, found.model.table_bytes) == (540, 540 * D * 4)
    assert found.model.item_rows_bytes == 500 * 8
    events = featured.prepared.num_events
    plain = replace_features(featured, [])
    assert found.data.mapped_bytes - plan(on_meta(BACKBONES["hstu"]), plain).data.mapped_bytes == 4 * (500 + 2 * events)

    step = found.steps["p99"]
    model = GenerativeRetriever(500, BACKBONES["hstu"](), **options)
    model.log = lambda *_, **__: None
    batch = next(b for b in featured.train_dataloader() if causal_pairs(b.offsets) == step.pairs)
    assert step.distinct_rows == len(model.embeddings.request(model.sparse_features(batch)).ids)
    # ids, times, their targets, users, offsets, negatives, and two features of each event
    assert step.batch_bytes == 8 * (batch.num_tokens * (4 + R + 2) + 2 * batch.num_users + 1)

    def forget():
        model.zero_grad()
        model.embeddings.discard_gradients()
        gc.collect()

    model.training_step(batch, 0).backward()
    forget()
    assert sum(step.kept.values()) == retained(lambda: model.training_step(batch, 0))
    forget()
    assert step.most_bytes == pytest.approx(allocations(lambda: model.training_step(batch, 0).backward())[1], rel=0.02)
    # Every distinct row is projected once; and so is what each token's item has become.
    projected = (step.distinct_rows + batch.num_tokens) * D * D if combine == "concat" else 0
    assert step.forward["products"] == 2 * (BLOCKS * step.tokens * dense_of("hstu") + projected)


def replace_features(data, features):
    return SequenceDataModule(
        data.prepared.path, batch_size=9, max_length=24, num_negatives=R, num_workers=0, seed=3, features=features
    )


def test_rematerialised_blocks_keep_less(data):
    all_kept = plan(on_meta(BACKBONES["fuxi"]), data).steps["p99"].kept
    kept = plan(on_meta(lambda: BACKBONES["fuxi"](rematerialise=True)), data).steps["p99"].kept
    assert kept["backbone"] < 0.75 * all_kept["backbone"]
    assert kept["loss"] == all_kept["loss"]


def test_mixed_precision_keeps_less(data):
    full, half = (plan(on_meta(BACKBONES["hstu"]), data, precision).steps["p99"] for precision in ("32-true", "bf16-mixed"))
    assert half.kept["backbone"] < full.kept["backbone"]
    assert half.operations == full.operations


def test_sizes_of_the_model(data):
    make = BACKBONES["hstu"]
    real = GenerativeRetriever(500, make())
    found = plan(on_meta(make, embeddings=EmbeddingTable(RowWiseAdaGrad())), data).model
    dense = [p for p in real.parameters() if p.requires_grad]
    assert sum(found.dense.values()) == sum(p.numel() for p in dense)
    assert found.dense["backbone.positions"] == 24 * D
    assert (found.table_rows, found.table_width, found.table_bytes) == (500, D, 500 * D * 4)
    assert (found.table_optimizer, found.table_optimizer_bytes) == ("RowWiseAdaGrad", 500 * 4)
    # two moments of every parameter, and a step counter each
    assert (found.optimizer, found.optimizer_bytes) == ("AdamW", 2 * found.dense_bytes + 4 * len(dense))


def test_an_optimizer_without_state(data):
    model = on_meta(BACKBONES["sasrec"], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    found = plan(model, data).model
    assert (found.optimizer, found.optimizer_bytes) == ("SGD", 0)


def test_a_large_table_and_a_large_model_take_no_memory(data):
    # KuaiRand-27K's catalogue and HSTU-large: 32 M rows of 1024 are 131 GB, and as much again for AdaGrad.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = on_meta(lambda: HSTU(1024, 16, 8, max_length=24), 32_038_725, embeddings=EmbeddingTable(AdaGrad()))
    found = plan(model, data)
    assert not found.notes
    assert found.model.table_bytes == found.model.table_optimizer_bytes == 32_038_725 * 1024 * 4
    assert sum(found.model.dense.values()) > 83_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


class Dense(Backbone):
    """A user's own: pads, calls PyTorch's attention, unpads; reads lengths and makes tensors on the way."""

    def __init__(self):
        super().__init__(D, 24, 0.1)
        self.qkv = nn.Linear(D, 3 * D)
        self.gaps = nn.Embedding(30, 3 * D)

    def encode(self, x, batch):
        length = int(batch.lengths.max())
        position = torch.arange(length)
        mask = position < batch.lengths[:, None]
        bias = torch.zeros(length, length).masked_fill(position > position[:, None], -torch.inf)
        projected = self.qkv(x) + self.gaps(batch.timestamps % 30)
        padded = x.new_zeros(batch.num_users, length, 3 * D)
        padded[mask] = projected * (batch.timestamps > 0)[:, None]
        q, k, v = padded.chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[mask]


class Dots(RetrievalLoss):
    """A user's own, of PyTorch's products."""

    def forward(self, output, items, targets, negatives):
        logits = torch.cat([items[targets][:, None], items[negatives]], 1) @ output[:, :, None]
        return -logits[..., 0].log_softmax(1)[:, 0].mean()


def test_own_backbone_and_loss(data):
    found = plan(on_meta(Dense, loss=Dots()), data)
    assert not found.notes
    assert found.model.dense == {"backbone.positions": 24 * D, "backbone.qkv": 3 * D * (D + 1), "backbone.gaps": 30 * 3 * D}
    for step in found.steps.values():
        dense, padded = step.tokens * 3 * D * D, step.users * step.longest**2 * 2 * D
        loss = step.tokens * (1 + R) * D
        assert step.forward == {"products": 2 * (dense + padded + loss)}
        assert step.backward["products"] == 4 * (dense + padded + loss)


@torch.library.custom_op("planning_test::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, gradient: gradient / 2)
register_flop_formula(torch.ops.planning_test.halve)(lambda x, **_: x[0] * x[1])


def test_own_operator_is_counted_by_its_formula(data):
    class Halving(Dense):
        def encode(self, x, batch):
            return halve(x)

    step = plan(on_meta(Halving), data).steps["p99"]
    assert step.forward["planning_test.halve"] == step.tokens * D


class Reading(Backbone):
    """A user's own that looks at its activations."""

    def __init__(self):
        super().__init__(D, 24, 0.0)

    def encode(self, x, batch):
        return x / float(x.detach().abs().max())


def test_a_backbone_that_reads_activations_is_planned_without_its_step(data):
    found = plan(on_meta(Reading), data)
    assert not found.steps
    (note,) = found.notes
    assert "operations and activations are not counted" in note
    assert found.model.dense == {"backbone.positions": 24 * D}
    assert found.data.steps == len(data.train_dataloader())


def test_own_errors_pass(data, tmp_path):
    with pytest.raises(ConfigurationError, match="max_length"):
        plan(on_meta(lambda: HSTU(D, max_length=23)), data)
    short = write_prepared(tmp_path, num_users=5, num_items=20, min_len=3, max_len=3)
    with pytest.raises(DataError, match="nothing to train on"):
        plan(on_meta(BACKBONES["hstu"]), SequenceDataModule(short, num_negatives=R))


def test_planning_draws_no_random_numbers(data):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plan(on_meta(BACKBONES["hstu"]), data)
    assert torch.equal(torch.get_rng_state(), state)


def test_shared_parameters_stay_shared():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    DryRun().adopt(model)
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1
