"""The console script `turbogr`.

Only what a subcommand needs is imported, and after it is known: `turbogr --help` and `turbogr doctor` are quick, and work where
Lightning or torch is broken.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from functools import partial

from turbogr import __version__
from turbogr.errors import MissingDependencyError, TurboGRError

TRAINER_COMMANDS = {
    "fit": "train a model; -c CONFIG (several compose), --trainer.*, --model.*, --data.*",
    "validate": "metrics of the best checkpoint on the validation items",
    "test": "metrics of the best checkpoint on the test items",
    "predict": "top items of every user, with original ids, as Parquet",
}
OTHER_COMMANDS = {
    "describe": "parameters, FLOPs and bytes of a step, before training; -c CONFIG as fit",
    "plan": "how many groups N ranks should form: bytes and memory of each choice; -c CONFIG --devices N",
    "data": "prepare, describe, synthesize or fetch data sets",
    "doctor": "what is installed, what is expected, how to mend it",
}


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: command line without the program's name; None takes the process's.

    Raises:
        SystemExit: with a code other than 0 unless all went well: 1 for an error that the message explains, 2 for a wrong
            command line, 130 after Ctrl-C.
    """
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return
    if args[0] == "--version":
        print(f"turbogr {__version__}")
        return
    command, rest = args[0], args[1:]
    try:
        code = _run(command, rest)
    except TurboGRError as error:
        print(f"turbogr {command}: error: {error}", file=sys.stderr)
        code = 1
    if code:
        raise SystemExit(code)


def _run(command: str, args: list[str]) -> int:
    if command == "doctor":
        from turbogr.doctor import main as doctor

        return doctor(args)
    if command not in {**TRAINER_COMMANDS, **OTHER_COMMANDS}:
        nearest = difflib.get_close_matches(command, [*TRAINER_COMMANDS, *OTHER_COMMANDS], n=1)
        hint = (
            f"; did you mean {nearest[0]}?" if nearest else f"; choose one of {', '.join([*TRAINER_COMMANDS, *OTHER_COMMANDS])}"
        )
        print(f"turbogr: error: there is no command {command!r}{hint}", file=sys.stderr)
        return 2
    try:
        runner = _runner(command)
    except (ImportError, OSError) as error:
        # OSError: a shared library that cannot be loaded.
        raise MissingDependencyError(f"{error}; run `turbogr doctor` to see what is broken and how to mend it") from error
    return runner(args)


def _runner(command: str) -> Callable[[list[str]], int]:
    """Imports what a command needs."""
    if command == "data":
        from turbogr.data.commands import main as data

        return data
    if command == "describe":
        from turbogr.describe_cli import run as describe

        return describe
    if command == "plan":
        from turbogr.plan_cli import run as plan

        return plan
    from turbogr.trainer_cli import run as trainer

    return partial(trainer, command)


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{text}" for name, text in {**TRAINER_COMMANDS, **OTHER_COMMANDS}.items())
    return f"""usage: turbogr COMMAND [options]

turbogr {__version__}: training of generative recommenders

commands:
{commands}

`turbogr COMMAND --help` lists all options of a command.
For example: turbogr fit -c movielens-100k/hstu.yaml --trainer.max_epochs 10"""
