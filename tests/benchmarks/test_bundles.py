"""Bundles of a schedule, loops unrolled."""

import pytest

from benchmarks.tpu import bundles

# A grid's loop with one inner loop of 3 passes, whose counter goes to 6 by 2.
LISTING = """\
= control target key start
LB: loop body
     0x0   :  { %s1 = inlined_call }
     0x1   :  { %s2 = smov 0 }
     0x2 LB: > { %s9_s3 = sadd.s32 1, %s1_s2 }
     0x3   : > { %v1 = vld }
     0x4 LB: >> { %s7_s4 = sadd.s32 2, %s5_s4 ;; PRODUCTS }
     0x4   : > { moved here by the scheduler }
     0x5   : >> { %p1 = scmp.ge.s32.totalorder %s7_s4, 6 /* loop exit test */ }
     0x6   : > { %p2 = scmp.ge.s32.totalorder %s9_s3, 4 /* loop exit test */ }
     0x7   :  { halt }
"""


@pytest.mark.parametrize(
    ("products", "cycles"),
    [("", 4 + 3 * 2), ("vmatmul.bf16.gmra.mxu0 %v1", 4 + 3 * 4), ("vmatmul.f32.gmra.mxu0 %v1", 4 + 3 * 2)],
)
def test_an_inner_loop_counts_as_often_as_it_runs_and_the_grid_s_loop_once(products, cycles):
    program = bundles.schedule(LISTING.replace("PRODUCTS", products))
    assert sum(loop.once for loop in program.inner) == cycles
