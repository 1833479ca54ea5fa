"""For mkdocstrings, which does not run the code: a signature's `**settings` become the keywords that `help` shows."""

import importlib
import inspect

import griffe


class Settings(griffe.Extension):
    """Take docstring and defaults from the function, and the types of its keywords from the TypedDict."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for every object that has been read from the source."""
        last = (
            obj.parameters[-1] if isinstance(obj, griffe.Function) and len(obj.parameters) else None
        )
        if last is None or "Unpack" not in str(last.annotation) or obj.name.startswith("_"):
            return
        public = getattr(importlib.import_module(obj.module.path), obj.name)
        types = _types(obj.module, str(last.annotation).partition("[")[2].rstrip("]"))
        del obj.parameters[last.name]
        for name, parameter in inspect.signature(public).parameters.items():
            if name not in obj.parameters:
                kind = griffe.ParameterKind.keyword_only
                obj.parameters.add(
                    griffe.Parameter(
                        name, annotation=types[name], kind=kind, default=repr(parameter.default)
                    )
                )
        if obj.docstring:
            obj.docstring.value = inspect.cleandoc(public.__doc__)


def _types(module: griffe.Module, name: str) -> dict[str, object]:
    """The annotations of a TypedDict that the module has, and of those that it extends."""
    group = module.members.get(name)
    if isinstance(group, griffe.Alias):  # from another module, which may not have been read yet
        home, _, name = group.target_path.rpartition(".")
        return _types(griffe.load(home), name)
    if not isinstance(group, griffe.Class):  # TypedDict itself
        return {}
    inherited = {
        key: value for base in group.bases for key, value in _types(module, str(base)).items()
    }
    return inherited | {key: attribute.annotation for key, attribute in group.attributes.items()}
