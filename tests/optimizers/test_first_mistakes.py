"""What somebody new to the library gets wrong, and whether the message says what to do."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.serialization import from_state_dict, to_state_dict

import muonjax
import muonjax.optax_contrib
from tests.tools.oracles import SHORT, queries_and_keys

PARAMS = {"dense": {"kernel": jnp.ones((8, 16)), "bias": jnp.zeros(16)}}
ATTENTION = {"a": queries_and_keys(8, 2, 4)}


READ = muonjax.inspect(lambda p: jnp.ones(4) @ p["w"], {"w": jnp.ones((4, 4))})
MUON = functools.partial(muonjax.muon, 1e-2)


@pytest.mark.parametrize(("call", "message"), [
    # Keywords of others.
    (lambda: MUON(ns_steps=1), "muon has no argument 'ns_steps': in muonjax it is newton_schulz=NewtonSchulz("),
    (lambda: MUON(beta=1), "muon has no argument 'beta': in muonjax it is decay"),
    (lambda: MUON(b1=1), "muon has no argument 'b1': in muonjax it is decay, or adam=optax.adamw"),
    (lambda: MUON(lr=1), "it is learning_rate"),
    (lambda: MUON(adam_b2=1), "adam=optax.adamw"),
    (lambda: MUON(consistent_rms=1), "it is rms"),
    (lambda: MUON(muon_weight_dimension_numbers=1), "it is program, the second argument"),
    (lambda: MUON(dimension_numbers=1), "it is program, the second argument"),
    (lambda: MUON(rules=1), "it is program, or dimension_numbers of muonclip: lambda params: muonjax."),
    (lambda: MUON(sites=1), "it is the second argument of muonclip"),
    (lambda: MUON(weight_decy=1), "Did you mean weight_decay"),
    (lambda: MUON(zzz=1), "Its arguments are learning_rate, program, decay, "),
    (lambda: muonjax.NewtonSchulz(deflate=3), "NewtonSchulz has no argument 'deflate'...Did you mean deflation"),
    (lambda: muonjax.muonclip(1e-2, tau=30.0), "muonclip has no argument 'tau': in muonjax it is threshold"),
    # Settings without their names.
    *((functools.partial(muonjax.muon, 1e-3, given), "muon(program=... must be what muonjax.inspect... go by name.")
      for given in (0.1, PARAMS, "wd")),
    (lambda: muonjax.muon(1e-3, None, 0.1), "muon: too many positional arguments; it takes learning_rate, "),
    (lambda: muonjax.muonclip(1e-3, None, 9.0), "muonclip: too many positional arguments; it takes learning_rate, "),
    (lambda: muonjax.NewtonSchulz(5), "NewtonSchulz: too many positional arguments; it takes coefficients, "),
    # Arguments of another kind.
    (lambda: muonjax.newton_schulz([[1.0, 0.0], [0.0, 2.0]]), "newton_schulz(x) needs an array, got list"),
    (lambda: muonjax.state_shardings(PARAMS, muonjax.muon(1e-3)),
     "state_shardings(tx={... must be an Optax transformation: "),
    (lambda: muonjax.Distribution(jax.make_mesh((1,), ("data",)), {"w": jnp.ones((8, 8))}),
     "at ['w'] holds Array...; ...lambda x: x.sharding, params)"),
    (lambda: muonjax.qk_clip(READ, 100.0), "qk_clip(threshold=<Program ... the program is the second argument"),
    *((functools.partial(muonjax.tabulate, first), "tabulate(params) got ")
      for first in (muonjax.muon(1e-3), lambda params: params, READ)),
    (lambda: muonjax.tabulate(READ, {"w": jnp.ones((4, 4))}), "what inspect returned; give it second"),
    (lambda: muonjax.muonclip(1e-3, {"a": jnp.ones((8, 8))}), "muonclip(program={'a': ... must be what muonjax."),
    (lambda: muonjax.muonclip(1e-3, muonjax.mha_site(), dimension_numbers=1), "muonclip(dimension_numbers=1) must be"),
    (lambda: muonjax.optax_contrib.muon(1.0, muon_weight_dimension_numbers=1), "muon_weight_dimension_numbers=1) must"),
    (lambda: muonjax.muonclip(1e-3, lambda params, x: x),
     "program=<function ... must be what muonjax.inspect(loss_fn, params, batch)"),
    (lambda: MUON().init({"dense": {"kernel": jnp.ones((8, 8))}, "path": pathlib.Path("x")}),
     "muon(params) got PosixPath... for the array 'path'"),
])  # fmt: skip
def test_the_message_says_what_to_do(call, message):
    """In two lines at most; three dots stand for anything."""
    with pytest.raises(
        TypeError, match=re.escape(message).replace(r"\.\.\.", ".*")
    ) as error:
        call()
    assert str(error.value).count("\n") <= 1


def test_a_loss_in_place_of_its_program():
    with pytest.raises(TypeError) as error:
        MUON(lambda params, batch: jnp.sum(batch @ params["dense"]["kernel"])).init(
            PARAMS
        )
    assert "muonjax.inspect(loss_fn, params, batch)" in error.value.__notes__[0]


def test_what_is_no_mistake():
    muonjax.adamclip(1e-2, muonjax.mha_site(), b1=0.8)  # its own


@pytest.mark.parametrize(("name", "meant"), [
    ("MuonClip", ". Did you mean muonclip?"), ("muon_clip", ". Did you mean muonclip?"),
    ("Muon", ". Did you mean muon?"), ("value_and_gradient", ". Did you mean value_and_grad?"), ("clip_qk", ""),
    ("_optimisers", ""),
])  # fmt: skip
def test_names_that_are_nearly_right(name, meant):
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}'{re.escape(meant)}$"
    ):
        getattr(muonjax, name)


def update(tx, gradients, params, state=None, **more):
    return tx.update(
        gradients, tx.init(params) if state is None else state, params, **more
    )


def test_gradients_of_another_shape():
    gradients = {"dense": {"kernel": jnp.ones((8, 17)), "bias": jnp.zeros(16)}}
    message = r"muon: the gradient of 'dense/kernel' has shape \(8, 17\), the parameter \(8, 16\)"
    with pytest.raises(ValueError, match=message):
        update(muonjax.muon(1e-2), gradients, PARAMS)
    with pytest.raises(
        ValueError, match="muon: 'dense/bias' is a parameter without a gradient"
    ):
        update(muonjax.muon(1e-2), {"dense": {"kernel": jnp.ones((8, 16))}}, PARAMS)
    with pytest.raises(ValueError, match="muon: 'b' is a gradient without a parameter"):
        update(
            muonjax.muon(1e-2),
            PARAMS | {"b": jnp.ones(3)},
            PARAMS,
            muonjax.muon(1e-2).init(PARAMS),
        )


@pytest.mark.parametrize("program", [None, muonjax.mha_site()])
def test_a_state_whose_tuples_have_become_mappings(program):
    """Orbax restores so without a target, and Flax's `to_state_dict` makes such trees."""
    make = muonjax.muon if program is None else muonjax.muonclip
    tx = make(1e-3, program, newton_schulz=SHORT)
    raw = to_state_dict(tx.init(ATTENTION))
    with pytest.raises(
        ValueError,
        match=r"is a dict, not a tuple.*the structure of jax.eval_shape\(tx.init, params\)",
    ):
        update(tx, ATTENTION, ATTENTION, raw, max_logits={"a": jnp.ones(2)})
    restored = from_state_dict(jax.eval_shape(tx.init, ATTENTION), raw)
    update(tx, ATTENTION, ATTENTION, restored, max_logits={"a": jnp.ones(2)})


def test_a_module_with_functions_in_it():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    calls = {
        "muon": muonjax.muon(1e-2).init,
        "tabulate": muonjax.tabulate,
        "dimension_numbers": muonjax.dimension_numbers,
        r"inspect\(len\)": functools.partial(muonjax.inspect, len),
    }
    for name, call in calls.items():
        with pytest.raises(
            TypeError,
            match=rf"{name}.*'activation'.*eqx\.(filter|partition)\(model, eqx\.is_in",
        ):
            call(model)


MAKE = {
    "muon": muonjax.muon,
    "normuon": muonjax.normuon,
    "muonh": functools.partial(muonjax.muonh, adam_learning_rate=1e-3),
    "muonclip": lambda rate: muonjax.muonclip(rate, muonjax.mha_site()),
    "adamclip": lambda rate: muonjax.adamclip(rate, muonjax.mha_site()),
    "hyperball": muonjax.hyperball,
    "cautious_weight_decay": muonjax.cautious_weight_decay,
    "monitor": lambda rate: muonjax.monitor(optax.sgd(rate)),
}


@pytest.mark.nan("the state of `monitor` has NaN for what was not measured")
@pytest.mark.parametrize("name", MAKE)
def test_update_without_params(name):
    tx = MAKE[name](1e-2)
    state = tx.init(ATTENTION)
    with pytest.raises(
        ValueError,
        match=rf"^{name} needs params: call tx\.update\(grads, state, params",
    ):
        jax.jit(tx.update)(ATTENTION, state)


def test_a_dtype_in_inject_hyperparams():
    """Optax takes `jnp.bfloat16`, which can be called, for a schedule, and hands on what it returns."""
    with pytest.raises(
        TypeError, match=r"muon\(mu_dtype=Array.*inject_hyperparams"
    ) as error:
        optax.inject_hyperparams(muonjax.muon)(1e-3, mu_dtype=jnp.bfloat16).init(PARAMS)
    (static,) = re.findall(r"static_args='(\w+)'", str(error.value))
    tx = optax.inject_hyperparams(muonjax.muon, static_args=static)(
        1e-3, mu_dtype=jnp.bfloat16
    )
    assert any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(tx.init(PARAMS)))


def loss_with_a_leaf(params, x):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, params[name]) for name in "qkv")
    return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)


@pytest.mark.parametrize(("leaf", "message"), [
    (jnp.arange(3), r"'other' is int32, which has no derivative.*not among the arguments to differentiate"),
    (jax.nn.relu, r"'other' is no array but .*eqx\.partition\(model, eqx\.is_inexact_array\)"),
])  # fmt: skip
def test_value_and_grad_by_what_has_no_derivative(leaf, message):
    params = {name: jnp.ones((8, 2, 4)) for name in "qkv"}
    with pytest.raises(
        TypeError, match=rf"value_and_grad\(loss_with_a_leaf\): {message}"
    ):
        muonjax.value_and_grad(loss_with_a_leaf)(
            params | {"other": leaf}, jnp.ones((1, 3, 8))
        )


@pytest.mark.parametrize("mask", [[], {"dense": {"kernel": True}}])
@pytest.mark.parametrize(("make", "call"), [
    (lambda mask: MUON(weight_decay_mask=mask), "muon(weight_decay_mask="),
    (lambda mask: MUON(weight_decay_mask=mask, adam=optax.sgd(0.1)), "muon(weight_decay_mask="),
    (lambda mask: muonjax.cautious_weight_decay(0.1, mask), "cautious_weight_decay(mask="),
    (lambda mask: muonjax.adamclip(1e-2, muonjax.mha_site(), mask=mask), "adamclip(mask="),
])  # fmt: skip
def test_a_mask_that_does_not_fit_the_parameters(make, call, mask):
    with pytest.raises(ValueError, match=re.escape(call)) as error:
        make(mask).init(PARAMS)
    assert "give True for all, False for none" in str(error.value)


def test_hyperball_needs_weights_and_not_shapes():
    tx = muonjax.muonh(1e-2, adam_learning_rate=1e-3)
    shapes = jax.eval_shape(lambda: PARAMS)
    with pytest.raises(
        TypeError, match=r"muonh: init.*\['kernel'\].*jax.eval_shape\(tx.init, params\)"
    ):
        tx.init(shapes)
    assert jax.tree.leaves(jax.eval_shape(tx.init, shapes))
