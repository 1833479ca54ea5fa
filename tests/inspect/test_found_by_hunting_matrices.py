"""Which matrices are in a parameter whose parts are normalized together, mixed, or moved by padding."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import muonjax
from tests.inspect.hostile_programs import program
from tests.inspect.test_hostile_programs import answer, described

pytestmark = pytest.mark.promotes("the programs are written as people write them")

B, T, D, H, S = 2, 6, 12, 3, 4
X = jax.ShapeDtypeStruct((B, T, D), "float32")
FUSED: dict[str, Any] = {"w": ((D, 3 * D), "0 | 1 / 3 of 1"), "out": ((D, 1), "an output head")}
ONE: dict[str, Any] = {"w": ((D, D), "0 | 1"), "o": ((D, D), "0 | 1"), "out": ((D, 1), "an output head")}
PROGRAMS = []
HEADS = []  # programs with an attention, of nine heads in one kernel


def rms(z, axis=-1):
    return z * lax.rsqrt(jnp.mean(z * z, axis, keepdims=True) + 1e-6)


def head(p, y):
    return jnp.mean(jnp.tanh(y @ p["out"]) ** 2)


def attend(p, q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return head(p, jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, D))


# Parts that are normalized by themselves, in one call.


@program(X, to=HEADS, **FUSED)
def queries_and_keys_normalized_together(p, x):
    z = (x @ p["w"]).reshape(B, T, 3, H, S)
    qk = rms(z[:, :, :2])
    return attend(p, qk[:, :, 0], qk[:, :, 1], z[:, :, 2])


@program(X, to=HEADS, **FUSED)
def queries_and_keys_concatenated_to_be_normalized(p, x):
    q, k, v = (z.reshape(B, T, H, S) for z in jnp.split(x @ p["w"], 3, -1))
    q, k = jnp.split(rms(jnp.concatenate([q, k], 2)), 2, 2)
    return attend(p, q, k, v)


@program(X, to=HEADS, **FUSED)
def queries_keys_and_values_normalized_together(p, x):
    return attend(p, *jnp.moveaxis(rms((x @ p["w"]).reshape(B, T, 3, H, S)), 2, 0))


@program(X, to=PROGRAMS, **FUSED)
def gates_of_one_norm_each(p, x):
    i, f, g = jnp.moveaxis(rms((x @ p["w"]).reshape(B, T, 3, D)), 2, 0)
    return head(p, jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f))


@program(X, to=PROGRAMS, **FUSED)
def gates_of_one_layer_norm_each(p, x):
    z = (x @ p["w"]).reshape(B, T, 3, D)
    z = z - z.mean(-1, keepdims=True)
    i, f, g = jnp.moveaxis(z / jnp.sqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-6), 2, 0)
    return head(p, jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f))


@program(X, to=PROGRAMS, **FUSED)
def a_softmax_of_each_part(p, x):
    z = jax.nn.softmax((x @ p["w"]).reshape(B, T, 3, D), -1)
    return head(p, z[:, :, 0] * z[:, :, 1] + z[:, :, 2])


@program(X, to=PROGRAMS, w=((D, 3 * D), "0 | 1"), out=((D, 1), "an output head"))
def gates_of_one_norm_for_all(p, x):
    i, f, g = jnp.split(rms(x @ p["w"]), 3, -1)
    return head(p, jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f))


@program(X, to=PROGRAMS, w=((D, 2 * D), "0 | 1"), out=((D, 1), "an output head"))
def a_gate_cut_through_normalized_heads(p, x):
    a, b = jnp.split(rms((x @ p["w"]).reshape(B, T, H, 2 * S)), 2, -1)
    return head(p, (a * jax.nn.sigmoid(b)).reshape(B, T, D))


@program(X, to=PROGRAMS, **FUSED)
def one_part_pooled_over_its_features(p, x):
    q, k, v = jnp.moveaxis((x @ p["w"]).reshape(B, T, 3, H, S), 2, 0)
    y = jnp.tanh(k) * v * q.max(-1, keepdims=True)
    return head(p, y.reshape(B, T, D))


@program(X, to=PROGRAMS, w=((D, D), "0 | 1"), o=((S + 2, D), "0 | 1"), out=((D, 1), "an output head"))
def running_sums_over_the_features(p, x):
    a, b = jnp.split(jnp.cumsum(x @ p["w"], -1), 2, -1)
    return head(p, jax.nn.relu((jnp.tanh(a) * b) @ p["o"]))


@program(X, to=PROGRAMS, w=((D, 2 * D), "0 | 1 / 2 of 1"), out=((D, 1), "an output head"))
def running_sums_over_one_part(p, x):
    a, b = jnp.split(x @ p["w"], 2, -1)
    first, second = jnp.split(jnp.cumsum(a, -1), 2, -1)
    return head(p, jnp.tanh(b) * jnp.tile(jnp.tanh(first) * second, 2))


@program(X, to=PROGRAMS, w=((D, 2 * D), "0 | 1 / 2 of 1"), out=((D, 1), "an output head"))
def running_sums_over_time(p, x):
    a, b = jnp.split(jnp.cumsum(x @ p["w"], 1), 2, -1)
    return head(p, jnp.tanh(a) * b)


@program(
    X, to=PROGRAMS, **dict.fromkeys("wg", ((D, 2 * D), "0 | 1 / 2 of 1")), out=((D, 1), "an output head")
)
def two_sides_gated_before_they_part(p, x):
    """AlphaFold's fused triangle multiplication."""
    left, right = jnp.split((x @ p["w"]) * jax.nn.sigmoid(x @ p["g"]), 2, -1)
    return head(p, jnp.einsum("bid,bjd->bijd", left, right).sum(1))


@program(
    X,
    jax.ShapeDtypeStruct((B, T), "int32"),
    to=PROGRAMS,
    w=((D, 2 * D), "0 | 1 / 2 of 1, 12 times"),
    table=((3, 2 * D), "looked up"),
    out=((D, 1), "an output head"),
)
def two_parts_of_a_sum_with_looked_up_biases(p, x, which):
    """GPT-OSS's experts, whose biases are looked up, with gates beside values."""
    z = x @ p["w"] + p["table"][which]
    return head(p, jax.nn.sigmoid(z[..., ::2]) * jnp.minimum(z[..., 1::2], 7.0))


@program(X, to=PROGRAMS, w=((D, 2 * D), "0 | 1 / 2 of 1"), out=((D, 1), "an output head"))
def a_part_gated_by_what_the_other_makes(p, x):
    a, b = jnp.split(x @ p["w"], 2, -1)
    z = (a * jax.nn.sigmoid(b.mean(1, keepdims=True))).reshape(B, T, 2, D // 2)
    return head(p, jnp.tile(z[:, :, 0] * jnp.tanh(z[:, :, 1]), 2))


# Mixtures of parameters.

BANK: dict[str, Any] = ONE | {"w": ((3, D, D), "1 | 2")}


@program(X, to=PROGRAMS, **BANK)
def a_mean_of_matrices(p, x):
    return head(p, jax.nn.relu(x @ p["w"].mean(0)) @ p["o"])


@program(X, to=PROGRAMS, a=((3,), "multiplied entry by entry"), **BANK)
def a_learned_mixture_of_matrices(p, x):
    w = (jax.nn.softmax(p["a"])[:, None, None] * p["w"]).sum(0)
    return head(p, jax.nn.relu(x @ w) @ p["o"])


@program(X, to=PROGRAMS, g=((D, 3), "0 | 1"), **BANK)
def a_mixture_of_matrices_chosen_by_data(p, x):
    gate = jax.nn.softmax(jnp.tanh(x.mean(1)) @ p["g"])
    w = (gate[:, :, None, None] * p["w"]).sum(1)
    return head(p, jax.nn.relu(jnp.einsum("btd,bdf->btf", x, w)) @ p["o"])


@program(X, to=PROGRAMS, a=((3,), "multiplied entry by entry"), b=((3, D), "added"), **ONE)
def a_learned_mixture_of_biases(p, x):
    b = (jax.nn.softmax(p["a"])[:, None] * p["b"]).sum(0)
    return head(p, jax.nn.relu(x @ p["w"] + b) @ p["o"])


FACTORS: dict[str, Any] = {"u": ((D, 2), "0 | 1"), "v": ((D, 2), "1 | 0"), "o": ONE["o"], "out": ONE["out"]}


@program(X, to=PROGRAMS, **FACTORS)
def two_factors_by_a_sum_of_products(p, x):
    w = (p["u"][:, None, :] * p["v"][None]).sum(-1)
    return head(p, jax.nn.relu(x @ w) @ p["o"])


@program(X, to=PROGRAMS, **FACTORS)
def two_factors_alone(p, x):
    return head(p, jax.nn.relu(x @ (p["u"] @ p["v"].T)) @ p["o"])


@program(X, to=PROGRAMS, g=((D,), "multiplied entry by entry"), **ONE)
def a_matrix_of_normalized_columns(p, x):
    w = p["g"] * p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2, 0))
    return head(p, jax.nn.relu(x @ w) @ p["o"])


@program(X, to=PROGRAMS, n=((D, D), "in a penalty"), **ONE)
def a_penalty_of_columns(p, x):
    norms = jnp.sqrt(jnp.sum(p["n"] ** 2, 0))
    return head(p, jax.nn.relu(x @ p["w"]) @ p["o"]) + 1e-3 * jnp.sum(norms)


@program(X, to=PROGRAMS, g=((D,), "multiplied entry by entry"), **ONE)
def a_gain_before_a_mean_over_time(p, x):
    return head(p, jax.nn.relu((rms(x) * p["g"]).mean(1) @ p["w"]) @ p["o"])


# Padding that cuts.


@program(X, to=HEADS, **FUSED)
def a_shift_by_padding(p, x):
    z = x @ p["w"]
    z = 0.5 * z + 0.5 * lax.pad(z, 0.0, ((0, 0, 0), (1, -1, 0), (0, 0, 0)))
    return attend(p, *(y.reshape(B, T, H, S) for y in jnp.split(z, 3, -1)))


@program(X, to=PROGRAMS, **ONE)
def a_matrix_shifted_by_padding(p, x):
    return head(p, jax.nn.relu(x @ lax.pad(p["w"], 0.0, ((0, 0, 0), (-2, 2, 0)))) @ p["o"])


@program(X, to=PROGRAMS, n=((D, D), "in a penalty"), **ONE)
def padding_that_cuts_all_of_it(p, x):
    nothing = lax.pad(p["n"], 0.0, ((0, 0, 0), (-D - 1, D + 1, 0)))
    return head(p, jax.nn.relu(x @ (p["w"] + nothing)) @ p["o"])


@program(X, to=PROGRAMS, **ONE)
def bits_of_an_activation(p, x):
    y = x @ p["w"]
    odd = lax.bitcast_convert_type(y, jnp.uint8).sum(-1) % 2  # four for each number
    return head(p, jax.nn.relu(y * odd.astype(y.dtype)) @ p["o"])


# Columns and rows in a constant order.

ORDER = np.random.default_rng(0).permutation(D)


@program(X, to=PROGRAMS, **ONE)
def columns_in_a_constant_order(p, x):
    return head(p, jax.nn.relu(x @ p["w"][:, ORDER]) @ p["o"])


@program(X, to=PROGRAMS, **ONE)
def rows_in_a_constant_order(p, x):
    return head(p, jax.nn.relu(x @ p["w"][jnp.asarray(ORDER)]) @ p["o"])


@program(X, to=PROGRAMS, **ONE)
def columns_taken_in_both_orders(p, x):
    w = jnp.take(p["w"], jnp.asarray(ORDER), axis=1)[:, np.argsort(ORDER)]
    return head(p, jax.nn.relu(x @ w) @ p["o"])


@program(X, jax.ShapeDtypeStruct((D,), "int32"), to=PROGRAMS, **ONE | {"w": ((D, D), "looked up")})
def rows_in_an_order_of_data(p, x, order):
    return head(p, jax.nn.relu(p["w"][order]) @ p["o"])


# Products of eight bits, as in quantized training: what they give goes on as whole numbers.


def rounded(x, scale):
    return jnp.clip(jnp.round(x * scale), -127, 127).astype(jnp.int8)


@jax.custom_vjp
def in_eight_bits(x, w):
    sums = lax.dot_general(
        rounded(x, 16), rounded(w, 64), (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sums.astype(jnp.float32) / (16 * 64)


in_eight_bits.defvjp(
    lambda x, w: (in_eight_bits(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, jnp.einsum("...i,...o->io", saved[0], g)),
)


@program(X, to=PROGRAMS, **ONE)
def layers_of_eight_bits(p, x):
    y = in_eight_bits(jax.nn.relu(in_eight_bits(x, p["w"])), p["o"])
    return jnp.mean(in_eight_bits(jnp.tanh(y), p["out"]) ** 2)


@program(X, to=PROGRAMS, e=((7, D), "looked up"), h=((D, 7), "an output head"), **ONE)
def an_index_of_the_largest_ends_a_path(p, x):
    logits = jax.nn.relu(x @ p["w"]) @ p["h"]
    again = jax.nn.one_hot(jnp.argmax(logits, -1), 7) @ p["e"]
    return head(p, again @ p["o"]) - jnp.mean(jax.nn.log_softmax(logits)[..., 0])


@program(X, to=PROGRAMS, u=((D,), "added"), v=((5,), "added"), **ONE)
def a_column_and_a_row_added_up(p, x):
    gain = (p["u"][:, None] + p["v"][None]).sum(-1)
    return head(p, jax.nn.relu((x * gain) @ p["w"]) @ p["o"])


@pytest.mark.parametrize("program", PROGRAMS + HEADS, ids=lambda program: program.fun.__name__)
def test_every_parameter_is_read_as_what_it_does(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parameters that are never used
        read = muonjax.inspect(program.fun, program.params, *program.args)
    found = {name: answer(read.decision(name), right) for name, right in program.expected.items()}
    assert found == program.expected


@pytest.mark.parametrize("program", HEADS, ids=lambda program: program.fun.__name__)
def test_every_head_is_a_matrix(program):
    read = muonjax.inspect(program.fun, program.params, *program.args)
    assert described(read.decision("w").per_head) == "0 | 1 / 9 of 1"


def test_a_norm_of_one_of_two_parts_does_not_join_them():
    """Queries beside gates in one kernel, as Qwen3.5's: a head's queries are normalized, its gates are not."""

    def loss(p, x):
        q, gate = jnp.split(jnp.einsum("btd,dhs->bths", x, p["q"]), 2, -1)
        q = q * jax.lax.rsqrt(jnp.mean(q**2, -1, keepdims=True) + 1e-6)
        return jnp.mean((jnp.einsum("bths,hso->bto", q * jax.nn.sigmoid(gate), p["o"]) @ p["out"]) ** 2)

    shapes = {"q": (12, 3, 8), "o": (3, 4, 12), "out": (12, 12)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    numbers = muonjax.inspect(loss, params, jax.ShapeDtypeStruct((2, 6, 12), jnp.float32)).dimension_numbers()
    assert numbers["q"] == muonjax.FusedDimensionNumbers(0, (1, 2), 2, 2)


@pytest.mark.parametrize("centered", [False, True])
def test_a_table_without_its_mean_is_what_the_table_is(centered):
    """DeBERTa's relative positions: the mean that is subtracted is no parameter of its own."""

    def loss(p, x):
        table = p["table"] - jnp.mean(p["table"], -1, keepdims=True) if centered else p["table"]
        q, k, v = (y.reshape(*y.shape[:-1], H, S) for y in (x @ p["q"], table @ p["k"], table @ p["v"]))
        weights = jax.nn.softmax(jnp.einsum("bqhd,khd->bhqk", q, k))
        return head(p, jnp.einsum("bhqk,khd->bqhd", weights, v).reshape(B, T, D))

    shapes = {"table": (5, D), "q": (D, D), "k": (D, D), "v": (D, D), "out": (D, 1)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = muonjax.inspect(loss, params, X)
    assert program.why("table").startswith("a learned input")
    assert program.dimension_numbers()["v"] == muonjax.MuonDimensionNumbers(0, 1)
    assert [a.problem for a in program.attentions] == [""]


def test_a_convolution_whose_second_operand_is_data_is_left_to_names():
    def loss(p, x):
        y = lax.conv_general_dilated(
            p["conv"]["kernel"], x, (1,), [(2, 2)], dimension_numbers=("HNC", "OHI", "HNC")
        )
        return jnp.mean(jnp.tanh(y) ** 2)

    params = {"conv": {"kernel": jax.ShapeDtypeStruct((3, 5, D), jnp.float32)}}
    decision = muonjax.inspect(loss, params, X).decision("conv/kernel")
    assert decision.by_names
    assert decision.why.startswith("conv_general_dilated: test_found_by_hunting_matrices.py:")
