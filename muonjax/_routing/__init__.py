"""Which parameters Muon takes, and as which matrices: decided from paths, shapes and siblings.

In the order in which to read it: `dimension_numbers` lists the evidence and decides; `roles` reads names, `neighbors`
what stands beside a leaf, `stacked` the axes that count layers, `axes` one layer's axes, `ends` the
ends of a model. `given` is for what callers, modules and arrays say outright.
"""
