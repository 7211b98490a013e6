"""Mutants of a Python file: the small, plausible mistakes that a test suite must notice.

Each replaces one stretch of source text. Left alone, since no promise hangs on them: annotations, docstrings, imports,
`__all__`, names for types, assertions (for the type checker), the wording of errors (everything inside a `raise`) and
the literal text of f-strings.
"""

import ast
from collections import Counter
from dataclasses import dataclass
from typing import Any

COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
BINARY = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
SYMBOL = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or",
}  # fmt: skip
ALIASES = ("Callable[", "tuple[", "TypeVar(")
"""How a module-level name for a type begins: an annotation, whatever the syntax."""
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: ``source[start:end]`` (UTF-8 bytes) becomes ``text``; a test of lines first..last may notice."""

    file: str
    place: str
    change: str
    start: int
    end: int
    text: str
    first: int
    last: int
    number: int = 0

    @property
    def name(self) -> str:
        """A name that does not move with the lines above it."""
        return f"{self.file} | {self.place} | {self.change} | {self.number}"

    def apply(self, source: str) -> str:
        """Return the file with this one change."""
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()


def mutants(source: str, file: str) -> list[Mutant]:
    """Return every mutant of ``source``, in the order of the text."""
    walk = _Walk(source, file)
    walk.visit(ast.parse(source))
    found, seen = [], Counter[tuple[str, str]]()
    for mutant in sorted(walk.found, key=lambda m: (m.start, m.end, m.text)):
        seen[mutant.place, mutant.change] += 1
        found.append(Mutant(**{**mutant.__dict__, "number": seen[mutant.place, mutant.change]}))
    return found


class _Walk(ast.NodeVisitor):
    def __init__(self, source: str, file: str) -> None:
        self.file, self.raw, self.found = file, source.encode(), list[Mutant]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line.encode()))
        self.place: list[str] = []
        self.statement = (1, 1)

    # Where things are.

    def span(self, node: Any) -> tuple[int, int]:
        start, end = (
            self.lines[node.lineno - 1] + node.col_offset,
            self.lines[node.end_lineno - 1] + node.end_col_offset,
        )
        return start, end

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def add(self, node: ast.AST, text: str, shown: str | None = None) -> None:
        """Put ``text`` in the place of ``node``."""
        start, end = self.span(node)
        self.put(start, end, text, shown or f"{_short(self.text(node))} -> {_short(text)}")

    def put(self, start: int, end: int, text: str, shown: str) -> None:
        place = ".".join(self.place) or "module"
        self.found.append(Mutant(self.file, place, shown, start, end, text, *self.statement))

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str, whole: ast.AST) -> None:
        """Replace the operator ``old`` that stands between two operands, brackets and comments aside."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.raw[start:end].decode().find(old)
        if at >= 0:
            start += len(self.raw[start:end].decode()[:at].encode())
            self.put(start, start + len(old.encode()), new, f"{old} -> {new} in {_short(self.text(whole))}")

    # Statements.

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            before, body = self.statement, getattr(node, "body", None)
            first = min((d.lineno for d in getattr(node, "decorator_list", [])), default=node.lineno)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            self.statement = (first, max(first, last or first))
            super().visit(node)
            self.statement = before
        else:
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.place.append(node.name)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(default)
        self.body(node.body)
        self.place.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.place.append(node.name)
        for keyword in (k for d in node.decorator_list if isinstance(d, ast.Call) for k in d.keywords):
            self.visit(keyword.value)
        self.body(node.body)
        self.place.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self.body(node.body)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not text and not isinstance(statement, ast.Import | ast.ImportFrom):
                self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            self.add(node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node.value, "None")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if "__all__" in names or (not self.place and self.text(node.value).startswith(ALIASES)):
            return
        if not isinstance(node.value, ast.Constant):
            self.add(node.value, "None")
        elif node.value.value is None:
            self.add(node.value, '""')
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            if not isinstance(node.value, ast.Constant):
                self.add(node.value, "None")
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass")
        kind = type(node.op)
        if kind in BINARY:
            self.between(node.target, node.value, SYMBOL[kind] + "=", BINARY[kind] + "=", node)
        self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion tells the type checker what is there; it decides nothing."""

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break")

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) != "TYPE_CHECKING":
            self.condition(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if not any(item.optional_vars for item in node.items):
            start, end = self.span(node.items[0].context_expr)[0], self.span(node.items[-1].context_expr)[1]
            self.put(start - len("with "), end, "if True", f"with {_short(self.raw[start:end].decode())} -> without")
        self.generic_visit(node)

    # Expressions.

    def condition(self, test: ast.expr) -> None:
        """Turn a condition round, where no other mutant does the same."""
        plain = isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(
            test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE
        )  # fmt: skip
        if not plain and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self.add(test, f"(not ({self.text(test)}))", f"not: {_short(self.text(test))}")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.between(left, right, SYMBOL[type(operator)], COMPARE[type(operator)], node)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, old, new, node)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in BINARY:
            self.between(node.left, node.right, SYMBOL[type(node.op)], BINARY[type(node.op)], node)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, str(not value))
        elif isinstance(value, int):
            self.add(node, str(value + 1))
        elif isinstance(value, float):
            self.add(node, repr(2 * value) if value else "1.0")
        elif isinstance(value, str):
            self.add(node, f"({self.text(node)} + 'XX')", f"{_short(self.text(node))} -> other text")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Inside f-strings positions are wrong before Python 3.12: leave them alone."""

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self.add(node.func, NAMES[node.func.id], f"{_short(self.text(node))} -> {NAMES[node.func.id]}")
        for keyword in node.keywords:
            if keyword.arg is not None:
                start, end = self.span(keyword)
                while chr(self.raw[end]).isspace():
                    end += 1
                end += self.raw[end : end + 1] == b","
                self.put(start, end, "", f"without {_short(self.text(keyword))} in {_short(self.text(node.func))}()")
        if isinstance(node.func, ast.Name) and node.func.id == "cast":
            return
        self.generic_visit(node)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
