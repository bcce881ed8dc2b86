"""The file that carries captured queries, keys and values: written by `capture.py`, read by `benchmark.py --input` and the tests.

One `.npz` archive a capture. For each captured layer L it holds `q{L}` (B, H, S, D), `k{L}` and `v{L}` (B, H_kv, S, D), all of one
floating dtype and after rotary embedding, so that causal attention over them with `scale` is exactly what the model computed. Beside
them stand `layers` (int array), `scale` (float), `tokens` (B, S) token numbers, `model` and `text` (names, for table headings).
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

__all__ = ["Capture", "load_capture", "save_capture"]


@dataclass
class Capture:
    """Queries, keys and values of some layers of one model over one text."""

    scale: float
    tokens: np.ndarray
    model: str
    text: str
    layers: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def sliced(self, tokens: int, kv_heads: int = 1) -> Capture:
        """The first `tokens` tokens and the query heads of the first `kv_heads` KV heads.

        A causal prefix needs nothing of what follows it, so the slice is what the model itself would have computed on the shorter text.
        """
        layers = {}
        for number, (q, k, v) in self.layers.items():
            group = q.shape[1] // k.shape[1]
            layers[number] = (q[:, : group * kv_heads, :tokens], k[:, :kv_heads, :tokens], v[:, :kv_heads, :tokens])
        return Capture(self.scale, self.tokens[:, :tokens], self.model, self.text, layers)


def save_capture(path: str | Path, capture: Capture) -> None:
    """Write `capture` to `path` (compressed `.npz`)."""
    arrays = {
        "layers": np.array(sorted(capture.layers), dtype=np.int64),
        "scale": np.float64(capture.scale),
        "tokens": capture.tokens,
        "model": np.array(capture.model),
        "text": np.array(capture.text),
    }
    for number, qkv in capture.layers.items():
        for name, array in zip("qkv", qkv, strict=True):
            arrays[f"{name}{number}"] = array
    with open(path, "wb") as file:  # a file object: np.savez would add ".npz" to a name without it
        np.savez_compressed(file, **arrays)


def load_capture(path: str | Path) -> Capture:
    """Read a capture.

    Raises
    ------
    ValueError
        If the archive is not one that `capture.py` wrote: the sentence names what is missing or does not fit.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a file written by capture.py, got another kind of file")
    with np.load(path, allow_pickle=False) as archive:
        missing = {"layers", "scale", "tokens"} - set(archive.files)
        if missing:
            raise ValueError(f"{path}: expected a file written by capture.py, but it has no {', '.join(sorted(missing))}")
        layers = {}
        for number in archive["layers"].tolist():
            q, k, v = (archive[f"{name}{number}"] for name in "qkv")
            if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
                raise ValueError(
                    f"{path}: layer {number}: expected q (B, H, S, D) and k, v (B, H_kv, S, D) with H a multiple of H_kv, "
                    f"got {q.shape}, {k.shape}, {v.shape}"
                )
            layers[number] = (q, k, v)
        text = {name: str(archive[name]) if name in archive.files else "?" for name in ("model", "text")}
        return Capture(float(archive["scale"]), archive["tokens"], text["model"], text["text"], layers)
