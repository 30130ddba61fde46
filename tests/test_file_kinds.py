"""Links, pipes and files of a user in place of what the package writes and reads, and files that may not be read."""

import os
import random
import shutil
import signal
import socket
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from sparsebert import SparseBertForMaskedLM, attach, build_pattern, load
from sparsebert.data.documents import load_documents
from sparsebert.data.streams import open_documents
from sparsebert.file_kinds import kind_of
from sparsebert.files import LOCK_NAME, UNFINISHED_NAME, is_empty, locked_output, open_text
from sparsebert.masks import pulling
from sparsebert.masks.listing import list_masks
from sparsebert.masks.mask_files import MaskFileError, check_undamaged, parts_named_in
from sparsebert.masks.pulling import pull_folder
from sparsebert.masks.pushing import check_pushable
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.output_folders import ASIDE_NAME, remove, written_whole
from sparsebert.training.runs.checkpoint_manifests import check_whole, newest_whole, whole_checkpoint
from sparsebert.training.runs.run_folders import run_folder


COMMIT, OTHER = "1" * 40, "2" * 40
CONFIG = "config.json"


def put(kind, path, outside):
    """Something of a user's, or of one who means harm, at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        return
    target = {"link to a folder": outside, "link to a file": outside / CONFIG, "link to nothing": outside / "new"}
    if kind in target:
        path.symlink_to(target[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(path.parent, os.O_RDONLY)
            made.bind(f"/proc/self/fd/{here}/{path.name}")  # the whole path would be too long
            os.close(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "thesis.txt").write_text("mine")


KINDS = ("link to a folder", "link to a file", "link to nothing", "pipe", "socket", "device", "file", "folder")


def look(folder):
    """All that is in a folder: its kind, its content and, of a link, where it leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = kind_of(path)
        found[path.relative_to(folder)] = kind, path.read_bytes() if kind == "file" else None
    return found


@contextmanager
def at_once():
    """What waits is interrupted, by an error that nothing takes for one of a file."""

    def late(number, frame):
        raise KeyboardInterrupt("it waits")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def outside(tmp_path):
    """A folder of a user in which everything has a name that is written or removed elsewhere."""
    place = tmp_path / "home"
    names = ("out/thesis.txt", "runs/log", f"{COMMIT}/a", f"{OTHER}/b", CONFIG, "metrics.json", "model.safetensors")
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("precious")
    (place / "checkpoint-2").mkdir()
    return place


@pytest.fixture
def source(tiny_config, tmp_path_factory):
    """A model with its mask, as it is on the Hub."""
    folder = tmp_path_factory.mktemp("source")
    SparseBertForMaskedLM(tiny_config(pattern="window")).save_pretrained(folder)
    return folder


@pytest.fixture
def hub(source, monkeypatch):
    """A Hub with that model, and a client that writes to its folder as if nothing could be in the way."""
    names = [path.name for path in source.iterdir()]

    class Api:
        def __init__(self, token):
            pass

        def model_info(self, repo_id, revision):
            return types.SimpleNamespace(sha=COMMIT)

        def list_repo_files(self, repo_id, revision):
            return names

        def verify_repo_checksums(self, repo_id, revision, local_dir):
            return types.SimpleNamespace(mismatches=[], missing_paths=[])

    def download(repo_id, local_dir, **arguments):
        shutil.copytree(source, local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(pulling, "HfApi", Api)
    monkeypatch.setattr(pulling, "snapshot_download", download)


def write(folder):
    """What a run saves, as libraries do that follow links."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("trainer_state.json", "training_args.bin", "predictions_test.jsonl"):
        with open(folder / name, "w") as file:
            file.write("{}")


def save_checkpoint(folder, step):
    with whole_checkpoint(folder / f"checkpoint-{step}"):
        write(folder / f"checkpoint-{step}")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({}, folder / f"checkpoint-{step}" / name)
        (folder / f"checkpoint-{step}" / CONFIG).write_text("{}")


def train(model, out, overwrite=False, resume=None):
    with locked_output(out) as left, run_folder(out, overwrite, resume, unfinished=left) as (folder, _):
        save_checkpoint(folder, 2)
        write(folder)
        model.save_pretrained(folder)
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "runs/events").write_text("")
        (folder / "metrics.json").write_text("{}")


def rewrite(model, out, overwrite):
    with written_whole(out, overwrite) as folder:
        write(folder)
        model.save_pretrained(folder)
        (folder / "metrics.json").write_text("{}")


# What is done with a folder `out`, and the model that is saved.
OPERATIONS = (
    *(lambda model, out: train(model, out), lambda model, out: train(model, out, overwrite=True)),
    lambda model, out: train(model, out, resume=True),
    *(lambda model, out: rewrite(model, out, False), lambda model, out: rewrite(model, out, True)),
    lambda model, out: pull_folder("user/model", out),
    lambda model, out: pull_folder("user/model", out, overwrite=True),
    lambda model, out: model.save_pretrained(out),
    lambda model, out: build_pattern("window", 16, 4).save_pretrained(out),
    lambda model, out: load(out),
    lambda model, out: check_pushable(out),
    lambda model, out: SparseMask.from_pretrained(out),
)
ASIDE = ".out.unfinished"
NAMES = (
    *(f"out/{name}" for name in (LOCK_NAME, UNFINISHED_NAME, ASIDE_NAME, f"{ASIDE_NAME}/out", f"{ASIDE_NAME}/out-1")),
    *(f"out/{ASIDE_NAME}/out/{name}" for name in ("metrics.json", "runs", "checkpoint-2", "model.safetensors")),
    *(f"out/{name}" for name in (CONFIG, "generation_config.json", "model.safetensors", "README.md", "metrics.json")),
    *(f"out/{name}" for name in ("mask_config.json", "mask.safetensors", "trainer_state.json", "runs", "notes")),
    *(f"out/checkpoint-2{name}" for name in ("", "/trainer_state.json", "/optimizer.pt", "/checkpoint_manifest.json")),
    *(ASIDE, f"{ASIDE}/{LOCK_NAME}", f"{ASIDE}/replaced", f"{ASIDE}/{COMMIT}", f"{ASIDE}/{OTHER}"),
    *(f"{ASIDE}/{COMMIT}/{CONFIG}", f"{ASIDE}/{COMMIT}/.cache", f"{ASIDE}/replaced/notes/mine", f"{ASIDE}/thesis"),
)


@pytest.mark.parametrize("count", [80, pytest.param(5_000, marks=pytest.mark.slow)])
def test_whatever_is_at_a_working_name(tmp_path, tiny_config, source, hub, outside, count):
    """Nothing elsewhere is touched, and nothing waits. What does not go is refused in a line."""
    model, before, done = SparseBertForMaskedLM(tiny_config(pattern="window")), look(outside), 0
    rng = random.Random(count)
    save_checkpoint(tmp_path / "run", 1)
    for index in range(count):
        place = tmp_path / "place"
        start = rng.choice(("nothing", "a model", "a run"))
        if start != "nothing":
            shutil.copytree(source if start == "a model" else tmp_path / "run", place / "out")
            (place / "out/mine").write_text("mine")
        if start == "a run":
            (place / "out" / UNFINISHED_NAME).write_text('{"alone": true}')
        operation = rng.choice(OPERATIONS)
        used = [name for name in NAMES if name.startswith("out") or operation in OPERATIONS[5:7]]
        for name in rng.sample(used, rng.randint(1, 3)):
            path = place / name
            if not all(kind_of(parent) in ("folder", None) for parent in path.parents):
                continue
            if rng.random() < 0.5 and path.is_file():
                path.unlink()  # in the place of a file that was there
            put(rng.choice(KINDS), path, outside)
        place.mkdir(exist_ok=True)
        try:
            with at_once():
                operation(model, place / "out")
            done += 1
        except (OSError, ValueError) as error:
            assert str(error)
        assert look(outside) == before, index
        if start != "nothing":
            assert any((place / at / "mine").is_file() for at in ("out", f"{ASIDE}/replaced")), index
        shutil.rmtree(place)
    assert count / 10 < done < 0.9 * count


def test_links_beside_and_in_a_folder_are_refused_or_replaced(tmp_path, tiny_config, source, hub, outside):
    """Each of the four kinds by its name: refused where it is a working folder, replaced where it is a file."""
    before, out = look(outside), tmp_path / "out"
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    for link, target, operation in (
        (tmp_path / ASIDE, outside, lambda: pull_folder("user/model", out)),
        (out / ASIDE_NAME, outside, lambda: train(model, out, overwrite=True)),
        (out / ASIDE_NAME, outside, lambda: rewrite(model, out, True)),
        (out / ASIDE_NAME / "out", outside, lambda: train(model, out, overwrite=True)),
        (out / UNFINISHED_NAME, outside / CONFIG, lambda: train(model, out)),
        (out / LOCK_NAME, outside / CONFIG, lambda: train(model, out)),
        (tmp_path / ASIDE / LOCK_NAME, outside / CONFIG, lambda: pull_folder("user/model", out)),
        (tmp_path / ASIDE / "replaced", outside, lambda: pull_folder("user/model", out)),
        (tmp_path / ASIDE / OTHER, outside, lambda: pull_folder("user/model", out)),
        (tmp_path / ASIDE / COMMIT / CONFIG, outside / CONFIG, lambda: pull_folder("user/model", out)),
    ):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        with pytest.raises(FileExistsError, match=f"{link} is a link"):
            operation()
        assert look(outside) == before and link.is_symlink()
        shutil.rmtree(out, ignore_errors=True)
        remove(tmp_path / ASIDE)
    for saved in (model, model.config, attach(BertModel(tiny_config(BertConfig)), "window")):
        out.mkdir()
        for name in (CONFIG, "model.safetensors", "mask_config.json"):
            (out / name).symlink_to(outside / name)
        saved.save_pretrained(out)
        assert look(outside) == before and not (out / CONFIG).is_symlink()
        shutil.rmtree(out)


def test_what_no_pull_left_is_not_removed(tmp_path, hub, outside):
    for name in ("thesis.txt", "thesis/page", f"{COMMIT}x/a"):
        (tmp_path / ASIDE / name).parent.mkdir(parents=True)
        (tmp_path / ASIDE / name).write_text("mine")
        with pytest.raises(FileExistsError, match="is not of a pull"):
            pull_folder("user/model", tmp_path / "out")
        assert (tmp_path / ASIDE / name).read_text() == "mine"
        shutil.rmtree(tmp_path / ASIDE)
    # What was set aside goes back, but not out of the folder.
    pull_folder("user/model", tmp_path / "out")
    (tmp_path / "out/notes").symlink_to(outside)
    (tmp_path / ASIDE / "replaced/notes/deep").mkdir(parents=True)
    (tmp_path / ASIDE / "replaced/notes/deep/mine").write_text("mine")
    with pytest.raises(FileExistsError, match="leads out of"):
        pull_folder("user/model", tmp_path / "out", overwrite=True)
    assert (tmp_path / ASIDE / "replaced/notes/deep/mine").is_file() and not (outside / "deep").exists()


def test_files_of_a_user_at_our_names_stay(tmp_path):
    for name, content in ((UNFINISHED_NAME, "mine"), (UNFINISHED_NAME, '{"mine": 1}'), (UNFINISHED_NAME, "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(FileExistsError, match="not a file of sparsebert"), locked_output(tmp_path):
            pass
        assert (tmp_path / name).read_text() == content
        (tmp_path / name).unlink()
    (tmp_path / f".{UNFINISHED_NAME}.{16 * 'a'}.tmp").touch()  # of a run that was killed while it wrote its mark
    with locked_output(tmp_path):
        assert is_empty(tmp_path) and {*os.listdir(tmp_path)} == {LOCK_NAME, UNFINISHED_NAME}
    (tmp_path / LOCK_NAME).write_text("mine")
    with locked_output(tmp_path):
        (tmp_path / "result").touch()
    assert (tmp_path / LOCK_NAME).read_text() == "mine" and not (tmp_path / UNFINISHED_NAME).exists()
    # Nor is a mark written through a second name of the same file.
    (tmp_path / UNFINISHED_NAME).touch()
    os.link(tmp_path / UNFINISHED_NAME, tmp_path / "other")
    with locked_output(tmp_path):
        assert not (tmp_path / "other").read_bytes()


def test_logs_are_moved_into_a_folder_alone(tmp_path, tiny_config, outside):
    """One that is a link is replaced, as other folders are."""
    out, before = tmp_path / "out", look(outside)
    model = SparseBertForMaskedLM(tiny_config(pattern="window"))
    for _ in range(2):
        train(model, out, overwrite=True)
        assert [path.name for path in (out / "runs").iterdir()] == ["events"] and look(outside) == before
        shutil.rmtree(out / "runs")
        (out / "runs").symlink_to(outside)


def test_checkpoints_are_not_saved_out_of_the_folder(tmp_path, tiny_config, outside):
    before, model = look(outside), SparseBertForMaskedLM(tiny_config(pattern="window"))
    save_checkpoint(tmp_path / "out", 1)
    (tmp_path / "out/latest").symlink_to("checkpoint-1")  # which leads nowhere else
    (link := tmp_path / "out/checkpoint-2").symlink_to(outside)
    with pytest.raises(FileExistsError, match="checkpoint-2 is a link"):
        train(model, tmp_path / "out", resume=True)
    (outside / "inner").symlink_to("config.json")  # which stays, too
    before = look(outside)
    with whole_checkpoint(link):  # a training without an output folder of its own
        write(link)
    assert look(outside) == before and not link.is_symlink()
    shutil.rmtree(link)
    link.mkdir()
    (link / "optimizer.pt").symlink_to(outside / CONFIG)
    train(model, tmp_path / "out", resume=True)
    assert look(outside) == before and newest_whole(tmp_path / "out") == link


READERS = (
    *((name, load) for name in ("model.safetensors", "mask_config.json", "mask.safetensors", "README.md")),
    *((name, check_pushable) for name in ("model.safetensors", "mask_config.json", "mask.safetensors")),
    *((name, check_undamaged) for name in (CONFIG, "tokenizer.json", "mask.safetensors")),
    *((name, SparseMask.from_pretrained) for name in ("mask_config.json", "mask.safetensors")),
    *((name, check_whole) for name in ("optimizer.pt", "new.json", "checkpoint_manifest.json", "trainer_state.json")),
    *(("text.txt", read) for read in (load_documents, lambda path: open_text(path).__enter__())),
    *(("text.txt", lambda path, name=name: open_documents(f"{path.parent}/{name}")) for name in ("text.txt", "*.txt")),
)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_would_be_waited_for_is_refused_at_once(tmp_path, source, outside, kind):
    for name, read in READERS:
        folder = shutil.copytree(source, tmp_path / "folder")
        if read is check_whole:
            save_checkpoint(folder, 1)
            folder = folder / "checkpoint-1"
        (folder / name).unlink(missing_ok=True)
        put(kind, folder / name, outside)
        path = folder / name if name == "text.txt" else folder
        refused = pytest.raises((OSError, ValueError), match=rf"{name}.* is a {kind}|no such file|there is no")
        with refused, at_once():
            read(path)
        shutil.rmtree(tmp_path / "folder")
    # Beside a mask that is saved, and where nothing depends on it, it is passed over.
    for name in (CONFIG, "model.safetensors"):
        put(kind, tmp_path / "beside" / name, outside)
    with at_once():
        assert parts_named_in(tmp_path / "beside" / CONFIG) == []
        build_pattern("window", 16, 4).save_pretrained(tmp_path / "beside")
    model = load(source)
    (source / "README.md").unlink()
    put(kind, source / "README.md", outside)
    with at_once():
        assert list_masks(str(source))[0]["scores"] == {}
        model.save_pretrained(tmp_path / "again")  # whose card may say what that of its source does


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, source, monkeypatch):
    allowed = os.access
    for name in ("model.safetensors", CONFIG, "mask_config.json"):
        closed = source / name
        closed.chmod(0o600)
        monkeypatch.setattr(os, "access", lambda path, mode, no=closed: Path(path) != no and allowed(path, mode))
        for read in (load, check_pushable):
            with pytest.raises((PermissionError, MaskFileError)) as error:
                read(source)
            said = str(error.value)
            assert f"{closed} may not be read, its permissions are -rw-------" in said and "damaged" not in said
