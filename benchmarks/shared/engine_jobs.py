"""
Two processes on the CPU train small models under an engine: search, freeze, fine-tune, save and resume.

    python -m benchmarks.shared.engine_jobs FOLDER '{"ENGINE": ["JOB", ...], ...}'

Each process writes what it found to `FOLDER/ENGINE-RANK.json`, by job. Accelerate starts DeepSpeed and FSDP on
accelerators only; here it is given the state that it would make there.
"""

import gc
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import distributed
from transformers import TrainerCallback, TrainingArguments, set_seed

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseBertForSequenceClassification
from sparsebert.learning.search_schedule import SearchSchedule
from sparsebert.training.trainer import SparseBertTrainer


RECIPES = Path(__file__).parents[2] / "recipes"
ONE = "one process"
# Name of the engine to the class that the model is wrapped in; FSDP2 puts its name before that of the model.
ENGINES = {
    ONE: "SparseBert",
    "DDP": "DistributedDataParallel",
    "ZeRO-1": "DeepSpeedEngine",
    "ZeRO-2": "DeepSpeedEngine",
    "ZeRO-3": "DeepSpeedEngine",
    "FSDP2 full": "FSDPSparseBert",
    "FSDP2 sharded": "FSDPSparseBert",
}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Without noise, so that the processes draw the mask of one process.
PENALTY = {"search": "dam_s", "mask_form": "log", "sparsity_weight": 1e-6, "noise_scale": 0.0, "hard": False}
TARGET = {"search": "dam_s", "target_sparsity": 0.7, "noise_scale": 1.0}
BATCH, STEPS, FREEZE, SPARSITY, EARLY, LATE = 8, 8, 0.5, 0.6, 3, 6


def rows(kind):
    """Sequences with as many labels each, so that the mean over processes is that over the batch."""
    made = [{"input_ids": [(7 * i + j * (1 + i % 3)) % 50 for j in range(24)]} for i in range(BATCH * STEPS)]
    return [row | {"labels": row["input_ids"] if kind == "tokens" else i % 2} for i, row in enumerate(made)]


def arguments(engine, folder, **fields):
    """The arguments of a run under an engine, with the state of accelerate that they need."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if engine.startswith("ZeRO"):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        fields |= {"deepspeed": str(RECIPES / "deepspeed" / f"zero{engine[-1]}.json")}
    elif engine.startswith("FSDP2"):
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        state = f"{engine.split()[1].upper()}_STATE_DICT"
        fields |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": state}}
    if engine.startswith(("ZeRO", "FSDP2")):
        fields["accelerator_config"] = {"use_configured_state": True}
    processes = 1 if engine == ONE else 2
    return TrainingArguments(
        str(folder),
        **{"max_steps": STEPS, "save_strategy": "no"} | fields,
        per_device_train_batch_size=BATCH // processes,
        per_device_eval_batch_size=BATCH // processes,
        learning_rate=0.01,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )


class Watch(TrainerCallback):
    """Notes the gradient of the logits in the first step, and a hash of the logits after every step."""

    def __init__(self, attention):
        self.attention, self.hashes, self.gradient = attention, [], None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        logits = self.attention.mask_logits
        if logits is not None and self.gradient is None:
            self.gradient = logits.grad.flatten().tolist()

    def on_step_end(self, args, state, control, **kwargs):
        if self.attention.mask_logits is not None:
            self.hashes.append(sha(self.attention.mask_logits))


def sha(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def train(engine, folder, model, data, callbacks=(), resume=None, **fields):
    """Train and save; what came of it."""
    watch = Watch(model.sparse_attention)
    trainer = SparseBertTrainer(
        model,
        arguments(engine, folder, **fields),
        train_dataset=data,
        eval_dataset=data[:BATCH],
        callbacks=[*callbacks, watch],
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        return {"error": str(error)}
    attention = model.sparse_attention
    if attention.searching:
        trainer.save_model(f"{folder}/searching")
        attention.freeze()
    trainer.save_model()
    logs = {name: [log[name] for log in trainer.state.log_history if name in log] for name in ("loss", "grad_norm")}
    return logs | {
        "wrapped": type(trainer.model_wrapped).__name__,
        "world_size": trainer.args.world_size,
        "hashes": watch.hashes,
        "gradient": watch.gradient,
        "mask": sha(attention.mask.to_table()),
        "sparsity": attention.sparsity(),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "saved": sorted(path.name for path in Path(trainer.args.output_dir).iterdir()),
    }


def search(engine, folder, resume=None, output="search", **fields):
    set_seed(0)
    model = SparseBertForMaskedLM(SparseBertConfig(**SIZES, **PENALTY))
    callbacks = [SearchSchedule(FREEZE, sparsity=SPARSITY)]
    if output == "search":
        fields |= {"save_strategy": "steps", "save_steps": EARLY}
    return train(engine, folder / output, model, rows("tokens"), callbacks, resume, **fields)


def target(engine, folder):
    set_seed(0)
    model = SparseBertForMaskedLM(SparseBertConfig(**SIZES, **TARGET))
    return train(engine, folder / "target", model, rows("tokens"), max_steps=4)


def continued(engine, folder):
    """The search with a target, from weights and logits that are loaded."""
    made = arguments(engine, folder)  # ZeRO-3 is to know of the model before it is loaded
    model = SparseBertForMaskedLM.from_pretrained(folder / "target" / "searching")
    assert made.world_size == (1 if engine == ONE else 2)
    return train(engine, folder / "continued", model, rows("tokens"), max_steps=2)


def finetune(engine, folder):
    set_seed(0)
    made = arguments(engine, folder)  # ZeRO-3 is to know of the model before it is loaded
    model = SparseBertForSequenceClassification.from_pretrained(folder / "search")
    assert made.world_size == (1 if engine == ONE else 2)
    return train(engine, folder / "finetune", model, rows("classes"), max_steps=4)


def accumulate(engine, folder):
    """The search with batches of a quarter."""
    return search(engine, folder, output="accumulated", gradient_accumulation_steps=2, max_steps=STEPS // 2)


def checkpointed(engine, folder):
    """The search with activation checkpointing."""
    return search(engine, folder, output="checkpointed", gradient_checkpointing=True)


JOBS = {job.__name__: job for job in (search, target, continued, finetune, accumulate, checkpointed)}


def run(engine, folder, job):
    """A job: the name of a function, or "resume STEP" or "resume STEP of ENGINE"."""
    if not job.startswith("resume"):
        return JOBS[job](engine, folder)
    _, step, *other = job.split(maxsplit=3)
    source = folder.parent / other[1] if other else folder
    return search(engine, folder, str(source / "search" / f"checkpoint-{step}"), output=job.replace(" ", "-"))


def worker(folder, engine, jobs, rank):
    """One process of an engine: writes what it found, and ends the process."""
    code = 1
    try:
        torch.set_num_threads(1)
        if engine != ONE:
            local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            os.environ |= {name: str(value) for name, value in local.items()}
            store = distributed.FileStore(str(folder / engine / "store"), 2)
            distributed.init_process_group("gloo", rank=rank, world_size=2, store=store)
        found = {job: run(engine, folder / engine, job) for job in jobs}
        (folder / f"{engine}-{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not the usual end: the threads of gloo may abort the process while Python shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    if any(engine.startswith("ZeRO") for engine in plan):
        from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 - takes seconds, once for all processes
    gc.freeze()  # nor need each of them look again at what has been imported
    failed = []
    for engine, jobs in plan.items():
        (folder / engine).mkdir(parents=True, exist_ok=True)
        (folder / engine / "store").unlink(missing_ok=True)
        children = []
        for rank in range(1 if engine == ONE else 2):
            child = os.fork()  # what is imported is imported once
            if not child:
                worker(folder, engine, jobs, rank)
            children.append(child)
        failed += [engine for child in children if os.waitpid(child, 0)[1]]
    return f"failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    sys.exit(main())
