"""
Push the folder of a model or a mask to a repository of the Hub, in one commit.

A run is pushed without its checkpoints, logs and pickled files. The repository is created if it is missing; a
README.md there that sparsebert did not write is kept. With `--subfolder` a repository can hold several masks of one
base model.
"""

from dataclasses import dataclass

from ..hub import HubArguments
from ..masks.mask_files import MASK_CONFIG_NAME
from ..masks.pushing import push_folder
from ..models.inference.compiled_files import check_not_compiled
from ._command import Command, Results


@dataclass
class PushArguments(HubArguments):
    """
    What to push, and where to. `revision` is the branch, created if missing.

    Args:
        folder (`str`): Folder of a model, a run or a mask.
        repo_id (`str`): Repository, such as `user/name`.
        mask_only (`bool`): Push the mask of a model without the model.
        private (`bool`, *optional*): Create the repository as a private one.
        create_pr (`bool`): Open a pull request instead of changing the branch.
        commit_message (`str`, *optional*): Message of the commit.
    """

    folder: str
    repo_id: str
    mask_only: bool = False
    private: bool | None = None
    create_pr: bool = False
    commit_message: str | None = None


def command(words):
    examples = ("runs/demo/dam_s --repo_id user/name", "MASK_DIR --repo_id user/masks --subfolder dam_s-90")
    return Command(run, {"push": PushArguments}, examples, "DIR")


def run(values):
    options = PushArguments(**values["push"])
    if not options.mask_only:
        check_not_compiled(options.folder, "folder")
    done, names = push_folder(**vars(options))
    url = done.pr_url or done.commit_url
    notes = [f"pushed {', '.join(names)}", url]
    if not any(name.endswith(MASK_CONFIG_NAME) for name in names):
        notes.insert(0, f"{options.folder} holds no frozen mask")
    return Results({"url": url, "commit": done.oid, "files": names}, notes=notes)
