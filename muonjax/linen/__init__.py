"""muonjax for Flax Linen: routing of parameters, attention that reports its largest logits, LoHa adapters."""

from muonjax._routing.dimension_numbers import dimension_numbers as dimension_numbers
from muonjax.linen._attention import TrainState as TrainState
from muonjax.linen._attention import attention_fn as attention_fn
from muonjax.linen._attention import watch as watch
from muonjax.linen._loha import LoHaConv as LoHaConv
from muonjax.linen._loha import LoHaDense as LoHaDense
from muonjax.linen._loha import loha as loha
from muonjax.linen._loha import merge as merge
