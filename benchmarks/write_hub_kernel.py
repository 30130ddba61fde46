"""
Write attention under a frozen mask as a kernel for the kernel hub of Transformers.

    python -m benchmarks.write_hub_kernel DIR

DIR becomes a kernel repository in the layout of the library `kernels`: the parts `masks` and `attention` of this
package, in a build variant for each backend of PyTorch, and in one for CPUs like this with the compiled libraries of
the CPU operator that lie beside its sources. It is uploaded as it is, on a branch `v0`: version 0 may change. Try it
before: `LOCAL_KERNELS=organization/sparsebert-attention=DIR`.
"""

import argparse
import base64
import hashlib
import json
import platform
import shutil
from pathlib import Path

import sparsebert


PACKAGE = Path(sparsebert.__file__).parent
NAME = "sparsebert-attention"
VERSION = 0  # which the hub keeps for what may still change
BACKENDS = ("cpu", "cuda", "metal", "rocm", "xpu")
# That of the compiled libraries. They use nothing of PyTorch, so they fit every version from the first supported one.
MACHINE = platform.machine().lower().replace("arm64", "aarch64").replace("amd64", "x86_64")
COMPILED = f"torch-stable-abi211-cpu-{MACHINE}-{platform.system().lower()}"
# What attention imports (see the floors of tests/test_layout.py), without its link to the models of this package.
PARTS = ("checks.py", "file_kinds.py", "files.py", "hub.py", "version.py", "masks/**/*", "attention/**/*")
LEFT_OUT = ("attention/__init__.py", "attention/interface.py")
INIT = '''"""Attention under a frozen sparse mask. See the README of the repository."""

from .attention.dot_product import sparse_dot_product_attention
from .attention.hub_kernel import flash_attn_forward, set_mask, supports_flash_attn
from .masks.mask_files import MaskFileError
from .masks.patterns import build_pattern
from .masks.sparse_mask import SparseMask


__all__ = [
    "MaskFileError",
    "SparseMask",
    "build_pattern",
    "flash_attn_forward",
    "set_mask",
    "sparse_dot_product_attention",
    "supports_flash_attn",
]
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
- sparse-attention
---

# Attention under a frozen sparse mask

For stock models, with a mask that [sparsebert](https://pypi.org/project/sparsebert) saved beside their weights:

```python
from transformers import AutoModel

model = AutoModel.from_pretrained(MODEL, attn_implementation="{repository}@v{version}", allow_all_kernels=True)
```

A mask from elsewhere is set by the kernel itself:

```python
from kernels import get_kernel

kernel = get_kernel("{repository}", version={version}, trust_remote_code=True)
kernel.set_mask(model, kernel.SparseMask.from_pretrained(MASK))
```

On CPUs it compiles its operator at the first use if it holds none for the machine. It imports transformers.
"""


def write(folder: Path, repository: str) -> list[Path]:
    """Write the kernel, and return the folders of its build variants, that of the compiled libraries first."""
    sources = sorted({path for part in PARTS for path in PACKAGE.glob(part) if path.suffix in (".py", ".cpp", ".h")})
    contents = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sources}
    contents = {name: text for name, text in contents.items() if name not in LEFT_OUT}
    contents["__init__.py"] = INIT
    contents["attention/__init__.py"] = '"""How attention runs under a mask."""\n'
    libraries = sorted(PACKAGE.glob("attention/**/*.so"))
    variants = {COMPILED: ("cpu", libraries)} if libraries else {}
    variants |= {f"torch-{backend}": (backend, []) for backend in BACKENDS}
    for variant, (backend, compiled) in variants.items():
        _write_variant(folder / "build" / variant, backend, contents, compiled)
    (folder / "README.md").write_text(CARD.format(repository=repository, version=VERSION), encoding="utf-8")
    return [folder / "build" / variant for variant in variants]


def _write_variant(built, backend, contents, libraries):
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(contents.items())).encode())
    # Several versions can be loaded in one process, so each has a module and a namespace of operators of its own.
    identity = f"{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:8]}"
    for name, text in contents.items():
        for before, after in (
            ('"sparsebert::', f'"{identity}::'),
            ('Library("sparsebert"', f'Library("{identity}"'),
            ("torch.ops.sparsebert.", f"torch.ops.{identity}."),
        ):
            text = text.replace(before, after)
        target = built / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for library in libraries:
        shutil.copy(library, built / library.relative_to(PACKAGE))
    files = {
        path.relative_to(built).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(built.rglob("*"))
        if path.is_file()
    }
    metadata = {
        "name": NAME,
        "id": identity,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (built / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the repository to write; it must not exist yet")
    parser.add_argument("--repository", default=f"organization/{NAME}", help="its name on the Hub")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists already: name a folder that does not")
    print(*write(options.folder, options.repository), sep="\n")


if __name__ == "__main__":
    main()
