"""Which parameters Muon takes, and as which matrices: decided from paths, shapes and siblings.

In the order in which to read it: `dimension_numbers` lists the evidence and decides; `roles` reads names, `siblings`
what stands beside a leaf, `stacked_layers` the axes that count layers, `matrices` one layer's axes, `output_heads` the
ends of a model. `given` is for what callers, modules and arrays say outright.
"""
