"""Compile the sources of the packages with decorators around their functions, for what the tests watch in every call.

Ordinary runs import the same files without them: what is compiled here is never kept.
"""

import ast
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from typing import NamedTuple

PACKAGES = ("muonjax", "pallas_kernels")


class Decorator(NamedTuple):
    """A function of `tests` that decorates functions of the packages.

    Attributes:
      module: Where it is, below `tests.tools`.
      name: Its name there.
      decorates: Whether it decorates a function.
      only_in: What a source file contains that has such a function.
    """

    module: str
    name: str
    decorates: Callable[[ast.FunctionDef], bool]
    only_in: bytes = b""

    @property
    def expression(self) -> ast.expr:
        text = (
            f"__import__('tests.tools.{self.module}').tools.{self.module}.{self.name}"
        )
        return ast.parse(text, mode="eval").body


def compile_decorated(source: bytes, path: str, decorators: list[Decorator]):
    tree = ast.parse(source, filename=path)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in decorators:
                if decorator.decorates(
                    node
                ):  # inside of the source's own; the last one is the innermost
                    node.decorator_list.append(
                        ast.copy_location(decorator.expression, node)
                    )
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Loader(SourceFileLoader):
    decorators: tuple[Decorator, ...] = ()

    def get_code(self, fullname):
        source = self.get_data(self.path)
        decorators = [one for one in self.decorators if one.only_in in source]
        if not decorators:
            return super().get_code(fullname)
        # Not the base's: it would keep what is compiled here for ordinary runs.
        return compile_decorated(source, self.path, decorators)


class Finder(MetaPathFinder):
    """Finds the modules of `packages`, whose functions get the decorators."""

    def __init__(self, *decorators: Decorator, packages: tuple[str, ...] = PACKAGES):
        self.packages = packages
        self.loader = type("DecoratingLoader", (Loader,), {"decorators": decorators})

    def find_spec(self, name, path, target=None):
        spec = (
            PathFinder.find_spec(name, path, target)
            if name.partition(".")[0] in self.packages
            else None
        )
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec


def install(*decorators: Decorator):
    """Before the first import of a package."""
    if early := [name for name in PACKAGES if name in sys.modules]:
        raise RuntimeError(
            f"{early[0]} was imported before the tests could decorate its functions."
        )
    if decorators:
        sys.meta_path.insert(0, Finder(*decorators))
