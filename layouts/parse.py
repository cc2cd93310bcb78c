"""From what a user types to a layout: a catalog name, an expression, or a Python file.

Grammar of an expression (blanks are free)::

    layout  = [ swizzle "o" ] pair ":" pair         S<3,3,3> o (8,64):(64,1)
    swizzle = ( "S" | "Sw" | "Swizzle" ) "<" int "," int "," int ">"
    pair    = "(" mode "," mode ")"
    mode    = int | "D" [ ( "+" | "-" ) int ]       D is the width of the tile
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
from pathlib import Path

from layouts.catalog import CATALOG
from layouts.formula import FormulaLayout
from layouts.smem_layout import COLS, IDENTITY, SmemLayout, Swizzle, TileCols
from layouts.toys import TOYS, Toy


class LayoutSyntaxError(ValueError):
    """A malformed expression; the message shows it with a caret under the character that is wrong."""

    def __init__(self, text: str, position: int, reason: str):
        self.text, self.position, self.reason = text, position, reason
        super().__init__(f"{reason}\n  {text}\n  {' ' * position}^")


class _Reader:
    """Reads an expression from left to right."""

    _TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|.)?", re.DOTALL)

    def __init__(self, text: str):
        self.text = text
        self.tokens = []
        position = 0
        while position < len(text.rstrip()):
            match = self._TOKEN.match(text, position)
            self.tokens.append((match.start(1), match.group(1)))
            position = match.end()
        self.tokens.append((len(text.rstrip()), ""))
        self.index = 0

    @property
    def position(self) -> int:
        return self.tokens[self.index][0]

    @property
    def token(self) -> str:
        return self.tokens[self.index][1]

    def error(self, expected: str) -> LayoutSyntaxError:
        found = repr(self.token) if self.token else "the end"
        return LayoutSyntaxError(self.text, self.position, f"expected {expected}, found {found}")

    def take(self, *allowed: str) -> str:
        token = self.token
        if token not in allowed:
            raise self.error(" or ".join(map(repr, allowed)))
        self.index += 1
        return token

    def integer(self) -> int:
        token = self.token
        if not token.isdecimal():
            raise self.error("an integer")
        self.index += 1
        return int(token)

    def swizzle(self) -> Swizzle:
        start = self.position
        self.take("S", "Sw", "Swizzle")
        numbers = []
        for opening in "<,,":
            self.take(opening)
            negative = self.token == "-"
            if negative:
                self.take("-")
            numbers.append(-self.integer() if negative else self.integer())
        self.take(">")
        try:
            return Swizzle(*numbers)
        except ValueError as error:
            raise LayoutSyntaxError(self.text, start, str(error)) from None

    def mode(self) -> int | TileCols:
        start = self.position
        if self.token == "D":
            self.take("D")
            if self.token not in ("+", "-"):
                return COLS
            sign = self.take("+", "-")
            number = self.integer()
            return COLS + number if sign == "+" else COLS - number
        if not self.token.isdecimal():
            raise self.error("an integer or 'D'")
        value = self.integer()
        if value == 0:
            raise LayoutSyntaxError(self.text, start, "an extent or stride must be positive, found 0")
        return value

    def pair(self) -> tuple[int | TileCols, int | TileCols]:
        self.take("(")
        rows = self.mode()
        self.take(",")
        cols = self.mode()
        self.take(")")
        return rows, cols

    def layout(self) -> SmemLayout:
        swizzle = IDENTITY
        if self.token != "(":
            if self.token not in ("S", "Sw", "Swizzle"):
                raise self.error("a swizzle 'S<bits,base,shift>' or '('")
            swizzle = self.swizzle()
            self.take("o")
        shape = self.pair()
        self.take(":")
        stride = self.pair()
        if self.token:
            raise self.error("the end")
        return SmemLayout(self.text.strip(), shape, stride, swizzle)


def parse_expression(text: str) -> SmemLayout:
    """The layout that an expression such as ``"S<3,3,3> o (8,64):(64,1)"`` describes, named by it.

    Raises:
        LayoutSyntaxError: a malformed expression, a swizzle whose bit fields overlap, an extent of zero.
    """
    return _Reader(text).layout()


def _from_file(path: Path, name: str | None) -> SmemLayout | FormulaLayout | Toy:
    """The layout that a Python file defines; ``name`` is a variable or a layout's own name."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        variables = runpy.run_path(str(path))
    except Exception as error:  # whatever the user's file raises is a fault of the argument
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error
    found = {key: value for key, value in variables.items() if isinstance(value, (SmemLayout, FormulaLayout, Toy))}
    if name:
        matching = [value for key, value in found.items() if name in (key, value.name)]
        if not matching:
            raise ValueError(f"{path} defines no layout {name!r}; it defines {', '.join(found) or 'none'}")
        return matching[0]
    if len(found) != 1:
        listing = ", ".join(found) or "none"
        raise ValueError(f"{path} must define one layout, or name one as {path}:NAME; it defines {listing}")
    return next(iter(found.values()))


def _hint(unknown: str, names: list[str]) -> str:
    """What someone who typed an unknown name may have meant; empty if that can't be told."""
    if os.path.isfile(f"{unknown}.py"):
        return f"; a file? say {unknown}.py"
    same = [name for name in names if name.casefold() == unknown.casefold()]
    if same:
        return f"; names are case-sensitive: did you mean {same[0]}?"
    close = difflib.get_close_matches(unknown.upper(), names, 1)
    return f"; did you mean {close[0]}?" if close else ""


def find_layout(text: str) -> SmemLayout | FormulaLayout | Toy:
    """The layout that a user names: in the catalog, among the toys, by expression or in a Python file.

    Raises:
        LayoutSyntaxError: a malformed expression.
        ValueError: an unknown name, or a file that doesn't define one layout.
    """
    if text in CATALOG:
        return CATALOG[text]
    if text in TOYS:
        return TOYS[text]
    file = re.fullmatch(r"(.+\.py)(?::(\w+))?", text)
    if file:
        return _from_file(Path(file[1]), file[2])
    if re.fullmatch(r"\s*\w+\s*", text):
        names = [*CATALOG, *TOYS]
        raise ValueError(f"no layout named {text!r}{_hint(text.strip(), names)}\nknown names: {', '.join(names)}")
    return parse_expression(text)
