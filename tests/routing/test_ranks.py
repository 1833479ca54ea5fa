"""How many axes a parameter of each kind has in one layer: with more it is a stack, with the fewest it is none."""

import pytest

from muonjax._routing.roles import Parameter, read_roles
from muonjax._routing.siblings import Siblings
from muonjax._routing.stacked_layers import _verdict

# From the layers of Flax and of others: [d, heads size] or [d, heads, size]; [d, 3, heads, size]; [*window, in, out].
KINDS = {
    **{f"attention/{name}/kernel": (2, 3) for name in ("query", "key", "value", "out")},
    "attention/qkv/kernel": (2, 4),
    "attention/kv/kernel": (2, 4),
    "attention/kv_b_proj/kernel": (2, 3),
    "mlp/gate_up_proj/kernel": (2, 4),
    "moe/experts/kernel": (2, 3),
    "moe/router/kernel": (2, 2),
    "conv/kernel": (2, 5),
    "mlp/Dense_0/kernel": (2, 2),
    "mlp/Dense_0/lora_a": (2, 2),
    "conv/hada_t1": (3, 5),
    "norm/scale": (1, 1),
    "mlp/Dense_0/bias": (1, 1),
    "lm_head/kernel": (2, 2),
    "user_factors": (2, 2),
}
SIZES = (7, 11, 13, 17, 19, 23, 29)  # nothing else fits together


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_as_many_axes_as_its_layers(name):
    fewest, most = KINDS[name]
    path = tuple(name.split("/"))
    (role,) = read_roles([path])
    for rank in range(fewest, 7):
        shape = SIZES[:rank]
        parameter = Parameter(path, role, shape, tuple(range(rank)), shape)
        verdict = _verdict(parameter, Siblings([parameter]))
        assert verdict is (True if rank > most else False if rank == fewest else None)
