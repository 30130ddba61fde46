"""The section `data` of a pre-training recipe."""

from dataclasses import dataclass

from ...hub import HubArguments


@dataclass
class PretrainingArguments(HubArguments):
    """
    Section `data` of a pre-training recipe. `revision` and `subfolder` are those of `base_model`.

    Args:
        text (`str` or `list`): Training text: `"builtin"`, files, or `"hub:owner/name"`, see [`load_documents`].
        streaming (`bool`): Read the training text during the training instead of tokenizing all of it first, for text
            of any size. `text` and `validation` are then files, URLs, patterns such as `"data/*.parquet"`, or
            `"hub:owner/name"`, see [`open_documents`]; `training.max_steps` is needed.
        shuffle_buffer (`int`): With `streaming`, number of examples that are shuffled at once.
        validation (`str` or `list`, *optional*): Held-out text, in the same form; by default 1 document in 100.
        tokenizer (`str`, *optional*): Folder or Hub id of a tokenizer; by default that of `base_model`, and without
            one a WordPiece tokenizer of `model.vocab_size` tokens, trained on the text.
        base_model (`str`, *optional*): Folder or Hub id of weights to start from.
        mask (`str`, *optional*): Folder or Hub id of a [`SparseMask`] to train with.
        mask_revision (`str`, *optional*): Branch, tag or commit of the mask, if it is a Hub id.
        mask_subfolder (`str`, *optional*): Folder of the mask within its repository or folder.
        nsp (`bool`): Train on next-sentence pairs with MLM and NSP loss, like BERT; otherwise on packed text with MLM
            only, or with `model.is_decoder` to predict the next token.
        pack_documents (`bool`): Whether the documents of a row of packed text attend to themselves only, with
            positions that restart in each; otherwise a row is one text, with a `[SEP]` between documents. Not with
            `nsp`.
        max_length (`int`): Maximum number of tokens per example.
        max_tokens (`int`, *optional*): Maximum number of tokens of training text to read.
        max_validation_tokens (`int`): Maximum number of tokens of held-out text to read.
        cache_dir (`str`, *optional*): Folder for the tokenized text, which later runs and all processes of a machine
            reuse; by default that of `datasets` (`HF_DATASETS_CACHE`).
        mlm_probability (`float`): Fraction of the tokens to predict.
        freeze_threshold (`float`, *optional*): Freeze by keeping entries with P above this; 0.5 if neither a
            threshold nor a sparsity is given.
        freeze_sparsity (`float`, *optional*): Freeze by keeping the entries with the highest P, down to this sparsity;
            by default the model's `target_sparsity`.
        start_from_attention (`bool`): Start the search from what `base_model` attends to, instead of a start at which
            all positions are alike, or near ones likelier.
        search_end (`float`): Fraction of the training at which the mask is frozen; the rest trains with the frozen
            mask.
        pruning (`dict`, *optional*): Arguments of [`ProgressivePruning`], such as `{"final_sparsity": 0.9}`, to prune
            the mask by a schedule during training.
        max_minutes (`float`, *optional*): Minutes of training, including saving and evaluation during the training.
            The learning rate and the search follow the clock, `warmup_steps` is a fraction, and `max_steps` and
            `num_train_epochs` may end the training sooner.
        batch_ramp (`float`): Fraction of the training during which the batch grows to its full size; until then, the
            weights are updated several times in each step. Needs `gradient_accumulation_steps`.
        attn_implementation (`str`): Attention backend, `"sparse_auto"` or a name of `BACKENDS`.
        pictures (`bool`): Draw the mask at the end, if matplotlib is installed and the model is not dense.
        resume (`bool`): Continue from the newest complete checkpoint in the output folder, if there is one.
        allow_partial_resume (`bool`): Resume also from a checkpoint that lacks parts, such as the optimizer's state.
        overwrite (`bool`): Replace what is in the output folder, once the new run is finished.
    """

    text: str | list = "builtin"
    streaming: bool = False
    shuffle_buffer: int = 10_000
    validation: str | list | None = None
    tokenizer: str | None = None
    base_model: str | None = None
    mask: str | None = None
    mask_revision: str | None = None
    mask_subfolder: str | None = None
    nsp: bool = True
    pack_documents: bool = False
    max_length: int = 128
    max_tokens: int | None = None
    max_validation_tokens: int = 200_000
    cache_dir: str | None = None
    mlm_probability: float = 0.15
    freeze_threshold: float | None = None
    freeze_sparsity: float | None = None
    start_from_attention: bool = False
    search_end: float = 1.0
    pruning: dict | None = None
    max_minutes: float | None = None
    batch_ramp: float = 0.0
    attn_implementation: str = "sparse_auto"
    pictures: bool = True
    resume: bool = False
    allow_partial_resume: bool = False
    overwrite: bool = False
