"""What the loops of a kernel consist of, on PTX written by hand."""

import pytest

from benchmarks.shared.ptx import matrix_loops


def loop(waiting, order="wait compute copy"):
    """A kernel with one loop of two matrix instructions and two groups of copies a step."""
    parts = {
        "wait": f"cp.async.wait_group {waiting};\nbar.sync 0;",
        "compute": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2}, {%r1}, {%r2}, {%f1, %f2};\n" * 2,
        "copy": "cp.async.cg.shared.global [ %r3 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;\ncp.async.commit_group;\n" * 2,
    }
    body = "\n".join(parts[part] for part in order.split())
    return f"""
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0)
{{
    .reg .pred %p<3>;
    cp.async.commit_group;
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
    {body}
    ex2.approx.ftz.f32 %f3, %f4;
    fma.rn.f32 %f5, %f6, %f7, %f8;
    @%p1 add.s64 %rd1, %rd1, 128;
    selp.b32 %r4, %r5, %r6, %p1;
    mov.b32 %r7, %r8;
    @%p2 bra $L__BB0_1;
$L__BB0_2:
    ret;
}}"""


def test_counts():
    (found,) = matrix_loops(loop(1))
    assert found.waits == (1,)
    wanted = {"matrix": 2, "copy": 2, "special": 1, "float": 1, "alu": 3, "free": 1, "group": 4}
    assert dict(found.counts) == wanted  # the addition on 64 bits counts twice
    assert found.flops(4) == 4 * 2 * (2 * 16 * 8 * 16)


@pytest.mark.parametrize(
    "waiting, order, ahead",
    [
        (0, "wait compute copy", 0),  # the copies of this step are waited for at once in the next
        (1, "wait compute copy", 0),
        (2, "wait compute copy", 1),  # those of the step before
        (4, "wait compute copy", 2),
        (0, "wait copy compute", 1),
        (0, "copy wait compute", 0),
        (2, "copy wait compute", 1),
    ],
)
def test_how_long_copies_are_under_way(waiting, order, ahead):
    assert matrix_loops(loop(waiting, order))[0].ahead == ahead


def test_only_innermost_loops_with_matrix_instructions():
    inner = loop(0)
    outer = inner.replace("$L__BB0_1:", "$L__BB0_9:\n$L__BB0_8:\nadd.s32 %r1, %r1, 1;\nbra.uni $L__BB0_8;\n$L__BB0_1:")
    outer = outer.replace("$L__BB0_2:", "@%p1 bra $L__BB0_9;\n$L__BB0_2:")
    assert matrix_loops(outer) == matrix_loops(inner)
    assert not matrix_loops(inner.replace("mma.sync", "madd.sync"))


def test_warp_groups():
    group = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
    ptx = loop(0).replace("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", group)
    assert matrix_loops(ptx)[0].flops(8) == 2 * 2 * (2 * 64 * 64 * 16)
