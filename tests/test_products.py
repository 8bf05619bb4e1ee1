"""Products of 16 bits are the float64 product, rounded, whether the CPU has instructions for them or not."""

import pytest
import torch
import torch.nn.functional as F

from dinfer.families import products
from dinfer.families.products import FEW, in_hardware, linear, product

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[True, False], ids=["in hardware", "in loops"])
def hardware(request, monkeypatch):
    monkeypatch.setattr(products, "in_hardware", lambda device, dtype: request.param or dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("rows", [1, FEW, 3 * FEW])
def test_products_are_the_exact_ones_rounded(hardware, dtype, rows):
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 96), (64, 96), (64,)))
    mixed = torch.randn(rows, 64).to(dtype)
    for made, exact in (
        (linear(x, weight), F.linear(x.double(), weight.double())),
        (linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())),
        (product(mixed, weight), mixed.double() @ weight.double()),
    ):
        assert made.dtype == dtype
        eps = torch.finfo(dtype).eps  # of the sum of some 100 terms of size 1; float16 loops may sum in float16
        torch.testing.assert_close(made.double(), exact, rtol=2 * eps, atol=100 * eps)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_without_instructions_the_sum_is_rounded_once(monkeypatch, dtype):
    monkeypatch.setattr(products, "in_hardware", lambda device, dtype: False)
    x, weight = torch.randn(FEW, 96).to(dtype), torch.randn(64, 96).to(dtype)
    exact = F.linear(x.double(), weight.double())
    for made in (linear(x, weight), product(x, weight.T.contiguous())):
        torch.testing.assert_close(made.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


def test_float32_and_gpus_need_no_detour():
    assert in_hardware("cpu", torch.float32)
    assert all(in_hardware("cuda", dtype) for dtype in HALVES)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="this CPU has more, or less, than AVX2")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_avx2_has_no_products_of_16_bits(dtype):
    assert not in_hardware("cpu", dtype)
