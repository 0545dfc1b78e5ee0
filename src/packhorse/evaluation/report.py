"""A passkey result -> tables for the terminal, JSON, and a heat map of length and depth."""

import json
from pathlib import Path

from packhorse.evaluation.passkey import PasskeyResult, Score, wilson
from packhorse.evaluation.spans import span_name


def result_lines(result: PasskeyResult) -> list[str]:
    """What a terminal shows: by length, then by distance."""
    settings = result.settings
    heads = [f"memory {mode}" if mode != "full" else "full attention" for mode in result.modes]
    lines = [
        f"Pass keys of {settings.digits} digits, {settings.samples} texts at each of {settings.depths} depths; exact "
        "match [95 % interval], token accuracy",
        f"Chance: exact {result.chance_exact:.5f}, tokens {result.chance_token:.3f}",
    ]
    if result.segment_length is not None:
        lines += ["", f"Key one or more segments of {result.segment_length} tokens back", _row("length", heads)]
        for length in settings.lengths:
            scores = [result.remembered(length, mode) for mode in result.modes]
            lines.append(_row(f"{length:,}", [_cell(score) for score in scores]))
    lines += ["", "By distance in segments; at 0 local attention may see the key", _row("length  segments", heads)]
    for length, span in sorted({key[:2] for key in result.distances}):
        scores = [result.distances[length, span, mode] for mode in result.modes]
        lines.append(_row(f"{length:,}  {span_name(span)}", [_cell(score) for score in scores]))
    return lines


def write_json(result: PasskeyResult, path: Path, **more: str) -> None:
    """Everything, with what else is said about it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**more, **result.to_dict()}, indent=1) + "\n", encoding="utf-8")


def write_heat_map(result: PasskeyResult, path: Path) -> bool:
    """Exact match by length and depth, one panel a mode. False where matplotlib is missing (extra `eval`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lengths, depths = result.settings.lengths, result.settings.shares
    figure = Figure(figsize=(1.2 + len(result.modes) * (1.2 + 0.5 * len(lengths)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(result.modes), sharey=True, squeeze=False)[0]
    for panel, mode in zip(axes, result.modes, strict=True):
        shares = [[result.cells[length, depth, mode].share for length in lengths] for depth in depths]
        image = panel.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.set_title(f"memory {mode}" if mode != "full" else "full attention")
        panel.set_xlabel("tokens of the text")
    axes[0].set_ylabel("depth of the key")
    figure.colorbar(image, ax=list(axes), label="exact match")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _cell(score: Score) -> str:
    low, high = wilson(score.exact, score.trials)
    return f"{score.share:.3f} [{low:.3f}, {high:.3f}]  {score.token_share:.3f}" if score.trials else "-"


def _row(name: str, cells: list[str]) -> str:
    return f"  {name:>18}  " + "  ".join(f"{cell:<28}" for cell in cells).rstrip()
