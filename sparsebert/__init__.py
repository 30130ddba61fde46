"""SparseBERT: a BERT that learns which attention positions it needs."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .architectures import ARCHITECTURES
from .attach import attach, detach, sparsity, sparsity_loss
from .attention import sparse_dot_product_attention
from .configuration_sparsebert import SparseBertConfig
from .loading import load
from .masks.patterns import PATTERNS, build_pattern
from .masks.search import SEARCHES
from .masks.sparse_mask import MaskFileError, SparseMask
from .mixers import MIXERS
from .modeling_sparsebert import (
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
from .plan import Plan, plan
from .positions import extend_positions
from .probability import PROBABILITY_MAPS
from .sparse_attention import SparseAttention
from .version import __version__


AutoConfig.register("sparsebert", SparseBertConfig)
for _auto, _model in (
    (AutoModel, SparseBertModel),
    (AutoModelForPreTraining, SparseBertForPreTraining),
    (AutoModelForMaskedLM, SparseBertForMaskedLM),
    (AutoModelForCausalLM, SparseBertLMHeadModel),
    (AutoModelForNextSentencePrediction, SparseBertForNextSentencePrediction),
    (AutoModelForSequenceClassification, SparseBertForSequenceClassification),
    (AutoModelForTokenClassification, SparseBertForTokenClassification),
    (AutoModelForQuestionAnswering, SparseBertForQuestionAnswering),
    (AutoModelForMultipleChoice, SparseBertForMultipleChoice),
):
    _auto.register(SparseBertConfig, _model)

__all__ = [
    "ARCHITECTURES",
    "MIXERS",
    "PATTERNS",
    "PROBABILITY_MAPS",
    "Plan",
    "SEARCHES",
    "MaskFileError",
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
    "SparseMask",
    "__version__",
    "attach",
    "build_pattern",
    "detach",
    "extend_positions",
    "load",
    "plan",
    "sparse_dot_product_attention",
    "sparsity",
    "sparsity_loss",
]
