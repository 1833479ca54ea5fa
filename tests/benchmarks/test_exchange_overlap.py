"""The share of an exchange that is hidden, in schedules whose answer is known."""

import pytest

from benchmarks.common import roofline
from benchmarks.tpu import exchange_overlap as overlap

TPU = overlap.TARGETS["v5e:4x4"]
# Bfloat16: a tenth of a second on the links, and compute for six hundredths.
SIZE = int(0.05 * TPU.bytes_a_second)
CYCLES = int(0.06 * roofline.ROOFLINES["v5e"].optimistic.clock)

SCHEDULE = f"""HloModule step, is_scheduled=true

%one (a: bf16[{SIZE}]) -> bf16[{SIZE}] {{
  %a = bf16[{SIZE}]{{0}} parameter(0)
  ROOT %sent = bf16[{SIZE}]{{0}} all-to-all(%a), replica_groups={{{{0,1}}}}
}}

%body (b: f32[8]) -> f32[8] {{
  %b = f32[8]{{0}} parameter(0)
  ROOT %work = f32[8]{{0}} copy(%b), backend_config={{"estimated_cycles":"{CYCLES}"}}
}}

ENTRY %main (x: bf16[{SIZE}], y: f32[8]) -> bf16[{SIZE}] {{
  %x = bf16[{SIZE}]{{0}} parameter(0)
  %y = f32[8]{{0}} parameter(1)
  %start = ((bf16[{SIZE}]{{0}}), bf16[{SIZE}]{{0}}, s32[]) async-start(%x), calls=%one
  %loop = f32[8]{{0}} while(%y), body=%body, backend_config={{"known_trip_count":{{"n":"1"}}}}
  ROOT %done = bf16[{SIZE}]{{0}} async-done(%start)
}}
"""


def shares(text, target=TPU):
    found = overlap.exchanges(text, target)
    return [round(1 - one.waited / one.seconds, 3) for one in found], overlap.summary(found)


def test_compute_hides_what_it_is_long_enough_for():
    each, row = shares(SCHEDULE)
    assert each == [0.6]
    assert row["hidden_share"] == pytest.approx(0.6)
    assert row["asynchronous"] == row["all_to_alls"] == 1
    assert row["mebibytes"] == pytest.approx(2 * SIZE / 2**20)
    assert shares(SCHEDULE.replace('"n":"1"', '"n":"2"'))[0] == [1.0]


def test_a_synchronous_one_hides_nothing():
    each, row = shares(SCHEDULE.replace("async-start(%x), calls=%one", "all-to-all(%x)"))
    assert each == [0.0]
    assert row["asynchronous"] == 0


def test_two_share_the_links():
    twice = SCHEDULE.replace(
        "  %loop", f"  %next = (bf16[{SIZE}]{{0}}, bf16[{SIZE}]{{0}}) all-to-all-start(%x)\n  %loop"
    ).replace("  ROOT %done", f"  %last = bf16[{SIZE}]{{0}} all-to-all-done(%next)\n  ROOT %done")
    each, row = shares(twice)
    # The second ends after .2 s and compute hides .06 of them; nothing is left to wait for the first.
    assert each == [pytest.approx(-0.4), 1.0]
    assert row["hidden_share"] == pytest.approx(0.3)


def test_on_a_gpu_a_roofline_says_how_long_the_compute_takes():
    gpu = overlap.TARGETS["8 x H100"]
    model = roofline.ROOFLINES["H100"].optimistic
    # A copy of so many floats, read and written once, takes as long as six tenths of the transfer.
    seconds = 0.6 * 2 * SIZE / gpu.bytes_a_second
    floats = int(seconds * model.memory * model.memory_efficiency / 8)
    copy = SCHEDULE.replace("f32[8]", f"f32[{floats}]").replace("%loop = ", "%copy = ")
    copy = copy.replace(copy[copy.index("while(%y)") : copy.index("\n  ROOT %done")], "copy(%y)")
    each, _ = shares(copy, gpu)
    assert each == [pytest.approx(0.6, abs=0.01)]
