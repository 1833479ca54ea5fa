"""Result blocks of the QK-Clip benchmarks."""

from benchmarks.common.blocks import Block

BLOCKS = {
    "clip_holds": Block(
        text="A run that is made to diverge (learning rate {learning_rate:g}, QK-Clip's threshold {threshold:g}, "
        "{steps} steps): the largest attention logit of any step is {runs[muon][largest_logit]:.0f} with Muon alone, "
        "{runs[muonclip][largest_logit]:.0f} with MuonClip. The clip follows the update and uses the logits of the "
        "forward pass before it, so a step may exceed the threshold by what one update adds; more than one and a "
        "half times the threshold was measured in {runs[muonclip][steps_above_1.5_thresholds]} of the {steps} steps "
        "(Muon: {runs[muon][steps_above_1.5_thresholds]})."
    ),
    "mla_clip_holds": Block(
        text="In {steps} steps at a learning rate of {learning_rate:g}, Muon alone reaches a logit of "
        "{rows[0][largest_logit]:,.0f}, and its loss, {rows[0][loss_lowest_20]:.2f} at its lowest mean over 20 steps, "
        "rises again to {rows[0][loss_last_20]:.2f}. With the clip at {threshold:g} the largest logit is "
        "{rows[1][largest_logit]:.0f} (the statistic is one step older than the weights, so one update can exceed the "
        "threshold), and the loss falls to {rows[1][loss_last_20]:.2f}. Of all heads at all steps the clip scaled "
        "{rows[1][share_above_threshold]:.0%}.\n\n{machine}"
    ),
    "value_and_grad": Block(
        columns={
            "layers": "{layers}",
            "`inspect` ÷ `jax.make_jaxpr`": "{inspect:quartiles}",
            "tracing of `value_and_grad` ÷ JAX's": "{tracing:quartiles}",
            "flops ÷ JAX's": "{flops:.4f}",
            "temporary memory ÷ JAX's": "{temporary:.4f}",
        },
        text="{table}\n\nAn unrolled decoder with the shapes of Llama-3-8B: traced with {layers} layers, in processor "
        "seconds (medians and quartiles of {rounds} rounds), compiled with {compiled_layers}. {machine}",
    ),
    "max_logits": Block(
        columns={
            "program": "{program}",
            "time against attention alone (quartiles)": "{row:quartiles}",
            "temporary memory, MiB": "{temporary_mib:.0f}",
        },
        text="{table}\n\nCausal, batch {batch}, {length} positions, {heads} heads of {size}, {dtype}; {machine}",
    ),
    "qk_clip_drift": Block(
        columns={
            "`shared_keys`": '`"{shared_keys}"`',
            "hot head's logit": "{hot_logit:.0f}",
            "calm heads' logits (20 at first)": "{calm_logit:.2g}",
            "key weights": "×{key_weight:.2g}",
            "calm query weights": "×{calm_query_weight:.3g}",
        },
    ),
}
