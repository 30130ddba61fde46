"""What `from_pretrained` and `save_pretrained` of all models of transformers do while the plugin is enabled."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from ..attention.choosing.choice import ATTENTION_NAMES, SAVED_NAMES
from ..attention.model_masks import sparse_attention_of, without_adapters
from ..masks.mask_cards import CARD_NAME
from ..masks.mask_files import PARTS_FIELD, MaskFileError, folder_of_part, has_other_content, parts_named_in
from ..masks.mask_sources import IF_THERE, find_descriptions, hub_arguments_in
from ..masks.pushing import DESCRIPTIONS, own_descriptions, public_content, push_folder
from ..models.coverage import carriers_in
from ..models.inference.compiled_files import is_compiled
from ..models.inference.compiled_loading import load_compiled
from ..models.inference.compiled_models import CompiledModel
from ..models.parts import (
    check_names,
    forget_in_parts,
    named_in_config,
    parts_with_mask,
    remove_parts,
    save_parts,
    take_over_configs,
    warn_of_parts,
)
from ..models.saving import HUB_UPLOAD_ARGUMENTS, SparseModelMixin, keep_inside, remove_mask
from ..models.stock_loading import from_pretrained_with_mask, may_carry
from .adapters import attach_mask_of_adapter
from .replacements import by_name


def from_pretrained(
    stock: Callable[..., Any],
    cls: Any,
    pretrained_model_name_or_path: str | PathLike | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """
    Attach the mask beside the weights, and those of parts. All others (`Auto*`, `pipeline`, sentence-transformers) end
    here.
    """
    source = pretrained_model_name_or_path
    if source is not None and is_compiled(source, kwargs.get("subfolder")):
        return load_compiled(source, cls, **kwargs)
    try:
        loaded = from_pretrained_with_mask(stock, cls, source, *args, **kwargs)
    except KeyError as error:
        if error.args[0] not in SAVED_NAMES:
            raise
        # A part without a mask looks up a class of its own for the attention that the whole was saved with.
        loaded = from_pretrained_with_mask(stock, cls, source, *args, **kwargs | {"attn_implementation": None})
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    config, names = kwargs.get("config"), vars(model.config).get(PARTS_FIELD)
    if config is not None and (names or str(getattr(config, "name_or_path", None)) != str(source)):
        # It may be the configuration of another model.
        path = None if source is None else cached_file(source, CONFIG_NAME, **hub_arguments_in(kwargs), **IF_THERE)
        names = names if path is None else parts_named_in(Path(path))
    if names:
        _attach_parts(model, source, names, kwargs)
    return loaded


def _attach_parts(model, source, names, arguments):
    """Attach the masks of the parts that the configuration of a model names. `arguments`: those of the loading."""
    hub_arguments = hub_arguments_in(arguments)
    base, commit = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
    if base and str(base) != str(source):  # that of an adapter
        source, hub_arguments = base, {}
    if commit is not None:
        hub_arguments["revision"] = commit
    within = hub_arguments.pop("subfolder", None)
    check_names(names, source)
    forget_in_parts(model)
    for name in names:
        folder = folder_of_part(name) if within is None else f"{within}/{folder_of_part(name)}"
        # The mask may have been attached to the encoder of a head, which is now loaded alone.
        alone = model.base_model is model and name == model.base_model_prefix
        try:
            part: Any = model if alone else model.get_submodule(name)
        except AttributeError:
            part = None
        if not isinstance(part, PreTrainedModel):
            raise MaskFileError(f"{source}: {PARTS_FIELD} names {name!r}, no model inside this {type(model).__name__}")
        if find_descriptions(source, **hub_arguments, subfolder=folder) == (None, None):
            raise MaskFileError(f"{source}: {PARTS_FIELD} names {name!r}, but there is no mask in its folder {folder}")
        stock = part.config._attn_implementation
        if sparse_attention_of(part) is None and stock in (*ATTENTION_NAMES, *SAVED_NAMES):
            part.config._attn_implementation = None  # what `detach` goes back to
        attach_mask_of_adapter(part, source, is_trainable=True, **hub_arguments, subfolder=folder)
        if arguments.get("attn_implementation") is not None:
            part.set_attn_implementation(stock)


def save_pretrained(stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """
    Save the masks of a model's parts, too, of which [`SparseModelMixin`] knows nothing. Remove that of the model which
    one without a mask replaces.
    """
    for name, module in model.named_modules():
        if isinstance(module, CompiledModel):
            raise ValueError(
                f"{name} of this {type(model).__name__} is compiled, and would be saved without what is in its graph: "
                "save it alone, by its own save_pretrained"
            )
    given = by_name(stock, model, *args, **kwargs)
    folder, parts = Path(given["save_directory"]), parts_with_mask(model)
    is_main, adapter = given.get("is_main_process", True), getattr(model, "_hf_peft_config_loaded", False)
    if is_main and may_carry(type(model)) and sparse_attention_of(model) is None:
        remove_mask(folder, adapter)
    if adapter:
        warn_of_parts(model)
        return stock(model, *args, **kwargs)
    take_over_configs(model)
    known = parts_named_in(folder / CONFIG_NAME) if is_main else []
    if not (parts or known or PARTS_FIELD in vars(model.config)):
        return stock(model, *args, **kwargs)
    for part in parts.values():
        if isinstance(part, SparseModelMixin):
            part.prepare_saving()
    # Before anything is written: an interrupted save must not leave new weights and old masks.
    remove_parts(known, folder)
    if is_main:
        keep_inside(folder)
    given.pop(next(iter(given)))  # the model
    push, hub = given.pop("push_to_hub", False), {}
    if push:  # with the masks, which are not yet written within the save
        hub = {name: given.pop(name) for name in HUB_UPLOAD_ARGUMENTS if name in given}
    with named_in_config(model.config, list(parts)):
        result = stock(model, **given)
    if is_main:
        save_parts(parts, folder)
    if push:
        model.push_to_hub(**{"repo_id": folder.name} | hub, token=given.get("token"))
    return result


def folder_additions(stock: Callable[..., Any], api: Any, *args: Any, **kwargs: Any) -> list[CommitOperationAdd]:
    """What an upload of a folder adds, as that of a Trainer: no path of the model that a mask was found for."""
    return [_public(added) for added in stock(api, *args, **kwargs)]


def _public(added):
    name, path = PurePosixPath(added.path_in_repo).name, added.path_or_fileobj
    if name not in DESCRIPTIONS or not isinstance(path, str | Path) or has_other_content(Path(path)):
        return added
    content = public_content(Path(path))
    return added if content == Path(path).read_bytes() else CommitOperationAdd(added.path_in_repo, content)


def upload(stock: Callable[..., Any], pushed: Any, *args: Any, **kwargs: Any) -> Any:
    """
    The last step of `push_to_hub`. If the repository has a mask or search that a model, its part or an adapter lacks,
    its one commit also deletes that, and what is about it. Models with a mask have a step of their own.
    """
    inner = without_adapters(pushed)
    if not isinstance(inner, PreTrainedModel):
        return stock(pushed, *args, **kwargs)
    arguments = by_name(stock, pushed, *args, **kwargs)
    folder, repo_id, before = Path(arguments["working_dir"]), arguments["repo_id"], arguments["files_timestamps"]
    given: Any = {name: arguments.get(name) for name in ("token", "revision", "create_pr", "commit_description")}
    names = {path.name for path in folder.iterdir() if before.get(path.name, 0) < path.stat().st_mtime}
    for path in (path for name in DESCRIPTIONS for path in folder.rglob(name)):
        if path.relative_to(folder).parts[0] in names:  # made for the push
            path.write_bytes(public_content(path))
    if not (may_carry(type(inner)) or carriers_in(inner)):
        return stock(pushed, *args, **kwargs)
    if inner is pushed:
        names.discard(CARD_NAME)  # that of the repository, which transformers has written there
    api, revision = HfApi(token=given["token"]), given["revision"]
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = {*api.list_repo_files(repo_id, revision=revision)} - names
    masks = {name for name in there if "/" not in name or name.startswith(folder_of_part(""))}
    if not own_descriptions(api, repo_id, masks, revision):
        return stock(pushed, *args, **kwargs)
    message = arguments.get("commit_message") or "Upload model"
    return push_folder(folder, repo_id, commit_message=message, names=names, **given)[0]
