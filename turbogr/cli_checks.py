"""What a configuration must keep to before anything is built, beyond the types of its options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry

from turbogr.errors import ConfigurationError
from turbogr.models.hstu import HSTU

MONITOR = "val/NDCG@10"
"""What base.yaml monitors."""
_MAX_SEED = 2**32 - 1
# Options of the trainer and their least values; Lightning takes others, and fails in the midst of the run or ignores them.
_LEAST = {
    "max_epochs": -1,
    "max_steps": -1,
    "num_nodes": 1,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
    "gradient_clip_val": 0,
}
_ENDLESS = ("max_epochs", "max_steps")
_PRECISIONS = ("32", "32-true", "bf16", "bf16-mixed", "16", "16-mixed")
# Options of the model that a resumed run may change: they say what is measured and recommended, not what is trained.
_FREE = ("model.top_k", "model.predict_k")


def check_numbers(config: Namespace) -> None:
    """Refuses numbers that Lightning and torch would only stumble over.

    Args:
        config: of one command.

    Raises:
        ConfigurationError: names the option.
    """
    seed, model_seed, trainer = config.seed_everything, config.model.seed, config.trainer
    # bool is an int: true asks for a random seed
    if not isinstance(seed, bool) and seed is not None and not 0 <= seed <= _MAX_SEED:
        raise ConfigurationError(f"seed_everything is {seed}; it must lie between 0 and {_MAX_SEED}")
    if model_seed is not None and model_seed < 0:
        raise ConfigurationError(f"model.seed is {model_seed}; it must be 0 or more")
    for option, least in _LEAST.items():
        number = trainer[option]
        if number is not None and number < least:
            endless = ", or -1 for no limit" if option in _ENDLESS else ""
            raise ConfigurationError(f"trainer.{option} is {number}; it must be {max(least, 0)} or more{endless}")
    if trainer.val_check_interval is not None and trainer.val_check_interval in (0, 0.0):
        raise ConfigurationError(
            "trainer.val_check_interval is 0; it must be a number of batches, 1 or more, or a part of an epoch, such as 0.5"
        )
    if config.checkpoint.mode not in ("min", "max"):
        raise ConfigurationError(f"checkpoint.mode is {config.checkpoint.mode}; it must be min or max")
    check_strategy(trainer.strategy)
    if trainer.precision is not None and str(trainer.precision) not in _PRECISIONS:
        raise ConfigurationError(
            f"trainer.precision is {trainer.precision}, which would also convert item rows and times: use 32-true or bf16-mixed"
        )


def check_strategy(strategy: Any) -> None:
    """Refuses the name of a strategy that Lightning does not know.

    Raises:
        ConfigurationError: names the nearest one.
    """
    names = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy.lower() not in names:
        nearest = difflib.get_close_matches(strategy.lower(), names, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "names are auto, ddp and turbogr, among others"
        raise ConfigurationError(f"trainer.strategy is {strategy}, which is the name of no strategy; {hint}")


def settle_devices(trainer: Namespace, environment: Mapping[str, str]) -> None:
    """Under torchrun, takes the number of ranks from it; base.yaml's `devices: 1` is no wish.

    Args:
        trainer: section of the configuration; `devices` and `num_nodes` are changed.
        environment: of the process.

    Raises:
        ConfigurationError: the configuration asks for other numbers than torchrun started.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    started = {"devices": local, "num_nodes": world // local}
    for option, number in started.items():
        asked = trainer[option]
        if str(asked) not in ("1", "auto", "-1", str(number)):
            raise ConfigurationError(
                f"trainer.{option} is {asked}, but torchrun started {local} processes on each of {world // local} nodes: "
                f"leave trainer.{option} out, or start as many with torchrun"
            )
        trainer[option] = number


def settle_monitor(config: Namespace) -> None:
    """Refuses to monitor what is not measured; where model.top_k lacks 10, base.yaml's monitor takes the nearest K below.

    Args:
        config: of `fit`; `checkpoint.monitor` is changed.

    Raises:
        ConfigurationError: a checkpoint or a callback monitors something else; names what can be.
    """
    ks = sorted(set(config.model.top_k))
    if config.checkpoint.monitor == MONITOR and ks and 10 not in ks:
        config.checkpoint.monitor = f"val/NDCG@{max((k for k in ks if k < 10), default=ks[0])}"
    measured = [*(f"val/{name}@{k}" for name in ("HR", "NDCG") for k in ks), "val/MRR", "train/loss"]
    monitors = {"checkpoint.monitor": config.checkpoint.monitor}
    callbacks = config.trainer.callbacks or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        # A callback of one's own may log, and so monitor, what it likes.
        if callback.class_path.startswith("lightning.pytorch."):
            name = callback.class_path.rpartition(".")[2]
            monitors[f"monitor of {name}"] = callback.get("init_args", {}).get("monitor")
    for option, monitor in monitors.items():
        if monitor is not None and monitor not in measured:
            raise ConfigurationError(
                f"{option} is {monitor}, which is not measured; choose one of {', '.join(measured)}, or set model.top_k"
            )


def one_max_length(max_length: int, backbone: Any) -> int:
    """The data's max_length, for the backbone; refuses a backbone that asks for another one.

    A configuration file that asks for the backbone's default is not noticed; `check_max_length` sees it on the command line.
    """
    asked = backbone.get("init_args", {}).get("max_length") if isinstance(backbone, Namespace | dict) else None
    # The default of HSTU, with which every recipe begins, stays behind when another class is named.
    if asked not in (None, max_length, _default_max_length(HSTU), _default_max_length(_class_of(backbone))):
        _refuse_max_length(asked, max_length)
    return max_length


def check_max_length(args: Sequence[str], max_length: int) -> None:
    """Refuses a backbone's max_length on the command line that is not the data's.

    Args:
        args: the command line.
        max_length: the data's.
    """
    for option, value in zip(args, [*args[1:], ""], strict=True):
        name, equals, inline = option.partition("=")
        if name in ("--model.backbone.max_length", "--model.backbone.init_args.max_length"):
            asked = inline if equals else value
            if asked != str(max_length):
                _refuse_max_length(asked, max_length)


def check_file(path: Path) -> None:
    """Refuses a configuration file that is not a mapping in YAML.

    Raises:
        ConfigurationError: names the file, and the line where it is known.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; name a configuration file in it")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise ConfigurationError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if content is None:
        raise ConfigurationError(f"{path} is empty: write options into it, or leave it out")
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}; expected sections such as `trainer:` and `model:`")


def model_differences(then: str, now: str, all_options: bool = True) -> list[str]:
    """How the models of two configurations differ, one text an option: their model sections, and the features that they use.

    Args:
        then: YAML of the earlier one.
        now: YAML of the present one.
        all_options: also those that a resumed run may change.
    """
    configurations = [yaml.safe_load(text) for text in (then, now)]
    old, new = (dict(flat(config["model"], "model")) for config in configurations)
    # A checkpoint that is older than the option says nothing about it.
    if all("features" in config["data"] for config in configurations):
        old["data.features"], new["data.features"] = (config["data"]["features"] for config in configurations)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    # Options of another class are all different, and say nothing.
    replaced = tuple(key.removesuffix("class_path") + "init_args." for key in keys if key.endswith(".class_path"))
    keys = [key for key in keys if not key.startswith(replaced)]
    return [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys if all_options or key not in _FREE]


def flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested configuration."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}")
    else:
        yield key, value


def _refuse_max_length(asked: Any, max_length: int) -> None:
    raise ConfigurationError(
        f"model.backbone.init_args.max_length is {asked} and data.max_length is {max_length}: give data.max_length alone, "
        "the backbone follows it"
    )


def _class_of(backbone: Any) -> Any:
    module, _, name = str(backbone["class_path"]).rpartition(".")
    return getattr(import_module(module), name)


def _default_max_length(backbone: Any) -> Any:
    parameter = inspect.signature(backbone).parameters.get("max_length")
    return None if parameter is None else parameter.default
