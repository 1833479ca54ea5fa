"""muonjax for Flax NNX: attention that reports its largest logits, LoHa adapters."""

from muonjax.nnx._attention import attention_fn as attention_fn
from muonjax.nnx._loha import LoHa as LoHa
from muonjax.nnx._loha import LoHaConv as LoHaConv
from muonjax.nnx._loha import LoHaLinear as LoHaLinear
from muonjax.nnx._loha import LoHaParam as LoHaParam
from muonjax.nnx._lycoris import load_lycoris as load_lycoris
from muonjax.nnx._lycoris import save_lycoris as save_lycoris
from muonjax.nnx._model import adapters as adapters
from muonjax.nnx._model import add_loha as add_loha
from muonjax.nnx._model import merge as merge
from muonjax.nnx._model import remove_loha as remove_loha
from muonjax.nnx._model import unmerge as unmerge
