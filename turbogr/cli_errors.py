"""Turns what jsonargparse says about a wrong option into one line that names the nearest valid one."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterable
from importlib import import_module

_NOT_ACCEPTED = re.compile(r"Option '([^']+)' is not accepted")
_UNKNOWN_KEY = re.compile(r"(?:Subcommand '\w+'|Group '(?P<group>[^']+)') does not accept option '(?P<key>[^']+)'")
_PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS_PATH = re.compile(r"Problem with given class_path '([^']+)'")
_NO_ATTRIBUTE = re.compile(r"module '([^']+)' has no attribute '([^']+)'")
_NO_MODULE = re.compile(r"No module named '([^']+)'")
_EXPECTED = re.compile(r"Expected an? (?:<class '([^']+)'>|([^\n]+?))(?:\. Got value: .*)?$", re.MULTILINE)
_LITERAL = re.compile(r"typing\.Literal(\[.*\])")
_SUBTYPES = re.compile(r"Subtypes: \[(?:\w+\[|<class ')(\w+(?:\.\w+)+)")
_MANY = re.compile(r"Subtypes: \[.*\b(?:list|Iterable)\[")
_CALLABLE = re.compile(r"Callable\[\[.*\], ([\w.]+)\]")
_PATH_EXPECTED = re.compile(r"Expected a dot import path string: (\S+)")
_NAMESPACE = re.compile(r"Namespace\(class_path='([^']+)'")
_NESTED = re.compile(r"NestedArg\(key='([^']*)', val='?(.*?)'?\)")
_FACTORIES = ("torch.optim.optimizer.Optimizer", "torch.optim.lr_scheduler.LRScheduler")
"""What the options that take a class rather than an object make: jsonargparse does not always say which of them it wanted."""
_GIVEN = re.compile(r"(?:Given|Got) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_LINK = re.compile(r"Call to compute_fn of link .* failed: (.*)", re.DOTALL)
_STRATEGY = "trainer.strategy"
_TYPES = {"NoneType": "null", "collections.abc.Sequence": "list", "collections.abc.Iterable": "list"}
"""Words of YAML for types of Python."""
_ELSEWHERE = {
    "epochs": "trainer.max_epochs",
    "lr": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "gpus": "trainer.devices",
    "seed": "seed_everything",
}
"""Options by names that other tools give them."""


def explain(message: str, known: Iterable[str]) -> str:
    """One line for the user.

    Args:
        message: what jsonargparse says.
        known: dotted names of all options of the command.
    """
    message = _of_the_class(message)
    if match := re.match(r"unrecognized arguments: (\S+)", message):
        text = _unrecognized(match[1], known)
    elif match := _UNKNOWN_KEY.search(message):
        text = unknown_option(f"{match['group']}.{match['key']}" if match["group"] else match["key"], known)
    elif match := _NOT_ACCEPTED.search(message):
        text = _unknown_class_option(match[1], message[: match.start()], message[match.end() :], known)
    elif match := _NO_ATTRIBUTE.search(message):
        names = [name for name, value in vars(import_module(match[1])).items() if inspect.isclass(value)]
        text = f"{_keys(message, match.start())}: there is no {match[1]}.{match[2]}{_did_you_mean(match[2], names)}"
    elif match := _NO_MODULE.search(message):
        text = f"{_keys(message, match.start())}: there is no module {match[1]}"
    elif match := _LINK.search(message):
        text = match[1]
    elif match := _REQUIRED.search(message):
        # Keys of a subcommand start with its name.
        names, owner = re.split(r",\s*", match[1]), _keys(message, match.start())
        options = " ".join(f"{owner}.init_args.{name}" if owner else "--" + name.split(".", 1)[-1] for name in names)
        text = f"{options} must be given, on the command line or in a configuration file"
    else:
        text = _wrong_value(message)
    return text


def unknown_option(key: str, known: Iterable[str], dashes: bool = False) -> str:
    """Says that an option does not exist, and names the nearest one.

    Args:
        key: dotted name as given.
        known: dotted names of all options.
        dashes: show names as on the command line.
    """
    known = sorted(set(known))
    # Compare level by level: in `modell.backbone.init_args.dim` the first part is at fault, whatever follows.
    parts, prefix, prefixes = (
        key.split("."),
        "",
        {".".join(k.split(".")[: n + 1]) for k in known for n in range(k.count(".") + 1)},
    )
    depth = 0
    while depth < len(parts) - 1 and prefix + parts[depth] in prefixes:
        prefix += f"{parts[depth]}."
        depth += 1
    siblings = sorted({k[len(prefix) :].split(".")[0] for k in prefixes if k.startswith(prefix) and k != prefix[:-1]})
    leaves = {k.rpartition(".")[2]: k for k in reversed(known)}
    mark = "--" if dashes else ""
    given = mark + ".".join(parts[: depth + 1])
    name = ""
    if nearest := difflib.get_close_matches(parts[depth], siblings, n=1):
        name = prefix + nearest[0]
    elif depth == len(parts) - 1 and (elsewhere := _ELSEWHERE.get(parts[depth])) and elsewhere.split(".")[0] in prefixes:
        name = elsewhere
    elif nearest := difflib.get_close_matches(parts[-1], leaves, n=1):
        name = leaves[nearest[0]]
    if name:
        return f"there is no option {given}; did you mean {mark}{name}?"
    return f"there is no option {given}; valid here: {', '.join(siblings) or 'none'}"


def _unrecognized(argument: str, known: Iterable[str]) -> str:
    """A word of the command line that no option takes."""
    if argument.startswith("-"):
        return unknown_option(argument.lstrip("-").split("=")[0], known, dashes=True)
    hint = f"; did you mean -c {argument}?" if argument.endswith((".yaml", ".yml")) else ""
    return f"{argument!r} belongs to no option{hint}"


def _of_the_class(message: str) -> str:
    """The message without what else the option could have been, where the name of a class was given.

    Of a union, jsonargparse tells why each alternative failed. What is wrong with the class that was named tells most; it comes
    first, later ones try the base class.
    """
    lines = message.splitlines()
    start = 0
    while (found := next((n for n in range(start, len(lines)) if _CLASS_PATH.search(lines[n])), None)) is not None:
        problem = lines[found].lstrip()
        indent = len(lines[found]) - len(problem) + (2 if problem.startswith("- ") else 0)
        end = next((n for n in range(found + 1, len(lines)) if len(lines[n]) - len(lines[n].lstrip()) <= indent), len(lines))
        errors = [n for n in range(start, found) if lines[n].strip() == "Errors:"]
        before = lines[: errors[-1] + 1] if errors else lines[:found]
        lines = [*before, *lines[found:end]]
        start = len(before) + 1
    return "\n".join(lines)


def _unknown_class_option(option: str, before: str, after: str, known: Iterable[str]) -> str:
    """An option that the constructor of a class does not take."""
    # Where a class is asked for and not an object of it, its name stands behind.
    classes = _CLASS_PATH.findall(before) or _NAMESPACE.findall(after)[:1]
    if not classes:
        return unknown_option(option, known)
    module, _, name = classes[-1].rpartition(".")
    parameters = [p for p in inspect.signature(getattr(import_module(module), name)).parameters if p != "self"]
    if _CALLABLE.search(before):
        parameters = parameters[1:]  # the model gives the first one: the parameters, or the optimizer
    hint = _did_you_mean(option, parameters) or f"; it takes {', '.join(parameters) or 'no option'}"
    return f"{_keys(before)}: {classes[-1]} has no option {option}{hint}"


def _wrong_value(message: str) -> str:
    """A value of a wrong type, or anything else: without the usage text, in one line."""
    keys, words, values = _keys(message), _PATH_EXPECTED.findall(message), _GIVEN.findall(message)
    nested = [key for value in values for key, _ in _NESTED.findall(value)]
    if keys == _STRATEGY and (nested or (values and values[-1].startswith("{"))):
        return _strategy_without_class(nested, words)
    given = [_NESTED.sub(r"\2", value) for value in words or values]
    expected = list(dict.fromkeys(a or b for a, b in _EXPECTED.findall(message)))
    types = [text for text in expected if "import path" not in text and not text.startswith("path but")]
    choices = [str(choice) for text in types if (match := _LITERAL.fullmatch(text)) for choice in ast.literal_eval(match[1])]
    names = dict.fromkeys(_TYPES.get(text, text) for text in types if not _LITERAL.fullmatch(text))
    if keys and given and len(types) < len(expected) and not choices and names.keys() <= {"null", "list", "bool"}:
        bases = _SUBTYPES.findall(message) or _CALLABLE.findall(message) or _FACTORIES
        hint = _did_you_mean(given[-1], [c.__name__ for base in bases for c in _subclasses(base)])
        return f"{keys}: {given[-1]} is neither a class path nor the name of a known class{hint}"
    if keys and given and types:
        *others, last = [name for name in names if name != "null"] + choices + ["null"] * ("null" in names)
        wanted = f"{', '.join(others)} or {last}" if others else last
        return f"{keys}: {given[-1]!r} is not accepted, expected {wanted}{_did_you_mean(given[-1], choices)}"
    return " ".join(message.split())


def _strategy_without_class(options: list[str], words: list[str]) -> str:
    """Options for a strategy that is given by its name, or not at all."""
    option = ".".join([_STRATEGY, *options])
    given = f", and {words[-1]} is none" if words else ""
    return f"{option}: options need the strategy's class{given}: set {_STRATEGY} to one, such as TurboGRStrategy or DDPStrategy"


def _subclasses(path: str) -> list[type]:
    module, _, name = path.rpartition(".")
    found, queue = [], [getattr(import_module(module), name)]
    while queue:
        queue += (children := queue.pop().__subclasses__())
        found += children
    return found


def _keys(message: str, end: int | None = None) -> str:
    """The option that a message is about: nested messages name one level each; where it takes several classes, of which."""
    first, *others = dict.fromkeys(_PARSER_KEY.findall(message[:end])) or [""]
    classes = _CLASS_PATH.findall(message[:end])
    if others and classes and _MANY.search(message):
        return f"{first}, {'.init_args.'.join(others)} of {classes[0].rpartition('.')[2]}"
    return ".init_args.".join([first, *others])


def _did_you_mean(word: str, choices: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""
