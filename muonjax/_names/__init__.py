"""Routing by names: which parameters Muon takes, and as which matrices, decided from paths and shapes alone.

Read it in this order: `dimension_numbers` lists the evidence, decides, and says what can't be decided. `roles` reads
names, `axes` which axes count layers and which are rows and columns, `ends_of_model` the two ends of a model.
"""
