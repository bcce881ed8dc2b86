"""Table parsing and figures."""

import re
import subprocess
import sys

import numpy as np
import pytest

from blitz_attn import plot, sabi, video

LIST = sabi.causal(512)
TABLE = """
progress 3 of 9
========================================================================
DTYPE=bfloat16 INPUT_LAYOUT='BNSD' SABI_SORTED=True TORCH_REFERENCE='own dense'
========================================================================
block_shape H B s_q s_kv D frame(L,R,T,B) sparsity Outputs_equal Ref_Latency_[usec] Our_Latency_[usec] GFLOP/s of_ideal
------------------------------------------------------------------------
128x128       3   1   4096   4096  128               -      0.00             yes             100.00             110.00 50.0 91%
128x128       3   1   4096   4096  128      (29,1,29,1)      0.50             yes                N/A              60.00 49.0 N/A
64x32         3   1   4096   4096  128               -      0.50             no                 N/A              60.00 49.0 80%
128x512       3   1   4096   4096  128               -      0.00             yes              90.00              95.00 49.0
========================================================================
"""


def test_parse_table():
    first, second, third = plot.parse_table(TABLE)  # the last row has a cell too few
    assert {
        "block_shape": (128, 128),
        "s_q": 4096,
        "frame(L,R,T,B)": None,
        "sparsity": 0.0,
        "Outputs_equal": "yes",
    }.items() <= first.items()
    assert {"Our_Latency_[usec]": 110.0, "GFLOP/s": 50.0, "of_ideal": 91}.items() <= first.items()
    assert (second["frame(L,R,T,B)"], second["Ref_Latency_[usec]"]) == ((29, 1, 29, 1), None)
    assert third["block_shape"] == (64, 32)
    assert plot.parse_table("") == plot.parse_table("128x128 is a block shape") == []
    bare = plot.parse_table("128x512 3 1 4096 4096 128 (8,x) 0.50 (1.5,2) N/A " + "9" * 5000)[0]  # no head, and cells that are not numbers
    assert list(bare) == list(plot.COLUMNS)
    assert (bare["frame(L,R,T,B)"], bare["Outputs_equal"], bare["Our_Latency_[usec]"]) == ("(8,x)", (1.5, 2.0), float("inf"))


def test_speedups():
    curves, skipped = plot.speedups(plot.parse_table(TABLE))
    assert curves == {(1, 3, 4096, 4096, 128, (128, 128)): [(0.0, 100 / 110), (0.5, 100 / 60)]}
    assert skipped == [(1, 3, 4096, 4096, 128, (64, 32))]


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: plot.plot_speedup([]), ValueError, "rows: expected at least one row of a benchmark table, got none"),
        (
            lambda: plot.plot_speedup(plot.parse_table(TABLE)[2:]),
            ValueError,
            "rows: expected a reference latency at sparsity 0, got none in any of 1 groups",
        ),
        (
            lambda: plot.plot_mask(np.zeros((1, 0, 4, 1), int), 4),
            ValueError,
            "sabi: expected at least one head, row and column, got a mask of shape (1, 0, 4, 4)",
        ),
        (lambda: plot.parse_table(5), TypeError, "text: expected a string, got int"),
        (lambda: plot.speedups(5), TypeError, "rows: expected a list of dicts of parse_table, got int"),
        (lambda: plot.speedups([3]), TypeError, "rows[0]: expected a dict of parse_table, got int"),
        (lambda: plot.speedups([{}]), ValueError, "rows[0]: expected a column B, got []"),
        (lambda: plot.plot_speedup([{}]), ValueError, "rows[0]: expected a column B, got []"),
        (lambda: plot.speedups([plot.parse_table(TABLE)[0] | {"B": "x"}]), TypeError, "rows[0]: expected an integer, got str"),
        (lambda: plot.plot_mask(LIST, block_shape=128), TypeError, "block_shape: expected two positive numbers (queries, keys), got int"),
        (lambda: plot.plot_mask(LIST, max_heads="a"), TypeError, "max_heads: expected an integer, got str"),
        (lambda: plot.plot_mask(LIST, max_heads=0), ValueError, "max_heads: expected at least 1, got 0"),
        (lambda: plot.plot_mask(LIST, ax=3), TypeError, "ax: expected matplotlib's Axes, got int"),
        (lambda: plot.plot_mask(LIST, title=3), TypeError, "title: expected a string, got int"),
        (lambda: plot.plot_mask(LIST, dpi=-1), ValueError, "dpi: expected a positive number, got -1"),
        (lambda: plot.plot_speedup(plot.parse_table(TABLE), dpi="x"), TypeError, "dpi: expected a number, got str"),
    ],
)
def test_bad_arguments(call, kind, sentence):
    pytest.importorskip("matplotlib")
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        call()


def drawn(figure, path):
    """The picture as an array, read back from the file."""
    image = pytest.importorskip("matplotlib.image")
    figure.savefig(path)
    return image.imread(path)


def test_plot_speedup(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [
        f"{q}x{k} 3 1 {s} {s} 128 - {p} yes 90.0 {100 * (1 - p)}"
        for q in (64, 128)
        for k in (128, 512)
        for s in (512, 4096)
        for p in (0.0, 0.9)
    ]
    figure = plot.plot_speedup(plot.parse_table("\n".join(cells)), title="Title")
    axes = figure.axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(labels) == 8 + 2
    assert "block_shape=(64, 128) BNSD=(1, 3, 512, 128)" in labels
    lines = {line.get_label(): line for line in axes.get_lines()}
    one, other = (lines[f"block_shape=({q}, {k}) BNSD=(1, 3, 512, 128)"] for q, k in ((64, 128), (128, 512)))
    assert one.get_color() != other.get_color()
    assert one.get_linestyle() != other.get_linestyle()
    assert one.get_marker() != lines["block_shape=(64, 128) BNSD=(1, 3, 4096, 128)"].get_marker()
    np.testing.assert_allclose(one.get_ydata(), [0.9, 9.0])
    assert axes.get_title() == "Title"
    picture = drawn(figure, tmp_path / "speedup.png")
    assert picture.shape[:2] == (840, 1440)
    assert picture[..., :3].std() > 0.05


def test_plot_mask(tmp_path):
    pytest.importorskip("matplotlib")
    lists = sabi.random_with_frame(2048, sparsity=0.5, heads=4, frame=sabi.FrameWidths(1, 1, 1, 1))
    figure = plot.plot_mask(lists, block_shape=(128, 128), title="Four heads")
    assert len(figure.axes) == 4
    shown = figure.axes[2].get_images()[0]
    assert (np.asarray(shown.get_array()) == sabi.to_block_mask(lists, 16)[0, 2]).all()
    assert list(shown.get_extent()) == [0, 2048, 2048, 0]
    assert figure.axes[1].get_title().startswith("batch 0, head 1: ")
    assert drawn(figure, tmp_path / "mask.png")[..., :3].std() > 0.05


def test_a_notebook_shows_figures():
    pytest.importorskip("matplotlib")
    assert plot.plot_mask(LIST)._repr_png_().startswith(b"\x89PNG")


def test_plot_into_axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    left, right = figure.subplots(1, 2)
    assert plot.plot_mask(sabi.causal(512), ax=left, title="mask") is figure
    assert left.get_title() == "mask"
    assert plot.plot_speedup(plot.parse_table(TABLE), ax=right) is figure


def test_matplotlib_is_imported_on_use_only():
    code = "import sys; from blitz_attn import plot, sabi, testing; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_plot_cubes(tmp_path):
    """Each panel shows the tokens of a frame that the block of a given token sees, and those that this block holds."""
    pytest.importorskip("matplotlib")
    spans = [3, (5, 8, 12), 2, (1, 6, 5)]
    order = video.cube_order(video.Geometry(spans), (2, 4, 4))
    lists = video.blocks(order, [video.Neighbourhood(), video.SlidingTiles((1, 1, 2))], (24, 16))
    token = 3 + (2 * 8 + 5) * 12 + 7
    row = int(order.inverse[token]) // 24
    figure = plot.plot_cubes(order, lists, row, head=1)
    seen = sabi.to_token_mask(lists, 515)[0, 1][row * 24][order.inverse]
    own = order.inverse // 24 == row
    assert own[token]
    kinds = np.where(own, 2, seen)
    frames = [*kinds[3:483].reshape(5, 8, 12), kinds[485:].reshape(6, 5)]
    assert len(figure.axes) == 6
    for panel, frame in zip(figure.axes, frames, strict=True):
        assert (np.asarray(panel.get_images()[0].get_array()) == frame).all()
    assert [panel.get_title() for panel in figure.axes[::5]] == ["grid 0, frame 0", "grid 1, frame 0"]
    plain = "and 5 of 5 plain tokens, which are not drawn"
    assert seen[:3].all()
    assert seen[483:485].all()
    assert figure._suptitle.get_text() == f"24 queries (orange) see {seen.sum()} of 515 tokens ({seen.mean():.1%}: blue and orange, {plain})"
    assert drawn(figure, tmp_path / "cubes.png")[..., :3].std() > 0.05
    few = plot.plot_cubes(order, np.asarray(lists), row, block_shape=(24, 16), max_frames=2, title="few")
    assert [panel.get_title() for panel in few.axes] == ["grid 0, frame 2", "grid 1, frame 0"]
    assert few._suptitle.get_text() == "few"
    frames = video.cube_order(video.Geometry([(2, 4, 4)]), (1, 4, 4))
    for columns, told in (([0], "25.0%: blue and some of the orange"), ([2], "25.0%: blue"), ([0, 1, 2], "75.0%: blue and orange")):
        title = plot.plot_cubes(frames, np.array([[columns, columns]]), 0, block_shape=(16, 8))._suptitle.get_text()
        assert title == f"16 queries (orange) see {8 * len(columns)} of 32 tokens ({told})"
    usual = plot.plot_cubes(order, lists)  # by default, row is the block with the middle token of the first grid
    assert np.asarray(usual.axes[2].get_images()[0].get_array())[4, 6] == 2
