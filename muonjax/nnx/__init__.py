"""muonjax for Flax NNX: routing of parameters, attention that reports its largest logits, LoHa adapters."""

from muonjax.nnx._attention import attention_fn as attention_fn
from muonjax.nnx._loha import LoHaConv as LoHaConv
from muonjax.nnx._loha import LoHaLinear as LoHaLinear
from muonjax.nnx._loha import LoHaParam as LoHaParam
from muonjax.nnx._loha import add_loha as add_loha
from muonjax.nnx._loha import merge as merge
from muonjax.nnx._program import inspect as inspect
from muonjax.nnx._program import value_and_grad as value_and_grad
from muonjax.nnx._program import watch as watch
from muonjax.nnx._routing import dimension_numbers as dimension_numbers
