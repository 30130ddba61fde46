"""Text that is read during training: documents from shards or the Hub, and batches of rows made from them."""

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils.versions import require_version

from ..file_kinds import check_readable
from .documents import Documents, document_of, documents_of, file_documents, hub_source, in_split, text_format
from .row_cache import key_of
from .rows import Piece, TextInMemory, TokenizedText, packed_rows, pair_rows


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

# Endings of compressed files, and what fsspec calls them.
_COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".bz2": "bz2", ".zst": "zstd"}
# Earlier versions forget their place when they resume for the second time.
_DATASETS = "datasets>=5.2"
# Documents that are tokenized at once.
_AT_ONCE = 16
# Rows of a Parquet file that are read at once.
_ROWS_AT_ONCE = 1000


def open_documents(source: str | Iterable[str]) -> "datasets.IterableDataset":
    """
    The documents of shards, or of a dataset on the Hub, as a dataset with a column `text`. Only names are read yet.

    They are named by paths, URLs of any kind that fsspec opens, or patterns of them such as `"data/*.parquet"`, or by
    `"hub:owner/name"` or `"hub:owner/name:config"`, whose split `train` is read. Files are Parquet with a column
    `text`, or as [`load_documents`] reads them; all but Parquet may be compressed.
    """
    import datasets

    require_version(_DATASETS, f"Streaming needs it: pip install '{_DATASETS}'")
    if isinstance(source, str) and source.startswith("hub:"):
        name, config = hub_source(source)
        return datasets.load_dataset(name, *config, split="train", streaming=True)
    shards = find_shards(source)
    if shard_format(shards[0]) == ".parquet":
        # By default batches are as large as the first group of rows, and a shard without rows has none.
        return datasets.load_dataset(
            "parquet", data_files={"train": shards}, split="train", streaming=True, batch_size=_ROWS_AT_ONCE
        )
    features = datasets.Features({"text": datasets.Value("string")})
    return datasets.IterableDataset.from_generator(_read_shards, features, {"shards": shards})


def find_shards(source: str | Iterable[str]) -> list[str]:
    """The files that a source of [`open_documents`] names, of formats that can be read, sorted within a pattern."""
    from fsspec.core import url_to_fs

    shards: list[str] = []
    for pattern in [source] if isinstance(source, str) else source:
        filesystem, path = url_to_fs(pattern)
        cause: BaseException | None = None
        try:
            found = [pattern] if filesystem.info(path)["type"] == "file" else []
        except FileNotFoundError as error:
            found, cause = [], error.__cause__  # of a URL: why it cannot be read
        if not found and any(character in path for character in "*?["):
            found = [filesystem.unstrip_protocol(name) for name in sorted(filesystem.glob(path))]
        if "file" in filesystem.protocol:
            check_readable(path)
            for name in found:
                check_readable(name.removeprefix("file://"))
        if not found:
            raise FileNotFoundError(f"no such file: {pattern!r}" + (f" ({cause})" if cause else ""))
        shards += found
    if not shards:
        raise ValueError("no files: name at least one file")
    kinds = {shard_format(shard) == ".parquet" for shard in shards}
    if len(kinds) > 1:
        raise ValueError(f"Parquet and other files cannot be mixed, got {shards[0]!r} and others")
    return shards


def shard_format(shard: str) -> str:
    """The format of a file, that of a text or `".parquet"`; raises an `ImportError` if nothing can decompress it."""
    from fsspec.compression import compr

    kind, suffix = text_format(shard, _COMPRESSIONS, (".parquet",)), Path(shard).suffix
    if suffix in _COMPRESSIONS and _COMPRESSIONS[suffix] not in compr:
        raise ImportError(f"{shard!r} needs a package that reads {suffix}: pip install zstandard")
    return kind


def _open_shard(shard: str) -> IO[bytes]:
    import fsspec

    return fsspec.open(shard, "rb", compression=_COMPRESSIONS.get(Path(shard).suffix))


def _read_shards(shards: list[str]) -> Iterator[dict[str, str]]:
    for shard in shards:
        for document in file_documents(shard, shard_format(shard), _open_shard):
            yield {"text": "\n".join(document)}


def stream_documents(source: str | Iterable[str], split: str = "train", holdout_every: int = 100) -> Documents:
    """
    [`load_documents`] for the sources of [`open_documents`]. Its `fingerprint` is made of the names, sizes and dates
    of the files, whose content is not read for it; for a URL, of what its server says about the version, if it does.
    """
    rows = enumerate(open_documents(source))
    documents = filter(None, (document_of(row, f"row {number} of {source!r}") for number, row in rows))

    def fingerprint() -> str | None:
        if isinstance(source, str) and source.startswith("hub:"):
            return None
        versions = [_version(shard) for shard in find_shards(source)]
        return None if None in versions else key_of("stream", split, holdout_every, versions)

    return Documents(documents_of(documents, source, split, holdout_every), fingerprint)


def _version(shard: str) -> str | None:
    """What changes with a file; `None` for a URL whose server does not say."""
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(shard)
    if "http" not in filesystem.protocol:
        return str(filesystem.ukey(path))
    found = filesystem.info(path)  # its `ukey` is a hash of the URL alone
    stated = [str(found[name]) for name in ("ETag", "Last-Modified", "Content-MD5", "Digest") if name in found]
    return " ".join([path, str(found.get("size")), *stated]) if stated else None


@dataclass(eq=False)
class RowStream(IterableDataset):
    """
    Batches of pre-training examples of a text that is read meanwhile, without end: after the last document, the next
    epoch begins with the shards in another order.

    Documents are read in parts of about `shuffle_buffer` rows. The rows of a part are made as by
    [`pretraining_dataset`], with pairs of documents of the same part, and shuffled. While they are given out, the next
    part is read. Text at the end of a part that does not fill a row is left out.

    Every reader, that is a worker of a process, has documents of its own: the shards are dealt out if that is even,
    and otherwise the documents. A batch comes with the place in the text where the next one begins. Going on from
    there reads one part again and gives the same batches as without a stop; the shuffle buffer of `datasets` would
    lose what is in it.
    """

    documents: "datasets.IterableDataset"  # from `open_documents`
    tokenizer: "PreTrainedTokenizerBase"
    max_length: int
    batch_size: int
    collator: Callable[[list[dict[str, Any]]], Any]  # such as a `ReproducibleCollator`
    nsp: bool = False
    seed: int = 0  # of the order and of the pairs
    shuffle_buffer: int = 10_000  # rows that are shuffled at once
    split: str = "train"  # or "all", for the held-out documents as well
    drop_last: bool = False  # leave out the batch at the end of an epoch that is not full
    rank: int = 0
    world_size: int = 1
    short_seq_prob: float = 0.1
    pack_documents: bool = False
    _places: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)
    _given: int = field(default=0, init=False)

    def start_from(self, given: int, places: Mapping[int, dict[str, Any]]) -> None:
        """
        Begin the next iteration after the batches that this process was given before, at the place that came with the
        last batch of each worker.
        """
        self._given, self._places = given, dict(places)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Yield the worker, the place where its next batch begins, and the batch."""
        from datasets.distributed import split_dataset_by_node

        index, workers = 0, 1
        if (info := get_worker_info()) is not None:
            index, workers = info.id, info.num_workers
            # Tokenizers would warn that one was used before the process was forked.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # A loader asks its first worker first: the one whose turn it was when the run stopped.
        worker = (index + self._given) % workers
        reader, readers = self.rank * workers + worker, self.world_size * workers
        place = self._places.get(worker, {"epoch": 0, "state": None, "rows": 0})
        documents = split_dataset_by_node(copy.deepcopy(self.documents), reader, readers)
        while True:
            epoch, found = place["epoch"], False
            collator: Any = self.collator
            collate = collator.for_epoch(epoch) if hasattr(collator, "for_epoch") else collator
            for following, rows in self._batches(documents, **place):
                found = True
                yield worker, following, collate(rows)
            if not found and place["state"] is None and not place["rows"]:
                raise ValueError(
                    f"there is too little text for reader {reader + 1} of {readers} (workers of all processes) to "
                    "fill a batch: take fewer dataloader_num_workers, a smaller batch, or more text"
                )
            place = {"epoch": epoch + 1, "state": None, "rows": 0}

    def _batches(
        self, documents: "datasets.IterableDataset", epoch: int, state: dict[str, Any] | None, rows: int
    ) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield the rows of the batches of an epoch, from a place in it, and the place of the next one."""
        parts = self._parts(documents, epoch, state)
        part = _next_whole(parts)
        batch: list[dict[str, Any]] = []
        while part is not None:
            (begin, table), part, read = part, None, 0.0
            while rows < len(table):
                more = table.slice(rows, self.batch_size - len(batch)).to_pylist()
                batch += more
                rows += len(more)
                # The next part is read little by little, so that no batch has to wait for all of it.
                while part is None and read < rows / len(table):
                    item = next(parts, 1.0)
                    if isinstance(item, float):
                        read = item
                    else:
                        part = item
                if len(batch) == self.batch_size:
                    yield {"epoch": epoch, "state": begin, "rows": rows}, batch
                    batch = []
            rows = 0
            part = part or _next_whole(parts)
        if batch and not self.drop_last:
            yield {"epoch": epoch + 1, "state": None, "rows": 0}, batch

    def _parts(
        self, documents: "datasets.IterableDataset", epoch: int, state: dict[str, Any] | None
    ) -> Iterator["float | tuple[dict[str, Any] | None, pa.Table]"]:
        """Yield how much of a part has been read and, once it has, the state at its beginning and its rows."""
        documents.set_epoch(1 + zlib.crc32(f"{self.seed} {epoch}".encode()))  # the seed of the order of the shards
        documents.load_state_dict(state)  # type: ignore[arg-type]  # None is the beginning
        needed = self.shuffle_buffer * (self.max_length - 2)
        begin, pieces = state, list[Piece]()
        for batch in documents.iter(_AT_ONCE):
            rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
            found = [document_of(row, "a row of the text") for row in rows]
            used = [document for document in found if document and in_split(document, self.split)]
            pieces += TokenizedText(used, self.tokenizer, self.nsp, quiet=True)
            tokens, ends = (sum(len(piece[index]) for piece in pieces) for index in (0, 2))
            if tokens >= needed and (ends > 1 or not self.nsp):
                yield begin, self._rows(pieces, epoch)
                begin, pieces = documents.state_dict(), []
            else:
                yield tokens / needed
        yield begin, self._rows(pieces, epoch)

    def _rows(self, pieces: list[Piece], epoch: int) -> "pa.Table":
        """The rows of a part, shuffled."""
        import pyarrow as pa

        text = TextInMemory(pieces)
        generator = np.random.default_rng([self.seed, epoch, zlib.crc32(text.ids.tobytes())])
        special = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        tables: list[pa.Table] = []
        if self.nsp and len(text.document_offsets) > 2:
            tables += pair_rows(text, *special, self.max_length, None, self.short_seq_prob, generator)
        elif not self.nsp and len(text.ids) >= self.max_length - 2:
            tables += packed_rows(pieces, *special, self.max_length, pack_documents=self.pack_documents)
        if not tables:
            return pa.table({})
        table = pa.concat_tables(tables).combine_chunks()
        return table.take(pa.array(generator.permutation(len(table))))


def _next_whole(parts):
    return next((part for part in parts if not isinstance(part, float)), None)
