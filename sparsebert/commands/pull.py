"""
Download a model or a mask from the Hub into a folder, and verify its checksums.

The folder appears only when it is complete. An interrupted download is kept next to it under a hidden name, and the
same command continues with it.
"""

from dataclasses import dataclass

from ..hub import HubArguments
from ..masks.pulling import pull_folder
from ._command import Command, Results


@dataclass
class PullArguments(HubArguments):
    """
    What to download, and where to.

    Args:
        repo_id (`str`): Repository, such as `user/name`.
        output_dir (`str`): Folder to write, created if missing.
        overwrite (`bool`): Replace the model or mask that is in the folder.
    """

    repo_id: str
    output_dir: str
    overwrite: bool = False


def command(words):
    examples = ("user/name --output_dir DIR", "user/masks --subfolder dam_s-90 --output_dir DIR")
    return Command(run, {"pull": PullArguments}, examples, "HUB_ID")


def run(values):
    options = PullArguments(**values["pull"])
    names = pull_folder(**vars(options))
    content = {"output_dir": options.output_dir, "files": names}
    return Results(content, notes=[f"written: {options.output_dir}/{name}" for name in names])
