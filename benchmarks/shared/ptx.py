"""What the loops of a compiled kernel consist of, read from its PTX."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property


MATRIX = ("mma.", "wgmma.mma_async", "tcgen05.mma")
SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)")
# Classes of instructions by the beginning of their names; the first that fits. What is in none of them is `alu`.
CLASSES = (
    ("matrix", MATRIX),
    ("copy", ("cp.async.ca", "cp.async.cg")),
    ("group", ("cp.async.", "wgmma.", "tcgen05.", "fence", "mbarrier", "bar.", "membar", "elect")),
    ("special", ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "div.full")),
    ("shuffle", ("shfl", "redux", "vote")),
    ("shared", ("ld.shared", "st.shared", "ldmatrix", "stmatrix")),
    ("global", ("ld.global", "st.global", "atom", "red.")),
    ("float", ("fma.", "add.f", "add.rn.f", "add.ftz.f", "sub.f", "sub.rn.f", "sub.ftz.f", "mul.f", "mul.rn.f",
               "mul.ftz.f", "neg.f")),
    ("multiply", ("mul.", "mad.")),
    ("free", ("mov", "bra", "cvt.u64.u32", "cvta", ".reg", ".pragma", "ret")),
)  # fmt: skip
# Rounds after which the copies under way are those of the steady state: more than a pipeline has stages.
ROUNDS = 12


@dataclass(frozen=True)
class Loop:
    """A loop that multiplies matrices: its instructions, without predicates."""

    body: tuple[str, ...]

    @cached_property
    def counts(self) -> Counter:
        """Instructions of a thread and step, by class. One on 64 bits counts twice, as it becomes two."""
        counts: Counter = Counter()
        for instruction in self.body:
            name = kind(instruction)
            wide = name in ("alu", "multiply") and re.search(r"\.[sub]64", instruction.split()[0])
            counts[name] += 2 if wide else 1
        return counts

    def flops(self, warps: int) -> int:
        """
        Operations of the matrix instructions of a block and step: two for a multiplication and its addition. Those of
        Blackwell (`tcgen05`) do not tell their shape and are not counted.
        """
        total = 0
        for instruction in filter(is_matrix, self.body):
            if shape := SHAPE.search(instruction):
                m, n, k = map(int, shape.groups())
                # Four warps issue one wgmma together.
                total += 2 * m * n * k * (warps // 4 if instruction.startswith("wgmma") else warps)
        return total

    @cached_property
    def waits(self) -> tuple[int, ...]:
        """How many groups of copies may be under way after each wait for copies."""
        found = (re.match(r"cp\.async\.wait_group\s+(\w+)", instruction) for instruction in self.body)
        return tuple(int(match[1], 0) for match in found if match)

    @cached_property
    def ahead(self) -> float:
        """
        How long a group of copies is under way before it is waited for, in steps of matrix instructions: the least of
        all waits. At 0 the loop waits for copies that it has only just started.
        """
        position, commits, leads = 0, [], []
        for _ in range(ROUNDS):
            leads = []
            for instruction in self.body:
                if is_matrix(instruction):
                    position += 1
                elif instruction.startswith("cp.async.commit_group"):
                    commits.append(position)
                elif match := re.match(r"cp\.async\.wait_group\s+(\w+)", instruction):
                    awaited = len(commits) - int(match[1], 0)
                    if awaited > 0:
                        leads.append(position - commits[awaited - 1])
        return min(leads, default=0) / sum(map(is_matrix, self.body))


def kind(instruction: str) -> str:
    """The class of an instruction, a key of `CLASSES` or `"alu"`."""
    return next((name for name, starts in CLASSES if instruction.startswith(starts)), "alu")


def is_matrix(instruction: str) -> bool:
    """Whether an instruction multiplies matrices."""
    return instruction.startswith(MATRIX)


def matrix_loops(ptx: str) -> list[Loop]:
    """The innermost loops that multiply matrices, in the order of the program."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    spans: list[tuple[int, int]] = []
    text = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    for part in re.split(r"[;{}\n]", text):
        words = part.strip()
        while match := re.match(r"([$\w]+):", words):
            labels[match[1]] = len(instructions)
            words = words[match.end() :].strip()
        words = re.sub(r"^@!?%\w+\s+", "", words)
        if not re.match(r"[a-z]\w*(\.|\s|$)", words):
            continue
        if match := re.match(r"bra(?:\.uni)?\s+([$\w]+)", words):
            if match[1] in labels:
                spans.append((labels[match[1]], len(instructions)))
        instructions.append(words)
    spans = [span for span in spans if any(map(is_matrix, instructions[slice(*span)]))]
    inner = [
        span
        for span in set(spans)
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    return [Loop(tuple(instructions[slice(*span)])) for span in sorted(inner)]
