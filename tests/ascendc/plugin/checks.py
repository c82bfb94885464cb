"""Runs the plugin on the device made of the host's memory; prints a JSON object. A process of its own: `checks FOLDER`."""

from __future__ import annotations

import ctypes
import json
import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.ascendc import on_device
from tests.ascendc.plugin.build import DEVICE
from tests.ops.jagged_cases import offsets_of
from turbogr.ops.backend import Backend
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.ops.npu_plugin import PLUGIN


def install(folder: Path) -> tuple[Callable[[], list[int]], Callable[[], int]]:
    """Makes the device "npu"; gives counters of copies (to it, from it) and of launches."""
    torch.utils.rename_privateuse1_backend("npu")
    device = ctypes.CDLL(str(folder / DEVICE), mode=ctypes.RTLD_GLOBAL)
    module = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module("npu", module)
    torch.ops.load_library(folder / PLUGIN)
    counts = (ctypes.c_int64 * 2)()

    def copies() -> list[int]:
        device.turbogr_test_copies(counts)
        return list(counts)

    return copies, on_device.launches_of(folder / PLUGIN)


def said(act: Callable[[], Any]) -> str:
    """The class and message of what `act` raises, or that it returned."""
    try:
        act()
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "returned"


def main() -> None:
    copies, launches = install(Path(sys.argv[1]))
    results = [
        asdict(on_device.run(case, dtype, "npu", launches)) for case in on_device.cases() for dtype in on_device.TOLERANCES
    ]
    found: dict[str, Any] = {"parity": results, **attention(copies, launches), **rows(launches)}
    print(json.dumps(found))


def attention(copies: Callable[[], list[int]], launches: Callable[[], int]) -> dict[str, Any]:
    offsets = offsets_of([5, 0, 70])
    tokens = int(offsets[-1])
    torch.manual_seed(0)
    q = torch.randn(tokens, 2, 8)
    on_npu, offsets_npu = q.to("npu"), offsets.to("npu")

    def call(x: Tensor = on_npu, o: Tensor = offsets_npu, **options: Any) -> Tensor:
        return jagged_hstu_attention(x, x, x, o, **{"scale": 0.1, **options})

    def launched(**options: Any) -> int:
        before = launches()
        call(**options)
        return launches() - before

    def error(x: Tensor, expected: Tensor) -> float:
        return float((x.cpu().double() - expected.double()).abs().max())

    expected = call(q, offsets, backend="reference")
    found: dict[str, Any] = {
        "launches": {
            "auto": launched(),
            "torch": launched(backend="torch"),
            "float64": launched(x=on_npu.double()),
            "mask": launched(mask="tests.ascendc.plugin.checks.window"),
            "no tokens": launched(x=on_npu[:0], o=offsets_of([0, 0]).to("npu")),
            "too wide": launched(x=torch.randn(tokens, 1, 600).to("npu")),
        },
        "in PyTorch": error(call(backend="torch"), expected),
        "strided": error(call(torch.randn(8, 2, tokens).copy_(q.permute(2, 1, 0)).to("npu").permute(2, 1, 0)), expected),
        "negative control": error(call(scale=0.11), expected),
    }
    before = copies()[1]
    for _ in range(3):
        call()
    found["offsets seen again"] = copies()[1] - before
    offsets_npu.copy_(offsets_of([75, 0, 0]))
    found["changed"] = error(call(), call(q, offsets_of([75, 0, 0]), backend="reference"))
    direct = torch.ops.turbogr.jagged_hstu_attention
    found["said"] = {
        "falling": said(lambda: call(o=torch.tensor([0, 70, 60, tokens]).to("npu"))),
        "too short": said(lambda: call(o=torch.tensor([0, 3]).to("npu"))),
        "short table": said(lambda: call(position_bias=torch.zeros(10).to("npu"))),
        "cpp": said(lambda: call(backend="cpp")),
        "two devices": said(lambda: direct(on_npu, q, on_npu, offsets_npu, *[None] * 4, 1, 1, 1, 1)),
        "shapes": said(lambda: direct(on_npu, on_npu[1:], on_npu, offsets_npu, *[None] * 4, 1, 1, 1, 1)),
        "rank": said(lambda: direct(*[on_npu[:, 0]] * 3, offsets_npu, *[None] * 4, 1, 1, 1, 1)),
        "no rank": said(lambda: direct(*[on_npu[0, 0, 0]] * 3, offsets_npu, *[None] * 4, 1, 1, 1, 1)),
    }
    return found


def rows(launches: Callable[[], int]) -> dict[str, Any]:
    """Look-ups and negatives that are particular; by name: the largest error, and launches."""
    torch.manual_seed(1)
    tables, ids, splits = [torch.randn(9, 5), torch.randn(4, 5)], torch.randint(0, 4, (30,)), torch.tensor([0, 11, 30])
    on_npu = [x.to("npu") for x in tables]
    expected = jagged_embedding_lookup(tables, ids, splits, backend="reference")
    found: dict[str, Any] = {}

    def note(name: str, actual: Callable[[], Tensor], wanted: Tensor) -> None:
        before = launches()
        difference = actual().detach().cpu().double() - wanted.double()
        found[name] = [float(difference.abs().max()), launches() - before]

    def written(out: Tensor) -> Tensor:
        jagged_embedding_lookup(on_npu, ids.to("npu"), splits, out=out)
        return out

    def gradient_of(wanted: list[bool], device: str) -> Tensor:
        leaves = [x.to(device).detach().requires_grad_(want) for x, want in zip(tables, wanted, strict=True)]
        backend: Backend = "auto" if device == "npu" else "reference"
        jagged_embedding_lookup(leaves, ids.to(device), splits, backend=backend).square().sum().backward()
        return leaves[wanted.index(True)].grad

    note("out", lambda: written(torch.empty(30, 5).to("npu")), expected)
    note("out, strided", lambda: written(torch.empty(5, 30).to("npu").t()), expected)
    for wanted in ([True, False], [False, True]):
        note(f"gradient of {wanted}", lambda wanted=wanted: gradient_of(wanted, "npu"), gradient_of(wanted, "cpu"))
    output, table, index = torch.randn(6, 8), torch.randn(11, 8), torch.randint(0, 11, (6, 3))
    half, factors = table.half(), torch.rand(11)
    logits = torch.ops.turbogr.negative_logits(output, half, index, factors, "torch")
    moved = [x.to("npu") for x in (output, half, index, factors)]
    note("rows in half precision", lambda: torch.ops.turbogr.negative_logits(*moved), logits)
    found["wrong splits"] = said(lambda: jagged_embedding_lookup(on_npu, ids.to("npu"), torch.tensor([0, 31, 30])))

    def backward_of(ids: Tensor) -> list[Tensor]:
        gradient, backward = torch.ones(30, 5).to("npu"), torch.ops.turbogr.jagged_embedding_lookup_backward
        return backward(gradient, ids, splits, [9, 4], [True, True], "auto")

    found["narrow ids"] = said(lambda: backward_of(ids.int().to("npu")))
    found["ids elsewhere"] = said(lambda: backward_of(ids))
    found["ids of two dimensions"] = said(lambda: backward_of(ids.view(15, 2).to("npu")))
    found["sound ids"] = said(lambda: backward_of(ids.to("npu")))
    return {"rows": found}


def window(query_position: Tensor, key_position: Tensor) -> Tensor:
    """A mask of one's own."""
    return query_position - key_position < 8


if __name__ == "__main__":
    main()
