"""PTX text → a kernel as data: parameters, shared memory, registers and instructions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace
from functools import lru_cache

from cute_fa.emulator.report import EmulationError

REGISTER_BITS = {"pred": 1, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "b32": 32, "u32": 32, "s32": 32}
REGISTER_BITS |= {"f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f16x2": 32, "b8": 16, "u8": 16, "s8": 16}
_LONGEST_TEXT = 300  # characters; the accumulator of a wgmma has several hundred
TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


class PtxSyntaxError(EmulationError):
    """The text is not PTX of the kind that this parser reads; the message names the line."""


@dataclass(frozen=True)
class Reg:
    """A register; ``bits`` is 1 for a predicate."""

    name: str
    bits: int


@dataclass(frozen=True)
class Imm:
    """An immediate: an int, or the bits of a float literal of ``float_bits`` bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or a shared-memory variable."""

    name: str


@dataclass(frozen=True)
class Mem:
    """[base + offset]; ``base`` is a register, a symbol or an immediate."""

    base: object
    offset: int


@dataclass(frozen=True)
class MapMem:
    """[base, {coordinates}]: a box of the tensor whose map lies at ``base``."""

    base: object
    coordinates: tuple


@dataclass(frozen=True)
class Vec:
    """{a, b, ...}; an element is None where PTX writes the sink ``_``."""

    items: tuple


@dataclass(frozen=True)
class Not:
    """!p, a negated predicate operand."""

    reg: Reg


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``source`` is "file:line" of the Python that it came from, or ""."""

    index: int
    line: int
    opcode: str
    operands: tuple
    guard: Reg | None
    guard_negated: bool
    text: str
    source: str

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    def __str__(self):
        where = f" ({self.source})" if self.source else ""
        text = self.text if len(self.text) <= _LONGEST_TEXT else f"{self.text[:90]} … {self.text[-60:]}"
        return f"PTX line {self.line}: {text}{where}"


@dataclass(frozen=True)
class Param:
    """A kernel parameter and its place in the block of parameters (bytes)."""

    name: str
    size: int
    offset: int


@dataclass
class Kernel:
    """An entry of a PTX module."""

    name: str
    target: str
    params: list[Param] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)  # variable → offset in bytes
    static_shared_bytes: int = 0
    block: tuple[int, int, int] | None = None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label → index of the instruction behind it

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(r"\{|\}|;|[^\s;{}][^;{}]*")
_REG_DECL = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_SHARED = re.compile(
    r"(?:\.(extern|visible|weak)\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$.]+)(?:\[(\d*)\])?"
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^%]*?\s)?([\w$.]+)(?:\[(\d+)\])?\s*$")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+(.*)", re.S)
_OPCODE = re.compile(r"([\w.:]+)\s*(.*)", re.S)
_LABEL = re.compile(r"\s*([\w$%]+)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+")
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"")


_ENTRY = re.compile(r"(?:\.visible\s+)?\.entry\s+([\w$]+)\s*\(")


@lru_cache(maxsize=32)
def only_entry(ptx: str, prefix: str) -> str:
    """A module of several entries with one left, all else at its line.

    Args:
        prefix: what the entry's name begins with, up to the number that the DSL appends.

    Raises:
        PtxSyntaxError: no entry or several have that name.
    """
    entries = list(_ENTRY.finditer(ptx))
    wanted = [entry for entry in entries if re.fullmatch(re.escape(prefix) + r"(_\d+)?", entry.group(1))]
    if len(wanted) != 1:
        names = ", ".join(entry.group(1) for entry in entries)
        raise PtxSyntaxError(f"expected one .entry named {prefix!r} with or without a number, found {names}")
    for entry in reversed(entries):
        if entry is not wanted[0]:
            end = _closing_brace(ptx, ptx.index("{", entry.end())) + 1
            ptx = ptx[: entry.start()] + re.sub(r"[^\n]", " ", ptx[entry.start() : end]) + ptx[end:]
    return ptx


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxSyntaxError("a body has no closing brace")


@lru_cache(maxsize=32)
def parse(ptx: str) -> Kernel:
    """Parses a PTX module with one entry.

    Args:
        ptx: the text of the module.

    Returns:
        The entry as a ``Kernel``; the result is cached by the text and must not be changed.

    Raises:
        PtxSyntaxError: no entry or several, or a statement that cannot be read.
    """
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", ptx))
    if len(entries) != 1:
        raise PtxSyntaxError(f"expected a PTX module with one .entry, found {len(entries)}")
    target = re.search(r"\.target\s+(\w+)", ptx)
    kernel = Kernel(entries[0].group(1), target.group(1) if target else "")
    clean = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), ptx)
    files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(clean)}
    body_start = clean.index("{", entries[0].end())
    header = clean[entries[0].end() : body_start]
    _parse_params(kernel, header[: header.index(")")])
    reqntid = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header)
    if reqntid:
        kernel.block = tuple(int(extent or 1) for extent in reqntid.groups())
    shared = _SharedLayout(kernel)
    for match in _SHARED.finditer(clean[: entries[0].start()]):
        shared.add(match)
    _BodyParser(kernel, shared, files).run(clean, body_start)
    shared.finish()
    return kernel


def _parse_params(kernel: Kernel, text: str):
    offset = 0
    for declaration in text.split(","):
        if not declaration.strip():
            continue
        match = _PARAM.search(declaration.strip())
        if not match:
            raise PtxSyntaxError(f"cannot read the parameter {declaration.strip()!r}")
        align, kind, name, count = match.groups()
        element = TYPE_BYTES[re.sub(r"\D", "", kind)]
        size = element * int(count or 1)
        alignment = int(align or element)
        offset = -(-offset // alignment) * alignment
        kernel.params.append(Param(name, size, offset))
        offset += size


class _SharedLayout:
    """Gives every shared-memory variable its offset; the dynamic one follows the static ones."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.dynamic: list[tuple[str, int]] = []

    def add(self, match):
        _, align, kind, name, count = match.groups()
        alignment = int(align or TYPE_BYTES[re.sub(r"\D", "", kind)])
        if count == "":
            self.dynamic.append((name, alignment))
            return
        start = -(-self.kernel.static_shared_bytes // alignment) * alignment
        self.kernel.shared[name] = start
        self.kernel.static_shared_bytes = start + TYPE_BYTES[re.sub(r"\D", "", kind)] * int(count or 1)

    def finish(self):
        for name, alignment in self.dynamic:
            start = -(-self.kernel.static_shared_bytes // alignment) * alignment
            self.kernel.shared[name] = start
            self.kernel.static_shared_bytes = start


class _BodyParser:
    """Reads the statements between the braces of an entry, keeping the scopes of inline assembly apart."""

    def __init__(self, kernel: Kernel, shared: _SharedLayout, files: dict[str, str]):
        self.kernel = kernel
        self.shared = shared
        self.files = files
        self.scopes: list[dict[str, Reg]] = []
        self.ranges: list[tuple[str, int]] = []
        self.scope_count = 0
        self.scope_numbers: list[int] = []  # of the open scopes, outermost first
        self.branches: list[tuple[int, list[int]]] = []  # index of each branch, and the scopes it stands in
        self.source = ""

    def run(self, text: str, start: int):
        """Reads from the opening brace of the body to the closing one."""
        statement = None  # where the current one starts
        line, counted = text.count("\n", 0, start) + 1, start
        for match in _TOKEN.finditer(text, start):
            token = match.group(0)
            if statement is not None:
                if token == ";":
                    line += text.count("\n", counted, statement)
                    counted = statement
                    self._statement(text[statement : match.start()].strip(), line)
                    statement = None
            elif token == "{":
                self.scopes.append({})
                self.scope_count += 1
                self.scope_numbers.append(self.scope_count)
            elif token == "}":
                self.scopes.pop()
                self.scope_numbers.pop()
                if not self.scopes:
                    self._resolve_branches()
                    return
            elif token != ";":
                rest, skipped = self._directives(token)
                statement = match.start() + skipped if rest else None
        raise PtxSyntaxError("the body of the entry does not end")

    def _directives(self, token: str) -> tuple[str, int]:
        """Takes labels and .loc lines off the front of a statement; returns the rest and what was skipped."""
        skipped = 0
        while True:
            stripped = token.lstrip()
            skipped += len(token) - len(stripped)
            token = stripped
            label = _LABEL.match(token)
            if token.startswith((".loc", ".pragma", ".file")):
                loc = _LOC.match(token)
                if loc:
                    self.source = f"{self.files.get(loc.group(1), '?')}:{loc.group(2)}"
                end = token.find("\n")
                end = len(token) if end < 0 else end
            elif label:
                name = self._label(label.group(1), self.scope_numbers)
                self.kernel.labels[name] = len(self.kernel.instructions)
                end = label.end()
            else:
                return token, skipped
            token = token[end:]
            skipped += end

    @staticmethod
    def _label(name: str, scope_numbers: list[int]) -> str:
        """The kernel's name for a label of the innermost scope."""
        return name if len(scope_numbers) == 1 else f"{name}#{scope_numbers[-1]}"

    def _resolve_branches(self):
        """Gives branches to labels of inner scopes the kernel's names for them."""
        instructions, labels = self.kernel.instructions, self.kernel.labels
        for index, scopes in self.branches:
            target = instructions[index].operands[0].name
            candidates = (self._label(target, scopes[:depth]) for depth in range(len(scopes), 0, -1))
            found = next((name for name in candidates if name in labels), target)
            instructions[index] = replace(instructions[index], operands=(Symbol(found),))

    def _statement(self, text: str, line: int):
        if not text or text.startswith((".pragma", ".loc", ".branchtargets")):
            return
        declaration = _REG_DECL.match(text)
        if declaration:
            self._declare(declaration, line)
            return
        shared = _SHARED.match(text)
        if shared:
            self.shared.add(shared)
            return
        if text.startswith("."):
            raise PtxSyntaxError(f"PTX line {line}: cannot read the directive {text!r}")
        guard = _GUARD.match(text)
        opcode, operands = _OPCODE.match(guard.group(3) if guard else text).groups()
        if opcode.split(".")[0] == "bra" and len(self.scope_numbers) > 1:
            self.branches.append((len(self.kernel.instructions), list(self.scope_numbers)))
        self.kernel.instructions.append(
            Instruction(
                index=len(self.kernel.instructions),
                line=line,
                opcode=opcode,
                operands=tuple(self._operand(part, line) for part in _split(operands)),
                guard=self._register(guard.group(2), line) if guard else None,
                guard_negated=bool(guard and guard.group(1)),
                text=" ".join(text.split()),
                source=self.source,
            )
        )

    def _declare(self, match, line: int):
        kind, names = match.groups()
        if kind not in REGISTER_BITS:
            raise PtxSyntaxError(f"PTX line {line}: registers of type .{kind} are not supported")
        bits = REGISTER_BITS[kind]
        for name in (n.strip() for n in names.split(",")):
            if name.endswith(">"):
                self.ranges.append((name[: name.index("<")], bits))
            elif len(self.scopes) == 1:
                self.scopes[-1][name] = Reg(name, bits)
            else:
                self.scopes[-1][name] = Reg(f"{name}#{self.scope_count}", bits)

    def _register(self, name: str, line: int) -> Reg:
        found = self._lookup(name)
        if found is None:
            raise PtxSyntaxError(f"PTX line {line}: {name!r} is no declared register")
        return found

    def _lookup(self, name: str) -> Reg | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        stem = name.rstrip("0123456789")
        for prefix, bits in self.ranges:
            if stem == prefix and stem != name:
                register = Reg(name, bits)
                self.scopes[0][name] = register
                return register
        return None

    def _operand(self, text: str, line: int):
        if text == "_":
            return None
        if text.startswith("{"):
            return Vec(tuple(self._operand(part, line) for part in _split(text[1:-1])))
        if text.startswith("["):
            if "{" in text:
                base, coordinates = _split(text[1:-1])
                return MapMem(self._operand(base, line), self._operand(coordinates, line).items)
            address = re.match(r"\[\s*([%\w$.]+)\s*(?:([+-])\s*(-?\w+)\s*)?\]$", text)
            if address is None:
                raise PtxSyntaxError(f"line {line}: cannot read the address {text!r}")
            base, sign, offset = address.groups()
            displacement = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
            return Mem(self._operand(base, line), displacement)
        if text.startswith("!"):
            return Not(self._register(text[1:].strip(), line))
        if "|" in text:
            return Vec(tuple(self._operand(part.strip(), line) for part in text.split("|")))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Imm(int(text[2:], 16), 32)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Imm(int(text[2:], 16), 64)
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][+-]?\d+)?", text):
            return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Imm(int(text.rstrip("U"), 0 if "x" in text.lower() else 10))
        register = self._lookup(text)
        if register is not None:
            return register
        if text.startswith("%") or text == "WARP_SZ":
            return Special(text)
        if re.fullmatch(r"[\w$]+", text):
            return Symbol(text)
        raise PtxSyntaxError(f"PTX line {line}: cannot read the operand {text!r}")


def _split(text: str) -> list[str]:
    """Splits operands at the commas outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts
