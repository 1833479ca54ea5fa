"""LoHa adapters: low-rank Hadamard products, one adapter of one layer, its settings, and LyCORIS files.

In the order in which to read it: `hadamard` is ΔW, `hadamard_forms` and `hadamard_dot` are x · (W + ΔW) without it;
`adapter` is one layer's, `config` its settings and the axes of its kernel, `lycoris` its form in a file.
"""
