"""BERT with a learned or fixed sparse attention mask: the stock classes plus [`attach`] in construction."""

from pathlib import Path

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
from .configuration_sparsebert import DIAGONALS, SparseBertConfig
from .masks.sparse_mask import HUB_ARGUMENTS, SparseMask


HUB_UPLOAD_ARGUMENTS = ("repo_id", "commit_message", "private", "revision", "create_pr", "commit_description", "tags")


class SparseBertPreTrainedModel(BertPreTrainedModel):
    """
    Base of all SparseBERT models. Adds to a stock BERT the mask ([`SparseAttention`], property `sparse_attention`),
    `freeze` and `set_mask`; a frozen mask is saved and loaded with the weights.
    """

    config: SparseBertConfig
    config_class = SparseBertConfig
    # Otherwise Trainer believes that the loss is divided by the number of accumulation steps already.
    accepts_loss_kwargs = False
    # A step of the optimiser is smaller than what bfloat16 resolves at the logits' size.
    _keep_in_fp32_modules_strict = {"mask_logits"}

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
        """Run through a [`SparseMask`] from now on, see [`SparseAttention.set_mask`]."""
        self.sparse_attention.set_mask(mask)

    def freeze(self, threshold=0.5, sparsity=None, metadata=None):
        """End the search and return the [`SparseMask`], see [`SparseAttention.freeze`]."""
        return self.sparse_attention.freeze(threshold, sparsity, metadata)

    def save_pretrained(self, save_directory, *args, is_main_process=True, push_to_hub=False, **kwargs):
        """As the host's, plus the frozen mask as `mask_config.json` and `mask.safetensors`."""
        hub = {name: kwargs.pop(name) for name in HUB_UPLOAD_ARGUMENTS if name in kwargs}
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        mask = self.sparse_attention.mask
        if mask is not None and is_main_process:
            mask.save_pretrained(save_directory)
        if push_to_hub:
            # Not by the host within its save, which would upload what it has written itself, without the mask.
            hub.setdefault("repo_id", Path(save_directory).name)
            self.push_to_hub(**hub, token=kwargs.get("token"))

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
