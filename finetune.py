"""
Fine-tune: `python finetune.py [RECIPE] --task TASK --model DIR_OR_HUB_ID [--field value ...]`.

Through a model's frozen mask, through another (`--mask` with a folder, Hub id or pattern), or dense; one seed or
several (`--seeds`), at given settings or the best of a grid (`--sweep`), one task or all of GLUE (`--all`). Writes to
`output_dir` the model with its mask, the tokenizer, predictions, `metrics.json`, `results.md` (the tables it prints)
and logs.
"""

from accelerate import PartialState
from transformers import TrainingArguments

from sparsebert import SparseBertConfig
from sparsebert.analysis.tables import print_tables, read_runs, tables
from sparsebert.commands.command_line import run_script
from sparsebert.training.finetuning import FinetuningArguments
from sparsebert.training.recipes import load_recipe
from sparsebert.training.repetitions import run


SECTIONS = {"data": FinetuningArguments, "model": SparseBertConfig, "training": TrainingArguments}


def main(arguments):
    output = run(load_recipe(arguments, SECTIONS))
    if not PartialState().is_main_process:
        return
    runs = read_runs([output])
    (output / "results.md").write_text("\n".join(table.markdown() for table in tables(runs)))
    print_tables(runs)
    print(f"written to {output}")


if __name__ == "__main__":
    run_script(main)
