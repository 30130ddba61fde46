"""
A dense encoder and one with a mask on the same texts: how fast each is in every engine and precision, and how many
nearest neighbors of a text stay.
"""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ..attention.model_masks import sparse_attention_of
from ..hub import check_available, read_config, read_tokenizer
from ..models.architectures import num_positions
from ..models.inference.compiled_files import is_compiled
from ..models.inference.compiling import ENGINES, compile
from ..models.inference.text_encoders import TextEncoder, encode_long, pooling_of
from ..models.loading import check_folder, read_model
from ..models.model_classes import encoder_class_of
from ..models.quantization import quantize
from .statistics import CONFIDENCE
from .tables import Table


ROUNDS, NEIGHBORS, RESAMPLES = 5, 10, 1000
# Texts that are timed, the first ones.
TIMED = 16
# Least share of neighbors that stay for the advice to deploy.
ENOUGH = 0.8
# The dense and the sparse model, and the dense one on the parts of a text.
KINDS, SPLIT = ("dense", "sparse"), "split"


def read_encoder(source: str, length: int, **hub_arguments: Any) -> TextEncoder:
    """A model with or without a mask, or a compiled one, pooled as sentence-transformers does, for so many tokens."""
    check_folder(source, subfolder=hub_arguments.get("subfolder"))
    check_available(source, "config.json", **hub_arguments)
    config = read_config(source, **hub_arguments)
    pooling = pooling_of(source, **hub_arguments)
    tokenizer = read_tokenizer(source, config, **hub_arguments)
    model = read_model(encoder_class_of(config).from_pretrained, source, **hub_arguments).eval()
    if not is_compiled(source, hub_arguments.get("subfolder")) and torch.cuda.is_available():
        model = model.cuda()
    attention = sparse_attention_of(model)
    mask = None if attention is None else attention.search or attention.mask
    if mask is not None and mask.length_policy == "error":
        length = min(length, mask.length)
    return TextEncoder(model, tokenizer, min(length, num_positions(config)), *pooling)


def systems_of(encoder: TextEncoder, precisions: Sequence[str], texts: Sequence[str]) -> dict[str, TextEncoder]:
    """
    An encoder in every engine and precision that can run it here, by `"ENGINE PRECISION"`; a compiled one is what it
    is.
    """
    if made := getattr(encoder.model, "compiled_as", None):
        return {f"{made['engine']} {made['precision']}": encoder}
    found, on_cpu = {}, encoder.model.device.type == "cpu"
    for precision in precisions:
        if precision != "int8" or on_cpu:
            found[f"pytorch {precision}"] = replace(encoder, model=in_precision(encoder.model, precision))
        for engine, (_, package) in ENGINES.items() if on_cpu else ():
            if find_spec(package) is not None:
                _say(f"compiling: {engine} {precision}")
                try:
                    model = compile(copy.deepcopy(encoder.model), engine, precision, texts, encoder.tokenizer)
                except ValueError as error:
                    _say(f"left out: {engine} {precision}: {error}")
                else:
                    found[f"{engine} {precision}"] = replace(encoder, model=model)
    if not found:
        raise ValueError(f"precisions: nothing runs {', '.join(precisions)} on a model on {encoder.model.device.type}")
    return found


def in_precision(model: Any, precision: str) -> Any:
    """A copy of a model in `"float32"`, `"bfloat16"` or `"int8"`."""
    model = copy.deepcopy(model)
    return quantize(model) if precision == "int8" else model.to(getattr(torch, precision))


def compare_encoders(
    encoders: Mapping[str, TextEncoder], texts: Sequence[str], precisions: Sequence[str], split: int, rounds: int
) -> dict[str, Any]:
    """
    Embeddings of the same texts by both of `KINDS`, and the time of the first ones, for which the systems take turns.

    The dense model in float32 is what neighbors and cosines are compared with. If the sparse model takes texts of more
    than `split` tokens, or than the dense one takes, the dense one is also run on their parts, see [`encode_long`], as
    many as have together the tokens that the sparse one reads.
    """
    dense, sparse = (encoders[kind] for kind in KINDS)
    part = min(split, dense.length)
    in_parts_too = part < sparse.length
    special = dense.tokenizer.num_special_tokens_to_add() * math.ceil(sparse.length / part)
    read = {text: beginning(dense.tokenizer, text, sparse.length - special) for text in texts if in_parts_too}

    def in_parts(system, texts):
        return encode_long(system, [read[text] for text in texts], split=part)

    functions: dict[str, Callable[[Sequence[str]], np.ndarray]] = {}
    for kind in KINDS:
        for name, system in systems_of(encoders[kind], precisions, texts).items():
            functions[f"{kind} {name}"] = system.encode
            if kind == "dense" and in_parts_too:
                functions[f"{SPLIT} {name}"] = partial(in_parts, system)
    begin = time.perf_counter()
    reference = dense.encode(texts)
    each = (time.perf_counter() - begin) * (1 + rounds * min(TIMED / len(texts), 1))
    _say(f"{len(functions)} systems: about {each * len(functions):.0f} s, if all are as fast as the dense model")
    systems: dict[str, Any] = {}
    for name, function in functions.items():  # the first call, which compiles and fills caches
        begin = time.perf_counter()
        rows = function(texts)
        _say(f"{name}: {len(texts)} texts in {time.perf_counter() - begin:.1f} s")
        systems[name] = {"norm": float(np.linalg.norm(rows, axis=1).mean())} | closeness(rows, reference)
    times: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    for done in range(rounds):
        if done:
            left = (time.perf_counter() - started) * (rounds - done) / done
            _say(f"timed: round {done} of {rounds}, about {left:.0f} s left")
        for name, function in functions.items():
            begin = time.perf_counter()
            function(texts[:TIMED])
            times[name].append(time.perf_counter() - begin)
    for name, seconds in times.items():
        systems[name]["texts_per_second"] = _interval([len(texts[:TIMED]) / each for each in seconds])
    against = "dense" if sparse.length <= dense.length else SPLIT
    best = [min(_of(kind, times), key=lambda name: statistics.median(times[name])) for kind in (against, "sparse")]
    return {
        "systems": systems,
        "best": best,
        "speed_up": _interval([ours / theirs for ours, theirs in zip(*(times[name] for name in best), strict=True)]),
        "num_texts": len(texts),
        "encoders": {
            kind: {"length": each.length, "pooling": each.pooling, "normalized": each.normalized}
            for kind, each in encoders.items()
        },
    }


def beginning(tokenizer: Any, text: str, count: int) -> str:
    """A text up to the end of its first `count` tokens, special ones not counted."""
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[: places[count - 1][1]] if len(places) > count else text


def _say(text):
    """A line on the way, also where nobody looks at a terminal."""
    print(text, file=sys.stderr, flush=True)


def _of(kind, names):
    return [name for name in names if name.startswith(f"{kind} ")]


def closeness(rows: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Mean cosine of embeddings `(N, D)` with those of a reference, and the share of common nearest neighbors."""
    if rows.shape != reference.shape:
        return {}
    unit = [each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-12) for each in (rows, reference)]
    count, nearest = min(NEIGHBORS, len(rows) - 1), []
    for each in unit:
        similar = each @ each.T
        np.fill_diagonal(similar, -np.inf)
        nearest.append(np.argsort(-similar, axis=1)[:, :count])
    common = [len({*ours} & {*theirs}) / count for ours, theirs in zip(*nearest, strict=True)] if count else [1.0]
    return {"cosine": float((unit[0] * unit[1]).sum(1).mean()), "neighbors": float(np.mean(common))}


def _interval(values):
    """The median of some numbers, with its bootstrap interval."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return {"median": statistics.median(values), "low": float(low), "high": float(high)}


def verdict(found: Mapping[str, Any]) -> str:
    """Whether to deploy the sparse encoder, and why, in one sentence."""
    dense, sparse = (found["encoders"][kind] for kind in KINDS)
    ratio, (theirs, ours) = found["speed_up"], found["best"]
    speed = f"{ours} is {ratio['median']:.2f} times as fast [{ratio['low']:.2f}, {ratio['high']:.2f}] as {theirs}"
    kept = found["systems"][ours].get("neighbors")
    for field in ("pooling", "normalized"):
        if dense[field] != sparse[field]:
            return (
                f"Do not deploy: {field} is {dense[field]} for the dense, {sparse[field]} for the sparse model, so "
                "that their embeddings do not mix: copy modules.json and what it names beside the sparse model."
            )
    if kept is None:
        return "Do not deploy: the two models make embeddings of different sizes."
    if ratio["low"] <= 1:
        return f"Do not deploy here: {speed}, which is no gain that this machine and these texts show."
    if found["num_texts"] <= 2 * NEIGHBORS:
        return (
            f"Do not deploy on this alone: {speed}, but of {found['num_texts']} texts too many are among the "
            f"{NEIGHBORS} nearest by chance: compare on more than {2 * NEIGHBORS} (num_texts)."
        )
    if dense["length"] < sparse["length"]:
        return (
            f"Decide by the score of your task: {speed}, but the dense model reads {dense['length']} tokens of a text "
            f"at once and the sparse one {sparse['length']}, so that neighbors say nothing about the mask."
        )
    if kept < ENOUGH:
        return (
            f"Do not deploy yet: {speed}, but only {kept:.0%} of the {NEIGHBORS} nearest neighbors stay: score your "
            "task with both, or search again with a lower target_sparsity or a longer recovery."
        )
    return f"Deploy: {speed}, and {kept:.0%} of the {NEIGHBORS} nearest neighbors stay."


def comparison_table(found: Mapping[str, Any]) -> Table:
    """Speed and closeness of every system."""
    rows = []
    for name, numbers in found["systems"].items():
        rate = numbers["texts_per_second"]
        row = {"system": name, "texts per second": f"{rate['median']:.1f} [{rate['low']:.1f}, {rate['high']:.1f}]"}
        if "cosine" in numbers:
            row |= {f"same {NEIGHBORS} nearest": f"{numbers['neighbors']:.0%}", "cosine": f"{numbers['cosine']:.3f}"}
        rows.append(row | {"norm": f"{numbers['norm']:.2f}"})
    pooled = "; ".join(
        f"{kind}: {each['pooling']}{', normalized' * each['normalized']}, texts cut to {each['length']} tokens"
        for kind, each in found["encoders"].items()
    )
    notes = (
        pooled,
        f"{CONFIDENCE:.0%} intervals of the median over rounds; neighbors and cosine: with the dense model in float32",
        f"{SPLIT}: the dense model, the mean of the embeddings of a text's parts",
    )
    return Table.of(f"Embeddings of {found['num_texts']} texts", rows, notes)
