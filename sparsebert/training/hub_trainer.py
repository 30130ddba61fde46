"""What a Trainer of models with a mask pushes to the Hub."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import CONFIG_NAME, logging

from ..masks.mask_cards import CARD_NAME, own_card, save_card
from ..masks.mask_files import CODE_NAME, MASK_STATE, folder_of_part, own_state, parts_named_in
from ..masks.pushing import DESCRIPTIONS, files_of_parts, own_descriptions
from ..models.parts import remove_parts


logger = logging.get_logger(__name__)


class _Token(str):
    """A token that becomes `None` when it is pickled, as in the file of arguments that a Trainer saves and pushes."""

    def __reduce_ex__(self, protocol):
        return type(None), ()

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


class HubTrainer(Trainer):
    """
    The part of [`SparseBertTrainer`] that is about the Hub.

    - A push, at the end or of a checkpoint, contains the mask or the search, also those of parts, and deletes what
      contradicts it: all of a mask, for a model without one.
    - `push_results` pushes what a run adds to its folder after the model is saved.
    - The arguments are saved and pushed without `hub_token`: pickling them leaves it out.
    - The card of a model with a mask is kept, and completed with what the Trainer knows.
    """

    _sparse_attention: Callable[[], Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.hub_token is not None:
            self.args.hub_token = _Token(self.args.hub_token)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        # `save_model` has written the card of a model with a mask, or found one of the user.
        path = Path(str(self.args.output_dir), CARD_NAME)
        if self._sparse_attention() is None or not path.exists():
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero() and (card := own_card(path)) is not None:
            names = {"language": "language", "license": "license", "tags": "tags", "dataset_tags": "datasets"}
            for name, field in names.items():
                if kwargs.get(name):
                    given = kwargs[name] if isinstance(kwargs[name], list) or field == "license" else [kwargs[name]]
                    card.data[field] = [*(card.data.get(field) or ()), *given] if field == "tags" else given
            save_card(path.parent, card)

    def _contradicting_files(self) -> Sequence[str]:
        """Names of files of another mask, which a model without one lacks all."""
        names = getattr(self.accelerator.unwrap_model(self.model), "_contradicting_files", None)
        return (*MASK_STATE, CODE_NAME) if names is None else names()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        token = self.args.hub_token if token is None else token
        # Transformers 5.17 does not know the argument.
        given = {} if private is None else {"private": private}
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, **given)
        self._delete_contradicting(token, revision)
        return super().push_to_hub(commit_message, blocking, token, revision, **given, **kwargs)

    def push_results(self) -> None:
        """
        With the argument `push_to_hub`, push what a run has written since `save_model` pushed the model: results,
        pictures and the card with both. `Trainer.push_to_hub` would save the model again, with a card without them.
        """
        if not self.args.push_to_hub or not self.is_world_process_zero():
            return
        try:
            HfApi(token=self.args.hub_token).upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=str(self.args.output_dir),
                commit_message="Results",
                revision=self.args.hub_revision,
                ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"],
            )
        except Exception as error:  # whatever it is, the run is finished, and its model pushed
            logger.warning(
                f"{self.hub_model_id} has the model, but its results could not be pushed: {error}\n"
                "`sparsebert push` pushes the finished run."
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        pushes = self.args.hub_strategy != HubStrategy.END and (self.args.hub_always_push or not busy)
        if pushes and self.is_world_process_zero():
            # The stock Trainer copies only the files that it knows to the folder that is pushed.
            source, folder = Path(checkpoint_folder), Path(str(self.args.output_dir))
            for name in {*self._contradicting_files()} & {*own_state(folder), CODE_NAME}:
                (folder / name).unlink(missing_ok=True)
            for name in (*MASK_STATE, CODE_NAME):
                if (source / name).is_file():
                    shutil.copy(source / name, folder / name)
            remove_parts(parts_named_in(folder / CONFIG_NAME), folder)
            for part in map(folder_of_part, parts_named_in(source / CONFIG_NAME)):
                shutil.copytree(source / part, folder / part, dirs_exist_ok=True)
            try:
                self._delete_contradicting(self.args.hub_token, None)
            except Exception as error:  # whatever it is, a training does not end for it
                logger.warning(f"{self.hub_model_id}: the files of the previous mask could not be deleted: {error}")
        super()._push_from_checkpoint(checkpoint_folder)

    def _delete_contradicting(self, token, revision):
        """
        Delete from the repository what belongs to another state of the mask, before the push: in between there is no
        mask, and not that of another model.
        """
        if not self.is_world_process_zero():
            return
        api, revision = HfApi(token=token), revision or self.args.hub_revision
        repo_id = str(self.hub_model_id)
        there = set(api.list_repo_files(repo_id, revision=revision))
        stale = {*self._contradicting_files()} & there
        described = stale & set(DESCRIPTIONS)
        stale -= described - own_descriptions(api, repo_id, described, revision)
        stale |= files_of_parts(api, repo_id, there, revision) & there
        if stale:
            api.delete_files(repo_id, sorted(stale), commit_message="Delete the former mask", revision=revision)
