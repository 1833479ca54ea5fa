"""muonjax for Flax Linen: attention that reports its largest logits, LoHa adapters."""

from muonjax.linen._attention import TrainState as TrainState
from muonjax.linen._attention import attention_fn as attention_fn
from muonjax.linen._attention import watch as watch
from muonjax.linen._loha import LoHaConv as LoHaConv
from muonjax.linen._loha import LoHaDense as LoHaDense
from muonjax.linen._loha import loha as loha
from muonjax.linen._lycoris import load_lycoris as load_lycoris
from muonjax.linen._lycoris import save_lycoris as save_lycoris
from muonjax.linen._parameters import adopt as adopt
from muonjax.linen._parameters import join_adapters as join_adapters
from muonjax.linen._parameters import merge as merge
from muonjax.linen._parameters import split_adapters as split_adapters
from muonjax.linen._parameters import unmerge as unmerge
