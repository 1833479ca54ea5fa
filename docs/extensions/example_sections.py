"""For mkdocstrings: the docstrings say "Example:", where its parser knows only "Examples:"."""

import re

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section when an object is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for every object that has been read from the source."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
