"""muonjax for Flax NNX: LoHa adapters."""

from muonjax.nnx._loha import LoHaConv as LoHaConv
from muonjax.nnx._loha import LoHaLinear as LoHaLinear
from muonjax.nnx._loha import LoHaParam as LoHaParam
from muonjax.nnx._loha import add_loha as add_loha
from muonjax.nnx._loha import merge as merge
