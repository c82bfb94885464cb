"""A device that computes on the CPU and keeps account: who waited for it, what was copied how, what was read too early.

It takes the place of PyTorch's PrivateUse1 device under the name "npu", once and for the whole process, so it is to be imported
by a process of its own. Its tensors are Python objects around CPU tensors; work is done at once, in the order of the program,
and for each of its streams a clock says what that work may be sure of on a device on which streams run beside each other:

    a wait      the host reads a value or a size that the device computes, or copies to or from memory that is not pinned
    a race      a stream reads what another wrote, or writes what another read or wrote, and has not waited for it
    a reuse     memory of a stream is made anew while another stream may still use what was given back

All three are written down with the line of code they came from. `turbogr::` operators run as PyTorch code, as on any device for
which they have no kernel.
"""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, distributed
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"
NAME_OF_KEY = "PrivateUse1"
COUNT = 2
COLLECTIVES = ("all_reduce", "broadcast", "all_to_all_single", "all_gather_single")
"""Of torch.distributed; their first argument is written."""
CHECKOUT = Path(__file__).resolve().parents[2]
_READS_ON_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Note(NamedTuple):
    """Something that was written down.

    Attributes:
        kind: wait, race, reuse; or copy, for what was brought to the device without waiting.
        what: the operator.
        where: innermost lines of this checkout, or of Lightning, innermost first.
        stream: number of the stream.
    """

    kind: str
    what: str
    where: tuple[str, ...]
    stream: int


notes: list[Note] = []
_library: list[torch.library.Library] = []  # kept: what it registers goes with it
_pinned: dict[int, Tensor] = {}  # by address; kept, so that no address comes again


def note(kind: str, what: object) -> None:
    """Writes something down."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_stack()]
    lines: list[str] = []
    for name, line, function in reversed(frames):
        if name.startswith(str(CHECKOUT)) and "site-packages" not in name and name != __file__:
            lines.append(f"{Path(name).relative_to(CHECKOUT)}:{line} {function}")
        elif "/lightning/" in name or "/torch/optim/" in name:
            lines.append(f"{name[name.index('site-packages/') + 14 :]}:{line} {function}")
    lines = lines or [f"{name}:{line} {function}" for name, line, function in reversed(frames)]
    notes.append(Note(kind, str(what), tuple(lines[:12]), Stream.current.number))


class Stream:
    """Stands for torch.Stream. Its clock: number of a stream -> how much of that stream's work is sure to be done."""

    current: Stream
    made: ClassVar[list[Stream]] = []

    def __init__(self, device: object = None) -> None:
        self.device = torch.device(NAME, 0)
        self.number, self.clock, self._outer = len(Stream.made), Counter[int](), []
        self.free = Counter[int]()  # uses of memory of this stream that was given back
        Stream.made.append(self)

    def tick(self) -> int:
        """Another piece of work; its number."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def record_event(self) -> Event:
        return Event(Counter(self.clock))

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock

    def synchronize(self) -> None:
        note("wait", "Stream.synchronize")

    def __enter__(self) -> Stream:
        self._outer.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *error: object) -> None:
        Stream.current = self._outer.pop()


class Event(NamedTuple):
    """What a stream was sure of at some time."""

    clock: Counter[int]


class Memory:
    """One allocation: the stream that it was made on, who wrote it last and who has used it since."""

    def __init__(self) -> None:
        if any(Stream.current.clock[number] < time for number, time in Stream.current.free.items()):
            note("reuse", f"of memory that streams {sorted(Stream.current.free)} used")
        Stream.current.free.clear()
        self.stream, self.writer, self.used = Stream.current, (Stream.current.number, Stream.current.tick()), Counter[int]()
        self.recorded: set[int] = set()

    def read(self, what: object) -> None:
        number, time = self.writer
        if Stream.current.clock[number] < time:
            note("race", what)
        self.used[Stream.current.number] = Stream.current.tick()

    def write(self, what: object) -> None:
        self.read(what)
        if any(Stream.current.clock[number] < time for number, time in self.used.items()):
            note("race", what)
        self.writer = (Stream.current.number, Stream.current.tick())

    def __del__(self) -> None:
        uses = self.used | Counter(dict([self.writer]))
        self.stream.free |= Counter({number: time for number, time in uses.items() if number not in self.recorded})


class OnDevice(Tensor):
    """A tensor of the device: `raw` on the CPU, and the memory that it shares with its views."""

    raw: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, memory: Memory) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
        )

    def __init__(self, raw: Tensor, memory: Memory) -> None:
        self.raw, self.memory = raw, memory

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream.number)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied

    def tolist(self) -> Any:
        note("wait", "tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the CPU tensors within."""
    name = str(func)
    if func.namespace == "turbogr":
        return OPDEFS[func._schema.name]._backend_fns[None](*args, **kwargs)
    inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    of_device = [x for x in inputs if isinstance(x, OnDevice)]
    target = kwargs.get("device")
    to_host = of_device and target is not None and torch.device(target).type == "cpu"
    _waits(func, name, args, kwargs, inputs, bool(to_host))
    if func is torch.ops.aten.record_stream.default:
        return None
    aliases = [(a, a.alias_info) for a in func._schema.arguments]
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = {id(x) for a, alias in aliases if alias is not None and alias.is_write for x in tree_iter(values.get(a.name))}
    if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # a view reads nothing
        for x in of_device:
            (x.memory.write if id(x) in written else x.memory.read)(name)
    raw_args, raw_kwargs = tree_map_only(OnDevice, lambda x: x.raw, (args, kwargs))
    if target is not None:
        raw_kwargs = {**raw_kwargs, "device": torch.device("cpu")}
    raw_kwargs.pop("pin_memory", None)
    result = func(*raw_args, **raw_kwargs)
    if to_host or not isinstance(result, (Tensor, list, tuple)):
        return result.clone() if isinstance(result, Tensor) else result
    owners = {x.raw.untyped_storage().data_ptr(): x.memory for x in of_device if x.raw.numel()}
    out = tree_map_only(Tensor, lambda x: _wrapped(x, inputs, owners), result)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _wrapped(raw: Tensor, inputs: list[Tensor], owners: dict[int, Memory]) -> Tensor:
    of_host = [x for x in inputs if not isinstance(x, OnDevice)]
    if any(x is raw for x in of_host):
        return raw
    address = raw.untyped_storage().data_ptr()
    if raw.numel() and any(x.untyped_storage().data_ptr() == address for x in of_host):
        raw = raw.clone()  # brought from the host
    return OnDevice(raw, owners.get(address) or Memory() if raw.numel() else Memory())


def _waits(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], to_host: bool) -> None:
    """Writes down whether the host waits for the device here."""
    if to_host:
        note("wait", f"{name} to the host")
    elif func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
        source = args[-1] if func is torch.ops.aten._to_copy.default else args[1]
        goes = func is torch.ops.aten._to_copy.default or isinstance(args[0], OnDevice)
        if not isinstance(source, OnDevice) and goes and source.dim() + source.numel() != 1:
            free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            note("copy" if free and is_pinned(source) else "wait", f"{name} of {source.numel()} from the host")
        elif isinstance(source, OnDevice) and not goes:
            note("wait", f"{name} to the host")
    elif func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default):
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            note("wait", f"{name} by a mask")
        elif any(not isinstance(x, OnDevice) for x in indices):
            note("wait", f"{name} by an index of the host")
    elif func is torch.ops.aten.repeat_interleave.Tensor:
        if kwargs.get("output_size") is None:
            note("wait", f"{name} without its size")
    elif _READS_ON_HOST & set(func.tags) and any(isinstance(x, OnDevice) for x in inputs):
        note("wait", name)


def is_pinned(tensor: Tensor, device: object = None) -> bool:
    """Of a CPU tensor."""
    return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in _pinned


def pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    """A copy in memory that is called pinned; itself where it lies there."""
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    _pinned[copy.untyped_storage().data_ptr()] = copy
    return copy


def _collective(function: Any) -> Any:
    """A function of torch.distributed, which reads and writes its tensors in the current stream."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        first = next(tree_iter(args))
        for x in tree_iter((args, kwargs)):
            if isinstance(x, OnDevice):
                (x.memory.write if x is first else x.memory.read)(function.__name__)
        return function(*tree_map_only(OnDevice, lambda x: x.raw, args), **tree_map_only(OnDevice, lambda x: x.raw, kwargs))

    return collective


def _through_host(function: Any) -> Any:
    """torch.tensor and its like: PyTorch copies there behind the back of Python."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return function(data, *args, device=device, **kwargs)
        return function(data, *args, **kwargs).to(device)

    return made


def install() -> None:
    """Makes `import torch_npu`, `torch.npu`, streams and pinned memory work."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    sys.modules["torch_npu"] = module
    npu = types.SimpleNamespace(
        set_device=lambda device: None,
        empty_cache=lambda: None,
        device_count=lambda: COUNT,
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        memory_stats=lambda device: {},
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=0: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda state, device=0: None,
        _is_in_bad_fork=lambda: False,
        synchronize=lambda device=None: note("wait", "synchronize"),
        mem_get_info=lambda device=None: (2**33, 2**34),
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=npu)
    _library.append(torch.library.Library("_", "IMPL"))
    _library[0].fallback(lambda op, *args, **kwargs: run(op, args, kwargs), NAME_OF_KEY)
    _library.append(torch.library.Library("aten", "IMPL"))
    for name in ("arange", "arange.start", "arange.start_step"):  # PyTorch's own make an empty tensor and let it grow
        func = getattr(torch.ops.aten.arange, name.partition(".")[2] or "default")
        _library[1].impl(name, lambda *args, f=func, **kwargs: run(f, args, kwargs), NAME_OF_KEY)
    Stream.current = Stream()
    torch.Stream = Stream  # type: ignore[assignment, misc]
    torch.accelerator.current_stream = lambda device=None: Stream.current  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda device=None: note("wait", "synchronize")  # type: ignore[assignment]
    Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]
    Tensor.is_pinned = is_pinned  # type: ignore[assignment, method-assign]
    torch.tensor, torch.as_tensor = _through_host(torch.tensor), _through_host(torch.as_tensor)
    for name in COLLECTIVES:
        setattr(distributed, name, _collective(getattr(distributed, name)))
    distributed.Backend.default_device_backend_map[NAME] = "gloo"
