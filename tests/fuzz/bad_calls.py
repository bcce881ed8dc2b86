"""Bad calls: a valid call of a public function in which one argument, sometimes two, is replaced by an unusual value, or is missing,
unknown or surplus.

Either the call is accepted, or it is refused with a TypeError or a ValueError, whose only sentence names an argument. In both cases nothing
outside the outputs is written, and the call takes little time and memory.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import time
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import blitz_attn
import exporters
from exporters import Dlpack

from . import unusual_values
from .arena import Arena
from .arrays import HAS_TORCH, bits_of
from .draw import Discard, Draw
from .good_calls import GROUPS, Good, parameters
from .problems import Finding, problem
from .refusals import REFUSALS, Refusal
from .unusual_values import ALIEN, ANY, ENDLESS, is_huge, table

try:
    import resource
except ImportError:  # not on every platform
    resource = None  # type: ignore[assignment]

SECONDS = 10.0  # of processor time, far more than any call should take: this does not find calls that are merely slow
SECONDS_PER_ELEMENT = 1e-6  # allowed in addition, for results that the arguments make large
KIBIBYTES = 1 << 20
VARIETIES = 32
WEIGHT = 0.03  # per function, so that about a tenth of a campaign's problems are bad calls
HOW = ("argument", "two arguments", "unknown keyword", "too many positional", "missing argument", "positional", "refusal")
SENTENCE = re.compile(r"([\w\[\]., ]+): expected .+, got .+", re.DOTALL)
CALLED = ("chooser", "mask_mod")  # arguments that may be the caller's function: Python's error about its signature is passed on
PLAIN = (np.ndarray, np.generic, str, bool, int, float, type(None))


class Call:
    """A valid call whose arguments can be replaced."""

    def __init__(self, name: str, good: Good, variety: int, seed: int = 0) -> None:
        self.name, self.good = name, good
        self.arena = Arena(seed)
        self.arguments = good.make(self.arena, variety)
        self.replaced: dict[str, str] = {}  # argument: name of the unusual value
        self.positional: tuple[Any, ...] = ()
        self.by_position: list[str] = []  # the names of positional arguments
        self.python_refuses = False
        self.calls_unusual = False  # whether an unusual function was given, which may not take the arguments that the package passes

    def value(self, argument: str) -> Any:
        if argument in self.arguments:
            return self.arguments[argument]
        if argument in self.by_position:
            return self.positional[self.by_position.index(argument)]
        default = parameters(self.good.call)[argument].default
        return None if default is inspect.Parameter.empty else default

    def choices(self, argument: str) -> list[str]:
        """Names of the unusual values that may replace this argument. Those that are made from the valid value come first."""
        return [*table(self.value(argument)), *ANY]

    def replace(self, argument: str, unusual: str) -> None:
        if self.good.lenient and (is_huge(unusual) or "65535" in unusual or unusual in ENDLESS):
            raise Discard("blitz_attn.testing makes arrays of any size that is asked for, and reads sequences as NumPy does")
        if argument in self.good.sizes and re.search(r"2\*\*3[123]\b", unusual):
            raise Discard("this size is below the limit, so that the call would make a result as large as that")
        if argument in self.good.sizes and self.name == "from_function" and "65535" in unusual:
            raise Discard("this size is right, and the function of the caller would look at all pairs")
        right = self.value(argument)
        try:
            self.arguments[argument] = ANY[unusual]() if unusual in ANY else table(right)[unusual](right)
        except Exception as error:  # the value may be unusual already, or memory may be short; the package is not involved
            raise Discard(f"{unusual} cannot be made from {type(right).__name__}") from error
        self.replaced[argument] = f"{self.replaced[argument]}, {unusual}" if argument in self.replaced else unusual
        self.calls_unusual |= argument in CALLED and callable(self.arguments[argument])

    def refuse(self, row: Refusal) -> None:
        """Changes arguments by a row of `refusals`. In this variety, the call need not be refused."""
        try:
            self.arguments = row.apply(self.arguments)
        except Exception as error:
            raise Discard(f"{row.changes} cannot be made in this variety") from error
        self.replaced |= dict.fromkeys(row.changes, "huge, as a refusal has it")

    def make_positional(self) -> None:
        """Passes by position all arguments that may be passed so."""
        names = self.by_position
        for name, parameter in parameters(self.good.call).items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY or name not in self.arguments:
                break
            names.append(name)
        self.positional = tuple(self.arguments.pop(name) for name in names)

    def run(self) -> str:
        """Makes the call and judges its outcome. Returns "accepted", or the sentence of the refusal."""
        before = self.arena.memory.copy()
        memory, clock, elements = _peak(), time.process_time(), 0
        try:
            with contextlib.redirect_stdout(io.StringIO()) if not self.good.quiet else contextlib.nullcontext():
                result = self.good.call(*self.positional, **self.arguments)
        except Exception as error:
            text = self._judge_refusal(error)
        else:
            text, elements = "accepted", getattr(result, "size", 0)
            self._judge_result(result)
        clock, memory = time.process_time() - clock, _peak() - memory
        if clock > SECONDS + SECONDS_PER_ELEMENT * (elements if isinstance(elements, int) else 0):
            raise Finding(f"{self.name}({self.replaced}): {clock:.1f} s of work")
        if memory > KIBIBYTES:
            raise Finding(f"{self.name}({self.replaced}): {memory / KIBIBYTES:.1f} GiB of memory")
        outside = np.ones(before.shape, np.bool_)
        if text == "accepted":
            for name in self.good.writes:
                _mark(self.arena.memory, outside, self.value(name))
        if not np.array_equal(before[outside], self.arena.memory[outside]):
            raise Finding(f"{self.name}({self.replaced}): {text}, and wrote where it should not")
        return text

    def _judge_refusal(self, error: Exception) -> str:
        """The sentence of an acceptable refusal. Any other exception is raised again."""
        if isinstance(error, MemoryError) and any(map(is_huge, self.replaced.values())):
            return "MemoryError"
        if _is_from_unusual_value(error):  # an exception of an object's own method may be passed on as it is, as in NumPy
            return "the object's own exception"
        if self.good.lenient:  # helpers for tests promise no sentences, but must end and write nothing
            return "refused"
        if not isinstance(error, (TypeError, ValueError)):
            raise error
        text = _text(error)
        self._judge_sentence(type(error), text)
        return text

    def _judge_sentence(self, kind: type[Exception], text: str) -> None:
        where = f"{self.name}({self.replaced}): {kind.__name__}: {text}"
        if kind not in (TypeError, ValueError):
            raise Finding(f"{where}\nis another kind of exception")
        if not text.strip() or "\n" in text or len(text) > 1000:
            raise Finding(f"{where}\nis not one sentence")
        if self.python_refuses:
            return
        match = SENTENCE.fullmatch(text)
        if match is None:
            raise Finding(f"{where}\nis not `name: expected ..., got ...`")
        named = [re.sub(r"\[.*?\]", "", name).partition(".")[0] for name in match[1].split(", ")]
        known = {*parameters(self.good.call), *self.good.names}
        if not all(name in known for name in named):
            raise Finding(f"{where}\nnames something that is not an argument")
        cast = any(unusual.startswith("this as float") for unusual in self.replaced.values())  # a valid dtype that the other arguments do not have
        whole = (kind is TypeError and not cast) or (self.replaced and all(unusual in ALIEN for unusual in self.replaced.values()))
        if whole and not any(re.search(rf"\b{argument}\b", text) for argument in (*self.replaced, *self.good.names)):
            raise Finding(f"{where}\ndoes not name the argument")

    def _judge_result(self, result: Any) -> None:
        returned = result if isinstance(result, tuple) else (result,)
        given = [*self.positional, *self.arguments.values()]
        given += [part for x in given if isinstance(x, tuple) for part in x]
        if self.good.lenient or all(_is_plausible(x) or any(x is y for y in given) for x in returned):  # a given output is returned as it is
            return
        raise Finding(f"{self.name}({self.replaced}): accepted, with a result of {type(result).__name__}")


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as other:
        raise Finding(f"a {type(error).__name__} that cannot be shown: {type(other).__name__}") from error


def _is_from_unusual_value(error: Exception) -> bool:
    """Whether a method of an unusual value raised this exception."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_filename in (unusual_values.__file__, exporters.__file__)


def _peak() -> float:
    """The largest memory of this process so far, in KiB."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _is_plausible(result: Any) -> bool:
    if isinstance(result, (tuple, list, set)):
        return all(map(_is_plausible, result))
    if isinstance(result, dict):
        return all(map(_is_plausible, result.values()))
    if isinstance(result, np.ndarray):
        return bool(result.dtype.kind in "fiubV" and not result.dtype.hasobject)
    if HAS_TORCH and type(result).__module__.partition(".")[0] == "torch":
        return True
    return isinstance(result, PLAIN) or type(result).__module__.startswith("blitz_attn")


def _mark(memory: np.ndarray, outside: np.ndarray, written: Any) -> None:
    """Excludes the bytes of an output from those that must not change."""
    if isinstance(written, (tuple, list)):
        for part in written:
            _mark(memory, outside, part)
    if HAS_TORCH and type(written).__module__.partition(".")[0] == "torch":
        written = written.detach().numpy()
    if isinstance(written, Dlpack):
        written = written.array
    if isinstance(written, memoryview):
        written = np.asarray(written)
    if not isinstance(written, np.ndarray) or not written.size or not np.may_share_memory(memory, written):
        return
    first = written.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    low = sum(min(0, (n - 1) * step) for n, step in zip(written.shape, written.strides, strict=True))
    covered = np.frombuffer(outside.data, np.uint8, offset=first + low)
    shape, strides = (*written.shape, written.itemsize), (*written.strides, 1)
    as_strided(covered[-low:], shape, strides)[...] = 0


# ---- Problems -----------------------------------------------------------------------------------------------------


@cache
def _expected(group: str, name: str) -> list[bytes]:
    """The bits of the result of the valid call of variety 0, and of its arrays after the call."""
    return _bits(Call(name, GROUPS[group][name], 0))


def _bits(call: Call) -> list[bytes]:
    with contextlib.redirect_stdout(io.StringIO()):
        result = call.good.call(**call.arguments)
    found = []
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, np.ndarray) or (HAS_TORCH and type(part).__module__.partition(".")[0] == "torch"):
            found.append(bits_of(part))
    return [*found, call.arena.memory.tobytes()]


def _change(draw: Draw, group: str, call: Call) -> None:
    names = list(parameters(call.good.call))
    rows = REFUSALS.get(f"{group}.{call.name}", [])
    how = draw.pick("how", HOW, (24, 5, 1, 1, 1, 1, 3 if rows else 0))
    if how == "refusal" and rows:
        call.refuse(rows[draw.integer("row", 0, len(rows) - 1)])
    if how in ("argument", "two arguments", "positional") and names:
        argument = draw.pick("argument", names)
        call.replace(argument, draw.pick("odd", call.choices(argument)))
    if how == "two arguments" and names:
        second = draw.pick("argument 2", names)
        call.replace(second, draw.pick("odd 2", call.choices(second)))
    call.python_refuses = how in ("unknown keyword", "too many positional", "missing argument") or None in call.replaced or call.calls_unusual
    if how == "unknown keyword":
        call.arguments[draw.pick("keyword", ("strange", "Q", "self", "mask", ""))] = 1
    elif how == "too many positional":
        call.make_positional()
        call.positional += (None,) * draw.integer("more", 1, 40)
    elif how == "missing argument" and call.arguments:
        call.arguments.pop(draw.pick("left out", list(call.arguments)))
    elif how == "positional":
        call.make_positional()


def _problem(group: str) -> None:
    names = list(GROUPS[group])

    def run(draw: Draw) -> None:
        name = draw.pick("function", names)
        call = Call(name, GROUPS[group][name], draw.integer("variety", 0, VARIETIES - 1), draw.seed)
        _change(draw, group, call)
        cap = blitz_attn.isa()
        try:
            with cap:
                call.run()
        finally:
            blitz_attn.set_num_threads(None)
        if draw.flag("good again", 0.03) and _bits(Call(name, GROUPS[group][name], 0)) != _expected(group, name):
            raise Finding(f"{name}: a right call gives other bits than before")

    problem(f"bad_call.{group}", weight=WEIGHT * len(names))(run)


for _group in GROUPS:
    _problem(_group)
