"""Runs vLLM's CPU engine over a list of cases, and prints a line of RESULT and JSON for each. tests/test_vllm.py starts it as a process.

    python tests/vllm_runs.py '{"model": "llama", "folder": "...", "cases": [{"options": "1", "engine": {}, "run": "generate"}]}'

Each case has the value of BLITZ_ATTN_VLLM, arguments of `vllm.LLM`, and what to run. The models are tiny, with random weights.
"""

import gc
import json
import os
import random
import sys
from pathlib import Path

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
WORDS = 512
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": WORDS, "initializer_range": 0.2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}


def make_model(kind, folder):
    """Saves a model of this kind, unless it exists, with a tokenizer whose words are "w0", "w1" and so on. Returns its folder."""
    import torch
    import transformers as t
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = Path(folder) / kind
    if path.exists():
        return str(path)
    torch.manual_seed(0)
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**GROUPED, sliding_window=100)),  # a window
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(  # softcaps, and windows in every second layer
            **GROUPED, sliding_window=96, attn_logit_softcapping=5.0, query_pre_attn_scalar=64)),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=WORDS, hidden_size=256, n_layer=3, n_head=4, initializer_range=0.2)),  # ALiBi
        "bert": lambda: t.BertModel(t.BertConfig(**SIZES)),  # an encoder
    }[kind]()  # fmt: skip
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2", cls_token="w3", sep_token="w4").save_pretrained(path)
    return str(path)


def draw_prompts(lengths=(5, 40, 300, 700, 33, 129, 1100), repeated=None, seed=1):
    """Prompts of these lengths. With `repeated`, each prompt repeats that many tokens, so that drafts can be made."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, WORDS) for _ in range(repeated or n)] for n in lengths]
    return [{"prompt_token_ids": (x * n)[:n]} for x, n in zip(prompts, lengths, strict=True)]


def sampling(tokens=16):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def generate(llm, repeated=None, turns=1):
    """The tokens of the last of `turns` turns over the same prompts."""
    for _ in range(turns):
        found = llm.generate(draw_prompts(repeated=repeated), sampling(), use_tqdm=False)
    return {"tokens": [x.outputs[0].token_ids for x in found], "cached": [x.num_cached_tokens for x in found]}


def embed(llm):
    prompts = [{"prompt_token_ids": x["prompt_token_ids"][:500]} for x in draw_prompts()]
    return {"embeddings": [x.outputs.embedding for x in llm.embed(prompts, use_tqdm=False)]}


def alone(llm):
    """Computes attention of each request of each step a second time, without the others. Returns how many of how many
    results were the same, bit by bit, and the size of the largest batch."""
    import torch

    from blitz_attn.integrations._vllm.backend import Layer
    from blitz_attn.integrations._vllm.step import Run

    counts = {"same": 0, "requests": 0, "largest_batch": 0}
    attend = Layer._attend

    def compare(self, layer, step, run, q, views, out):
        attend(self, layer, step, run, q, views, out)
        counts["largest_batch"] = max(counts["largest_batch"], run.end - run.first)
        for i in range(run.first, run.end):
            one = Run(run.how, i, i + 1)
            part = step.queries(one)
            rows = slice(part.start - step.queries(run).start, part.stop - step.queries(run).start)
            again = torch.full_like(out[rows], float("nan"))
            attend(self, layer, step, one, q[rows], views, again)
            counts["requests"] += 1
            counts["same"] += bool((again.view(torch.uint8) == out[rows].contiguous().view(torch.uint8)).all())

    Layer._attend = compare
    llm.generate(draw_prompts([20 + 37 * n for n in range(16)]), sampling(), use_tqdm=False)
    Layer._attend = attend
    return counts


def load(llm, requests=200, seed=0):
    """Runs requests that arrive at drawn steps, and then, one by one, those that were not cancelled. Some have a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(3, WORDS) for _ in range(96)]
    prompts = []
    for n in range(requests):
        own = [rng.randrange(3, WORDS) for _ in range(rng.choice([3, 20, 90, 250]))]
        prompts.append((common + own if n % 3 == 0 else own, rng.randrange(4, 48)))
    cancelled = set(rng.sample(range(requests), requests // 8))
    engine, tokens, step, arrived, preempted = llm.llm_engine, {}, 0, 0, 0
    scheduler = engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def count_preemptions(*args, **kwargs):
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = count_preemptions
    stopped = {}  # the step at which a request is cancelled
    while arrived < requests or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 4])):
            if arrived < requests:
                prompt, new = prompts[arrived]
                engine.add_request(f"r{arrived}", {"prompt_token_ids": prompt}, sampling(new))
                if arrived in cancelled:
                    stopped[arrived] = step + rng.randrange(1, 12)
                arrived += 1
        names = [f"r{n}" for n, at in stopped.items() if at == step]
        if names:
            engine.abort_request(names)
        for found in engine.step():
            if found.finished:
                tokens[int(found.request_id[1:].split("-")[0])] = found.outputs[0].token_ids
        step += 1
    whole = {n: x for n, x in tokens.items() if len(x) == prompts[n][1]}
    single = {n: llm.generate([{"prompt_token_ids": prompts[n][0]}], sampling(prompts[n][1]), use_tqdm=False)[0].outputs[0].token_ids for n in whole}
    return {"finished": len(whole), "equal": sum(whole[n] == x for n, x in single.items()), "cancelled": requests - len(whole), "preempted": preempted}


def main():
    os.environ |= ENVIRONMENT
    told = json.loads(sys.argv[1])
    path = make_model(told["model"], told["folder"])
    from vllm import LLM, plugins
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    for case in told["cases"]:
        os.environ["BLITZ_ATTN_VLLM"] = case.get("options", "")
        plugins.plugins_loaded = False
        registry._ATTN_OVERRIDES.clear()
        selector._cached_get_attn_backend.cache_clear()
        usual = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 512 if told["model"] == "bert" else 1536}
        try:
            llm = LLM(path, **usual | case.get("engine", {}))
            function, arguments = globals()[case.get("run", "generate")], case.get("arguments", {})
            print("RESULT " + json.dumps(function(llm, **arguments)), flush=True)
        except Exception as error:  # the test reads what went wrong
            print("RESULT " + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        llm = None
        gc.collect()


if __name__ == "__main__":
    main()
