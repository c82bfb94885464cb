"""NegativeOffload, NegativeQuantization and LogitSharing: options, what they switch on, what they say and refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.data.make import write_prepared
from tests.distributed.strategy_cases import QUIET
from turbogr.callbacks.logit_sharing import ENOUGH_TOKENS, FEW_TOKENS, LogitSharing, recommended
from turbogr.callbacks.negative_offload import NegativeOffload
from turbogr.callbacks.negative_quantization import NegativeQuantization
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.losses import RetrievalLoss
from turbogr.models.hstu import HSTU
from turbogr.models.negatives import SharedLogits
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.tokens import NEGATIVES
from turbogr.negative_bytes import FP16, FP32, NegativeLoad, offload_below
from turbogr.sparse.apart import Apart


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> SequenceDataModule:
    path = tmp_path_factory.mktemp("prepared") / "p"
    write_prepared(path, num_users=30, num_items=40, min_len=5, max_len=12, seed=1)
    return SequenceDataModule(path, batch_size=8, max_length=12, num_negatives=4, num_workers=0)


def model_of(data: SequenceDataModule) -> GenerativeRetriever:
    return GenerativeRetriever(data.num_items, HSTU(dim=8, num_blocks=1, num_heads=1, max_length=12), top_k=(5,))


class Look(pl.Callback):
    """Looks at the model within a step."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        path = pl_module.negatives
        self.found.append((path.sharing, path.segment, dict(pl_module.embeddings.apart)))


def seen(data: SequenceDataModule, *callbacks: pl.Callback) -> Any:
    """Sharing, segment and what is kept apart, while a model is trained with these callbacks."""
    look = Look()
    trainer = pl.Trainer(**QUIET, callbacks=[look, *callbacks], max_steps=2, enable_checkpointing=False, limit_val_batches=0)
    trainer.fit(model_of(data), data)
    assert len(look.found) == 2
    assert look.found[0] == look.found[1]
    return look.found[0]


def test_what_they_switch_on(data):
    assert seen(data) == (None, None, {})
    assert seen(data, LogitSharing(3, "lender")) == (SharedLogits(3, "lender", True), None, {})
    assert seen(data, NegativeQuantization("bf16")) == (None, None, {NEGATIVES: Apart(torch.bfloat16, False)})
    assert seen(data, NegativeOffload(5, "offload")) == (None, 5, {NEGATIVES: Apart(torch.float32, True)})
    assert seen(data, NegativeOffload(5, "fused")) == (None, None, {})
    both = (None, 5, {NEGATIVES: Apart(torch.float16, True)})
    assert seen(data, NegativeOffload(5, "offload"), NegativeQuantization()) == both
    assert seen(data, NegativeQuantization(), NegativeOffload(5, "offload")) == both


class Break(pl.Callback):
    """Ends training with an exception."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert pl_module.negatives.sharing is not None
        raise self.exception


@pytest.mark.parametrize("exception", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["Ctrl-C", "error"])
def test_training_that_is_cut_short_leaves_nothing_switched_on(data, exception):
    model = model_of(data)
    callbacks = [NegativeOffload(5, "offload"), NegativeQuantization(), LogitSharing(2), Break(exception)]
    trainer = pl.Trainer(**QUIET, callbacks=callbacks, max_epochs=1, enable_checkpointing=False)
    with pytest.raises((RuntimeError, SystemExit)):  # Lightning makes SystemExit of Ctrl-C
        trainer.fit(model, data)
    assert (model.negatives.sharing, model.negatives.segment, model.embeddings.apart) == (None, None, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogitSharing(0), "k must be at least 1, got 0"),
        (lambda: LogitSharing("many"), "auto"),
        (lambda: LogitSharing(2, "both"), "scores must be one of own, lender; got 'both'"),
        (lambda: NegativeOffload(segment=0), "segment must be at least 1, got 0"),
        (lambda: NegativeOffload(mode="maybe"), "mode must be one of auto, offload, fused; got 'maybe'"),
        (lambda: NegativeQuantization("fp8"), "dtype must be one of fp16, bf16; got 'fp8'"),
    ],
)
def test_impossible_options(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("callback", [LogitSharing, NegativeOffload, NegativeQuantization])
def test_another_module_is_refused(callback):
    class Other(pl.LightningModule):
        pass

    with pytest.raises(ConfigurationError, match=rf"{callback.__name__} changes how a GenerativeRetriever .* Other is none"):
        callback().setup(SimpleNamespace(), Other(), "fit")


def test_k_is_recommended_by_table_9():
    assert [recommended(15 * 2048), recommended(2 * 2048)] == [2, 4]
    assert [recommended(x) for x in (1, FEW_TOKENS, ENOUGH_TOKENS, 10**9)] == [4, 4, 2, 2]
    ks = [recommended(tokens) for tokens in range(1000, 50_000, 500)]
    assert ks == sorted(ks, reverse=True)
    assert 3 in ks


def test_auto_says_what_it_chose(data, caplog):
    with caplog.at_level("INFO"):
        sharing, *_ = seen(data, LogitSharing("auto"))
    assert sharing.k == 4
    tokens = 8 * data.num_training_tokens / data.num_users
    assert f"LogitSharing: k = 4 for {tokens:,.0f} tokens a batch" in caplog.text


def test_small_batches_are_warned_about(data):
    with pytest.warns(UserWarning, match="fewer than any that TurboGR recommends k = 2 for"):
        seen(data, LogitSharing(2))
    with pytest.warns(UserWarning, match=r"batch 0 has \d+ tokens, which can lend each other less than k = 500 asks for"):
        seen(data, LogitSharing(500))


def test_on_a_cpu_nothing_is_offloaded_by_itself(data, caplog):
    with caplog.at_level("INFO"):
        assert seen(data, NegativeOffload()) == (None, None, {})
    assert "negatives are not offloaded (rows are in the host's memory anyway)" in caplog.text


@pytest.mark.parametrize(("memory", "offloads"), [(2 * 10**4, True), (10**12, False)])
def test_on_a_device_bytes_decide(data, memory, offloads, monkeypatch, caplog):
    # 60 tokens and more draw each of 40 items: fused are some kB. A device of 20 kB has no tenth of it to spare.
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(mem_get_info=lambda device: (0, memory)))
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), datamodule=data)
    model = model_of(data)
    with caplog.at_level("INFO"):
        NegativeOffload(segment=1).on_fit_start(trainer, model)
    assert (NEGATIVES in model.embeddings.apart) == offloads
    assert f"negatives are {'offloaded to the host' if offloads else 'not offloaded'} (" in caplog.text
    assert " fused, " in caplog.text


@pytest.mark.parametrize("callbacks", [[], [NegativeQuantization()]], ids=["fp32", "fp16"])
def test_auto_keeps_the_rule_that_describe_shows(data, monkeypatch, callbacks):
    """A byte of device memory decides, and it is that of `turbogr.negative_bytes.offload_below`."""
    model = model_of(data)
    for callback in callbacks:
        callback.setup(SimpleNamespace(callbacks=callbacks), model, "fit")
    tokens = round(8 * data.num_training_tokens / data.num_users)
    load = NegativeLoad.expected(tokens, data.num_negatives, model.embeddings.dim, model.num_items)
    below = round(offload_below(load, 1, FP16 if callbacks else FP32))
    assert below > 0
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), datamodule=data)
    for memory, offloads in ((below - 1, True), (below, False)):
        module = SimpleNamespace(mem_get_info=lambda device, memory=memory: (0, memory))
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        offload = NegativeOffload(segment=1)
        offload.on_fit_start(trainer, model)
        assert (model.negatives.segment == 1) == offloads
        offload.teardown(trainer, model, "fit")


def test_negatives_within_the_batch_are_not_offloaded_by_themselves(data, caplog):
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
        datamodule=SequenceDataModule(data.prepared.path, num_negatives=4, negative_sampling="in_batch", num_workers=0),
    )
    model = model_of(data)
    with caplog.at_level("INFO"):
        NegativeOffload(segment=1).on_fit_start(trainer, model)
    assert NEGATIVES not in model.embeddings.apart
    assert "not offloaded (negatives drawn within the batch are targets" in caplog.text


def test_features_of_items_are_refused_where_rows_are_kept_apart(data):
    model = model_of(data)
    model.tokens.names["item"].append("author")
    with pytest.raises(ConfigurationError, match=r"NegativeQuantization keeps the rows of negatives apart.*without author"):
        NegativeQuantization().setup(SimpleNamespace(callbacks=[]), model, "fit")
    with pytest.raises(ConfigurationError, match="NegativeOffload"):
        NegativeOffload(mode="offload").on_fit_start(SimpleNamespace(), model)
    NegativeOffload(mode="fused").on_fit_start(SimpleNamespace(), model)


class Own(RetrievalLoss):
    """Without `of_products`."""

    def forward(self, output, items, targets, negatives):
        return (output @ items.T).mean()


def train(data: SequenceDataModule, model: GenerativeRetriever, *callbacks: pl.Callback) -> None:
    pl.Trainer(**QUIET, callbacks=list(callbacks), max_steps=1, enable_checkpointing=False, limit_val_batches=0).fit(
        model, data
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (NegativeQuantization, "NegativeQuantization"),
        (lambda: NegativeOffload(mode="offload"), r"NegativeOffload\(mode='offload'\)"),
        (lambda: LogitSharing(2, "lender"), r"LogitSharing\(scores='lender'\)"),
    ],
)
def test_a_loss_without_products_is_refused_before_training(data, make, named, monkeypatch):
    model = model_of(data)
    model.loss = Own()
    monkeypatch.setattr(GenerativeRetriever, "training_step", lambda *_: pytest.fail("it trains"))
    with pytest.raises(ConfigurationError, match=rf"{named} needs a loss that has of_products .*; Own has none"):
        train(data, model, make())


def test_a_loss_without_products_is_trained_where_nobody_needs_them(data, caplog):
    model = model_of(data)
    model.loss = Own()
    with caplog.at_level("INFO"):
        train(data, model, LogitSharing(2), NegativeOffload())
        cuda = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), datamodule=data)
        NegativeOffload(segment=1).on_fit_start(cuda, model)
    assert model.embeddings.apart == {}
    assert "not offloaded (Own has no of_products" in caplog.text


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            lambda: [LogitSharing(2), LogitSharing(3, "lender")],
            r"2 callbacks LogitSharing, LogitSharing\(k=2, scores='own', lender_gradient=True\) and "
            r"LogitSharing\(k=3, scores='lender', lender_gradient=True\)",
        ),
        (
            lambda: [NegativeQuantization("bf16"), LogitSharing(2), NegativeQuantization()],
            r"NegativeQuantization\(dtype='bf16'\) and NegativeQuantization\(dtype='fp16'\)",
        ),
        (
            lambda: [NegativeOffload(mode="fused"), NegativeOffload(5)],
            r"NegativeOffload\(segment=100, mode='fused'\) and NegativeOffload\(segment=5, mode='auto'\)",
        ),
    ],
)
def test_two_of_a_kind_are_refused(data, callbacks, message):
    model = model_of(data)
    with pytest.raises(ConfigurationError, match=message):
        train(data, model, *callbacks())
    assert (model.negatives.sharing, model.negatives.segment, model.embeddings.apart) == (None, None, {})
