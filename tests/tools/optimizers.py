"""The optimizers of the library by their names, for tests of what is around the orthogonalization."""

import muonjax
from tests.tools.oracles import SHORT


def optimizer(name, program=None, rate=1e-3, **settings):
    """With an iteration that compiles quickly; the clip is that of multi-head attention."""
    if name == "adamclip":
        return muonjax.adamclip(rate, muonjax.mha_site(), **settings)
    settings = {"newton_schulz": SHORT} | settings
    if name == "muonclip":
        site = muonjax.mha_site()
        return muonjax.muonclip(rate, site, dimension_numbers=program, **settings)
    if name == "muonh":
        settings = {"adam_learning_rate": rate} | settings
    return getattr(muonjax, name)(rate, program, **settings)
