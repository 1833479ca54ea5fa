"""Levanter's language models, with its own loss, whose head and cross-entropy are computed in blocks."""

import jax

from tests.inspect.library_models.model import instance, tokens


def language(config):
    """`config.build` and the loss that Levanter's trainer differentiates, of one text."""
    import equinox as eqx
    import haliax as hax
    from levanter.models.lm_model import LmExample

    # Experts are chosen in a shard_map. Its trainer sets a mesh too.
    jax.set_mesh(
        jax.make_mesh(
            (1,),
            ("data",),
            (jax.sharding.AxisType.Auto,),
            devices=jax.devices()[:1],
        )
    )
    config = instance(config)
    whole = eqx.filter_eval_shape(
        lambda: config.build(hax.Axis("vocab", 99), key=jax.random.key(0))
    )
    arrays, static = eqx.partition(whole, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    params, structure = jax.tree.flatten(arrays)
    paths = [
        jax.tree_util.keystr(p, simple=True, separator="/")
        for p, _ in jax.tree.leaves_with_path(arrays)
    ]
    names = [path.removesuffix("/0") for path in paths]  # the array of a named array

    def loss(params, text):
        model = eqx.combine(
            jax.tree.unflatten(structure, [params[name] for name in names]),
            static,
        )

        example = LmExample.causal(hax.named(text, config.max_Pos))
        return model.compute_next_token_loss(example, key=jax.random.key(0)).scalar()

    return loss, dict(zip(names, params, strict=True)), [tokens(8)]
