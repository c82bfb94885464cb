"""What all operators on jagged tensors ask of their inputs."""

import pytest
import torch

from turbogr.ops.add_positions import jagged_add_positions
from turbogr.ops.fuxi_attention import jagged_fuxi_attention
from turbogr.ops.fuxi_native import KERNEL as FUXI
from turbogr.ops.fuxi_native import FuXiKernel
from turbogr.ops.gated_norm import gated_norm
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.ops.hstu_native import KERNEL as HSTU
from turbogr.ops.hstu_native import HSTUKernel
from turbogr.ops.jagged import check_devices, without_autocast
from turbogr.ops.normalise import normalised
from turbogr.ops.relative_attention import AttentionInputs
from turbogr.ops.softmax_attention import jagged_softmax_attention
from turbogr.ops.softmax_native import KERNEL as SOFTMAX
from turbogr.ops.softmax_native import SoftmaxKernel

ATTENTION = [jagged_hstu_attention, jagged_fuxi_attention, jagged_softmax_attention]
BIASED = ATTENTION[:2]
BACKENDS = ["auto", "torch", "reference"]


def inputs(heads: int = 2, qk_dim: int = 8, v_dim: int = 8) -> dict[str, torch.Tensor]:
    """One sequence of four tokens."""
    qk, v = (4, heads, qk_dim), (4, heads, v_dim)
    return {"q": torch.randn(qk), "k": torch.randn(qk), "v": torch.randn(v), "offsets": torch.tensor([0, 4])}


def biases() -> dict[str, torch.Tensor]:
    times = torch.arange(4)
    return {"position_bias": torch.randn(4), "time_bias": torch.randn(9), "query_times": times + 1, "key_times": times}


def test_tensors_on_different_devices_are_refused():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    check_devices("turbogr::x", q=here, k=None, v=here)
    check_devices("turbogr::x", q=None, k=there, v=there)
    check_devices("turbogr::x")
    with pytest.raises(ValueError, match="turbogr::x: offsets is on meta, but q on cpu"):
        check_devices("turbogr::x", q=here, k=None, offsets=there)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["k", "v", "offsets"])
@pytest.mark.parametrize("operator", ATTENTION)
def test_attention_is_on_one_device(operator, name, backend):
    tensors = inputs()
    operator(**tensors, scale=1.0, backend=backend)
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match=f"_attention: {name} is on meta, but q on cpu"):
        operator(**tensors, scale=1.0, backend=backend)


@pytest.mark.parametrize("name", ["position_bias", "time_bias", "query_times", "key_times"])
@pytest.mark.parametrize("operator", BIASED)
def test_bias_is_where_attention_is(operator, name):
    bias = biases()
    operator(**inputs(), scale=1.0, **bias)
    bias[name] = bias[name].to("meta")
    with pytest.raises(ValueError, match=f"_attention: {name} is on meta, but q on cpu"):
        operator(**inputs(), scale=1.0, **bias)


def test_time_function_is_where_attention_is():
    times = {name: x for name, x in biases().items() if name.endswith("times")}
    function = (torch.tensor(1.0), torch.tensor(0.5, device="meta"), torch.tensor(1.0))
    with pytest.raises(ValueError, match="decay is on meta, but q on cpu"):
        jagged_fuxi_attention(**inputs(), scale=1.0, time_function=function, **times)


def test_elementwise_operators_are_on_one_device():
    x, there, offsets = torch.randn(4, 8), torch.randn(4, 8, device="meta"), torch.tensor([0, 4])
    for tensors in ((there, x), (x, there)):
        with pytest.raises(ValueError, match="turbogr::gated_norm: gate is on"):
            gated_norm(*tensors, eps=1e-6)
    with pytest.raises(ValueError, match="turbogr::jagged_add_positions: table is on meta, but x on cpu"):
        jagged_add_positions(x, there, offsets)
    with pytest.raises(ValueError, match="turbogr::jagged_add_positions: offsets is on meta, but x on cpu"):
        jagged_add_positions(x, x, offsets.to("meta"))


@pytest.mark.parametrize("sizes", [(0, 8, 8), (2, 0, 8), (2, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", ATTENTION)
def test_attention_without_heads_or_width_is_refused(operator, backend, sizes):
    heads, qk_dim, v_dim = sizes
    with pytest.raises(ValueError, match=f"at least 1; got H {heads}, dqk {qk_dim}, dv {v_dim}"):
        operator(**inputs(*sizes), scale=1.0, backend=backend)


@pytest.mark.parametrize("heads", [0, 2])
def test_kernels_survive_having_no_heads(heads):
    """Beyond the operators' own checks: a division by the number of heads would end the process."""
    if any(kernel.library() is None for kernel in (HSTU, FUXI, SOFTMAX)):
        pytest.skip("needs a C++ compiler")
    tensors = inputs(heads).values()
    related = AttentionInputs(*tensors, None, None, None, None, scale=1.0, alpha=1.0, time_unit=1.0, time_divisor=1.0)
    hstu = HSTUKernel(HSTU.library(), related)
    fuxi = FuXiKernel(FUXI.library(), related, functional=False)
    outputs = [hstu.forward(), fuxi.forward(), SoftmaxKernel(SOFTMAX.library(), *tensors, 1.0).forward()[0]]
    assert [list(out.shape) for out in outputs] == [[4, heads, 8], [4, heads, 24], [4, heads, 8]]


@pytest.mark.parametrize("name", ["position_bias", "time_bias"])
@pytest.mark.parametrize("operator", BIASED)
def test_tables_are_floats(operator, name):
    bias = biases()
    bias[name] = bias[name].long()
    with pytest.raises(ValueError, match=f"{name} is a float table of one dimension.*got torch.int64"):
        operator(**inputs(), scale=1.0, **bias)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["time_unit", "time_divisor"])
@pytest.mark.parametrize("operator", BIASED)
def test_bucketing_is_positive(operator, name, value):
    with pytest.raises(ValueError, match=f"{name} {value}.* must be positive"):
        operator(**inputs(), scale=1.0, **biases(), **{name: value})


def test_operators_run_where_there_is_no_autocast():
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with without_autocast(here):
            assert not torch.is_autocast_enabled("cpu")
        with without_autocast(there):  # which PyTorch's autocast does not know
            assert torch.is_autocast_enabled("cpu")
    assert normalised(torch.zeros(2, 3, device="meta"), backend="auto").shape == (2, 3)


@pytest.mark.parametrize("operator", ATTENTION)
def test_checks_pass_in_a_whole_graph(operator):
    compiled = torch.compile(lambda **tensors: operator(**tensors, scale=1.0), fullgraph=True, backend="eager")
    tensors = inputs()
    assert torch.equal(compiled(**tensors), operator(**tensors, scale=1.0))
