"""SparseBERT: a BERT that learns which attention positions it needs."""

# First, since all others may import what lies in the current folder.
from . import _import_path  # noqa: F401


# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from . import plugin
from .analysis.plans import Plan, plan
from .attention.dot_product import sparse_dot_product_attention
from .attention.probability_maps import PROBABILITY_MAPS
from .learning.searches import SEARCHES
from .masks.mask_files import MaskFileError
from .masks.patterns import PATTERNS, build_pattern
from .masks.sparse_mask import SparseMask
from .models.architectures import ARCHITECTURES
from .models.attaching import attach, detach, sparsity, sparsity_loss
from .models.bert.configuration_sparsebert import SparseBertConfig
from .models.bert.modeling_sparsebert import (
    SparseBertForMaskedLM,
    SparseBertForMultipleChoice,
    SparseBertForNextSentencePrediction,
    SparseBertForPreTraining,
    SparseBertForQuestionAnswering,
    SparseBertForSequenceClassification,
    SparseBertForTokenClassification,
    SparseBertLMHeadModel,
    SparseBertModel,
    SparseBertPreTrainedModel,
)
from .models.bert.token_mixers import MIXERS
from .models.inference.compiling import compile
from .models.lengthening import extend_positions
from .models.loading import load
from .models.quantization import quantize
from .models.sparse_attention import SparseAttention
from .version import __version__


if TYPE_CHECKING:
    from .learning.progressive_pruning import ProgressivePruning
    from .learning.search_schedule import SearchSchedule
    from .training.searching.rest_bias import calibrate_rest
    from .training.trainer import SparseBertTrainer

# The Trainer of transformers and its callbacks bring in PEFT, datasets and accelerate.
_FOR_TRAINING = {
    "ProgressivePruning": ".learning.progressive_pruning",
    "SearchSchedule": ".learning.search_schedule",
    "SparseBertTrainer": ".training.trainer",
    "calibrate_rest": ".training.searching.rest_bias",
}

if plugin.wanted():
    plugin.enable()


def __getattr__(name: str) -> Any:
    if name in _FOR_TRAINING:
        return getattr(importlib.import_module(_FOR_TRAINING[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ARCHITECTURES",
    "MIXERS",
    "PATTERNS",
    "PROBABILITY_MAPS",
    "Plan",
    "ProgressivePruning",
    "SEARCHES",
    "MaskFileError",
    "SearchSchedule",
    "SparseAttention",
    "SparseBertConfig",
    "SparseBertForMaskedLM",
    "SparseBertForMultipleChoice",
    "SparseBertForNextSentencePrediction",
    "SparseBertForPreTraining",
    "SparseBertForQuestionAnswering",
    "SparseBertForSequenceClassification",
    "SparseBertForTokenClassification",
    "SparseBertLMHeadModel",
    "SparseBertModel",
    "SparseBertPreTrainedModel",
    "SparseBertTrainer",
    "SparseMask",
    "__version__",
    "attach",
    "build_pattern",
    "calibrate_rest",
    "compile",
    "detach",
    "extend_positions",
    "load",
    "plan",
    "quantize",
    "sparse_dot_product_attention",
    "sparsity",
    "sparsity_loss",
]
