"""BERT with a learned or fixed sparse attention mask: the stock classes, which carry a mask from construction on."""

from transformers import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
)

from ..masks.mask_files import HUB_ARGUMENTS
from ..masks.sparse_mask import DIAGONALS, SparseMask
from .attaching import SparseModelMixin, make_sparse_attention, register
from .configuration_sparsebert import SparseBertConfig
from .token_mixers import put_mixers


class SparseBertPreTrainedModel(SparseModelMixin, BertPreTrainedModel):
    """
    Base of all SparseBERT models: a stock BERT whose configuration describes the mask, which is saved and loaded with
    the weights.
    """

    config: SparseBertConfig
    config_class = SparseBertConfig
    # A step of the optimiser is smaller than what bfloat16 resolves at the logits' size.
    _keep_in_fp32_modules_strict = {"mask_logits", "alpha_logits"}

    def post_init(self):
        # Heads are built around a stock base model; either way the mask is attached once, before weights are made.
        if "sparse_attention" not in self.base_model._modules:
            put_mixers(self)
            register(self, make_sparse_attention(self, self.config))
        super().post_init()

    def initialize_weights(self):
        # A head's base model is a stock class, whose _init_weights does not know these parameters.
        super().initialize_weights()
        self.sparse_attention.reset_parameters()
        self.sparse_attention.probability_map.reset_parameters()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        As the host's; a frozen model's mask is read from the same folder or repository. `length_policy`, `last_token`
        and `diagonal` given here apply to that mask.
        """
        hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        sparse_attention = model.sparse_attention
        if sparse_attention.mask is None and not sparse_attention.searching:
            mask = SparseMask.from_pretrained(pretrained_model_name_or_path, **hub_arguments)
            # The configuration was saved as the mask is; what differs was asked for here.
            config = model.config
            changes = {"last_token": config.last_token, "diagonal": DIAGONALS[config.diagonal]}
            if config.length_policy is not None:
                changes["length_policy"] = config.length_policy
            sparse_attention.set_mask(mask.replace(**changes), search=config.search)
        return loaded


class SparseBertModel(SparseBertPreTrainedModel, BertModel):
    """[`BertModel`] with a sparse attention mask."""


class SparseBertForPreTraining(SparseBertPreTrainedModel, BertForPreTraining):
    """[`BertForPreTraining`] (MLM and NSP) with a sparse attention mask."""


class SparseBertForMaskedLM(SparseBertPreTrainedModel, BertForMaskedLM):
    """[`BertForMaskedLM`] with a sparse attention mask."""


class SparseBertLMHeadModel(SparseBertPreTrainedModel, BertLMHeadModel):
    """[`BertLMHeadModel`] (causal) with a sparse attention mask."""


class SparseBertForNextSentencePrediction(SparseBertPreTrainedModel, BertForNextSentencePrediction):
    """[`BertForNextSentencePrediction`] with a sparse attention mask."""


class SparseBertForSequenceClassification(SparseBertPreTrainedModel, BertForSequenceClassification):
    """[`BertForSequenceClassification`] with a sparse attention mask."""


class SparseBertForTokenClassification(SparseBertPreTrainedModel, BertForTokenClassification):
    """[`BertForTokenClassification`] with a sparse attention mask."""


class SparseBertForQuestionAnswering(SparseBertPreTrainedModel, BertForQuestionAnswering):
    """[`BertForQuestionAnswering`] with a sparse attention mask."""


class SparseBertForMultipleChoice(SparseBertPreTrainedModel, BertForMultipleChoice):
    """[`BertForMultipleChoice`] with a sparse attention mask."""
