"""BERT with a learned or fixed sparse attention mask: the stock classes plus [`attach`] in construction."""

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

from .attach import attach, get_sparse_attention
from .configuration_sparsebert import SparseBertConfig
from .masks.sparse_mask import HUB_ARGUMENTS, SparseMask


class SparseBertPreTrainedModel(BertPreTrainedModel):
    """
    Base of all SparseBERT models. Adds to a stock BERT the mask ([`SparseAttention`], property `sparse_attention`),
    `freeze` and `set_mask`; a frozen mask is saved and loaded with the weights.
    """

    config: SparseBertConfig
    config_class = SparseBertConfig
    # Otherwise Trainer believes that the loss is divided by the number of accumulation steps already.
    accepts_loss_kwargs = False

    def post_init(self):
        # Heads are built around a stock base model; either way the mask is attached once, before weights are made.
        if "sparse_attention" not in self.base_model._modules:
            attach(self)
        super().post_init()

    def initialize_weights(self):
        # A head's base model is a stock class, whose _init_weights does not know the mask logits.
        super().initialize_weights()
        self.sparse_attention.reset_parameters()

    @property
    def sparse_attention(self):
        return get_sparse_attention(self)

    def set_mask(self, mask):
        """
        Run through a [`SparseMask`] from now on.

        Raises:
            ValueError: As [`SparseAttention.set_mask`].
        """
        self.sparse_attention.set_mask(mask)
        # The mask is now a file beside the weights, no longer what the configuration describes.
        self.config.frozen = True
        self.config.pattern = self.config.pattern_kwargs = self.config.head_configuration = None
        self.config.mask_length = mask.length

    def freeze(self, threshold=0.5, sparsity=None, metadata=None):
        """
        End the search, see [`SparseAttention.freeze`].

        Returns:
            [`SparseMask`]
        """
        provenance = {"search": self.config.search, "base_model": self.config.name_or_path or None}
        mask = self.sparse_attention.thresholded_mask(threshold, sparsity)
        mask = mask.replace(metadata=provenance | (metadata or {}))
        self.set_mask(mask)
        return mask

    def save_pretrained(self, save_directory, *args, is_main_process=True, **kwargs):
        """As the host's, plus the frozen mask as `mask_config.json` and `mask.safetensors`."""
        mask = self.sparse_attention.mask
        if mask is not None and is_main_process:
            mask.save_pretrained(save_directory)
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As the host's; a frozen model's mask is read from the same folder or repository."""
        hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        sparse_attention = model.sparse_attention
        if sparse_attention.mask is None and not sparse_attention.searching:
            sparse_attention.set_mask(SparseMask.from_pretrained(pretrained_model_name_or_path, **hub_arguments))
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
