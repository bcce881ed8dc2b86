"""The instruction sets, threads and kernels that the library uses, and functions that change them."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import numpy as np

from . import _arrays, _core

__all__ = ["get_num_threads", "isa", "isa_levels", "kernels", "set_num_threads", "show_config"]

_ENVIRONMENT = ("BLITZ_ATTN_ISA", "BLITZ_ATTN_NUM_THREADS", "OMP_NUM_THREADS")
_OPTIONAL_PACKAGES = ("ml_dtypes", "torch", "jax", "matplotlib")


# ---- Threads ------------------------------------------------------------------------------------------------------


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads of calls that do not pass ``num_threads``.

    Parameters
    ----------
    num_threads : int or None
        From 1 to 1024. None restores the default: see the notes.

    Raises
    ------
    TypeError, ValueError
        `num_threads` is neither None nor an integer from 1 to 1024.

    Notes
    -----
    The first of these that is given counts: ``num_threads=`` of a call, this function, ``BLITZ_ATTN_NUM_THREADS``, ``OMP_NUM_THREADS``, and
    last the number of CPUs that affinity and the cgroup quota allow. The setting of this function holds for the whole process.

    The number of CPUs is found once, when it is first needed: a later change of the affinity does not change it. The library sets no
    affinity. Its threads inherit the affinity of the thread whose call starts them.

    Examples
    --------
    >>> import blitz_attn
    >>> blitz_attn.set_num_threads(2)
    >>> blitz_attn.get_num_threads()
    2
    >>> blitz_attn.set_num_threads(None)
    """
    _core.set_num_threads(num_threads)


def get_num_threads() -> int:
    """The number of threads of a call that does not pass ``num_threads``.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> import blitz_attn
    >>> blitz_attn.get_num_threads() >= 1
    True
    """
    return _core.get_num_threads()


# ---- Instruction sets ---------------------------------------------------------------------------------------------


class IsaCap:
    """A cap on the instruction sets in use, made by `isa`. The end of a ``with`` block sets the cap to the level that was in use before."""

    def __init__(self, level: str | None) -> None:
        self._before = _core.isa_active()
        if level is not None:
            _core.isa_set_cap(level)
        try:
            self.level = _core.isa_active()
        except MemoryError:  # no with block has been entered whose end would remove the cap
            _core.isa_set_cap(self._before)
            raise

    def __enter__(self) -> str:
        return self.level

    def __exit__(self, *exc_info: object) -> None:
        _core.isa_set_cap(self._before)

    def __repr__(self) -> str:
        return f"isa({self.level!r})"


def isa(level: str | None = None) -> IsaCap:
    """Cap the instruction sets that kernels may use, permanently or within a ``with`` block.

    Parameters
    ----------
    level : str, optional
        One of `isa_levels`. If the CPU or the build lacks this level, the highest level that both have is used. None changes nothing.

    Returns
    -------
    IsaCap
        Its ``level``, which a ``with`` block binds, is the level in use from now on. At its end, the block sets the cap to the level that
        was in use before.

    Raises
    ------
    TypeError, ValueError
        `level` is not the name of a level.

    Notes
    -----
    The cap holds for the whole process, not only for the calling thread. The environment variable ``BLITZ_ATTN_ISA`` sets the cap at start.

    Examples
    --------
    >>> import blitz_attn
    >>> with blitz_attn.isa("portable") as level:
    ...     print(level)
    portable
    """
    return IsaCap(level)


def isa_levels(*, available: bool = False) -> tuple[str, ...]:
    """Names of the instruction set levels, each of which includes the levels before it.

    Parameters
    ----------
    available : bool
        Name only levels that this CPU and this build have, whatever the cap.

    Returns
    -------
    tuple of str
        In rising order.

    Examples
    --------
    >>> import blitz_attn
    >>> blitz_attn.isa_levels(available=True)[0]
    'portable'
    """
    levels = _core.isa_levels()
    return levels[: levels.index(_core.isa_detected()) + 1] if _arrays.flag(available, "available") else levels


def kernels(level: str | None = None) -> dict[str, str]:
    """The kernels that a level uses, and the level that each is written for.

    Parameters
    ----------
    level : str, optional
        One of `isa_levels`; default: the level in use.

    Returns
    -------
    dict of str to str
        For the name of each kernel, the level whose instructions it uses. The name has the dtype of the queries in ``attend_...``
        (attention, with the sizes of its panels), ``few_...`` (attention of few queries per key/value head, as in decoding) and
        ``gradient_...``, and the dtype of keys and values in ``cache_...`` (decoding and selection over paged caches).

    Raises
    ------
    TypeError, ValueError
        `level` is not the name of a level.

    Examples
    --------
    >>> import blitz_attn
    >>> set(blitz_attn.kernels("portable").values())
    {'portable'}
    """
    return dict(_core.kernels(level))


# ---- The report ---------------------------------------------------------------------------------------------------


def _package_version(name: str) -> str | None:
    from importlib import metadata  # here because importing it takes as long as importing half of this package

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_family() -> str | None:
    """The family and model of the CPU, such as "26, model 2", which tell generations apart; None where Linux does not say."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("cpu family", "model"):
                    found.setdefault(name.strip(), value.strip())
    except OSError:
        return None
    return f"{found['cpu family']}, model {found['model']}" if len(found) == 2 else None


def _affinity() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cgroup_quota() -> float | None:
    """Number of CPUs that the control group may use; None without a limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _report() -> dict[str, Any]:
    return {
        "blitz_attn": {
            "version": _core.__version__,
            "compiler": _core.compiler,
            "location": os.path.dirname(os.path.abspath(_core.__file__)),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable, "numpy": np.__version__},
        "cpu": {
            "model": _core.cpu_model(),
            "family": _cpu_family(),
            "platform": platform.platform(),
            "affinity": _affinity(),
            "cgroup_quota": _cgroup_quota(),
        },
        "isa": {
            "active": _core.isa_active(),
            "detected": _core.isa_detected(),
            "levels": list(_core.isa_levels()),
            "why": _core.isa_note(),
        },
        "threads": {"count": _core.get_num_threads(), "why": _core.num_threads_source()},
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "packages": {name: _package_version(name) for name in _OPTIONAL_PACKAGES},
        "kernels": kernels(),
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " < ".join(map(str, value))
    return "-" if value is None else str(value)


def show_config(mode: str = "text") -> dict[str, Any] | None:
    """Report versions, CPU, instruction sets, threads and kernels, and the reason of each choice.

    Parameters
    ----------
    mode : {"text", "dict"}
        Print the report, or return it.

    Returns
    -------
    dict or None
        With ``mode="dict"``: sections of names and values that JSON can hold.

    Raises
    ------
    TypeError
        `mode` is not a string.
    ValueError
        `mode` is another string.

    Examples
    --------
    >>> import blitz_attn
    >>> report = blitz_attn.show_config("dict")
    >>> report["isa"]["active"] in blitz_attn.isa_levels(available=True)
    True
    """
    if _arrays.choice(mode, "mode", ("text", "dict")) == "dict":
        return _report()
    for section, entries in _report().items():
        width = max(map(len, entries), default=0)
        print(section)
        for name, value in entries.items():
            print(f"  {name:<{width}}  {_text(value)}")
    return None
