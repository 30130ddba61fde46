"""
The forward loops of other Triton kernels, to be compiled and counted like our own: plain fused attention, and
FlexAttention under a block mask. They are never run.
"""

import triton
import triton.language as tl


@triton.jit
def fused_step(acc, top, total, q, k, v, keep, scale):
    """One block of keys of fused attention."""
    s = tl.dot(q, tl.trans(k)) * scale
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    if keep is not None:
        new = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(top - new)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, new, total


@triton.jit
def plain_kernel(
    query, key, value, output, q_n, k_n, v_n, length, scale, HEAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fused attention without a mask, one head, n a multiple of the blocks."""
    rows, lane, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD)
    q = tl.load(query + rows[:, None] * q_n + d[None, :])
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + lane
        k = tl.load(key + columns[:, None] * k_n + d[None, :])
        v = tl.load(value + columns[:, None] * v_n + d[None, :])
        acc, top, total = fused_step(acc, top, total, q, k, v, None, scale)
    tl.store(output + rows[:, None] * HEAD + d[None, :], (acc / total[:, None]).to(output.dtype.element_ty))


@triton.jit
def flex_kernel(
    query, key, value, output, counts, blocks, full_counts, full_blocks, table, first, last, q_n, k_n, v_n, length,
    scale, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """
    What FlexAttention's template becomes with our block mask, one head, n a multiple of the blocks: a loop over the
    partial blocks, whose entries are looked up in `table` (n, n) int8, and one over the full blocks. SPARSE is the
    side of the blocks of the mask.
    """
    rows, lane, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD)
    MULTIPLE: tl.constexpr = SPARSE // BLOCK_N
    line = tl.program_id(0) * BLOCK_M // SPARSE
    blocks += line * (length // SPARSE)
    full_blocks += line * (length // SPARSE)
    q = tl.load(query + rows[:, None] * q_n + d[None, :])
    start_token, end_token = tl.load(first), tl.load(last)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    columns = tl.load(blocks) * SPARSE + lane
    for step in range(0, tl.load(counts + line) * MULTIPLE):
        k = tl.load(key + columns[:, None] * k_n + d[None, :])
        v = tl.load(value + columns[:, None] * v_n + d[None, :])
        keep = tl.load(table + rows[:, None] * length + columns[None, :]) != 0
        keep |= (rows == start_token)[:, None] | (columns == start_token)[None, :]
        keep |= (rows == end_token)[:, None] | (columns == end_token)[None, :]
        acc, top, total = fused_step(acc, top, total, q, k, v, keep, scale)
        jump = (tl.load(blocks + (step + 1) // MULTIPLE) - tl.load(blocks + step // MULTIPLE)) * SPARSE
        columns += tl.where((step + 1) % MULTIPLE == 0, jump - SPARSE + BLOCK_N, BLOCK_N)
    columns = tl.load(full_blocks) * SPARSE + lane
    for step in range(0, tl.load(full_counts + line) * MULTIPLE):
        k = tl.load(key + columns[:, None] * k_n + d[None, :])
        v = tl.load(value + columns[:, None] * v_n + d[None, :])
        acc, top, total = fused_step(acc, top, total, q, k, v, None, scale)
        jump = (tl.load(full_blocks + (step + 1) // MULTIPLE) - tl.load(full_blocks + step // MULTIPLE)) * SPARSE
        columns += tl.where((step + 1) % MULTIPLE == 0, jump - SPARSE + BLOCK_N, BLOCK_N)
    tl.store(output + rows[:, None] * HEAD + d[None, :], (acc / total[:, None]).to(output.dtype.element_ty))
