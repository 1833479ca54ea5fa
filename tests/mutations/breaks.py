"""The breaks that are tried: random ones of cosmic-ray's operators, and the few written by hand in rows.txt."""

import ast
import functools
import itertools
import pathlib
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("muonjax", "pallas_kernels")
# Kernels whose tests need an interpreter that came with JAX 0.11.
NEED_AN_INTERPRETER = ("_hopper",)

# Likely mistakes: an operator that is close to the right one.
BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitOr_BitAnd BitAnd_BitOr"
COMPARISON = "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt"
OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in BINARY.split()),
    *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISON.split()),
    *(
        "ReplaceUnaryOperator_USub_UAdd",
        "ReplaceUnaryOperator_Delete_USub",
        "ReplaceUnaryOperator_Delete_Not",
    ),
    *(
        "NumberReplacer",
        "AddNot",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "ZeroIterationForLoop",
    ),
    *(
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
    ),
]


class Break(NamedTuple):
    """`old` and `new` are a line of the file without the spaces at its ends, or a snippet that is in it once."""

    file: str
    old: str
    new: str
    which: int | None = None  # of the equal lines of the file; None: a snippet
    says: str = ""  # what a row by hand breaks, or why one is equivalent

    def is_there(self) -> bool:
        """Whether the sources still have what it breaks."""
        return (path := ROOT / self.file).exists() and self.old in path.read_text()

    def apply(self, source: str) -> str:
        if self.which is None:
            if source.count(self.old) != 1:
                raise SystemExit(
                    f"{self.file}: not there exactly once, please renew: {self.old!r}"
                )
            return source.replace(self.old, self.new)
        lines = source.splitlines(keepends=True)
        at = [i for i, line in enumerate(lines) if line.strip() == self.old][self.which]
        lines[at] = lines[at].replace(self.old, self.new)
        return "".join(lines)


def read(name: str) -> list[Break]:
    """Blocks of three lines: `file: what`, `- old`, `+ new`."""
    text = (pathlib.Path(__file__).parent / name).read_text()
    blocks = [
        block.splitlines() for block in text.split("\n\n") if not block.startswith("#")
    ]
    return [
        Break(head.split(": ", 1)[0], old[2:], new[2:], says=head.split(": ", 1)[1])
        for head, old, new in blocks
    ]


def decides_nothing(
    tree: ast.Module,
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations, messages, imports for types and the sizes of caches stand: (line, column) of their ends."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.arg(annotation=ast.expr() as x)
                | ast.AnnAssign(annotation=x)
                | ast.FunctionDef(returns=ast.expr() as x)
            ):
                yield _ends(x)
            case (
                ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict")
            ):
                yield _ends(node)
            case ast.Call(
                func=ast.Attribute(attr="warn" | "lru_cache" | "named_scope")
            ):
                yield _ends(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield _ends(node)


def _ends(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def candidates(file: str) -> dict[int, list[tuple[str, int]]]:
    """The operators that can change each line, each with the number of its place in the file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    source = (ROOT / file).read_text()
    spared = list(decides_nothing(ast.parse(source)))
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[int, list[tuple[str, int]]] = {}
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = itertools.chain.from_iterable(map(operator.mutation_positions, nodes))
        for which, (start, _) in enumerate(places):
            unpacks = re.fullmatch(
                r"(.*[(,\[{])?\s*", lines[start[0] - 1][: start[1]]
            )  # `*args`, no product
            if not (name.startswith("ReplaceBinary") and unpacks) and not any(
                a <= start < b for a, b in spared
            ):
                found.setdefault(start[0], []).append((name, which))
    return found


@functools.cache
def _lines() -> list[tuple[str, int, list[tuple[str, int]]]]:
    files = [
        str(p.relative_to(ROOT))
        for folder in SOURCES
        for p in sorted((ROOT / folder).rglob("*.py"))
    ]
    if jax.__version_info__ < (0, 11):
        files = [
            file
            for file in files
            if not any(word in file for word in NEED_AN_INTERPRETER)
        ]
    return [
        (f, line, ways) for f in files for line, ways in sorted(candidates(f).items())
    ]


def candidate_lines() -> int:
    """The lines of the library that decide something."""
    return len(_lines())


def sample(seed: int, number: int) -> Iterator[Break]:
    """`number` different lines of all that decide something, one break of each."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    chance = random.Random(seed)
    lines = list(_lines())
    chance.shuffle(lines)
    for file, line, ways in lines:
        if number == 0:
            return
        name, which = chance.choice(ways)
        source = (ROOT / file).read_text()
        changed = mutate_code(source, get_operator(f"core/{name}")(), which)
        if not _compiles(changed):
            continue
        texts = [text.strip() for text in source.splitlines()]
        old = texts[line - 1]
        new = changed.splitlines()[line - 1].strip()
        yield Break(file, old, new, texts[: line - 1].count(old))
        number -= 1


def _compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True
