"""Every recipe that comes with turbogr parses, and builds the model that it promises."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.data.make import write_prepared
from turbogr.callbacks.logit_sharing import LogitSharing
from turbogr.callbacks.negative_offload import NegativeOffload
from turbogr.callbacks.negative_quantization import NegativeQuantization
from turbogr.cli import main
from turbogr.models.bias import TimeBuckets
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.sasrec import SASRec
from turbogr.resources import recipes_dir
from turbogr.trainer_cli import TurboGRCLI

ALL = {str(path.relative_to(recipes_dir())) for path in recipes_dir().rglob("*.yaml") if path.name != "base.yaml"}
SWITCHES = sorted(name for name in ALL if name.startswith("switches/"))
RECIPES = sorted(ALL - set(SWITCHES))

# recipe -> (dim, blocks, heads, max_length, batch_size, dense learning rate, dropout): the size ladder and published settings
EXPECTED = {
    "movielens-100k/hstu.yaml": (50, 2, 1, 200, 32, 1e-3, 0.2),
    "movielens-100k/sasrec.yaml": (50, 2, 1, 200, 32, 1e-3, 0.2),
    "movielens-100k/fuxi.yaml": (50, 2, 1, 200, 32, 1e-3, 0.2),
    "movielens-1m/hstu.yaml": (50, 2, 1, 200, 128, 1e-3, 0.2),
    "movielens-1m/hstu-large.yaml": (50, 8, 2, 200, 128, 1e-3, 0.2),
    "movielens-1m/fuxi.yaml": (50, 2, 1, 200, 128, 1e-3, 0.2),
    "movielens-1m/sasrec.yaml": (50, 2, 1, 200, 128, 1e-3, 0.2),
    "kuairand-27k-sample/hstu-features.yaml": (50, 2, 1, 200, 32, 1e-3, 0.5),
}
LADDER = {
    "tiny": (128, 2, 8, 2048, 64, 4e-3, 0.5),
    "small": (256, 4, 8, 2048, 32, 4e-3, 0.5),
    "medium": (512, 8, 8, 2048, 16, 4e-3, 0.5),
    "large": (1024, 16, 8, 2048, 15, 4e-3, 0.5),
    "long": (1024, 16, 8, 4096, 7, 4e-3, 0.5),
}
FEATURES = {
    "movielens-100k/hstu-features.yaml": {"rating": ("event", 6)},
    "kuairand-27k-sample/hstu-features.yaml": {"actions": ("event", 40), "tab": ("event", 12)},
    "kuairand-27k/hstu-tiny-features.yaml": {
        "actions": ("event", 40),
        "tab": ("event", 12),
        "author_id": ("item", 50),
        "tag": ("item", 20),
    },
}
"""Recipe -> the features that it asks for, as of a small prepared folder."""
BACKBONES = {"hstu": HSTU, "fuxi": FuXi, "sasrec": SASRec}
EXPECTED |= {f"kuairand-27k/{name}-{size}.yaml": options for name in BACKBONES for size, options in LADDER.items()}
EXPECTED |= {name: EXPECTED[name.replace("-features", "")] for name in FEATURES if name not in EXPECTED}


class Built(TurboGRCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand):
        pass


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    # more items than the largest K of a recipe
    return write_prepared(tmp_path_factory.mktemp("prepared"), num_users=300, num_items=2100, min_len=10, max_len=12)


@pytest.fixture(scope="module")
def featured(tmp_path_factory) -> dict[str, Path]:
    return {
        recipe: write_prepared(tmp_path_factory.mktemp("featured"), 300, 2100, 10, 12, features=features)
        for recipe, features in FEATURES.items()
    }


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def test_all_recipes_are_known():
    assert set(RECIPES) == set(EXPECTED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_parses(recipe, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "-c", recipe, "--print_config"])
    assert not stopped.value.code
    config = yaml.safe_load(capsys.readouterr().out)
    folder, name = Path(recipe).parent.name, Path(recipe).stem
    assert config["data"]["path"] == f"data/{folder}" + "-features" * (recipe in FEATURES)
    assert config["trainer"]["default_root_dir"] == f"runs/{folder}-{name}", "no two recipes share a run folder"
    assert config["data"]["num_negatives"] == 128
    assert config["checkpoint"]["monitor"] == "val/NDCG@10"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_builds_what_it_promises(recipe, prepared, featured):
    dim, blocks, heads, max_length, batch_size, lr, dropout = EXPECTED[recipe]
    with torch.device("meta"):  # shapes alone: the large ones have hundreds of millions of parameters
        path = featured.get(recipe, prepared)
        built = Built("fit", ["-c", str(recipes_dir() / recipe), f"--data.path={path}", "--trainer.accelerator=cpu"])
    model, data = built.model, built.datamodule
    assert list(model.tokens.tables) == ["items", *FEATURES.get(recipe, ())]
    assert (model.backbone.dim, len(model.backbone.blocks), model.backbone.blocks[0].num_heads) == (dim, blocks, heads)
    assert model.backbone.max_length == data.max_length == max_length
    assert (data.batch_size, model.num_items) == (batch_size, 2100)
    assert model.backbone.dropout.p == dropout
    assert model.loss.temperature == 0.05
    optimizer = model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == lr
    assert tuple(optimizer.defaults["betas"]) == (0.9, 0.98)
    assert optimizer.defaults["weight_decay"] == 0
    if recipe.startswith("kuairand-27k/"):
        name, size = Path(recipe).stem.removesuffix("-features").split("-")
        with torch.device("meta"):
            preset = BACKBONES[name].preset(size)
        assert type(model.backbone) is type(preset)
        assert shapes(model.backbone) == shapes(preset), "recipe and preset are the same model"
        check_times_in_milliseconds(model.backbone)
    if recipe == "kuairand-27k/hstu-large.yaml":
        # 16 (1024 * 4096 + 1024^2 + 1024) + 16 (2 * 2048 - 1 + 33): the paper's 83.97 M
        assert sum(p.numel() for p in model.backbone.blocks.parameters()) == 83_968_512
    if recipe == "kuairand-27k/fuxi-large.yaml":
        assert sum(p.numel() for p in model.backbone.blocks.parameters()) == pytest.approx(201.55e6, rel=2e-3)


def shapes(backbone):
    return {name: tuple(parameter.shape) for name, parameter in backbone.named_parameters()}


def check_times_in_milliseconds(backbone):
    """As KuaiRand's are: time differences of a whole log do not saturate, and those of FuXi are in days."""
    if isinstance(backbone, HSTU):
        time: TimeBuckets = backbone.blocks[0].time
        month = torch.tensor([30 * 24 * 3600 * 1000])
        assert time.buckets(month) < time.count
        assert time.buckets(month // (24 * 30)) < time.buckets(month)
    elif isinstance(backbone, FuXi):
        assert backbone.time_encoder.unit == 24 * 3600 * 1000


def test_a_recipe_can_take_another_time_encoder(prepared):
    recipe = str(recipes_dir() / "movielens-100k/fuxi.yaml")
    options = ["--model.backbone.time_encoder=BucketedTime", "--model.backbone.time_encoder.buckets.count=12"]
    built = Built("fit", ["-c", recipe, f"--data.path={prepared}", "--trainer.accelerator=cpu", *options])
    assert built.model.backbone.time_encoder.buckets == TimeBuckets(count=12)
    assert [len(table) for table in built.model.backbone.time_encoder.tables] == [13, 13]


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_is_added_to_a_recipe(switch, prepared, capsys):
    """By its name, as a recipe is; it changes nothing but what it is for, and everything is built."""

    def config(*files):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", *(f"-c={name}" for name in files), "--print_config"])
        assert not stopped.value.code
        return yaml.safe_load(capsys.readouterr().out)

    recipe = "movielens-100k/hstu.yaml"
    plain, switched = config(recipe), config(recipe, switch)
    parts = set(yaml.safe_load((recipes_dir() / switch).read_text()))
    assert {part for part in plain if switched[part] != plain[part]} == parts
    assert f"-c {switch}" in (recipes_dir() / switch).read_text(), "it says how it is used"
    files = [f"-c={recipes_dir() / name}" for name in (recipe, switch)]
    Built("fit", [*files, f"--data.path={prepared}", "--trainer.accelerator=cpu"])


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("token_batches", {"tokens_per_batch": "auto", "balance": "off"}),
        ("balance", {"tokens_per_batch": None, "balance": "tokens"}),
        ("popularity_negatives", {"negative_sampling": "popularity", "popularity_exponent": 1.0}),
        ("in_batch_negatives", {"negative_sampling": "in_batch"}),
    ],
)
def test_switches_of_the_data(switch, expected, prepared):
    files = [f"-c={recipes_dir() / name}" for name in ("movielens-100k/hstu.yaml", f"switches/{switch}.yaml")]
    data = Built("fit", [*files, f"--data.path={prepared}", "--trainer.accelerator=cpu"]).datamodule
    assert {name: getattr(data, name) for name in expected} == expected


NEGATIVE_SWITCHES = {
    "negative_offload": (NegativeOffload, {"segment": 100, "mode": "auto"}),
    "negative_fp16": (NegativeQuantization, {"dtype": "fp16"}),
    "logit_sharing": (LogitSharing, {"k": 2, "scores": "own", "lender_gradient": True}),
}


@pytest.mark.parametrize(
    "switches", [*((name,) for name in NEGATIVE_SWITCHES), [*NEGATIVE_SWITCHES], [*NEGATIVE_SWITCHES][::-1]]
)
def test_switches_of_negatives(switches, prepared):
    """One by one, and all of them in either order."""
    files = [f"-c={recipes_dir() / name}" for name in ("movielens-100k/hstu.yaml", *(f"switches/{s}.yaml" for s in switches))]
    callbacks = Built("fit", [*files, f"--data.path={prepared}", "--trainer.accelerator=cpu"]).trainer.callbacks
    found = [callback for callback in callbacks if type(callback) in {kind for kind, _ in NEGATIVE_SWITCHES.values()}]
    assert [type(callback) for callback in found] == [NEGATIVE_SWITCHES[name][0] for name in switches]
    for name, callback in zip(switches, found, strict=True):
        options = NEGATIVE_SWITCHES[name][1]
        assert {option: getattr(callback, option) for option in options} == options


def test_the_model_corrects_by_the_datas_log_q(prepared):
    def built(*options):
        files = ["-c", str(recipes_dir() / "movielens-100k/hstu.yaml"), f"--data.path={prepared}", "--trainer.accelerator=cpu"]
        return Built("fit", [*files, *options])

    popular = built("--data.negative_sampling=popularity", "--data.popularity_exponent=0.5")
    assert torch.equal(popular.model._log_q, torch.from_numpy(popular.datamodule.log_q))
    assert popular.model._log_q.unique().numel() > 1
    assert built().model._log_q is None
