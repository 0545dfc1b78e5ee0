"""What a check found: each thing that is wrong, and what to do about it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Depth = Literal["quick", "full", "deep"]

REMEDIES = {
    "recipe": "`packhorse cache repair --config ...` writes it again from the settings.",
    "tokenizer": "`packhorse cache repair --config ...` takes it from the tokenizer of the settings again.",
    "plan": "Bring the page back from a copy: nothing else knows what was planned. Chunks that exist can be read.",
    "record": "`packhorse cache repair` builds the chunk again and writes the record anew.",
    "chunk": "`packhorse cache repair` builds it again from its source.",
    "index": "It is derived: `packhorse cache repair` derives it again from the records.",
    "stray": "`packhorse cache repair` moves it to the quarantine.",
    "metadata": "It is derived: `packhorse cache repair` derives it again from the records.",
    "suspect": "`packhorse cache repair` writes down again that this engine is not to be trusted.",
}
"""What can be damaged -> what to do."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """One of `REMEDIES`."""
    path: Path
    problem: str
    chunk: int | None = None

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        return f"{'' if self.chunk is None else f'chunk {self.chunk}: '}{self.problem}\n  {self.remedy}"


@dataclass(kw_only=True)
class Report:
    """What a check found."""

    folder: Path
    depth: Depth
    chunks: int = 0
    """Chunks that were checked."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no damage and worth knowing."""
    retokenized: int = 0
    """Documents that were tokenized again from their source."""
    bytes_read: int = 0
    """Of chunk files."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def damaged_chunks(self) -> list[int]:
        """Chunks whose file or record is damaged or missing."""
        return sorted({f.chunk for f in self.findings if f.chunk is not None and f.kind in ("record", "chunk")})

    def problem_of(self, chunk: int) -> str:
        """What is wrong with a chunk, in words."""
        return "; ".join(f.problem for f in self.findings if f.chunk == chunk)

    def add(self, kind: str, path: Path, problem: object, chunk: int | None = None) -> None:
        """Something is wrong."""
        self.findings.append(Finding(kind=kind, path=path, problem=str(problem).split("\n")[0], chunk=chunk))

    def lines(self) -> list[str]:
        """For people."""
        what = {"quick": "sizes and records verified", "full": "all hashes verified", "deep": "everything verified"}
        damaged = len(self.damaged_chunks)
        verdict = what[self.depth] if self.is_good else f"{damaged} damaged"
        lines = [f"{self.chunks - damaged}/{self.chunks} chunks, {verdict}"]
        if self.retokenized:
            lines.append(f"{self.retokenized:,} documents tokenized again from their source")
        return lines + self.notes + [str(finding) for finding in self.findings]
