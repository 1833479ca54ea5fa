"""The counter of launches, on programs whose counts are known."""

import pathlib

import pytest

from benchmarks.common import roofline
from benchmarks.common.hlo_launches import launches

HERE = pathlib.Path(__file__).parent
# Two products in a loop of five, one of which a fusion hides, and an update of one row in place.
GPU = (HERE / "launches_gpu.hlo").read_text()

TPU = (HERE / "launches_tpu.hlo").read_text()


def named(text):
    return {launch.name: launch for launch in launches(text)}


def test_a_loop_counts_as_often_as_it_runs():
    found = named(GPU)
    assert {name: launch.count for name, launch in found.items()} == {
        "f": 5,
        "g": 5,
        "copied": 1,
        "out": 1,
    }


def test_products_count_by_the_type_that_they_multiply():
    found = named(GPU)
    assert found["f"].flops == {"bf16": 2 * 64 * 16 * 32}
    assert found["g"].flops == {"f32 highest": 2 * 64 * 64 * 32}
    at_default = GPU.replace('"HIGHEST","HIGHEST"', '"DEFAULT","DEFAULT"')
    assert named(at_default)["g"].flops == {"f32 default": 2 * 64 * 64 * 32}
    thrice = GPU.replace("ALG_UNSET", "ALG_DOT_BF16_BF16_F32_X3")
    assert named(thrice)["g"].flops == {"bf16": 3 * 2 * 64 * 64 * 32}


def test_bytes_are_what_main_memory_moves():
    found = named(GPU)
    assert found["f"].moved == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    assert found["g"].moved == 4 * (
        2 * 64 * 32 + 64 * 64
    )  # without the library's scratch space
    assert found["out"].moved == 4 * (32 + 32) + 4  # the row, twice, and its number
    tpu = named(TPU)
    assert tpu["start"].moved == 2 * 3 * 64 * 32  # the other end is on the chip
    assert tpu["start"].asynchronous
    assert tpu["c"].moved == 2 * 3 * 64 * 64


def test_a_tpu_s_convolution_counts_as_the_product_that_it_is():
    (product,) = (launch for launch in launches(TPU) if launch.flops)
    assert product.flops == {"bf16": 2 * 3 * 64 * 64 * 32}
    assert product.cycles == 1500


def test_a_loop_without_a_length_is_an_error():
    with pytest.raises(ValueError, match="The length of the loop loop is not known"):
        launches(GPU.replace("%five = s32[] constant(5)", "%five = s32[] add(%i, %i)"))


def of_sizes(m, k, n):
    """The program with a product of other sizes."""
    text = GPU.replace("64,32", f"{m},{k}").replace("32,16", f"{k},{n}")
    return text.replace("64,16", f"{m},{n}")


def test_a_large_product_takes_its_flops_and_a_copy_its_bytes():
    h100 = roofline.ROOFLINES["H100"].pessimistic
    large = of_sizes(8448, 4096, 8192)
    seconds = h100.seconds(named(large)["f"])
    arithmetic = 2 * 8448 * 8192 * 4096 / (h100.efficiency * 990e12)
    assert seconds == pytest.approx(
        arithmetic + 32 * h100.round + h100.gap
    )  # 66 x 64 tiles: 32 rounds of 132
    copied = named(large)["copied"]
    assert h100.seconds(copied) == pytest.approx(
        2 * 4 * 8448 * 4096 / (0.85 * 3.35e12) + h100.gap
    )


def test_a_small_product_pays_for_a_whole_round():
    h100 = roofline.ROOFLINES["H100"].pessimistic
    small = of_sizes(1024, 1024, 1024)
    full = (
        2 * 1024**3 / (h100.efficiency * 990e12) * 132 / 64
    )  # 64 tiles on 132 multiprocessors
    assert h100.seconds(named(small)["f"]) == pytest.approx(
        full + h100.round + h100.gap
    )


def test_launches_that_differ_in_name_and_origin_alone_share_a_kernel():
    found = named(GPU)
    again = named(GPU.replace("%f = ", "%another = ").replace("(%f,", "(%another,"))
    assert again["another"].kernel == found["f"].kernel
    assert len({launch.kernel for launch in found.values()}) == len(found)
    assert named(GPU.replace("64,16", "32,16"))["f"].kernel != found["f"].kernel
