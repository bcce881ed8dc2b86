"""The library's report about the machine, and caps on the instruction set level."""

import io
import json
import sys
from importlib import metadata

import numpy as np
import pytest

import blitz_attn
from blitz_attn import _core, config
from interpreters import python

SECTIONS = ["blitz_attn", "python", "cpu", "isa", "threads", "environment", "packages", "kernels"]


def isa_report(**variables):
    return json.loads(python("-m", "blitz_attn", "--json", **variables))["isa"]


# ---- Import -------------------------------------------------------------------------------------------------------


def test_import_leaves_out_what_only_some_programs_need():
    program = """if True:
        import sys, blitz_attn
        print([name for name in ("distributed", "plot", "reference", "testing") if f"blitz_attn.{name}" in sys.modules])
        print(set(blitz_attn.__all__) <= set(dir(blitz_attn)))
        print(blitz_attn.reference.__name__, blitz_attn.plot.__name__, blitz_attn.testing.__name__)
    """
    assert python("-c", program).splitlines() == ["[]", "True", "blitz_attn.reference blitz_attn.plot blitz_attn.testing"]


# ---- The report ---------------------------------------------------------------------------------------------------


def test_the_dict_says_what_the_library_does():
    report = blitz_attn.show_config("dict")
    assert list(report) == SECTIONS
    assert report == json.loads(json.dumps(report))
    assert report["blitz_attn"]["version"] == blitz_attn.__version__ == _core.__version__
    assert report["cpu"]["model"]
    assert report["isa"]["active"] == _core.isa_active()
    assert report["isa"]["why"]
    assert report["threads"] == {"count": blitz_attn.get_num_threads(), "why": _core.num_threads_source()}
    assert report["kernels"] == blitz_attn.kernels()


def test_the_text_has_what_the_dict_has(capsys):
    assert blitz_attn.show_config() is None
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == SECTIONS
    report = blitz_attn.show_config("dict")
    for expected in (report["cpu"]["model"], report["isa"]["why"], report["threads"]["why"], *report["kernels"]):
        assert any(expected in line for line in lines)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("50000 100000\n", 0.5), ("150000\n", None), ("a b\n", None), (None, None)],
)
def test_the_quota_of_the_control_group(text, quota, monkeypatch):
    def stand_in(path, **_options):
        if text is None or path == "/proc/cpuinfo":
            raise FileNotFoundError(path)
        assert path == "/sys/fs/cgroup/cpu.max"
        return io.StringIO(text)

    monkeypatch.setattr(config, "open", stand_in, raising=False)
    assert blitz_attn.show_config("dict")["cpu"]["cgroup_quota"] == quota


def test_packages_that_are_missing_have_no_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert set(blitz_attn.show_config("dict")["packages"].values()) == {None}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"^mode: expected 'text' or 'dict', got 'xml'"):
        blitz_attn.show_config("xml")


def test_the_command_line_prints_text_and_json():
    assert python("-m", "blitz_attn").splitlines()[0] == "blitz_attn"
    assert list(json.loads(python("-m", "blitz_attn", "--json"))) == SECTIONS


def test_environment_is_shown():
    report = json.loads(python("-m", "blitz_attn", "--json", BLITZ_ATTN_NUM_THREADS="3"))
    assert report["environment"]["BLITZ_ATTN_NUM_THREADS"] == "3"
    assert report["threads"]["count"] == 3


# ---- Instruction sets ---------------------------------------------------------------------------------------------


def test_available_levels_are_the_first_ones_up_to_what_was_detected():
    levels = blitz_attn.isa_levels()
    assert levels[0] == "portable"
    assert len(set(levels)) == len(levels)
    available = blitz_attn.isa_levels(available=True)
    assert available == levels[: len(available)]
    assert available[-1] == _core.isa_detected()


def test_cap_holds_inside_the_block_only():
    before = _core.isa_active()
    for level in blitz_attn.isa_levels():
        with blitz_attn.isa(level) as active:
            assert active == _core.isa_active() == min(level, _core.isa_detected(), key=blitz_attn.isa_levels().index)
        assert _core.isa_active() == before


def test_caps_nest():
    levels = blitz_attn.isa_levels(available=True)
    with blitz_attn.isa(levels[-1]):
        with blitz_attn.isa("portable"), blitz_attn.isa() as active:
            assert active == "portable"
        assert _core.isa_active() == levels[-1]


def test_cap_is_taken_back_after_an_error():
    before = _core.isa_active()
    with pytest.raises(ZeroDivisionError), blitz_attn.isa("portable"):
        _ = 1 / 0
    assert _core.isa_active() == before


def test_cap_as_a_setter():
    before = _core.isa_active()
    cap = blitz_attn.isa("portable")
    try:
        assert cap.level == _core.isa_active() == "portable"
        assert repr(cap) == "isa('portable')"
    finally:
        blitz_attn.isa(before)
    assert _core.isa_active() == before


@pytest.mark.parametrize(("level", "error"), [("sse9", ValueError), ("AVX2", ValueError), ("", ValueError), (2, TypeError)])
def test_an_unknown_level_is_refused(level, error):
    before = _core.isa_active()
    with pytest.raises(error, match=r"^level: expected .*, got "):
        blitz_attn.isa(level)
    with pytest.raises(error, match=r"^level: expected .*, got "):
        blitz_attn.kernels(level)
    assert _core.isa_active() == before


@pytest.mark.skipif(_core.isa_detected() == "portable", reason="needs a level above portable")
def test_the_environment_caps_the_level():
    report = isa_report(BLITZ_ATTN_ISA="portable")
    assert report["active"] == "portable"
    assert report["detected"] == _core.isa_detected()
    assert "BLITZ_ATTN_ISA" in report["why"] or "cap" in report["why"]


def test_environment_cap_above_the_cpu():
    assert isa_report(BLITZ_ATTN_ISA=blitz_attn.isa_levels()[-1])["active"] == _core.isa_detected()


def test_unknown_environment_cap_is_reported_and_ignored():
    report = isa_report(BLITZ_ATTN_ISA="sse9")
    assert report["active"] == _core.isa_detected()
    assert "sse9" in report["why"]
    assert all(level in report["why"] for level in blitz_attn.isa_levels())


def test_a_cap_replaces_the_note_about_the_environment():
    program = "import json, blitz_attn; blitz_attn.isa('portable'); print(json.dumps(blitz_attn.show_config('dict')['isa']))"
    report = json.loads(python("-c", program, BLITZ_ATTN_ISA="sse9"))
    assert report["active"] == "portable"
    assert "sse9" not in report["why"]


def test_refused_permission_is_reported_and_a_lower_level_used():
    """Linux refuses tiles if a thread's signal stack cannot hold their state: a lower level is used, and the report says why."""
    if "amx" not in blitz_attn.isa_levels(available=True) or sys.platform != "linux" or _core.probe_tile_flops("amx", 0.01, 1) < 100:
        pytest.skip("the CPU has no amx")
    program = """if True:
        import ctypes, mmap
        class Stack(ctypes.Structure):
            _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
        memory = mmap.mmap(-1, 8192)
        stack = Stack(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 8192)  # the state of tiles alone has this size
        assert ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) == 0
        import blitz_attn, json
        print(json.dumps(blitz_attn.show_config("dict")["isa"]))
    """
    report = json.loads(python("-c", program))
    assert report["active"] == report["detected"] == "avx512"  # such CPUs are faster without avx512_bf16
    assert "refused" in report["why"]


# ---- Kernels ------------------------------------------------------------------------------------------------------


def test_kernels_are_no_higher_than_the_level():
    levels = blitz_attn.isa_levels()
    for level in blitz_attn.isa_levels(available=True):
        kernels = blitz_attn.kernels(level)
        jobs = [name.partition("_")[0] for name in kernels]
        assert {job: jobs.count(job) for job in jobs} == {"attend": 4, "few": 4, "gradient": 4, "cache": 9}  # one per dtype
        assert all(levels.index(implemented) <= levels.index(level) for implemented in kernels.values())
    assert blitz_attn.kernels() == blitz_attn.kernels(_core.isa_active())


# ---- Probes -------------------------------------------------------------------------------------------------------


def test_probes_measure_rates_above_zero():
    for level in blitz_attn.isa_levels(available=True):
        assert _core.probe_flops(level, 0.01, 1) > 0.1  # GFLOP/s
        if level != "amx":  # the one level that has tiles
            assert _core.probe_tile_flops(level, 0.001, 1) == 0
        assert _core.probe_read(level, 1 << 16, 0.01, 1) > 0.1  # GB/s
        assert _core.probe_read(level, np.ones(1 << 15, np.uint8), 0.01, 2) > 0.1
        assert _core.probe_read(level, np.ones(1 << 15, np.uint8), None, 2) > 0.1  # one pass over the array
        assert _core.probe_read(level, b"a few bytes", 0.01, 1) == 0


def test_probes_return_0_where_they_cannot_measure():
    for size, threads in ((1 << 62, 4), (1 << 62, 1), ((1 << 63) - 100, 1)):  # more than there is, and in two cases more than int64 holds
        assert _core.probe_read("portable", size, 0.01, threads) == 0
    too_many = 1025
    assert _core.probe_flops("portable", 0.001, too_many) == 0
    assert _core.probe_read("portable", 1 << 16, 0.001, too_many) == 0
    assert _core.probe_read("portable", np.ones(1 << 20, np.uint8), None, too_many) == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: _core.probe_flops("sse9", 0.01), ValueError),
        (lambda: _core.probe_flops("portable", 0.0), ValueError),
        (lambda: _core.probe_flops("portable", float("nan")), ValueError),
        (lambda: _core.probe_flops("portable", None), TypeError),
        (lambda: _core.probe_flops("portable", "1"), TypeError),
        (lambda: _core.probe_flops("portable", 0.01, 0), ValueError),
        (lambda: _core.probe_read("portable", 0, 0.01), ValueError),
        (lambda: _core.probe_read("portable", 1.5, 0.01), TypeError),
        (lambda: _core.probe_read("portable", b"", 0.01), ValueError),
    ],
)
def test_probes_refuse(call, error):
    with pytest.raises(error, match=r"^\w+: expected .*, got "):
        call()
