"""QK-Clip: which weights belong to which head, how large their logits are, and how they are scaled.

`site` describes the modules of an attention by a pattern, `site_constructors` makes the usual ones,
and `place_sites` finds them in a tree of parameters. `scale` says which entries of a parameter
belong to a head. `max_logits` measures, `match_statistics` matches what is measured to the sites,
and `clip_by_statistic` is the transformation that scales;
`qk_clip` and `signal_clip` are its public forms.
"""
