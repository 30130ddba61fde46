"""The structure of the package: the direction of imports, and names that can be told apart."""

import ast
from pathlib import Path

import sparsebert
from sparsebert.commands import VERBS


PACKAGE = Path(sparsebert.__file__).parent
# Each part may import those before it; parts on one line do not import each other.
FLOORS = (
    ("_import_path", "version", "checks", "file_kinds"),
    ("files", "finite_weights", "hub", "signals"),
    ("masks", "data", "recipe_files"),
    ("attention", "output_folders"),
    ("learning",),
    ("models",),
    ("analysis", "plugin"),
    ("theory", "training"),
    ("commands",),
)
DOORS = {"__init__", "__main__"}  # of the whole package
HEIGHT = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
TREES = {module: ast.parse((PACKAGE / module).read_text(encoding="utf-8")) for module in MODULES}


def part_of(module):
    """The folder at the top of the package that a module is in, or the module itself."""
    return Path(module.parts[0]).stem


def imports(module):
    """Modules of the package that a module imports, also for type checkers alone, as paths from the package."""
    package = list(module.parts[:-1])
    for node in ast.walk(TREES[module]):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            if not node.level:
                if base[:1] != ["sparsebert"]:
                    continue
                base = base[1:]
            names = [(base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name.split(".")[1:], "") for alias in node.names if alias.name.startswith("sparsebert")]
        for base, name in names:
            path = Path(*base, name) if name else Path(*base)
            if (PACKAGE / path).with_suffix(".py").is_file() or (PACKAGE / path).is_dir():
                yield path
            else:
                yield Path(*base)


def test_every_part_has_a_floor():
    assert {part_of(module) for module in MODULES} - DOORS == set(HEIGHT)


def test_imports_go_down():
    for module in MODULES:
        for imported in imports(module) if part_of(module) not in DOORS else ():
            part = part_of(imported) if imported.parts else "__init__"
            if part != part_of(module):
                assert HEIGHT.get(part, len(FLOORS)) < HEIGHT[part_of(module)], f"{module} imports {imported}"


def test_no_import_cycle():
    graph = {}
    for module in MODULES:
        source = module.with_suffix("") if module.name != "__init__.py" else module.parent
        graph[source] = {target for target in imports(module) if target != source}
    open_, done = [], set()

    def visit(node):
        assert node not in open_, " -> ".join(map(str, [*open_[open_.index(node) :], node]))
        if node in done:
            return
        open_.append(node)
        for target in graph.get(node, ()):
            visit(target)
        done.add(open_.pop())

    for node in graph:
        visit(node)


def test_the_wings_of_training_import_down():
    wings = ("runs", "training", "finetuning", "searching", "pretraining", "pruning")  # the Trainer is at the root
    for module in MODULES:
        for imported in imports(module) if part_of(module) == "training" else ():
            wing = next((part for part in reversed(imported.parts) if part in wings), None)
            if wing is not None:
                assert wings.index(wing) <= wings.index(module.parent.name), f"{module} imports {imported}"


def test_modules_have_names_of_their_own():
    """Outside `commands/`, whose modules are named by their verbs."""
    seen = {}
    for module in MODULES:
        if module.parts[0] == "commands" or module.stem in ("__init__", "__main__"):
            continue
        assert seen.setdefault(module.stem, module) == module, f"{module} and {seen[module.stem]} share a name"
    folders = {part for module in MODULES for part in module.parts[:-1]}
    assert not folders & set(seen)
    assert not (folders | set(seen)) & (set(sparsebert.__all__) - {"__version__"})


def test_no_function_or_class_has_the_name_of_a_module():
    modules = {module.stem for module in MODULES if module.parts[0] != "commands"}
    for module in MODULES:
        for node in TREES[module].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name not in modules, f"{node.name} in {module} has the name of a module"


def test_commands_are_the_verbs():
    names = {path.stem for path in (PACKAGE / "commands").glob("*.py") if not path.stem.startswith("_")}
    assert names == set(VERBS)


def test_only_verbs_that_train_import_training():
    verbs = ("finetune", "pretrain", "prune", "search")
    for module in MODULES:
        if module.parts[0] == "commands" and any(part_of(imported) == "training" for imported in imports(module)):
            assert module.stem in verbs


def test_every_module_says_what_it_is():
    for module in MODULES:
        assert ast.get_docstring(TREES[module]), f"{module} has no docstring"
