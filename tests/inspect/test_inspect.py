"""`inspect` and `Program` as a user meets them."""

import re
import sys
import warnings
import weakref
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn
from jax.experimental import sparse
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax._inspect.graph import Graph
from tests.inspect.attention import attend, layer, tokens, unrolled, unstacked, weights
from tests.tools.oracles import SHORT
from tests.tools.tiers import thorough
from tests.tools.views import leaf

NUMBERS = muonjax.MuonDimensionNumbers


def mlp(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["out"]) ** 2)


PARAMS = {"up": leaf(8, 16), "bias": leaf(16), "out": leaf(16, 1)}
X = leaf(4, 8)
PROGRAM = muonjax.inspect(mlp, PARAMS, X)
FIXED = np.eye(4, 3, dtype=np.float32)  # a matrix that does not train


def ones(tree):
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), tree)


def test_a_program_stands_for_dimension_numbers():
    params = ones(PARAMS)
    by_program = muonjax.muon(0.1, PROGRAM, newton_schulz=SHORT)
    by_hand = muonjax.muon(
        0.1, {"up": NUMBERS(0, 1), "bias": None, "out": None}, newton_schulz=SHORT
    )
    one, _ = jax.jit(by_program.update)(params, by_program.init(params), params)
    two, _ = jax.jit(by_hand.update)(params, by_hand.init(params), params)
    jax.tree.map(assert_array_equal, one, two)


def test_the_table_says_why_with_the_line_of_the_code():
    line = f"test_inspect.py:{mlp.__code__.co_firstlineno + 1}"
    table = muonjax.tabulate(PARAMS, muonjax.inspect(mlp, PARAMS, X))
    assert f"multiplied along axis 0: {line}" in table
    assert f"added: {line}" in table
    assert f"an output head, as no product follows it: {line}" in table


def test_python_values_stay_as_they_are():
    def loss(params, x, kind, *, double):
        assert (kind, double) == ("mean", True)
        return mlp(params, x) * (2 if double else 1)

    program = muonjax.inspect(loss, PARAMS, X, "mean", double=True)
    assert program.dimension_numbers()["up"] == NUMBERS(0, 1)


def test_nothing_is_computed_with_arrays():
    traced = []

    def loss(params, batch):
        traced.append(
            isinstance(batch["x"], jax.core.Tracer)
            and isinstance(batch["y"], jax.core.Tracer)
        )
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    muonjax.inspect(
        loss,
        {"w": leaf(8, 3)},
        {"x": np.ones((4, 8), "float32"), "y": jnp.ones((4, 3))},
    )
    assert traced
    assert all(traced)


def test_a_program_does_not_keep_the_parameters():
    params = ones(PARAMS)
    program = muonjax.inspect(mlp, params, X)
    up = weakref.ref(params["up"])
    del params
    assert up() is None
    assert program.dimension_numbers()["up"] == NUMBERS(0, 1)


def test_other_sizes_than_those_inspected():
    other = {"up": leaf(32, 64), "bias": leaf(64), "out": leaf(64, 1)}
    assert PROGRAM.dimension_numbers(other) == PROGRAM.dimension_numbers(PARAMS)


def test_parameters_that_were_not_inspected_are_named():
    with pytest.raises(ValueError, match="without the parameters extra"):
        PROGRAM.dimension_numbers({**PARAMS, "extra": leaf(2)})
    stacked = {**PARAMS, "up": leaf(3, *PARAMS["up"].shape)}
    with pytest.raises(ValueError, match=r"without the parameters up \(3, 8, 16\)"):
        muonjax.muon(1e-3, PROGRAM).init(jax.tree.map(jnp.zeros_like, stacked))


def two_layers(params, x):
    for name in ("below", "above"):
        x = layer(x, params[name])
    return jnp.mean((x @ params["out"]) ** 2)


def test_parts_of_a_model_train_with_the_program_of_all_of_it():
    """What another optimizer has is masked for this one; it is not asked for, and the table says so."""
    one = unstacked(jax.tree.map(jnp.asarray, weights()))[0]
    params = {"below": one, "above": one, "out": jnp.ones((tokens().shape[-1], 1))}
    x = tokens()
    program = muonjax.inspect(two_layers, params, x)
    grads = jax.jit(jax.grad(two_layers))(params, x)
    optimizers = {
        "train": muonjax.muon(1e-3, program, newton_schulz=SHORT),
        "frozen": optax.set_to_zero(),
    }
    tx = optax.partition(
        optimizers, {"below": "frozen", "above": "train", "out": "train"}
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert not any(map(np.any, jax.tree.leaves(updates["below"])))
    whole = muonjax.muon(1e-3, program, newton_schulz=SHORT)
    expected, _ = jax.jit(whole.update)(grads, whole.init(params), params)
    chex.assert_trees_all_close(
        updates["above"], expected["above"], rtol=1e-5, atol=1e-8
    )
    for part in (
        {"below": optax.MaskedNode()} | params | {"below": optax.MaskedNode()},
        {"above": one},
    ):
        last = muonjax.tabulate(part, program).splitlines()[-1]
        assert re.fullmatch(
            r"Not among these parameters, so that no attention .*: .*below/q.*\.", last
        )
    assert "Not among" not in muonjax.tabulate(params, program)


def test_nothing_depends_on_the_parameters():
    def constant(params, x):
        return jnp.sum(x)

    with pytest.raises(
        ValueError, match=r"inspect\(constant\): nothing that it returns"
    ):
        muonjax.inspect(constant, PARAMS, X)


def test_exchanged_arguments_are_named():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError) as refused:
        muonjax.inspect(model, mlp, X)
    assert str(refused.value).endswith(
        "the first argument is a Linear; it must be your loss function."
    )
    with pytest.raises(
        TypeError, match=r"come later: value_and_grad\(fun\)\(params, batch\)"
    ):
        muonjax.value_and_grad(mlp, PARAMS, X)
    with pytest.raises(
        TypeError,
        match=r"^muon\(learning_rate=.* or a schedule; the program is the second argument",
    ):
        muonjax.muon(muonjax.inspect(mlp, PARAMS, X), 1e-3)


def test_unused_parameters_are_named_once():
    with pytest.warns(
        UserWarning,
        match=r"inspect\(mlp\): .* no gradient, go to Adam: spare \(never used\)",
    ):
        muonjax.inspect(mlp, {**PARAMS, "spare": leaf(3, 3)}, X)


def test_parameters_in_a_penalty_alone_are_told_from_those_that_are_never_used():
    def loss(params, x):
        return mlp(params, x) + 0.1 * sum(
            jnp.sum(p**2) for p in jax.tree.leaves(params)
        )

    with pytest.warns(
        UserWarning,
        match=r"no gradient, go to Adam: spare \(in no product with data that was followed: .*test_inspect.py:\d+\)",
    ):
        program = muonjax.inspect(loss, {**PARAMS, "spare": leaf(3, 3)}, X)
    assert program.dimension_numbers()["spare"] is None


@pytest.mark.parametrize("penalty_first", [False, True])
def test_a_penalty_that_is_not_followed_decides_nothing_about_a_bias(penalty_first):
    def loss(params, x):
        matrix = params["bias"].reshape(4, 4)
        before = jnp.linalg.det(matrix) if penalty_first else 0.0
        error = mlp(params, x)
        after = 0.0 if penalty_first else jnp.linalg.det(matrix)
        return before + error + after

    decision = muonjax.inspect(loss, PARAMS, X).decision("bias")
    assert decision.why.startswith("added: ")
    assert not decision.by_names


def test_a_parameter_before_whole_numbers_has_no_gradient():
    def loss(params, x):
        chosen = (x @ params["q"]).astype(jnp.int32) % 16
        return mlp(params, x) + jnp.mean(params["table"][chosen] ** 2)

    tree = {**PARAMS, "q": leaf(8, 4), "table": leaf(16, 3)}
    with pytest.warns(UserWarning, match=r"q \(no gradient comes back to it: "):
        muonjax.inspect(loss, tree, X)


def test_a_parameter_under_stop_gradient_is_named_and_keeps_its_value():
    def loss(params, x):
        return mlp(jax.lax.stop_gradient(params) | {"out": params["out"]}, x)

    with pytest.warns(
        UserWarning,
        match=r"no gradient, go to Adam: .*\(no gradient comes back to it: .*\d\)",
    ):
        program = muonjax.inspect(loss, PARAMS, X)
    params = ones(PARAMS)
    optimizer = muonjax.muon(1.0, program, weight_decay=0.5)
    grads = jax.grad(loss)(params, ones(X))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert {name for name, update in updates.items() if (update == 0).all()} == {
        "up",
        "bias",
    }


def inspected(loss, params):
    """The program, and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = muonjax.inspect(loss, params, X)
    return program, [str(warning.message) for warning in caught]


LABELS = np.array([[0], [1], [2], [1]])


def cross_entropy(logits):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS, -1))


def critic(actions):
    return jnp.mean((jnp.tanh(actions @ FIXED) @ FIXED.T) ** 2)


@pytest.mark.parametrize(
    ("after", "is_doubtful"),
    [
        # A frozen layer or head, or a transform of the outputs.
        (lambda y: cross_entropy(y @ FIXED), True),
        (lambda y: jnp.mean(y**2), False),
        # An actor's loss, of its actions and of what a critic says of them.
        (lambda y: jnp.mean(y**2 + critic(y)), True),
        # Experts that do not train, or features of each example.
        (lambda y: jnp.mean(jnp.einsum("btd,bdf->btf", y[None], FIXED[None])), True),
        (
            lambda y: jnp.mean(y @ jax.random.normal(jax.random.key(0), (4, 3))),
            True,
        ),
    ],
)
def test_a_matrix_before_an_array_that_may_be_a_transform_of_the_outputs_is_named(
    after, is_doubtful
):
    params = {"up": leaf(8, 16), "out": leaf(16, 4)}

    def loss(p, x):
        return after(jnp.tanh(x @ p["up"]) @ p["out"])

    _, messages = inspected(loss, params)
    named = ["out (a hidden layer, or an output head: " in text for text in messages]
    assert named == [True] * is_doubtful


def resized(table):
    return jax.image.resize(table.reshape(7, 7, 8), (5, 6, 8), "bicubic").reshape(30, 8)


def mixture(mixed):
    def loss(p, x):
        y = mixed(jax.nn.softmax(x @ p["r"]), x, p["w"])
        return jnp.mean((jax.nn.relu(y) @ p["out"]) ** 2)

    return loss, {"r": leaf(8, 2), "w": leaf(2, 8, 16), "out": leaf(16, 4)}


def of_features(r, x, w):
    return jnp.einsum("bed,edf->bf", jnp.einsum("be,bd->bed", r, x), w)


def of_outputs(r, x, w):
    return jnp.einsum("be,bef->bf", r, jnp.einsum("bd,edf->bef", x, w))


def of_kernels(r, x, w):
    return jnp.einsum("bd,bdf->bf", x, jnp.einsum("be,edf->bdf", jnp.log(r), w))


def of_convolutions(r, x, w):
    kernels = jnp.einsum("be,edf->bfd", jnp.log(r), w).reshape(64, 8, 1)
    images = x.reshape(1, 32, 1)
    y = jax.lax.conv_general_dilated(
        images, kernels, (1,), "SAME", feature_group_count=4
    )
    return y.reshape(4, 16)


@pytest.mark.parametrize(
    ("loss", "params"),
    [
        mixture(of_features),
        mixture(of_outputs),
        mixture(of_kernels),
        mixture(of_convolutions),
        (  # A codebook that a softmax chooses from.
            lambda p, x: jnp.mean(
                (jnp.tanh(jax.nn.softmax(x @ p["c"]) @ p["w"]) @ p["out"]) ** 2
            ),
            {"c": leaf(8, 6), "w": leaf(6, 8), "out": leaf(8, 4)},
        ),
        (
            lambda p, x: jnp.mean((jnp.tanh(x + np.eye(4) @ p["w"]) @ p["out"]) ** 2),
            {"w": leaf(4, 8), "out": leaf(8, 4)},
        ),
        (
            lambda p, x: jnp.mean(
                ((x + jax.image.resize(p["w"], (4, 8), "bilinear")) @ p["out"]) ** 2
            ),
            {"w": leaf(7, 8), "out": leaf(8, 4)},
        ),
        # Positions of a grid in a flat table.
        (
            lambda p, x: jnp.mean((x[:, None] + resized(p["w"]) @ p["out"]) ** 2),
            {"w": leaf(49, 8), "out": leaf(8, 8)},
        ),
    ],
)
def test_a_matrix_that_may_be_several_or_a_table_is_named(loss, params):
    decision = muonjax.inspect(loss, params, X).decision("w")
    assert decision.by_names != bool(decision.doubt)


def one_hot(tokens):
    return jax.nn.one_hot(tokens, 6)


LOOK_UPS = {
    "smoothed": lambda t, x: 0.9 * one_hot(t) + 0.1 / 6,
    "mixed": lambda t, x: 0.7 * one_hot(t) + 0.3 * one_hot(t[::-1]),
    "interpolated": lambda t, x: x * one_hot(t) + (1 - x) * one_hot(t + 1),
    "padded": lambda t, x: jnp.where(t[:, None] > 0, one_hot(t), 0.0),
    "bag": lambda t, x: jnp.where(x > 0, one_hot(t), 0.0).sum(0, keepdims=True),
}
FEW_NUMBERS = {
    "eye": lambda t, x: jnp.eye(6)[t],
    "bag": lambda t, x: one_hot(t.reshape(2, 2)).max(0),
    "joined": lambda t, x: jnp.concatenate(
        [one_hot(t)[:, :3], one_hot(t + 1)[:, :3]], 1
    ),
    "thermometer": lambda t, x: (t[:, None] >= jnp.arange(6)) - 0.5,
}
FEATURES = {
    "noise": lambda t, x: one_hot(t) + jax.random.normal(jax.random.key(0), (4, 6)),
    "sum": lambda t, x: one_hot(t) + x,
    "adjacent": lambda t, x: jnp.tile(x, 6) + jnp.eye(4, 6),
}


def of_table(weights):
    def loss(p, tokens, x):
        return jnp.mean((jnp.tanh(weights(tokens, x) @ p["w"]) @ p["out"]) ** 2)

    params = {"w": leaf(6, 8), "out": leaf(8, 4)}
    tokens = jax.ShapeDtypeStruct((4,), "int32")
    return muonjax.inspect(loss, params, tokens, leaf(4, 1)).decision("w")


@pytest.mark.parametrize("weights", LOOK_UPS.values(), ids=LOOK_UPS)
def test_rows_that_data_choose_softly_are_looked_up(weights):
    assert of_table(weights).why.startswith("looked up")


@pytest.mark.parametrize("weights", FEW_NUMBERS.values(), ids=FEW_NUMBERS)
def test_what_few_numbers_multiply_may_be_a_table(weights):
    assert "such as zeros and ones" in of_table(weights).doubt


@pytest.mark.parametrize("weights", FEATURES.values(), ids=FEATURES)
def test_features_added_to_one_hot_numbers_meet_a_layer(weights):
    decision = of_table(weights)
    assert decision.numbers == NUMBERS(0, 1)
    assert not decision.doubt


def test_a_constant_that_centers_the_rows_of_a_kernel_is_no_index():
    """Weights minus their mean, by I - 1/n: a sum of numbers without data is not one hot."""

    def loss(p, x):
        centered = (jnp.eye(8) - 1 / 8) @ p["w"]
        return jnp.mean((jnp.tanh(x @ centered) @ p["out"]) ** 2)

    params = {"w": leaf(8, 8), "out": leaf(8, 4)}
    assert muonjax.inspect(loss, params, X).decision("w").numbers == NUMBERS(0, 1)


@pytest.mark.parametrize(
    "add", [lambda h, y: h + y, lambda h, y: y + h], ids=["stream first", "layer first"]
)
def test_layers_of_a_residual_stream_are_matrices_each(add):
    """As slices of one parameter, they are no loop over heads, in which order the sum is written."""

    def loss(p, x):
        h = x @ p["w"][0]
        for i in (1, 2):
            h = add(h, jnp.tanh(h) @ p["w"][i])
        return jnp.mean((jnp.tanh(h) @ p["out"]) ** 2)

    program, _ = inspected(loss, {"w": leaf(3, 8, 8), "out": leaf(8, 4)})
    assert program.decision("w").numbers == NUMBERS(1, 2)


def test_products_of_a_loop_over_heads_are_one_matrix():
    def loss(p, x):
        y = x[:, :4] @ p["w"][0]
        y = jnp.tanh(x)[:, 4:] @ p["w"][1] + y
        return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)

    program, _ = inspected(loss, {"w": leaf(2, 4, 8), "out": leaf(8, 4)})
    assert program.decision("w").numbers == NUMBERS((0, 1), 2)


def test_rules_change_decisions_and_leave_gains_without_weight_decay():
    """Stacked gains [layers, d] look like matrices to a tree of dimension numbers."""

    def loss(p, x):
        def layer(h, weights):
            return jnp.tanh(h * weights["gain"] @ weights["w"]), None

        h, _ = jax.lax.scan(layer, x, p["layers"])
        return jnp.mean((jnp.tanh(h @ p["router"]) @ p["out"]) ** 2)

    layers = {"gain": leaf(3, 8), "w": leaf(3, 8, 8)}
    params = {"layers": layers, "router": leaf(8, 8), "out": leaf(8, 2)}
    program = muonjax.inspect(loss, params, leaf(4, 8))
    ruled = program.with_rules([("router", None), ("out", NUMBERS(0, 1))])
    assert ruled.why("router") == "a rule of yours"
    assert ruled.dimension_numbers() == program.dimension_numbers() | {
        "router": None,
        "out": NUMBERS(0, 1),
    }
    params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    tx = muonjax.muon(1.0, ruled)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(still, tx.init(params), params)
    assert not jnp.any(updates["layers"]["gain"])
    np.testing.assert_allclose(updates["router"], -0.1 * params["router"], rtol=1e-6)
    assert ruled.per_head().dimension_numbers() == ruled.dimension_numbers()
    with pytest.raises(ValueError, match=r"with_rules\(rules=.*'nope' matches no leaf"):
        program.with_rules([("nope", None)])


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [1, 0, 2, 3]])
def test_constant_labels_choose_from_an_output_head(labels):
    def loss(p, x):
        logits = jnp.tanh(x @ p["up"]) @ p["out"]
        index = jnp.asarray(labels)[:, None]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), index, -1))

    program, messages = inspected(loss, {"up": leaf(8, 16), "out": leaf(16, 5)})
    assert messages == []
    assert program.why("out").startswith("an output head")


def between_layers(mix):
    return lambda p, x: jnp.mean((mix(jnp.tanh(x @ p["up"])) @ p["out"]) ** 2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: sparse.BCOO.fromdense(jnp.eye(4), nse=4) @ h,
        lambda h: h @ jax.scipy.linalg.expm(jnp.eye(16)),
        lambda h: h * jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(h)),
    ],
    ids=["sparse", "exponential", "incomplete beta"],
)
def test_rare_operations_of_jax_are_followed(mix):
    program, messages = inspected(
        between_layers(mix), {"up": leaf(8, 16), "out": leaf(16, 4)}
    )
    assert messages == []
    assert program.dimension_numbers() == {"up": NUMBERS(0, 1), "out": None}


def test_a_training_step_is_no_loss():
    def step(params, x):
        grads = jax.grad(mlp)(params, x)
        return optax.apply_updates(params, grads), jnp.zeros(())

    for fun in (step, jax.jit(step), jax.grad(mlp)):
        with pytest.raises(ValueError, match="returns a tree like the parameters"):
            muonjax.inspect(fun, PARAMS, X)


def test_queries_that_share_a_key_head_are_no_experts():
    def loss(p, x):
        q = jnp.einsum("td,dhs->ths", x, p["q"])
        weights = jax.nn.softmax(jnp.einsum("ths,us->htu", q, x @ p["k"]))
        y = jnp.einsum("htu,us->ths", weights, x @ p["v"])
        return jnp.mean((jnp.einsum("ths,hsd->td", y, p["o"]) @ p["out"]) ** 2)

    params = {"q": leaf(8, 2, 4), "k": leaf(8, 4), "v": leaf(8, 4)}
    params |= {"o": leaf(2, 4, 8), "out": leaf(8, 4)}
    program, messages = inspected(loss, params)
    assert messages == []
    assert program.dimension_numbers()["q"] == NUMBERS(0, (1, 2))


def test_a_matrix_that_names_decide_is_named_with_the_reason_of_the_program():
    def loss(params, x):
        y = jax.pure_callback(
            lambda x, w: x @ w, jax.ShapeDtypeStruct((4, 8), "float32"), x, params["up"]
        )
        return jnp.mean((y @ params["head"]) ** 2)

    program = muonjax.inspect(loss, {"up": leaf(8, 8), "head": leaf(8, 2)}, leaf(4, 8))
    with pytest.warns(
        UserWarning,
        match=r"names do: 'up' .* Muon: pure_callback is not followed: .*:\d+",
    ):
        assert program.dimension_numbers()["up"] == muonjax.MuonDimensionNumbers(0, 1)


def test_two_uses_that_contradict_each_other_are_named_with_their_lines():
    def loss(params, x):
        y = jnp.einsum("bi,iho->bho", x, params["w"])
        z = jnp.einsum("bi,hio->bho", jnp.tanh(y[:, 0]), params["w"])
        return jnp.mean((jnp.tanh(z) @ params["out"]) ** 2) + jnp.mean(
            (jnp.tanh(y) @ params["out"]) ** 2
        )

    params = {"w": leaf(4, 4, 4), "out": leaf(4, 1)}
    first = loss.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"'w'.*:{first}.*:{first + 1}"):
        muonjax.inspect(loss, params, leaf(2, 4)).dimension_numbers()


def test_a_last_product_without_a_loss_is_left_to_names():
    def forward(params, x):
        return jnp.tanh(x @ params["layer_0"]["kernel"]) @ params["head"]["kernel"]

    params = {"layer_0": {"kernel": leaf(8, 8)}, "head": {"kernel": leaf(8, 4)}}
    program = muonjax.inspect(forward, params, X)
    assert program.why("head/kernel").startswith("last product")
    numbers = program.dimension_numbers()
    assert numbers["layer_0"]["kernel"] == NUMBERS(0, 1)
    assert numbers["head"]["kernel"] is None


def test_a_model_without_attention():
    with pytest.raises(
        ValueError, match=r"inspect\(mlp\) has no attention.*Use muon instead"
    ):
        muonjax.muonclip(0.1, PROGRAM).init(ones(PARAMS))


def test_a_mask_by_a_number_that_the_function_closes_over():
    """Penzai's models hold it as an array, which stands in the program as a constant."""
    one = jax.tree.map(jnp.asarray, unstacked(weights())[0])
    x = tokens()
    least = jnp.float32(-1e30)

    def loss(params, x):
        def masked(logits):
            return jax.nn.softmax(
                jnp.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, least)
            )

        q, k, v = (jnp.einsum("btd,dhs->bths", x, params[name]) for name in "qkv")
        return jnp.mean(attend(q, k, v, masked) ** 2)

    (attention,) = muonjax.inspect(loss, one, x).attentions
    assert not attention.problem


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.MultiHeadDotProductAttention(2, name="attention")(x), None


@pytest.mark.parametrize("stack", [thorough(0), 1])
def test_scanned_linen_layers_are_clipped_layer_by_layer(stack):
    """With as many layers as heads, sizes can't tell them apart; the program does."""
    scan = nn.scan(
        nn.remat(Block),
        variable_axes={"params": stack},
        split_rngs={"params": True},
        length=2,
    )
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    params = scan().init(jax.random.key(0), x, None)["params"]
    params = jax.tree.map(lambda p: 4 * p, params)

    def loss(params, x):
        return jnp.mean(scan().apply({"params": params}, x, None)[0] ** 2)

    program = muonjax.inspect(loss, params, x)
    (_, maxima), _ = jax.jit(muonjax.value_and_grad(loss))(params, x)
    (name,) = maxima
    assert maxima[name].shape == (2, 2)
    kernel = np.moveaxis(np.asarray(params["attention"]["query"]["kernel"]), stack, 0)
    threshold = float(maxima[name][0].max()) / 2
    clipped = muonjax.apply_qk_clip(params, maxima, program, threshold)
    after = np.moveaxis(np.asarray(clipped["attention"]["query"]["kernel"]), stack, 0)
    factors = np.sqrt(np.minimum(1, threshold / np.asarray(maxima[name], np.float64)))
    assert_allclose(after, kernel * factors[:, None, :, None], rtol=1e-6)


def test_a_clip_of_an_nnx_model_that_counts_is_checked():
    """Dropout counts its calls in the model's state."""
    model = nnx.MultiHeadAttention(
        2, 8, decode=False, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    program = muonjax.inspect(lambda model, x: jnp.mean(model(x) ** 2), model, x)
    (deviation,) = program.check_clip(model, x).values()
    assert abs(deviation) < 1e-5


def test_in_a_chain_of_ones_own():
    tx = optax.chain(
        muonjax.orthogonalize(dimension_numbers=PROGRAM), optax.scale(-0.1)
    )
    params = ones({"up": PARAMS["up"]})
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["up"].shape == (8, 16)


def test_a_program_in_inject_hyperparams():
    """Optax would take what is callable for a schedule, and makes arrays of numbers, defaults too."""
    params = unstacked(jax.tree.map(jnp.asarray, weights()))[0]
    program = muonjax.inspect(
        lambda params, x: (layer(x, params) ** 2).mean(), params, tokens()
    )
    for make in (muonjax.muonclip, muonjax.adamclip, muonjax.muon, muonjax.normuon):
        tx = optax.inject_hyperparams(make)(1e-3, program)
        assert jax.jit(tx.init)(params).hyperparams["learning_rate"] == jnp.float32(
            1e-3
        )
    injected = optax.inject_hyperparams(muonjax.muon)(1e-3, lambda params: params)
    with pytest.raises(
        TypeError, match=r"muon\(program=.*inject_hyperparams.*static_args='program'"
    ):
        injected.init(params)


def test_a_parameter_that_there_is_not():
    with pytest.raises(
        KeyError, match=r"inspect\(mlp\) has no parameter 'upp'; there are .*'up'"
    ):
        PROGRAM.why("upp")


def test_arguments_that_the_function_does_not_take_are_named():
    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    params = {"w": jnp.ones((3, 3))}
    for arguments, given in [
        ([params], "dict"),
        ([params, jnp.ones((2, 3)), jnp.ones(3)], "dict, ArrayImpl, ArrayImpl"),
        ([nnx.Linear(3, 3, rngs=nnx.Rngs(0))], "Linear"),
    ]:
        with pytest.raises(TypeError, match=r"loss\(\) (missing|takes)") as error:
            muonjax.inspect(loss, *arguments)
        assert (
            f"inspect(loss) called your function with ({given}): first the parameters, then the batch."
            in error.value.__notes__[-1]
        )


def test_counters_beside_the_parameters_are_no_unused_parameters():
    """The keys and counts of an NNX module's dropout, say; and a quantized weight, whose gain trains."""

    def loss(params, x):
        return jnp.mean(
            (jnp.tanh(x @ (params["codes"] * params["gain"])) @ params["out"]) ** 2
        )

    params = {
        "codes": jnp.ones((3, 3), jnp.int8),
        "gain": jnp.ones(3),
        "out": jnp.ones((3, 2)),
        "count": jnp.zeros((), jnp.uint32),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = muonjax.inspect(loss, params, jnp.ones((2, 3)))
    assert program.why("count") == "whole numbers"
    assert program.why("gain").startswith("multiplied entry by entry")


def test_a_module_that_is_no_argument_is_asked_for():
    class Model(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
            self.out = nnx.Linear(16, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(jax.nn.relu(self.norm(self.up(x))))

    model = Model()
    x = jnp.ones((4, 8))

    def closed_over(params, x):
        nnx.update(model, params)
        return (model(x) ** 2).mean()

    def loss_fn(model, x):
        return (model(x) ** 2).mean()

    with pytest.raises(errors.TraceContextError) as error:
        muonjax.inspect(closed_over, nnx.state(model, nnx.Param), x)
    assert "muonjax.inspect(loss_fn, model, ...)" in " ".join(error.value.__notes__)
    assert muonjax.inspect(loss_fn, model, x).decision("up/kernel").numbers == NUMBERS(
        0, 1
    )


def test_several_losses_are_added():
    """As of a GAN: what one of them ignores the other one uses."""
    params = {"generator": PARAMS, "critic": PARAMS}

    def losses(params, x):
        generator = params["generator"]
        fake = jnp.tanh(x @ generator["up"] + generator["bias"]) @ generator["out"] * x
        return mlp(params["critic"], x) - mlp(params["critic"], fake), mlp(
            params["critic"], fake
        )

    together = muonjax.inspect(lambda params, x: sum(losses(params, x)), params, X)
    assert together.decision("critic/up").numbers == NUMBERS(0, 1)
    assert together.decision("generator/up").numbers == NUMBERS(0, 1)
    assert (
        together.dimension_numbers()
        == muonjax.inspect(losses, params, X).dimension_numbers()
    )


def test_the_line_in_a_notebook_is_that_of_a_cell(monkeypatch):
    """IPython gives a cell's code the name of a file that does not exist, and knows its number."""

    def format_code_name(name):
        return ("Cell", "In[3]") if "ipykernel" in name else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell)
    )
    code = "\ndef loss(params, x):\n    return ((x @ params['up'] + params['bias']) @ params['out']).sum()\n"
    exec(compile(code, "/tmp/ipykernel_12/4258106292.py", "exec"), names := {})
    assert muonjax.inspect(names["loss"], PARAMS, X).why("up").endswith(": In[3]:3")
    assert "test_inspect.py:" in muonjax.inspect(mlp, PARAMS, X).why("up")


def test_a_deep_model_is_searched_as_often_as_a_shallow_one(monkeypatch):
    """Each search goes over all operations: one for each layer would take quadratic time."""

    def searches(layers):
        calls = []
        search = Graph.upstream
        monkeypatch.setattr(
            Graph,
            "upstream",
            lambda *args, **kw: calls.append(1) or search(*args, **kw),
        )
        params = weights(layers)
        muonjax.inspect(unrolled, params, tokens())
        monkeypatch.undo()
        return len(calls)

    assert searches(2) == searches(6)
