"""How exact a kernel must be: the 2x rule."""

import torch


def with_gradients(function, inputs, grad, dtype=None):
    """Output of a function and the gradients of all inputs, in `dtype` if it is given; inputs keep their strides."""
    leaves = [each.detach().to(dtype or each.dtype).requires_grad_() for each in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def assert_as_good_as_plain(results, plain, truth, about="", units=4):
    """
    The 2x rule: at most twice the error of plain PyTorch in the same dtype (`plain`) against float64 (`truth`), plus a
    few units in the last place. `results` may be the output alone.
    """
    assert len(results) in (1, len(truth)) and len(plain) == len(truth)
    # Relative to the largest number, since a gradient of 0 is a difference of larger numbers.
    unit = torch.finfo(plain[0].dtype).eps * max(1.0, *(want.abs().max().item() for want in truth))
    for what, (got, other, want) in enumerate(zip(results, plain, truth, strict=False)):
        assert got.dtype == other.dtype and got.isfinite().all(), (about, what)
        error, allowed = ((each - want).abs().max().item() for each in (got, other))
        assert error <= 2 * allowed + units * unit, (about, what, error, allowed, unit)
