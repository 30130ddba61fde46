"""BERT with a learned or fixed sparse attention mask: the stock classes, with a mask from construction on."""

import copy
from os import PathLike
from typing import Any

from transformers import (
    BertConfig,
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
    GenerationMixin,
)
from transformers.utils import CONFIG_NAME

from ...attention.model_masks import sparse_attention_of
from ...hub import check_available
from ...learning.mask_description import MASK_FIELDS
from ...masks.mask_sources import check_subfolder, find_mask_files, hub_arguments_in
from ...masks.sparse_mask import SparseMask
from ..attaching import attach_module, warn_of_changed_weights
from ..model_configs import saved_with_code
from ..saving import SparseModelMixin
from ..sparse_attention import SparseAttention
from .configuration_sparsebert import NEW_SEARCH, SparseBertConfig
from .masked_token_head import with_skip_logits
from .token_mixers import put_mixers


class SparseBertPreTrainedModel(SparseModelMixin, BertPreTrainedModel):
    """
    Base class of all SparseBERT models: a stock BERT with a mask, which its configuration describes and which is saved
    and loaded with the weights.

    Raises:
        TypeError: If the configuration is not a [`SparseBertConfig`].
    """

    config: SparseBertConfig
    config_class = SparseBertConfig

    def __init__(self, config: SparseBertConfig, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, SparseBertConfig):
            hint = "SparseBertConfig(**config.to_dict()) makes it one, with a search or pattern if it is added"
            if config.model_type != BertConfig.model_type:
                hint = "sparsebert.attach gives masks to models of other types"
            raise TypeError(
                f"config of a {type(self).__name__} must be a SparseBertConfig, got a {type(config).__name__}: {hint}"
            )
        # A state of the mask is written into it, which is not that of other models made from the same configuration.
        config = copy.deepcopy(config)
        vars(config).pop(NEW_SEARCH, None)
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        # Heads are built around a stock base model. Either way the mask is attached once, before initialization.
        if sparse_attention_of(self) is None:
            put_mixers(self)
            attach_module(self, SparseAttention(self.config))
        # At the size of logits, bfloat16 does not resolve a step of the optimizer.
        logits = {name.rpartition(".")[2] for name, _ in self.sparse_attention.named_parameters()}
        self._keep_in_fp32_modules_strict = logits & {"mask_logits", "alpha_logits"}
        super().post_init()

    def initialize_weights(self) -> None:
        # The base model of a head is a stock class, whose _init_weights does not know these parameters.
        super().initialize_weights()
        self.sparse_attention.reset_parameters()
        self.sparse_attention.probability_map.reset_parameters()

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """As in transformers, for a class derived from these, which are always saved with their code."""
        if not saved_with_code(cls, auto_class):
            super().register_for_auto_class(auto_class)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """
        Load a model as transformers does. A frozen mask is read from the same folder or repository, and used as
        `length_policy`, `last_token` and `diagonal` ask if they are given, also beside a `config`.
        """
        hub_arguments = hub_arguments_in(kwargs)
        check_subfolder(hub_arguments.get("subfolder"))
        if pretrained_model_name_or_path is not None:
            check_available(pretrained_model_name_or_path, CONFIG_NAME, **hub_arguments)
        config: Any = kwargs.get("config")
        if isinstance(config, SparseBertConfig):
            # Where a configuration is given, transformers passes all other arguments to the model itself.
            if asked := {name: kwargs.pop(name) for name in MASK_FIELDS if name in kwargs}:
                config = kwargs["config"] = copy.deepcopy(config).changed(**asked)
                config.validate()
        # Another checkpoint that is loaded with the same configuration may hold the new search itself.
        replaced = getattr(config, NEW_SEARCH, False) and str(pretrained_model_name_or_path) == config.name_or_path
        if kwargs.get("search") is not None or replaced:
            return cls._with_new_search(pretrained_model_name_or_path, *args, **kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        sparse_attention = model.sparse_attention
        if sparse_attention.mask is None and not sparse_attention.searching:
            source: Any = pretrained_model_name_or_path
            mask = SparseMask.from_pretrained(source, **hub_arguments)
            sparse_attention.set_mask(model.config.used(mask), search=model.config.search)
            cached = {"local_files_only": True, "force_download": False}
            warn_of_changed_weights(source, find_mask_files(source, **hub_arguments | cached)[0])
        return loaded

    @classmethod
    def _with_new_search(cls, source, *args, ignore_mismatched_sizes=False, output_loading_info=False, **kwargs):
        """Load a model without the logits of the search that it may be in the middle of."""
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = super().from_pretrained(source, *args, **kwargs)
        others = sorted(str(key[0]) for key in info["mismatched_keys"] if not str(key[0]).endswith("mask_logits"))
        if others and not ignore_mismatched_sizes:
            raise RuntimeError(f"{source}: the weights {', '.join(others)} have other sizes than those of the model")
        made = {str(key[0]) for key in info["mismatched_keys"]} | set(info["missing_keys"])
        if not any(name.endswith("mask_logits") for name in made):
            model.sparse_attention.mask_logits._is_hf_initialized = False
            model.sparse_attention.reset_parameters()
        return (model, info) if output_loading_info else model


class SparseBertModel(SparseBertPreTrainedModel, BertModel):
    """[`BertModel`] with a sparse attention mask."""


class SparseBertForPreTraining(SparseBertPreTrainedModel, BertForPreTraining):
    """
    [`BertForPreTraining`] (MLM and NSP) with a sparse attention mask. With `skip_logits=True` its `forward` computes
    the loss alone, see [`SparseBertForMaskedLM`].
    """

    forward = with_skip_logits(BertForPreTraining.forward)


class SparseBertForMaskedLM(SparseBertPreTrainedModel, BertForMaskedLM):
    """
    [`BertForMaskedLM`] with a sparse attention mask. With `skip_logits=True` its `forward` computes the loss from the
    labeled tokens alone, and the logits of its output are `None`; [`SparseBertTrainer`] trains it this way.
    """

    forward = with_skip_logits(BertForMaskedLM.forward)


class SparseBertLMHeadModel(SparseBertPreTrainedModel, BertLMHeadModel, GenerationMixin):
    """[`BertLMHeadModel`] (causal) with a sparse attention mask."""

    def __init__(self, config: SparseBertConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.generation_config.temperature = None  # transformers takes that of the search


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
