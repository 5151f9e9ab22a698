"""Reads the TPU compiler's final schedule of a kernel: loops, branches, cycles.

The compiler writes one VLIW bundle a line. A backward branch closes a loop; a forward branch skips
a part. Cycles are bundles times how often they run, never below what the matrix units need; waits
for memory are not in it, so the figure is the compute side alone.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(LH|LB|LE|PB|PF|CT)?\s*:[\s>]*\{", re.IGNORECASE)
_BRANCH = re.compile(r"sbr\.rel\b.*?target = \$region(\d+)")
_REGION = re.compile(r"Start region (\d+)|Start/End empty region (\d+)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
WRAPPER = 0.9
"""Share of what holds it from which a branch is but a wrapper, always taken."""


@dataclass
class Part:
    """A stretch of bundles `[start, stop)` that runs `times` as often as what holds it."""

    kind: str
    """loop, branch or all."""
    start: int
    stop: int
    matmuls: int = 0
    """Matrix operations outside of `parts`."""
    times: float = 1.0
    parts: list["Part"] = field(default_factory=list)

    @property
    def bundles(self) -> int:
        return self.stop - self.start

    @property
    def letter(self) -> str:
        """Of its kind, upper-case if it has matrix operations."""
        return self.kind[0].upper() if self.total_matmuls() else self.kind[0]

    def listed(self, large: int) -> Iterator["Part"]:
        """Parts of so many bundles, in the order of the program, outer ones before inner ones.

        Inside a branch without matrix operations nothing is listed.
        """
        for part in self.parts:
            wrapper = part.kind == "branch" and part.bundles > WRAPPER * self.bundles
            if part.bundles >= large and not wrapper:
                yield part
            if wrapper or part.kind == "loop" or part.total_matmuls():
                yield from part.listed(large)

    def total_matmuls(self) -> int:
        return self.matmuls + sum(part.total_matmuls() for part in self.parts)

    def loops(self) -> Iterator["Part"]:
        """All loops inside."""
        for part in self.parts:
            if part.kind == "loop":
                yield part
            yield from part.loops()

    def cycles(self, matmul_cycles: float) -> float:
        own = self.bundles - sum(part.bundles for part in self.parts)
        inner = sum(part.cycles(matmul_cycles) for part in self.parts)
        return self.times * (max(own, self.matmuls * matmul_cycles) + inner)


def parse(text: str, delay: int) -> Part:
    """The whole kernel as nested parts.

    Args:
        text: A `*-final_bundles.txt` file.
        delay: Bundles that still run after a taken branch, 4 or 6.
    """
    bundles = _bundles(text)
    starts = {
        int(a or b): i
        for i, (_, body) in reversed([*enumerate(bundles)])
        for a, b in _REGION.findall(body)
    }
    loop_heads = [i for i, (mark, _) in enumerate(bundles) if mark == "LB"]
    spans: dict[tuple[int, int], str] = {}
    for i, (_, body) in enumerate(bundles):
        after = min(i + delay + 1, len(bundles))
        for region in map(int, _BRANCH.findall(body)):
            target = starts.get(region)
            if target is None:
                continue
            if target <= i:
                head = max((h for h in loop_heads if target <= h <= i), default=target)
                spans[min(target, head), after] = "loop"
            elif target > after:
                spans[after, target] = "branch"
    root = Part("all", 0, len(bundles))
    stack = [root]
    for (start, stop), kind in sorted(spans.items(), key=lambda s: (s[0][0], -s[0][1])):
        while stack[-1].stop <= start:
            stack.pop()
        part = Part(kind, start, min(stop, stack[-1].stop))
        stack[-1].parts.append(part)
        stack.append(part)
    _count_matmuls(root, [_COMMENT.sub("", body) for _, body in bundles])
    return root


def set_times(
    root: Part,
    times: Sequence[float],
    *,
    large: int,
    small_loop_times: float,
    inner_loop_times: float = 1.0,
    pattern: str = "",
) -> None:
    """Say how often each part runs: those of `large` bundles by `times`, other loops all alike.

    Args:
        small_loop_times: Of loops that are not among the parts.
        inner_loop_times: Of those inside of such a loop.
        pattern: Regular expression of the parts' letters, with a group of one letter for each
            count; a part that is below `large` on some chips is optional. "": one part each.

    Raises:
        ValueError: Other parts are listed; the message shows them.
    """
    parts = list(root.listed(large))
    letters = "".join(part.letter for part in parts)
    match = re.fullmatch(pattern or "(.)" * len(times), letters)
    if match is None:
        shown = ", ".join(f"{p.letter} {p.start}-{p.stop}" for p in parts)
        raise ValueError(f"{len(times)} counts, {pattern or 'one a part'}, for {shown}")
    for part in root.loops():
        part.times = small_loop_times
    for part in root.loops():
        for inner in part.loops() if all(part is not listed for listed in parts) else ():
            inner.times = inner_loop_times
    for index, value in zip(map(match.start, range(1, len(times) + 1)), times, strict=True):
        if index >= 0:
            parts[index].times = value


def _bundles(text: str) -> list[tuple[str, str]]:
    """Mark and text of each bundle; a comment may run over several lines."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            found.append((match[1] or "", line))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
    return found


def _count_matmuls(part: Part, code: list[str]) -> None:
    inside = {i for p in part.parts for i in range(p.start, p.stop)}
    own = (code[i] for i in range(part.start, part.stop) if i not in inside)
    part.matmuls = sum(len(re.findall(r"\bvmatmul\.", body)) for body in own)
    for inner in part.parts:
        _count_matmuls(inner, code)
