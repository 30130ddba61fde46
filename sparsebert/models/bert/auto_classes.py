"""The `Auto*` classes of transformers that load a SparseBERT, and the entries that make them do so."""

from transformers import (
    CONFIG_MAPPING,
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

from . import modeling_sparsebert as models
from .configuration_sparsebert import SparseBertConfig


AUTO_CLASSES = {
    AutoModel: models.SparseBertModel,
    AutoModelForPreTraining: models.SparseBertForPreTraining,
    AutoModelForMaskedLM: models.SparseBertForMaskedLM,
    AutoModelForCausalLM: models.SparseBertLMHeadModel,
    AutoModelForNextSentencePrediction: models.SparseBertForNextSentencePrediction,
    AutoModelForSequenceClassification: models.SparseBertForSequenceClassification,
    AutoModelForTokenClassification: models.SparseBertForTokenClassification,
    AutoModelForQuestionAnswering: models.SparseBertForQuestionAnswering,
    AutoModelForMultipleChoice: models.SparseBertForMultipleChoice,
}


def register_auto_classes() -> None:
    """Have the `Auto*` classes know the model type `sparsebert`."""
    AutoConfig.register(SparseBertConfig.model_type, SparseBertConfig, exist_ok=True)
    for auto_class, model_class in AUTO_CLASSES.items():
        auto_class.register(SparseBertConfig, model_class, exist_ok=True)


def unregister_auto_classes() -> None:
    """The opposite of [`register_auto_classes`], for which transformers has no function."""
    CONFIG_MAPPING._extra_content.pop(SparseBertConfig.model_type, None)
    for auto_class in AUTO_CLASSES:
        auto_class._model_mapping._extra_content.pop(SparseBertConfig, None)
