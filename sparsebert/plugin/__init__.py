"""
What `import sparsebert` adds to transformers and PEFT, and how it is taken back.

`register_patch_mapping` of transformers replaces modules of a model by the names of their classes. What is needed here
is where a model comes from and goes to, and stock classes, so methods of their base classes are replaced.
"""

import os

from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers.integrations import PeftAdapterMixin
from transformers.utils import PushToHubMixin

from ..attention.interface import register_names, unregister_names
from ..models import saving
from ..models.bert.auto_classes import register_auto_classes, unregister_auto_classes
from .adapters import adapter_config, load_adapter, save_adapters, set_adapter
from .replacements import AfterImport, Replacement
from .stock_models import folder_additions, from_pretrained, save_pretrained, upload


SWITCH = "SPARSEBERT_PLUGIN"

_replaced: list[AfterImport | Replacement] = []


def wanted() -> bool:
    """Whether the import is to call [`enable`]: unless the environment variable `SPARSEBERT_PLUGIN` is `0`."""
    return os.environ.get(SWITCH, "1").strip().lower() not in ("0", "false", "no", "off")


def enable() -> None:
    """
    Extend transformers and PEFT in this process. Importing sparsebert calls this, unless the environment variable
    `SPARSEBERT_PLUGIN` is `0`; a second call changes nothing.

    - `from_pretrained` of stock models attaches the mask beside the weights, and loads other models as before;
      `save_pretrained` of a model made of several saves the masks of its parts, too, which are attached with it. That
      and `push_to_hub` of a model without a mask remove the mask of the one that it replaces.
    - An upload of a folder, as that of a Trainer, leaves out the path of the local model that a mask was found for.
    - PEFT saves the mask of a model with its adapters, and attaches it with them. PEFT itself is not imported.
    - `Auto*` classes know the model type `sparsebert`, and `attn_implementation` the names of the backends.
    """
    if _replaced:
        return
    register_auto_classes()
    register_names()
    _replaced.append(Replacement(PreTrainedModel, "from_pretrained", from_pretrained))
    _replaced.append(Replacement(PreTrainedModel, "save_pretrained", save_pretrained))
    _replaced.append(Replacement(PushToHubMixin, "_upload_modified_files", upload))
    _replaced.append(Replacement(HfApi, "_prepare_upload_folder_additions", folder_additions))
    _replaced.append(Replacement(PeftAdapterMixin, "load_adapter", load_adapter))
    _replaced.append(Replacement(PeftAdapterMixin, "set_adapter", set_adapter))
    _replaced.append(AfterImport("peft", _extend_peft))
    saving.plugin_enabled = True


def _extend_peft(peft):
    _replaced.append(Replacement(peft.config.PeftConfigMixin, "from_json_file", adapter_config))
    _replaced.append(Replacement(peft.PeftModel, "load_adapter", load_adapter))
    _replaced.append(Replacement(peft.PeftModel, "set_adapter", set_adapter))
    _replaced.append(Replacement(peft.PeftModel, "save_pretrained", save_adapters))


def disable() -> None:
    """
    Take back what [`enable`] did: other libraries have their own functions again, and their tables no entry of ours.

    [`load`], [`attach`] and `save_pretrained` of models with a mask still work. A model with a mask enters the names
    of its backends in the table again when it is made or run, and [`load`] the model type `sparsebert`.
    """
    saving.plugin_enabled = False
    while _replaced:
        _replaced.pop().undo()
    unregister_names()
    unregister_auto_classes()
