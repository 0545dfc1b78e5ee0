"""A run -> what is told of it before its first step and after its last one, line by line."""

from lightning import LightningModule, Trainer

from packhorse.cache import DataSettings
from packhorse.models import InfiniAttentionConfig, gate_values
from packhorse.training.datamodule import TokenDataModule
from packhorse.training.gate_budget import gate_budget
from packhorse.training.speed import duration


def plan_lines(trainer: Trainer, module: LightningModule, seconds: float | None, activations: int | None) -> list[str]:
    """The plan of a run, line by line.

    Args:
        trainer: Before its first step.
        module: What it trains.
        seconds: That one micro-batch took, if one was tried.
        activations: Bytes that it kept.
    """
    data, plan = trainer.datamodule, trainer.datamodule.plan
    parameters = sum(p.numel() for p in module.model.parameters())
    # fp32 weights, gradients, and the two moments of Adam.
    state = 16 * parameters
    memory = f"{state / 1e6:,.0f} MB for weights, gradients and optimizer"
    if activations is not None:
        memory += f", {activations / 1e6:,.0f} MB for the activations of a micro-batch"
    expected = "known after the first steps"
    if not plan.steps:
        expected = "no end"
    elif seconds is not None:
        left = plan.steps - trainer.global_step
        expected = f"about {duration(seconds * left * trainer.accumulate_grad_batches)}, without validation"
    attention = module.infini_attention
    passes = f", {plan.epochs:.2f} epochs" if plan.steps and len(data.caches) == 1 else ""
    tokens = f" = {plan.tokens:,} tokens" if plan.steps else ""
    return [
        *cache_lines(data),
        f"  sequences   {plan.sequences:,} of {plan.sequence_length} tokens{passes}",
        f"  steps       {plan.length}{' of' if plan.steps else ', each of'} {plan.global_batch} sequences{tokens}",
        validation_line(trainer),
        f"  model       {parameters:,} parameters, segments of {attention.segment_length}, "
        f"memory {'on' if attention.turn_on_memory else 'off'}",
        *memory_lines(attention, plan.sequence_length),
        *(gate_lines(module) if plan.steps else []),
        f"  memory      {memory}",
        f"  time        {expected}",
    ]


def cache_lines(data: TokenDataModule) -> list[str]:
    """Where each cache of a run lies, and how it is used."""
    lines = []
    for name, cache in data.caches.items():
        built = "just built" if name in data.built else "found"
        epochs = f", {data.plan.epochs_of(name):.2f} epochs" if len(data.caches) > 1 and data.plan.steps else ""
        lines.append(f"  cache       {cache.folder}, {built}{weight_of(name, data.settings)}{epochs}")
    lines[-1] += f"; opened in {data.opening_seconds:.3f} s, first batch {data.first_batch_seconds():.3f} s later"
    return lines


def weight_of(name: str, settings: DataSettings) -> str:
    """The weights of a cache, ', weight 4, from step 90,001 on 2'; nothing for the only cache of a run."""
    told, before = "", None
    for stage in settings.stages if len(settings.caches) > 1 else []:
        weight = stage.weights.get(name, 0.0)
        if before is None:
            told = f", weight {weight:g}"
        elif weight != before:
            told += f", from step {stage.start_training_step:,} on {weight:g}"
        before = weight
    return told


def validation_line(trainer: Trainer) -> str:
    """On what a run is validated, or why it is not."""
    data, settings = trainer.datamodule, trainer.datamodule.settings
    counts = data.validation_sequences()
    if not trainer.limit_val_batches:
        return "  validation  none: `trainer.limit_val_batches` is 0; best.ckpt will not be written"
    if not settings.eval_sequences:
        return "  validation  none: `data.eval_sequences` is 0; best.ckpt will not be written"
    if any(counts.values()):
        of_each = f" ({', '.join(f'{name} {count:,}' for name, count in counts.items())})" if len(counts) > 1 else ""
        return f"  validation  {sum(counts.values()):,} evaluation sequences{of_each}"
    if settings.chunks_first is not None and any(cache.eval_share for cache in settings.caches.values()):
        return (
            "  validation  none yet: the first chunks have no evaluation sequences; it begins with the first that has"
        )
    return (
        "  validation  none: the cache has no evaluation sequences (raise `data.eval_share`, or add text); "
        "best.ckpt will not be written"
    )


def memory_lines(attention: InfiniAttentionConfig, sequence_length: int) -> list[str]:
    """A warning where the memory is on, but rows are too short to use it: documents end with their row."""
    if not attention.turn_on_memory or attention.segment_length < sequence_length:
        return []
    return [
        f"  warning     a row is one segment of {sequence_length:,} tokens: the memory is never read.",
        f"              Set `model.infini_attention.segment_length` below {sequence_length:,} (a quarter is usual), or "
        "raise `data.sequence_length`.",
    ]


def gate_lines(module: LightningModule) -> list[str]:
    """How far the gates can travel, where there are any; and when that is not far enough, what to do."""
    if not module.infini_attention.turn_on_memory:
        return []
    allowed = gate_budget(module.infini_attention, module.gate_schedule, module.balance_factor_lr)
    return [f"  gates       {allowed}", *([] if allowed.suffices else [f"              {allowed.advice()}"])]


def report_lines(
    trainer: Trainer,
    module: LightningModule,
    *,
    steps: int,
    rate: float,
    first_loss: float,
    last_loss: float,
    entropy: float,
) -> list[str]:
    """The report of a run, line by line.

    Args:
        trainer: When all steps are done.
        module: What was trained.
        steps: That were done.
        rate: Tokens per second.
        first_loss: At the beginning.
        last_loss: At the end.
        entropy: Unigram entropy of the data.
    """
    plan = trainer.datamodule.plan
    val, gates = trainer.callback_metrics.get("val/loss"), gate_values(module.model)
    return [
        *data_lines(trainer.datamodule),
        f"  training    {steps:,} steps, {steps * plan.global_batch * plan.sequence_length:,} tokens, "
        f"{rate:,.0f} tokens/s",
        f"  loss        {first_loss:.3f} at the beginning, {last_loss:.3f} at the end"
        + (f", {float(val):.3f} on evaluation text" if val is not None else ""),
        f"              {entropy:.3f} is the unigram entropy of the data: what guessing by frequency costs",
        f"  memory      gates from {float(gates.min()):.2f} to {float(gates.max()):.2f} "
        "(share of the compressive memory in a head's output)",
    ]


def data_lines(data: TokenDataModule) -> list[str]:
    """What each cache of a run holds."""
    lines = []
    for name, cache in data.caches.items():
        summary = cache.summary
        lines.append(
            f"  data        {f'{name}: ' if len(data.caches) > 1 else ''}{summary.tokens:,} tokens in "
            f"{summary.train_sequences + summary.eval_sequences:,} sequences of {cache.sequence_length}, "
            f"utilisation {summary.utilisation:.2%}, {summary.bytes_per_token:.2f} bytes per token on disk"
            f"{weight_of(name, data.settings)}"
        )
    return lines
