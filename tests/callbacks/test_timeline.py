import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from matplotlib.image import imread
from torch.utils.data import DataLoader

from tests.data.make import write_prepared
from tests.distributed import strategy_cases
from turbogr.callbacks.timeline import RESOURCES, Timeline, Window, chrome_trace, tracks
from turbogr.errors import ConfigurationError
from turbogr.strategies import TurboGRStrategy
from turbogr.tracing import Span, Trace


def made_step(batch: int, start: float) -> list[Span]:
    """One second of a pipeline that trains `batch`."""
    main, lane, host = 1, 2, 3
    parts = [
        ("gradients", batch - 1, "communication", 0.00, 0.15, lane),
        ("forward", batch, "compute", 0.00, 0.35, main),
        ("sum", batch - 1, "compute", 0.15, 0.20, lane),
        ("values", batch - 1, "communication", 0.20, 0.35, lane),
        ("ids", batch + 3, "communication", 0.35, 0.80, main),
        ("wait for values", batch - 1, "wait", 0.36, 0.40, main),
        ("update", batch - 1, "compute", 0.40, 0.45, main),
        ("look-up", batch + 1, "compute", 0.45, 0.50, lane),
        ("rows", batch + 1, "communication", 0.50, 0.70, lane),
        ("backward", batch, "compute", 0.45, 0.85, main),
        ("dense gradients", batch, "communication", 0.65, 0.75, main),
        ("dense gradients", batch, "communication", 0.75, 0.85, main),
        ("wait for dense gradients", batch, "wait", 0.80, 0.85, main),
        ("dense step", batch, "compute", 0.86, 0.90, main),
        ("owner's rows", batch + 3, "unique", 0.80, 0.95, host),
        ("load", batch + 4, "data", 0.90, 0.98, main),
        ("distinct rows", batch + 4, "unique", 0.98, 1.00, main),
    ]
    return [Span(name, b, resource, start + a, start + z, thread) for name, b, resource, a, z, thread in parts]


class Traced(SingleDeviceStrategy):
    def __init__(self):
        super().__init__("cpu")
        self.trace = Trace()
        self.wanted_at_setup = False

    def setup(self, trainer):
        self.wanted_at_setup = self.trace.wanted
        super().setup(trainer)


class Toy(LightningModule):
    """Writes spans as the strategy would."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.active = []

    def training_step(self, batch, index):
        trace = getattr(self.trainer.strategy, "trace", Trace())
        self.active.append(trace.active)
        with trace.span("forward", index, "compute"):
            time.sleep(0.001)
        with trace.span("rows", index + 1, "communication"):
            time.sleep(0.001)
        trace.add("ids", index - 1, "communication", time.perf_counter() - 0.01)  # begun in the step before
        return self.weight * 1.0

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder, timeline, batches=20, strategy=None, **options):
    settings = {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, "num_sanity_val_steps": 0}
    settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    model, strategy = Toy(), strategy or Traced()
    trainer = Trainer(**{**settings, **options}, default_root_dir=folder, callbacks=[timeline], strategy=strategy)
    trainer.fit(model, DataLoader(range(batches), batch_size=1), DataLoader(range(1), batch_size=1))
    return model, strategy


def test_a_window(tmp_path, capsys):
    timeline = Timeline(first_step=6, steps=3)
    model, strategy = fit(tmp_path, timeline)
    assert strategy.wanted_at_setup
    assert not strategy.trace.active
    assert [i for i, active in enumerate(model.active) if active] == [6, 7, 8, 9, 10]  # two more: what was begun ends there
    window = timeline.window
    assert (window.epoch, window.first, window.steps) == (0, 6, 3)
    assert window.starts == sorted(window.starts)
    assert {span.batch for span in window.spans if span.name == "forward"} >= {6, 7, 8}
    shares = window.shares
    assert shares.computing + shares.exposed + shares.idle == pytest.approx(1.0)
    assert min(shares.computing, shares.exposed, shares.communication) > 0

    written = json.loads((tmp_path / "timeline.json").read_text())
    assert written["otherData"]["first batch"] == 6
    assert written["otherData"]["shares"] == pytest.approx(shares._asdict())
    assert imread(tmp_path / "timeline.png").shape[1] == 2100
    assert not list(tmp_path.glob(".*"))
    out = capsys.readouterr().out
    assert "batches 6 to 8 of epoch 1" in out
    for name, share in (("computing", shares.computing), ("exposed communication", shares.exposed), ("idle", shares.idle)):
        line = next(line for line in out.splitlines() if line.strip("│ ").startswith(name))
        assert f"{share:.2%}" in line
    for name in ("timeline.json", "timeline.png"):
        assert str(tmp_path / name) in out


def test_the_window_avoids_validation_and_the_ends_of_epochs(tmp_path):
    """Epochs of 9 batches, a validation after the 6th: of those with four before them, no more than two are on end."""
    timeline = Timeline(first_step=2, steps=3)
    fit(tmp_path, timeline, 9, max_epochs=3, val_check_interval=6)
    assert (timeline.window.epoch, timeline.window.first, timeline.window.steps) == (0, 4, 2)
    assert (tmp_path / "timeline.json").is_file()
    later = Timeline(first_step=10, steps=3)
    fit(tmp_path, later, 9, max_epochs=3)
    assert (later.window.epoch, later.window.first, later.window.steps) == (1, 4, 3)


def test_too_few_batches_are_told(tmp_path):
    timeline = Timeline()
    with pytest.warns(UserWarning, match=r"nothing was recorded in 5 batches: it waits for 20 batches \(first_step\)"):
        fit(tmp_path, timeline, 5)
    assert timeline.window is None
    assert not list(tmp_path.iterdir())


def test_fast_dev_run_writes_nothing(tmp_path):
    fit(tmp_path, Timeline(0, 1), fast_dev_run=8)
    assert not list(tmp_path.iterdir())


def test_files_are_there_when_a_later_step_fails(tmp_path):
    class Failing(Timeline):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 15:
                raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        fit(tmp_path, Failing(5, 2, path=tmp_path / "a" / "seen.json"))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["seen.json", "seen.png"]


def test_refusals(tmp_path):
    with pytest.raises(ConfigurationError, match=r"set trainer\.strategy to turbogr"):
        fit(tmp_path, Timeline(), strategy="auto")
    with pytest.raises(ConfigurationError, match="steps"):
        Timeline(steps=0)
    with pytest.raises(ConfigurationError, match=r"must end in \.json"):
        Timeline(path="a.png")


@pytest.fixture
def window():
    spans = [span for step in range(-1, 4) for span in made_step(20 + step, 100.0 + step)]
    return Window(1, 20, [100.0, 101.0, 102.0, 103.0], sorted(spans, key=lambda span: span.start))


def test_shares_of_a_pipeline(window):
    """Of a second there is no computing in .35-.40, .80-.86 (backward waits) and .90-1; no communication in .15-.20, .85-1."""
    assert window.shares == pytest.approx((3.0, 0.79, 0.10, 0.11, 0.80))


def test_rows(window):
    found = {track.name: track.spans for track in tracks(window.touching())}
    assert list(found) == [
        "data",
        "unique",
        "unique (2)",
        "communication",
        "communication (2)",
        "communication (3)",
        "compute",
        "compute (2)",
    ]
    assert sum(map(len, found.values())) == len(window.touching())  # each once
    assert {span.name for span in found["compute"]} == {
        "forward",
        "wait for values",
        "update",
        "backward",
        "wait for dense gradients",
        "dense step",
    }
    for name, spans in found.items():
        for earlier, later in pairwise(spans):
            assert earlier.end <= later.start + 1e-9 or (name == "compute" and later.end <= earlier.end)
    assert [track.name for track in tracks([])] == list(RESOURCES)  # all there, also where nothing happened


def test_the_trace_of_chrome(window):
    written = json.loads(json.dumps(chrome_trace(window, 1, 2)))
    events = written["traceEvents"]
    names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    rows = dict(names)
    assert len(names) == len(rows)
    assert rows[0] == "steps"
    assert set(RESOURCES) <= set(rows.values())
    assert {e["pid"] for e in events} == {1}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(window.spans) + window.steps
    assert min(e["ts"] for e in complete) == 0
    assert all(e["dur"] >= 0 for e in complete)
    resources = {"wait": "compute", "step": "steps"}
    for event in complete:
        assert rows[event["tid"]].partition(" ")[0] == resources.get(event["cat"], event["cat"])
    for batch in (20, 21):  # batches in colours, alike in all rows
        assert len({e["cname"] for e in complete if e["args"]["batch"] == batch and e["cat"] != "wait"}) == 1
    steps = [e for e in complete if e["tid"] == 0]
    assert [e["args"]["batch"] for e in steps] == [20, 21, 22]
    assert steps[0]["ts"] == pytest.approx(1e6 * (window.starts[0] - window.spans[0].start))


def test_the_picture_shows_batches_in_colours(window, tmp_path):
    path = Path(tmp_path / "timeline.json")

    class Stub:
        default_root_dir, global_rank, world_size = tmp_path, 0, 2

    Timeline()._write(Stub(), window)
    pixels = imread(path.with_suffix(".png"))[..., :3]
    from turbogr.callbacks.drawing import BATCH_COLOURS, BLUE, ORANGE, _batch_colour

    def there(colour):
        rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        return (np.abs(pixels - rgb).max(-1) < 0.01).sum() > 200

    assert all(there(_batch_colour(batch)) for batch in (20, 21, 22))
    assert there(BLUE)
    assert there(ORANGE)
    assert not there("#00ff00")
    assert len(set(BATCH_COLOURS)) == 8


def test_one_rank_of_the_strategy(tmp_path):
    """Nothing travels, everything else is there."""
    timeline = Timeline(4, 2, path=tmp_path / "t.json")
    folder = write_prepared(tmp_path / "p", num_users=110, num_items=60, seed=1)
    strategy_cases.fit(folder, 1, TurboGRStrategy(), [timeline], data={"batch_size": 8}, limit_train_batches=12)
    assert timeline.window.steps == 2
    assert timeline.window.shares.communication == 0
    assert timeline.window.shares.computing > 0
    assert {span.name for span in timeline.window.spans} >= {
        "load",
        "distinct rows",
        "look-up",
        "forward",
        "backward",
        "update",
    }
