"""The inputs of a pre-training: the model of a recipe, and its tokenizer, rows and collator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from ...attention.choosing.choice import check_backend
from ...data.documents import load_documents
from ...data.examples import causal_collator, pretraining_collator, pretraining_dataset
from ...data.packing import PackedCollator
from ...data.streams import RowStream, open_documents, stream_documents
from ...data.tokenization import check_tokenizer, train_tokenizer
from ...finite_weights import check_weights
from ...hub import HubArguments, mask_arguments, read_tokenizer
from ...models.attaching import read_mask
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ...models.bert.modeling_sparsebert import SparseBertForMaskedLM, SparseBertForPreTraining, SparseBertLMHeadModel
from ...models.bert.token_mixers import fixed_length
from ...models.loading import read_model
from ..runs.resuming import rows_record
from ..runs.run_checks import check_served
from .pretraining_arguments import PretrainingArguments, check_not_searched


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


def make_model(data: PretrainingArguments, training: TrainingArguments, fields: dict[str, Any]) -> Any:
    """The model of a recipe: new, or with the weights of `base_model`."""
    model_class: Any = SparseBertForPreTraining if data.nsp else SparseBertForMaskedLM
    if fields.get("is_decoder"):
        model_class = SparseBertLMHeadModel
    if data.base_model:
        hub_arguments = data.hub_arguments(data.base_model)
        model = read_model(model_class.from_pretrained, data.base_model, **hub_arguments, **fields)
        check_weights(model, f"base_model {data.base_model}")
    else:
        model = model_class._from_config(SparseBertConfig(**fields))  # unlike the class, in the dtype that it says
    if data.mask:
        model.set_mask(read_mask(data.mask, **mask_arguments(data)))
    check_backend(data.attn_implementation, model.config.probability_map)
    model.set_attn_implementation(data.attn_implementation)
    if fixed_length(model.config) not in (None, data.max_length):
        raise ValueError(
            f"max_length must be {model.config.max_position_embeddings}, the max_position_embeddings of a model with "
            f"the token mixer 'bproj', got {data.max_length}"
        )
    sparse_attention = model.sparse_attention
    if data.base_model and not sparse_attention.searching:
        check_not_searched(data, f"the mask of base_model {data.base_model}")
    if data.pack_documents and sparse_attention.num_layers < model.config.num_hidden_layers:
        raise ValueError(
            "pack_documents true needs attention in all layers, since the other token_mixers mix neighboring tokens, "
            f"got {model.config.token_mixers!r}"
        )
    check_served(model, training, data.max_length)
    search = sparse_attention.search
    if search is not None and data.freeze_sparsity is not None and data.freeze_sparsity > search.most_sparsity:
        raise ValueError(
            f"freeze_sparsity must be at most {search.most_sparsity:.4f}, got {data.freeze_sparsity}: special tokens "
            "and a kept diagonal stay"
        )
    return model


@dataclass
class PretrainingInputs:
    """What a pre-training reads."""

    tokenizer: "PreTrainedTokenizerBase"
    train_set: "datasets.Dataset | RowStream"
    validation_set: "datasets.Dataset"
    collator: Callable[..., dict[str, Any]]
    record: dict[str, Any]


def _tokenizer_of_base(data: PretrainingArguments) -> "PreTrainedTokenizerBase":
    try:
        return read_tokenizer(str(data.base_model), **data.hub_arguments(data.base_model))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer: that of base_model {data.base_model} cannot be read ({error}); its weights mean nothing with "
            "another one: name its folder or Hub id"
        ) from error


def make_inputs(
    data: PretrainingArguments, training: TrainingArguments, config: SparseBertConfig
) -> PretrainingInputs:
    """Read or train the tokenizer, and tokenize the text of a recipe or open it as a stream."""
    held_out = "text (its held-out part; validation names another text)" if data.validation is None else "validation"

    def documents(split: str) -> Iterator[list[str]]:
        load = stream_documents if data.streaming else load_documents
        if data.validation is None:
            return load(data.text, split)
        return load(data.text if split == "train" else data.validation, "all")

    def rows(split: str, max_tokens: int | None) -> "datasets.Dataset":
        try:
            return pretraining_dataset(
                documents(split), tokenizer, data.max_length, data.nsp, training.seed, max_tokens,
                cache_dir=data.cache_dir, pack_documents=data.pack_documents,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{'text' if split == 'train' else held_out}: {error}") from error

    tokenizer: PreTrainedTokenizerBase
    if data.tokenizer:
        tokenizer = read_tokenizer(data.tokenizer, **HubArguments(token=data.token).hub_arguments())
    elif data.base_model:
        tokenizer = _tokenizer_of_base(data)
    else:
        tokenizer = train_tokenizer(documents("train"), config.vocab_size, cache_dir=data.cache_dir)
        tokenizer.model_max_length = config.max_position_embeddings
    check_tokenizer(tokenizer, config.vocab_size)
    collator: Callable = causal_collator
    if not config.is_decoder:
        masking_seed = training.seed if training.data_seed is None else training.data_seed
        collator = pretraining_collator(tokenizer, data.mlm_probability, data.max_length, masking_seed)
    if data.pack_documents:
        collator = PackedCollator(collator, tokenizer.cls_token_id)
    train_set: RowStream | datasets.Dataset
    if data.streaming:
        text = open_documents(data.text)
        train_set, record = RowStream(
            text, tokenizer, data.max_length, training.train_batch_size, collator, data.nsp, training.seed,
            data.shuffle_buffer, "train" if data.validation is None else "all", training.dataloader_drop_last,
            training.process_index, training.world_size, pack_documents=data.pack_documents,
        ), {"shards": text.num_shards}  # fmt: skip
    else:
        train_set = rows("train", data.max_tokens)
        record = rows_record(train_set)
    validation_set = rows("validation", data.max_validation_tokens)
    masking = getattr(collator, "for_evaluation", lambda: collator)()
    if not any((masking([row])["labels"] != -100).any() for row in validation_set):
        raise ValueError(f"{held_out}: no token of it is masked, so it has no loss: take more text")
    return PretrainingInputs(tokenizer, train_set, validation_set, collator, record)
