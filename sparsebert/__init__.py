"""SparseBERT: a BERT that learns which attention positions it needs."""

# First, since all others may import what lies in the current folder.
from . import _import_path  # noqa: F401


# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from . import plugin
from .version import __version__


if TYPE_CHECKING:  # where `as` says that a name is public
    from .analysis.plans import Plan as Plan, plan as plan
    from .attention.dot_product import sparse_dot_product_attention as sparse_dot_product_attention
    from .attention.interface import register_backend as register_backend
    from .attention.probability_maps import PROBABILITY_MAPS as PROBABILITY_MAPS
    from .learning.attach_fields import PatternConfig as PatternConfig, SearchConfig as SearchConfig
    from .learning.progressive_pruning import ProgressivePruning as ProgressivePruning
    from .learning.search_schedule import SearchSchedule as SearchSchedule
    from .learning.searches import SEARCHES as SEARCHES, register_search as register_search
    from .masks.mask_files import MaskFileError as MaskFileError
    from .masks.patterns import (
        PATTERNS as PATTERNS,
        build_pattern as build_pattern,
        register_pattern as register_pattern,
    )
    from .masks.sparse_mask import SparseMask as SparseMask
    from .models.architectures import ARCHITECTURES as ARCHITECTURES
    from .models.attaching import (
        attach as attach,
        detach as detach,
        sparsity as sparsity,
        sparsity_loss as sparsity_loss,
    )
    from .models.bert.configuration_sparsebert import SparseBertConfig as SparseBertConfig
    from .models.bert.modeling_sparsebert import (
        SparseBertForMaskedLM as SparseBertForMaskedLM,
        SparseBertForMultipleChoice as SparseBertForMultipleChoice,
        SparseBertForNextSentencePrediction as SparseBertForNextSentencePrediction,
        SparseBertForPreTraining as SparseBertForPreTraining,
        SparseBertForQuestionAnswering as SparseBertForQuestionAnswering,
        SparseBertForSequenceClassification as SparseBertForSequenceClassification,
        SparseBertForTokenClassification as SparseBertForTokenClassification,
        SparseBertLMHeadModel as SparseBertLMHeadModel,
        SparseBertModel as SparseBertModel,
        SparseBertPreTrainedModel as SparseBertPreTrainedModel,
    )
    from .models.bert.token_mixers import MIXERS as MIXERS
    from .models.inference.compiling import compile as compile
    from .models.inference.text_encoders import encode_long as encode_long
    from .models.lengthening import extend_positions as extend_positions
    from .models.loading import load as load
    from .models.quantization import quantize as quantize
    from .models.sparse_attention import SparseAttention as SparseAttention
    from .training.searching.rest_bias import calibrate_rest as calibrate_rest
    from .training.trainer import SparseBertTrainer as SparseBertTrainer

# Where the public names are, which are imported when they are first used: all need PyTorch, most the models of
# transformers, and those of `training` also PEFT, datasets and accelerate.
_HOMES = {
    "analysis.plans": "Plan plan",
    "attention.dot_product": "sparse_dot_product_attention",
    "attention.interface": "register_backend",
    "attention.probability_maps": "PROBABILITY_MAPS",
    "learning.attach_fields": "PatternConfig SearchConfig",
    "learning.progressive_pruning": "ProgressivePruning",
    "learning.search_schedule": "SearchSchedule",
    "learning.searches": "SEARCHES register_search",
    "masks.mask_files": "MaskFileError",
    "masks.patterns": "PATTERNS build_pattern register_pattern",
    "masks.sparse_mask": "SparseMask",
    "models.architectures": "ARCHITECTURES",
    "models.attaching": "attach detach sparsity sparsity_loss",
    "models.bert.configuration_sparsebert": "SparseBertConfig",
    "models.bert.modeling_sparsebert": """
        SparseBertForMaskedLM SparseBertForMultipleChoice SparseBertForNextSentencePrediction SparseBertForPreTraining
        SparseBertForQuestionAnswering SparseBertForSequenceClassification SparseBertForTokenClassification
        SparseBertLMHeadModel SparseBertModel SparseBertPreTrainedModel
    """,
    "models.bert.token_mixers": "MIXERS",
    "models.inference.compiling": "compile",
    "models.inference.text_encoders": "encode_long",
    "models.lengthening": "extend_positions",
    "models.loading": "load",
    "models.quantization": "quantize",
    "models.sparse_attention": "SparseAttention",
    "training.searching.rest_bias": "calibrate_rest",
    "training.trainer": "SparseBertTrainer",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOME_OF)]

if plugin.wanted():
    plugin.enable_later()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
