"""
The ways to run attention that are compared: a function each, under the same mask, padding and dropout.

Letters: B batch, H heads, n length, d head size.

All take query, key and value in the host's layout, `(B, n, H, d)` in memory seen as `(B, H, n, d)`, and give the
host's `(B, n, H, d)`, contiguous. Masks are brought into the form that a system reads beforehand, as a model does once
for all its layers.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sparsebert import SparseMask
from sparsebert.attention.backends import prepared, run_backend
from sparsebert.attention.capabilities import Request
from sparsebert.attention.choosing.choice import ATTENTION_NAMES, automatic, choose_backend
from sparsebert.attention.mask_inputs import MaskInputs

from .masks_by_name import build_mask, kept
from .measure import WrongResult, check_close, check_dropout


HEAD_SIZE = 64
# Scores of a chunk of heads in float64, at most.
CHUNK = 2**24


@dataclass
class Case:
    """Inputs and mask of one cell; `keep` is what the mask keeps, `(B or 1, H, n, n)`."""

    mask_name: str
    mask: SparseMask
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    keep: torch.Tensor
    padding: torch.Tensor | None

    @property
    def inputs(self):
        return self.query, self.key, self.value

    def first_sequence(self):
        """The same with a batch of one."""
        inputs = {name: getattr(self, name)[:1].detach().requires_grad_() for name in ("query", "key", "value")}
        padding = None if self.padding is None else self.padding[:1]
        return replace(self, **inputs, grad=self.grad[:1], keep=self.keep[:1], padding=padding)

    def request(self, gradients, dropout):
        """The [`Request`] of this case."""
        batch, num_heads, length, _ = self.query.shape
        device, padded = self.query.device.type, self.padding is not None
        return Request(
            device, self.query.dtype, batch, num_heads, length, length, HEAD_SIZE, dropout > 0, gradients, padded
        )


def make_case(mask_name, length, options, padded=False):
    """Random inputs under a mask."""
    generator = torch.Generator().manual_seed(options.seed)
    batch = max(1, options.tokens // length)
    mask = build_mask(mask_name, length, options.heads, options.seed)
    padding = None
    if padded:
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        padding = torch.arange(length) < lengths
    shape = (batch, length, options.heads, HEAD_SIZE)
    drawn = [torch.randn(shape, generator=generator).to(options.device, options.dtype) for _ in range(4)]
    inputs = [tensor.transpose(1, 2).requires_grad_() for tensor in drawn[:3]]
    grad = drawn[3] if padding is None else drawn[3] * padding[:, :, None, None].to(options.device)
    keep = kept(mask, length, padding).to(options.device)
    return Case(mask_name, mask, *inputs, grad, keep, None if padding is None else padding.to(options.device))


def _bias(case):
    # Finite, so that padded queries, which nothing reads, are no NaN.
    bias = torch.zeros(case.keep.shape, dtype=case.query.dtype, device=case.keep.device)
    return bias.masked_fill_(~case.keep, torch.finfo(bias.dtype).min)


def _eager(query, key, value, bias, dropout):
    scores = (query @ key.mT).float() * query.shape[-1] ** -0.5
    weights = (scores if bias is None else scores + bias).softmax(-1).to(value.dtype)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def eager(case, gradients, dropout):
    """Plain PyTorch, the whole score matrix in memory."""
    bias = _bias(case)
    return lambda *inputs: _eager(*inputs, bias, dropout), [bias]


def chosen_kernel(query, key, value, mask=None, dropout=0.0):
    """The kernel that PyTorch's attention takes by itself."""
    return SDPBackend(torch._fused_sdp_choice(query, key, value, mask, dropout, False)).name


def _sdpa(mask, dropout):
    def run(query, key, value):
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return output.transpose(1, 2).contiguous()

    return run


def sdpa(case, gradients, dropout):
    """PyTorch's fused attention with a bool mask."""
    return _sdpa(case.keep, dropout), [case.keep]


def sdpa_float(case, gradients, dropout):
    """The same with an additive mask made beforehand."""
    bias = _bias(case)
    return _sdpa(bias, dropout), [bias]


def sdpa_unmasked(case, gradients, dropout):
    """The same without a mask: another result, and what a dense model pays."""
    return _sdpa(None, dropout), []


def _forced(backend, dropout):
    run = _sdpa(None, dropout)

    def forced(*inputs):
        with sdpa_kernel(backend):
            return run(*inputs)

    return forced, []


def flash(case, gradients, dropout):
    """The flash kernel of PyTorch without a mask."""
    if case.query.device.type == "cuda" and case.query.dtype == torch.float32:
        raise ValueError("flash attention needs bfloat16 or float16")
    return _forced(SDPBackend.FLASH_ATTENTION, dropout)


def cudnn(case, gradients, dropout):
    """The kernel of cuDNN without a mask."""
    with torch.set_grad_enabled(gradients):
        request = torch.backends.cuda.SDPAParams(*case.inputs, None, dropout, False, False)
        if not torch.backends.cuda.can_use_cudnn_attention(request):
            raise ValueError("cuDNN has no attention for this")
    return _forced(SDPBackend.CUDNN_ATTENTION, dropout)


def flex_flash(case, gradients, dropout):
    """FlexAttention in the kernels of FlashAttention 4 (the package flash-attn-4), under the mask in tiles of 128."""
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        raise ValueError(
            "FlexAttention's backend FLASH needs the package flash-attn-4: pip install --pre flash-attn-4"
        )
    if dropout:
        raise ValueError("FlexAttention has no attention dropout")
    inputs = _prepared("sparse_flex", case, gradients, dropout)
    if inputs.rest[0] is not None:
        raise ValueError("this system has no rest")
    attention = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def run(query, key, value):
        options = {"BACKEND": "FLASH"}
        output = attention(query, key, value, block_mask=inputs.compiled[0], kernel_options=options)
        return output.transpose(1, 2).contiguous()

    return run, _forms(inputs)


def _forms(inputs):
    """The tensors that hold the mask of a backend of ours."""
    forms = inputs.compiled[0]
    if forms is None:
        forms = inputs.bias
    elif isinstance(forms, BlockMask):
        captured = forms.mask_mod.__closure__ or ()
        forms = [*vars(forms).values(), *(cell.cell_contents for cell in captured)]
    return [form for form in forms if isinstance(form, torch.Tensor)]


def _prepared(name, case, gradients, dropout):
    """The mask of a case in the form that a backend of ours reads."""
    request = case.request(gradients, dropout)
    shape = (request.batch, request.num_heads, request.num_queries, request.num_keys, request.head_size)
    chosen = choose_backend(name, case.mask, request.device, request.dtype, *shape, dropout, gradients, request.padded)
    sizes = (request.num_queries, request.num_keys, case.query.device)
    return prepared(MaskInputs(chosen, *sizes, case.mask, case.padding, dtype=request.dtype)).for_layer(0)


def _sparse(name):
    def build(case, gradients, dropout):
        inputs = _prepared(name, case, gradients, dropout)
        return lambda *tensors: run_backend(*tensors, inputs, HEAD_SIZE**-0.5, dropout)[0], _forms(inputs)

    return build


# A system is a function `(case, gradients, dropout) -> (function of query, key and value, tensors of its mask)`, and
# raises a ValueError for what it cannot do.
SYSTEMS = {
    "eager": eager,
    "sdpa": sdpa,
    "sdpa_float": sdpa_float,
    "sdpa_unmasked": sdpa_unmasked,
    "flash": flash,
    "cudnn": cudnn,
    "flex_flash": flex_flash,
} | {name: _sparse(name) for name in ATTENTION_NAMES}
DENSE = ("eager", "sdpa", "sdpa_float")
UNMASKED = ("sdpa_unmasked", "flash", "cudnn")


def auto_choice(case, gradients, dropout):
    """Name and reason of what `sparse_auto` chooses."""
    return automatic(case.mask, case.request(gradients, dropout))


def _exact(case, keep):
    """Output `(B, n, H, d)` and gradients `(B, H, n, d)` in float64; `keep` is `None` without a mask."""
    batch, num_heads, length, _ = case.query.shape
    step = max(1, CHUNK // length**2)
    grad = case.grad.transpose(1, 2)
    results = [torch.empty(case.query.shape, dtype=torch.float64, device=grad.device) for _ in range(4)]
    pairs = torch.cartesian_prod(torch.arange(batch), torch.arange(num_heads)).to(grad.device)
    for b, h in ((chunk[:, 0], chunk[:, 1]) for chunk in pairs.split(step)):
        query, key, value = (tensor[b, h].detach().double().requires_grad_() for tensor in case.inputs)
        scores = query @ key.mT * HEAD_SIZE**-0.5  # (chunk, n, n)
        if keep is not None:
            live = keep[b if len(keep) > 1 else torch.zeros_like(b), h]
            scores = scores.masked_fill(~live, -torch.inf)
        output = scores.softmax(-1).nan_to_num() @ value
        gradients = torch.autograd.grad(output, (query, key, value), grad[b, h].double())
        for result, values in zip(results, (output.detach(), *gradients), strict=True):
            result[b, h] = values.nan_to_num()
    return [results[0].transpose(1, 2), *results[1:]]


class Gate:
    """Refuses systems whose results are wrong, on the very inputs that are timed."""

    def __init__(self, case):
        self.case = case
        self._references = {}

    def _results(self, function, gradients):
        case = self.case
        with torch.set_grad_enabled(gradients):
            output = function(*case.inputs)
        values = [output.detach()]
        if gradients:
            values += torch.autograd.grad(output, case.inputs, case.grad)
        if case.padding is not None:
            values[0] = values[0] * case.padding[:, :, None, None]
        return dict(zip(("output", "query", "key", "value"), values, strict=False))

    def _reference(self, masked):
        """Float64, and plain PyTorch."""
        if masked not in self._references:
            case = self.case
            truth = _exact(case, case.keep if masked else None)
            if case.padding is not None:
                truth[0] = truth[0] * case.padding[:, :, None, None]
            bias = _bias(case) if masked else None
            plain = self._results(lambda *inputs: _eager(*inputs, bias, 0.0), True)
            self._references[masked] = dict(zip(plain, truth, strict=True)), plain
        return self._references[masked]

    def check(self, name, gradients=True, dropout=0.0):
        """Compare what a system computes with an exact result."""
        case = self.case
        label = f"{name} ({case.mask_name}, {case.query.shape[2]} tokens, {case.query.dtype})"
        function, _ = SYSTEMS[name](case, gradients, dropout)
        if dropout:
            live = case.keep.any(-1).transpose(1, 2).expand(case.grad.shape[:3])
            return check_dropout(label, function, *case.inputs, live)
        results = self._results(function, gradients)
        if not all(result.isfinite().all() for result in results.values()):
            raise WrongResult(f"{label}: not finite")
        return check_close(label, results, *self._reference(name not in UNMASKED))
