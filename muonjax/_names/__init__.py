"""Routing by names: which parameters Muon takes, and as which matrices, from paths and shapes.

Read it in this order. `routes` lists the evidence, decides, and says what can't be
decided. `path_words` and `roles` read names, `neighbors` what the leaves of a tree say about each
other, `layer_axes` which axes count layers, `axes` and `convolutions` which are rows and columns.
`ends_of_model` finds where a model begins and ends.
"""
