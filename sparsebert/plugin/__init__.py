"""
What `import sparsebert` adds to transformers and PEFT, and how it is taken back.

`register_patch_mapping` of transformers replaces modules of a model by the names of their classes. What is needed here
is where a model comes from and goes to, and stock classes, so methods of their base classes are replaced.
"""

import os
from typing import Any

from .replacements import AfterImport, Replacement


SWITCH = "SPARSEBERT_PLUGIN"

_undone: list[AfterImport | Replacement] = []


def wanted() -> bool:
    """Whether the import is to enable this: unless the environment variable `SPARSEBERT_PLUGIN` is `0`."""
    return os.environ.get(SWITCH, "1").strip().lower() not in ("0", "false", "no", "off")


def enable_later() -> None:
    """
    Have [`enable`] called as soon as transformers has imported models or configurations, or at once if it has already.
    Until then there is nothing to extend, and the import of sparsebert stays quick.
    """
    if _undone:
        return
    _undone.append(AfterImport(_extend_uploads, "huggingface_hub.hf_api"))
    # PEFT imports transformers, and is whole when it is extended.
    modules = ("transformers.modeling_utils", "transformers.models.auto.configuration_auto")
    _undone.append(AfterImport(enable, *modules, packages=("transformers", "sparsebert", "peft")))


def enable() -> None:
    """
    Extend transformers and PEFT in this process. Importing sparsebert has this called as soon as transformers imports
    models, unless the environment variable `SPARSEBERT_PLUGIN` is `0`; a second call changes nothing.

    - `from_pretrained` of stock models attaches the mask beside the weights, and loads other models as before;
      `save_pretrained` of a model made of several saves the masks of its parts, too, which are attached with it. That
      and `push_to_hub` of a model without a mask remove the mask of the one that it replaces.
    - An upload of a folder, as that of a Trainer, leaves out the path of the local model that a mask was found for.
    - PEFT saves the mask of a model with its adapters, and attaches it with them. PEFT itself is not imported.
    - `Auto*` classes know the model type `sparsebert`, and `attn_implementation` the names of the backends.
    """
    from transformers import PreTrainedModel
    from transformers.integrations import PeftAdapterMixin
    from transformers.utils import PushToHubMixin

    from ..attention.interface import register_names
    from ..models import saving
    from ..models.bert.auto_classes import register_auto_classes
    from .adapters import load_adapter, set_adapter
    from .stock_models import from_pretrained, save_pretrained, upload

    if saving.plugin_enabled:  # perhaps since one of these was imported
        return
    saving.plugin_enabled = True
    if not _undone:
        _undone.append(AfterImport(_extend_uploads, "huggingface_hub.hf_api"))
    register_auto_classes()
    register_names()
    _undone.append(Replacement(PreTrainedModel, "from_pretrained", from_pretrained))
    _undone.append(Replacement(PreTrainedModel, "save_pretrained", save_pretrained))
    _undone.append(Replacement(PushToHubMixin, "_upload_modified_files", upload))
    _undone.append(Replacement(PeftAdapterMixin, "load_adapter", load_adapter))
    _undone.append(Replacement(PeftAdapterMixin, "set_adapter", set_adapter))
    _undone.append(AfterImport(_extend_peft, "peft"))


def _extend_uploads():
    from huggingface_hub.hf_api import HfApi

    def additions(*args: Any, **kwargs: Any) -> Any:
        from .stock_models import folder_additions

        return folder_additions(*args, **kwargs)

    _undone.append(Replacement(HfApi, "_prepare_upload_folder_additions", additions))


def _extend_peft():
    import peft

    from .adapters import adapter_config, load_adapter, save_adapters, set_adapter

    _undone.append(Replacement(peft.config.PeftConfigMixin, "from_json_file", adapter_config))
    _undone.append(Replacement(peft.PeftModel, "load_adapter", load_adapter))
    _undone.append(Replacement(peft.PeftModel, "set_adapter", set_adapter))
    _undone.append(Replacement(peft.PeftModel, "save_pretrained", save_adapters))


def disable() -> None:
    """
    Take back what [`enable`] did: other libraries have their own functions again, and their tables no entry of ours.

    [`load`], [`attach`] and `save_pretrained` of models with a mask still work. A model with a mask enters the names
    of its backends in the table again when it is made or run, and [`load`] the model type `sparsebert`.
    """
    while _undone:
        _undone.pop().undo()
    from ..attention.interface import unregister_names
    from ..models import saving
    from ..models.bert.auto_classes import unregister_auto_classes

    saving.plugin_enabled = False
    unregister_names()
    unregister_auto_classes()
