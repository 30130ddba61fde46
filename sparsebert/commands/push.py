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
from ._command import Command, Printing, Results, needed


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

    folder: str | None = None
    repo_id: str | None = None
    mask_only: bool = False
    private: bool | None = None
    create_pr: bool = False
    commit_message: str | None = None


def command(words):
    return Command(
        run,
        {"push": PushArguments, "print": Printing},
        examples=("runs/demo/dam_s --repo_id user/name", "MASK_DIR --repo_id user/masks --subfolder dam_s-90"),
        words="DIR",
        positional="push.folder",
    )


def run(values):
    needed(values, "push.folder", "push.repo_id")
    options = PushArguments(**values["push"])
    done, names = push_folder(
        options.folder,
        options.repo_id,
        subfolder=options.subfolder,
        private=options.private,
        token=options.token,
        revision=options.revision,
        create_pr=options.create_pr,
        commit_message=options.commit_message,
        mask_only=options.mask_only,
    )
    url = done.pr_url or done.commit_url
    notes = [f"pushed {', '.join(names)}", url]
    if not any(name.endswith(MASK_CONFIG_NAME) for name in names):
        notes.insert(0, f"{options.folder} holds no frozen mask")
    return Results({"url": url, "commit": done.oid, "files": names}, notes=notes)
