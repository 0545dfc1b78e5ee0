"""A model -> scores of standard benchmarks, by lm-eval (extra `eval`).

lm-eval does the work; here a model is handed to it as it is, with its memory, and told that its context has no end.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from packhorse.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """What lm-eval shall do."""

    tasks: list[str]
    """Names of lm-eval's tasks, such as `lambada_openai hellaswag`."""
    num_fewshot: int | None = None
    """Solved examples before each question; by default as the task says."""
    limit: int | None = None
    """Only so many questions of each task."""
    batch_size: int = 8
    """Texts that are read together."""
    max_length: int = 4_096
    """Longer questions are cut at their beginning; Infini-attention itself has no limit."""
    include_path: Path | None = None
    """A folder with tasks of your own."""


def check_lm_eval() -> None:
    """Refuse before a model is loaded.

    Raises:
        SettingsError: lm-eval is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise SettingsError("Benchmarks need lm-eval.\nInstall it: `pip install packhorse[eval]`.") from None


def run_benchmarks(model: PreTrainedModel, tokenizer: Path, settings: BenchmarkSettings) -> dict[str, dict[str, float]]:
    """Task -> the values that it measures, by their names.

    Args:
        model: In evaluation mode.
        tokenizer: The folder of its tokenizer, for transformers.
        settings: Which tasks.

    Raises:
        SettingsError: lm-eval is not installed, or does not know a task.
    """
    check_lm_eval()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if settings.include_path is None else str(settings.include_path))
    if unknown := [task for task in settings.tasks if task not in manager.all_tasks]:
        raise SettingsError(f"lm-eval has no task {', '.join(unknown)}. `lm-eval ls tasks` lists them.")
    lm = HFLM(
        pretrained=model,
        backend="causal",
        tokenizer=AutoTokenizer.from_pretrained(str(tokenizer)),
        batch_size=settings.batch_size,
        max_length=settings.max_length,
    )
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=settings.tasks,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        task_manager=manager,
    )
    return {task: _numbers(values) for task, values in results["results"].items()}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, int | float)}
