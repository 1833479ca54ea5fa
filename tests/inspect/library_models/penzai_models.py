"""Penzai's transformers, of named arrays."""

import jax

from tests.inspect.library_models.model import cross_entropy, shape, tokens


def language(**settings):
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=48,
        num_decoder_blocks=2,
        vocab_size=99,
        **settings,
    )
    made = llamalike_common.build_llamalike_transformer(
        config, init_base_rng=jax.random.key(0), name="lm"
    )
    slots, values = pz.unbind_params(made, freeze=True)
    arrays, structure = jax.tree.flatten(values)
    names = [str(value.label) for value in values]

    def loss(params, text):
        values = structure.unflatten([params[name] for name in names])
        whole = pz.bind_variables(slots, values, unfreeze_as_copy=True)
        positions = pz.nx.arange("seq", text.shape[1])
        logits = whole(pz.nx.wrap(text, "batch", "seq"), token_positions=positions)
        return cross_entropy(
            logits.unwrap("batch", "seq", "vocabulary")[:, :-1], text[:, 1:]
        )

    params = {name: shape(*x.shape) for name, x in zip(names, arrays, strict=True)}
    return loss, params, [tokens(2, 8)]
