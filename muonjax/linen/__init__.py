"""muonjax for Flax Linen: a train state that passes the largest logits on, LoHa adapters."""

from muonjax.linen._loha import LoHaConv as LoHaConv
from muonjax.linen._loha import LoHaDense as LoHaDense
from muonjax.linen._loha import loha as loha
from muonjax.linen._loha import merge as merge
from muonjax.linen._train_state import TrainState as TrainState
