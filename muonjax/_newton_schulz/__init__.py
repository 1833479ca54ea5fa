"""Newton-Schulz orthogonalization: `polar_factor` chooses between two iterations.

`full_precision` multiplies in float32 or wider and deflates the Gram matrix, which it has anyway
(`deflation`): on a CPU, flops are all that counts. `half_precision` rounds the operands and sums in
float32, for accelerators: there a deflation would take more time than the steps that it saves.
Both make several steps at once by `composed_steps`, each from a Gram matrix that it normalizes
in its own way. Two more iterations have callers of their own: `_msign` has derivatives,
`optax_contrib` takes its coefficients from a state.
"""
