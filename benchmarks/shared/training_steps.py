"""
A model in a process of its own that takes training steps when it is told to, so that its peak memory is its own while
the steps of several models are timed in turns.

    python -m benchmarks.shared.training_steps SPEC    # JSON; a line of input is a step, one of output its report
"""

import contextlib
import json
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
from transformers import BertConfig, BertForPreTraining

from sparsebert import SparseBertConfig, SparseBertForPreTraining

from .masks_by_name import build_mask
from .measure import resident
from .report import ROOT


VOCABULARY = 30522
PREDICTED = 0.15
# Layers, hidden size, heads.
SIZES = {"mini": (4, 256, 4), "small": (4, 512, 8), "base": (12, 768, 12), "tiny": (1, 32, 2)}
SEARCHES = ("dam_s", "dam_u", "dam_b")
SYSTEMS = ("stock", "dense", *SEARCHES, "frozen")
# What can be added to a system, as in "dense+bf16".
OPTIONS = {
    "all_logits": "the head on all tokens, as in stock BERT",
    "unfused": "AdamW without its fused kernel",
    "bf16": "autocast to bfloat16",
    "compile": "torch.compile",
    "checkpoint": "activation checkpointing",
}
FROZEN = "dam_s:0.09"


def make_model(spec, system, options):
    layers, hidden, heads = SIZES[spec["size"]]
    length, dropout = spec["n"], spec["dropout"]
    fields = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "max_position_embeddings": max(512, length),
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    if system == "stock":
        model = BertForPreTraining(BertConfig(**fields, attn_implementation="sdpa"))
    else:
        mask = {"search": system} if system in SEARCHES else {"pattern": "dense"}
        model = SparseBertForPreTraining(SparseBertConfig(**fields, **mask, mask_length=length))
        if system == "frozen":
            model.set_mask(build_mask(FROZEN, length, heads, spec["seed"]))
    for name, weight in model.named_parameters():  # the same for all
        if weight.dim() > 1 and "mask_logits" not in name:
            torch.nn.init.normal_(
                weight.data, std=0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
            )
    if "checkpoint" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(spec["device"])


def make_inputs(spec):
    generator = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(5, VOCABULARY, (spec["batch"], spec["n"]), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) >= PREDICTED, -100)
    pairs = torch.randint(2, (spec["batch"],), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "next_sentence_label": pairs}
    return {name: values.to(spec["device"]) for name, values in inputs.items()}


def make_step(spec):
    """A function that takes one training step, and the loss before the first one without dropout."""
    system, *options = spec["system"].split("+")
    model, inputs = make_model(spec, system, options), make_inputs(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused="unfused" not in options)
    alone = {} if system == "stock" or "all_logits" in options else {"skip_logits": True}
    dtype = torch.bfloat16 if "bf16" in options else getattr(torch, spec["dtype"])
    precision = contextlib.nullcontext if dtype == torch.float32 else lambda: torch.autocast(spec["device"], dtype)
    run = torch.compile(model) if "compile" in options else model
    with torch.no_grad(), precision():
        loss = model.eval()(**inputs, **alone).loss.item()
    model.train()

    def step():
        with precision():
            loss = run(**inputs, **alone).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if spec["device"] == "cuda":
            torch.cuda.synchronize()

    return step, loss


def _serve(spec):
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    on_gpu = spec["device"] == "cuda"
    before = 0 if on_gpu else resident("VmRSS")
    if not on_gpu:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the imports is not that of the model
    step, loss = make_step(spec)
    print(json.dumps({"loss": loss}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM") - before
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


class Worker:
    """
    A process that trains one system, see [`make_step`]: its loss before the first step, without dropout, is set by
    `wait`, its peak memory (weights, optimizer and activations) by each step.
    """

    def __init__(self, spec):
        command = [sys.executable, "-m", __spec__.name, json.dumps(spec)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.name, self.peak_bytes, self.loss = spec["system"], 0, None

    def wait(self):
        """Wait until the model is there."""
        self.loss = self._answer()["loss"]

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended ({self._process.wait()}): {self._process.stderr.read()[-1500:]}")
        return json.loads(line)

    def step(self):
        """Take a step; its seconds."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return answer["seconds"]

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
