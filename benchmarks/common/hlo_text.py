"""Read the text of an optimized HLO module: its computations, their instructions, shapes and sizes."""

import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
for _bits in (8, 16, 32, 64):
    _BYTES |= dict.fromkeys([f"{kind}{_bits}" for kind in "suf"], _bits // 8)


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
      name: Without the percent sign.
      shape: The shape of the result, with its layout.
      op: Such as "fusion" or "custom-call".
      operands: Names, also without the percent sign. A parameter has its number here, a constant its value.
      attributes: Everything behind the operands.
      root: Whether the computation returns this result.
    """

    name: str
    shape: str
    op: str
    operands: list[str]
    attributes: str
    root: bool = False

    def attribute(self, pattern: str) -> str | None:
        """What the first group of a pattern matches in the attributes; None without a match."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def numbers(self, pattern: str) -> list[int]:
        """The whole numbers in what the first group of a pattern matches."""
        text = self.attribute(pattern) or ""
        return [int(number) for number in re.findall(r"\d+", text)]

    def called(self, key: str) -> str:
        """The name of the computation that the attribute `key` names; "" if there is no such attribute."""
        return self.attribute(rf"\b{key}=\{{?%?([\w.\-]+)") or ""


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The computations by name, each with its instructions by name, and the name of the one that runs."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif body := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
            shape, rest = _split_shape(body[3])
            if op := re.match(r"([\w\-]+)\(", rest):
                inside, attributes = _close(rest, op.end())
                operands = [part.split(" ")[-1].lstrip("%") for part in commas(inside)]
                current[body[2]] = Instruction(
                    name=body[2],
                    shape=shape,
                    op=op[1],
                    operands=operands,
                    attributes=attributes,
                    root=body[1] is not None,
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
        depth += _nesting(text[i])
        if depth == 0:
            return text[start:i], text[i + 1 :]
    return text[start:], ""


def commas(text: str) -> list[str]:
    """The parts between the commas outside of brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += _nesting(letter)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _nesting(letter: str) -> int:
    return (letter in "([{") - (letter in ")]}")


def shapes(text: str) -> list[tuple[str, tuple[int, ...], str]]:
    """The dtype, the sizes and the layout of each array in a shape."""
    arrays = []
    pattern = r"\b([a-z]+\d+|pred)\[([\d,]*)\](\{[^}]*\})?"
    for dtype, listed, layout in re.findall(pattern, text):
        sizes = tuple(map(int, re.findall(r"\d+", listed)))
        arrays.append((dtype, sizes, layout))
    return arrays


def size(text: str, *, main_memory: bool = False) -> int:
    """Bytes of a shape; `main_memory` leaves out arrays whose layout puts them into memory on the chip."""
    total = 0
    for dtype, sizes, layout in shapes(text):
        if not (main_memory and re.search(r"S\([1-9]\)", layout)):
            total += _BYTES.get(dtype, 0) * math.prod(sizes)
    return total
