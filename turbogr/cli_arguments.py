"""The command line as words, before it is parsed: recipes by their names, and the command that goes on with a run."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from pathlib import Path

from turbogr.cli_checks import check_file
from turbogr.errors import ConfigurationError
from turbogr.resources import recipes_dir


def find_recipes(args: list[str]) -> list[str]:
    """Replaces names of packaged recipes by their paths, where no such file exists here.

    Raises:
        ConfigurationError: if a configuration file is in neither place; names the nearest recipe.
    """
    found, takes_value = [], False
    for arg in args:
        option, equals, value = arg.partition("=")
        if takes_value:
            found.append(_recipe(arg))
        elif equals and option in ("-c", "--config"):
            found.append(f"{option}={_recipe(value)}")
        else:
            found.append(arg)
        takes_value = not takes_value and arg in ("-c", "--config")
    return found


def resume_command(command: str, args: list[str], checkpoint: Path) -> str:
    """The command line that goes on from a checkpoint: the one given, but for the checkpoint and --overwrite."""
    kept: list[str] = []
    skip = False
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        if skip:
            skip = False
        elif arg == "--ckpt_path" or (arg == "--overwrite" and following in ("true", "false")):
            skip = True
        elif not arg.startswith(("--ckpt_path=", "--overwrite")):
            kept.append(arg)
    program = [sys.executable, "-m", "turbogr"]
    if not sys.argv[0].endswith("__main__.py") and shutil.which("turbogr"):
        program = ["turbogr"]
    elif Path(sys.executable).is_relative_to(Path.cwd()):
        program[0] = os.path.relpath(sys.executable)
    return shlex.join([*program, command, *kept, "--ckpt_path", str(checkpoint)])


def _recipe(name: str) -> str:
    if Path(name).exists():
        check_file(Path(name))
        return name
    if ":" in name or "\n" in name:  # a configuration may also be given as YAML text
        return name
    folder = recipes_dir()
    packaged = folder / name.removeprefix("recipes/")
    if packaged.is_file():
        return str(packaged)
    recipes = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.yaml"))
    nearest = _nearest(name.removeprefix("recipes/"), recipes)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"recipes that come with turbogr: {', '.join(recipes)}"
    raise ConfigurationError(f"there is no configuration file {name}, here or among the recipes; {hint}")


def _nearest(name: str, recipes: list[str]) -> list[str]:
    """The recipes that may have been meant; by the file's name alone where no folder was given."""
    if "/" not in name:
        files = difflib.get_close_matches(name, [Path(recipe).name for recipe in recipes], n=1, cutoff=0.8)
        if same := [recipe for recipe in recipes if Path(recipe).name in files]:
            return same
    return difflib.get_close_matches(name, recipes, n=1)
