"""Read the text of an optimized HLO module: its computations, their instructions, shapes and sizes."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

_BYTES = {"pred": 1, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)
}
_BYTES |= {"c64": 8, "c128": 16}


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
      name: Without the percent sign.
      shape: Of the result, with its layout.
      op: Such as "fusion" or "custom-call".
      operands: Names (with a percent sign) or, in older texts, shapes and names.
      attributes: Everything behind the operands.
      root: Whether the computation returns this result.
    """

    name: str
    shape: str
    op: str
    operands: list[str]
    attributes: str
    root: bool = False

    def called(self, key: str) -> str | None:
        """The name of the computation that the attribute `key` names."""
        found = re.search(rf"\b{key}=\{{?%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations by name, and the name of the one that runs."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    entry = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif body := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
            shape, rest = _split_shape(body.group(3))
            if op := re.match(r"([\w\-]+)\(", rest):
                inside, attributes = _close(rest, op.end())
                root = body.group(1) is not None
                current.append(
                    Instruction(
                        body.group(2),
                        shape,
                        op.group(1),
                        commas(inside),
                        attributes,
                        root,
                    )
                )
    return computations, entry


def _split_shape(text: str) -> tuple[str, str]:
    if text.startswith("("):
        inside, rest = _close(text, 1)
        return inside, rest.strip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def _close(text: str, start: int) -> tuple[str, str]:
    """The text before and after the bracket that closes the one before `start`."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return text[start:i], text[i + 1 :]
    return text[start:], ""


def commas(text: str) -> list[str]:
    """The parts between the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and the sizes of each array in a shape."""
    found = re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", text)
    return [
        (dtype, tuple(map(int, filter(None, sizes.split(",")))))
        for dtype, sizes in found
    ]


def size(text: str, *, main_memory: bool = False) -> int:
    """Bytes of a shape; `main_memory` leaves out arrays whose layout puts them into memory on the chip."""
    found = re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\](\{[^}]*\})?", text)
    return sum(
        _BYTES[dtype] * math.prod(map(int, filter(None, sizes.split(","))))
        for dtype, sizes, layout in found
        if dtype in _BYTES and not (main_memory and re.search(r"S\([1-9]\)", layout))
    )


def source_frames(text: str) -> Callable[[str], list[tuple[str, str]]]:
    """From an instruction's attributes to the (file, function) that made it, the innermost first."""

    def table(head: str, pattern: str) -> list[tuple[str, ...]]:
        section = re.search(rf"^{head}\n((?:\d.*\n)*)", text, re.M)
        return re.findall(pattern, section.group(1), re.M) if section else []

    files = dict(table("FileNames", r'^(\d+) "(.*)"$'))
    functions = dict(table("FunctionNames", r'^(\d+) "(.*)"$'))
    locations = {
        number: (files.get(file, ""), functions.get(function, ""))
        for number, file, function in table(
            "FileLocations", r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)"
        )
    }
    # Parents are printed as one more than their number: the outermost frame's is itself.
    frames = {
        number: (location, str(int(parent) - 1))
        for number, location, parent in table(
            "StackFrames", r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)"
        )
    }

    @functools.cache
    def stack(number: str) -> list[tuple[str, str]]:
        found = []
        while number in frames:
            location, number = frames[number]
            found.append(locations.get(location, ("", "")))
        return found

    def of(attributes: str) -> list[tuple[str, str]]:
        number = re.search(r"stack_frame_id=(\d+)", attributes)
        return stack(number.group(1)) if number else []

    return of
