"""
Download a model or a mask from the Hub into a folder, and verify its checksums.

The folder appears only when it is complete. An interrupted download is kept next to it under a hidden name, and the
same command continues with it.
"""

from dataclasses import dataclass

from ..hub import HubArguments
from ..masks.pulling import pull_folder
from ._command import Command, Printing, Results, needed


@dataclass
class PullArguments(HubArguments):
    """
    What to download, and where to.

    Args:
        repo_id (`str`): Repository, such as `user/name`.
        output_dir (`str`): Folder to write, created if missing.
        overwrite (`bool`): Replace the model or mask that is in the folder.
    """

    repo_id: str | None = None
    output_dir: str | None = None
    overwrite: bool = False


def command(words):
    return Command(
        run,
        {"pull": PullArguments, "print": Printing},
        examples=("user/name --output_dir DIR", "user/masks --subfolder dam_s-90 --output_dir DIR"),
        words="HUB_ID",
        positional="pull.repo_id",
    )


def run(values):
    needed(values, "pull.repo_id", "pull.output_dir")
    options = PullArguments(**values["pull"])
    names = pull_folder(
        options.repo_id,
        options.output_dir,
        revision=options.revision,
        subfolder=options.subfolder,
        token=options.token,
        overwrite=options.overwrite,
    )
    content = {"output_dir": options.output_dir, "files": names}
    return Results(content, notes=[*(f"written: {options.output_dir}/{name}" for name in names)])
