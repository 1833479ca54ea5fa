"""Routing by names: which parameters Muon takes, and as which matrices, decided from paths and shapes alone.

Read it in this order: `dimension_numbers` lists the evidence and decides. `roles` reads names, `neighbors` what is
next to a leaf and which axes count layers, `axes` the rows and columns of one layer, `ends` the two ends of a model.
`given` has rules and messages.
"""
