"""Rules between fields, and between a recipe and the number of ranks. All problems are reported at once.

Each `_check_*` function returns sentences of the form "values: rule; fix". Nothing here needs a device, except that
`precision.dtype = "auto"` asks the device layer which formats are fast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from sennit.errors import ConfigError
from sennit.recipe.fields import nearest
from sennit.recipe.recipe import Recipe
from sennit.recipe.schedules import even_layers, model_parts, schedule_problems

logger = logging.getLogger(__name__)

SEGMENTS = (
    "attention_norm",
    "attention_gather",
    "attention",
    "attention_reduce",
    "mlp_norm",
    "mlp_gather",
    "mlp",
    "mlp_reduce",
)
"""Names that `recompute.segments` accepts for dense layers."""


def check_run(recipe: Recipe, world_size: int, *, fast_dtypes: Collection[str] | None = None) -> Recipe:
    """Return `recipe` with what depends on the job resolved: dp_shard=0 for `world_size` ranks, and precision auto
    (bf16 if in `fast_dtypes`; None asks the device of this process).

    Zeros that follow from other fields (head_size, max_position, lr.total_steps, run.dir) stay zero, so that a run's
    recipe.toml can be used again with, say, more steps.
    Raises ConfigError that lists all contradictions at once, each with its values, the rule and a fix.
    """
    problems = [
        *_check_heads(recipe),
        *_check_model(recipe),
        *_check_data(recipe),
        *_check_schedule(recipe),
        *_check_optional(recipe),
        *_check_unavailable(recipe),
        *_check_tensor_parallel(recipe),
        *_check_context_parallel(recipe),
        *_check_pipeline(recipe, world_size),
        *_check_world(recipe, world_size),
        *_check_batch(recipe, world_size),
    ]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        numbered = " ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))
        raise ConfigError(f"The recipe cannot run on {_ranks(world_size)}, {len(problems)} problems: {numbered}")
    _warn(recipe)
    return _resolve(recipe, world_size, fast_dtypes)


def _resolve(recipe: Recipe, world_size: int, fast_dtypes: Collection[str] | None) -> Recipe:
    dtype = str(recipe.precision.dtype)
    if dtype == "auto":
        if fast_dtypes is None:
            from sennit.device import get_device

            fast_dtypes = get_device().fast_dtypes
        dtype = "bf16" if "bf16" in fast_dtypes else "fp32"
    shards = recipe.parallel.dp_shard or world_size // _fixed_ranks(recipe)
    share = recipe.train.global_batch_size // (recipe.parallel.dp_replicate * shards)
    return recipe.replace(
        parallel__dp_shard=shards,
        parallel__cp_ulysses=_ulysses(recipe),
        train__micro_batch_size=recipe.train.micro_batch_size or _micro_batch_size(recipe, share) or share,
        precision__dtype=dtype,
    )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _divisors(number: int) -> str:
    found = [str(k) for k in range(1, number + 1) if number % k == 0]
    return "{" + ", ".join(found) + "}"


def _check_heads(recipe: Recipe) -> list[str]:
    m, problems = recipe.model, []
    if m.num_heads % m.num_kv_heads:
        problems.append(
            f"model.num_heads={m.num_heads} is not a multiple of model.num_kv_heads={m.num_kv_heads}: each kv head serves "
            f"the same number of query heads; use num_kv_heads in {_divisors(m.num_heads)}."
        )
    if m.head_size == 0 and m.hidden_size % m.num_heads:
        problems.append(
            f"model.hidden_size={m.hidden_size} is not a multiple of model.num_heads={m.num_heads}: with head_size=0 a "
            f"head has hidden_size / num_heads numbers; set model.head_size or use hidden_size="
            f"{_nearest_multiples(m.hidden_size, m.num_heads)}."
        )
        return problems
    size = m.head_size or m.hidden_size // m.num_heads
    if size % 2:
        problems.append(
            f"the head size is {size}: rotary embeddings rotate pairs of numbers, so it must be even; set "
            f"model.head_size={size + 1}."
        )
    return problems


def _check_model(recipe: Recipe) -> list[str]:
    m, rope, seq_len, problems = recipe.model, recipe.model.rope_scaling, recipe.train.seq_len, []
    if m.max_position and seq_len > m.max_position:
        problems.append(
            f"train.seq_len={seq_len} is longer than model.max_position={m.max_position}: positions beyond it are not "
            f"defined; shorten seq_len or set max_position to 0 (= seq_len)."
        )
    if rope.kind in ("llama3", "yarn") and rope.original_max_position == 0:
        problems.append(
            f"model.rope_scaling.kind={rope.kind} needs the context length of pre-training; set "
            f"model.rope_scaling.original_max_position (8192 for Llama 3.1)."
        )
    if rope.kind == "none" and rope.factor != 1.0:
        problems.append(
            f"model.rope_scaling.factor={rope.factor} has no effect with kind=none; choose kind linear, llama3 or yarn, "
            f"or set factor=1."
        )
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        problems.append(
            f"model.rope_scaling.low_freq_factor={rope.low_freq_factor} must be below high_freq_factor="
            f"{rope.high_freq_factor}; Llama 3.1 uses 1 and 4."
        )
    if rope.kind == "yarn" and rope.beta_slow >= rope.beta_fast:
        problems.append(
            f"model.rope_scaling.beta_slow={rope.beta_slow} must be below beta_fast={rope.beta_fast}; YaRN uses 1 and 32."
        )
    return problems


def _check_data(recipe: Recipe) -> list[str]:
    data, problems = recipe.data, []
    if data.blend and data.source != "stdlib":
        problems.append(
            "data.source and data.blend are both set: samples come from one or the other; remove one of them."
        )
    if not data.source or (not isinstance(data.source, str) and "" in data.source):
        problems.append("data.source is empty; name files, folders or .bin/.idx prefixes, or stdlib.")
    if data.tokenizer.startswith("bpe:") and data.source != "random":
        size = data.tokenizer[4:]
        if not size.isdigit() or int(size) < 260:
            problems.append(
                f"data.tokenizer={data.tokenizer!r}: bpe:N trains N tokens, at least 260 (256 bytes and a few special "
                f"ones); use for example bpe:4096."
            )
        elif 0 < recipe.model.vocab_size < int(size):
            problems.append(
                f"data.tokenizer={data.tokenizer!r} has more tokens than model.vocab_size={recipe.model.vocab_size}; set "
                f"model.vocab_size to 0 (the tokenizer's) or at least {size}."
            )
    if recipe.train.eval_every and data.validation_fraction == 0:
        problems.append(
            f"train.eval_every={recipe.train.eval_every} with data.validation_fraction=0: there is no held-out text to "
            f"evaluate on; set validation_fraction, for example 0.02, or eval_every=0."
        )
    return problems


def _check_schedule(recipe: Recipe) -> list[str]:
    lr, problems = recipe.lr, []
    total = lr.total_steps or recipe.train.steps
    if lr.warmup_steps > total and lr.total_steps:
        problems.append(
            f"lr.warmup_steps={lr.warmup_steps} is more than lr.total_steps={total}: the peak would never be reached; use at "
            f"most {total}."
        )
    return problems


def _check_optional(recipe: Recipe) -> list[str]:
    problems = []
    steps = recipe.log.profile_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        problems.append(
            f"log.profile_steps={list(steps)}: give the first and the last step to profile, counted from 1, for example "
            f"[3, 5], or nothing."
        )
    recompute = recipe.recompute
    for name in recompute.segments:
        if name not in SEGMENTS:
            guess = nearest(name, SEGMENTS)
            problems.append(
                f"recompute.segments has {name!r}, which is no segment of a layer; "
                f"{f'the nearest is {guess}' if guess else 'they are ' + ', '.join(SEGMENTS)}."
            )
    if recompute.mode == "selective" and not recompute.segments:
        problems.append(
            f"recompute.mode=selective recomputes nothing without recompute.segments; name some of {', '.join(SEGMENTS)}."
        )
    if recompute.segments and recompute.mode != "selective":
        problems.append(
            f"recompute.segments={list(recompute.segments)} has no effect with recompute.mode={recompute.mode}; use mode "
            f"selective or no segments."
        )
    return problems


def _check_unavailable(recipe: Recipe) -> list[str]:
    return [
        f"parallel.{name}={getattr(recipe.parallel, name)} is not available in this version; use {name}=1."
        for name in ("ep", "etp")
        if getattr(recipe.parallel, name) > 1
    ]


def _check_tensor_parallel(recipe: Recipe) -> list[str]:
    m, tp, problems = recipe.model, recipe.parallel.tp, []
    if tp == 1:
        return problems
    if m.num_heads % tp:
        problems.append(
            f"model.num_heads={m.num_heads} is not divisible by parallel.tp={tp}: each rank holds whole heads; use tp in "
            f"{_divisors(m.num_heads)}."
        )
    if (m.num_kv_heads >= tp and m.num_kv_heads % tp) or (m.num_kv_heads < tp and tp % m.num_kv_heads):
        fits = [str(k) for k in range(1, m.num_heads + 1) if m.num_kv_heads % k == 0 or k % m.num_kv_heads == 0]
        fits = [k for k in fits if m.num_heads % int(k) == 0]
        problems.append(
            f"model.num_kv_heads={m.num_kv_heads} does not fit parallel.tp={tp}: kv heads are split evenly over the ranks, "
            f"or, when there are fewer, each is copied to the same number of ranks; use tp in {{{', '.join(fits)}}}."
        )
    if m.ffn_size % tp:
        problems.append(
            f"model.ffn_size={m.ffn_size} is not divisible by parallel.tp={tp}; use ffn_size="
            f"{_nearest_multiples(m.ffn_size, tp)} or another tp."
        )
    padded = -(-m.vocab_size // m.vocab_multiple) * m.vocab_multiple or m.vocab_multiple
    if padded % tp:
        what = f"the vocabulary padded to {padded} rows" if m.vocab_size else "the padded vocabulary"
        below = m.vocab_multiple // tp * tp
        values = [str(value) for value in dict.fromkeys((below, below + tp, math.lcm(m.vocab_multiple, tp))) if value]
        problems.append(
            f"{what} (model.vocab_multiple={m.vocab_multiple}) is not divisible by parallel.tp={tp}; use vocab_multiple "
            f"{' or '.join(values)}, or another tp."
        )
    if recipe.parallel.sequence_parallel and recipe.train.seq_len % tp:
        problems.append(
            f"train.seq_len={recipe.train.seq_len} is not divisible by parallel.tp={tp}: sequence parallelism splits it "
            f"evenly; use seq_len={_nearest_multiples(recipe.train.seq_len, tp)} or parallel.sequence_parallel=false."
        )
    return problems


def _ulysses(recipe: Recipe) -> int:
    """Return the ranks of a Ulysses group for cp_kind both (0 for other kinds): what is asked for, or the largest
    divisor of cp, smaller than cp, that divides the heads of a tensor-parallel rank."""
    p = recipe.parallel
    if p.cp_kind != "both":
        return 0
    heads = recipe.model.num_heads // p.tp
    fits = [k for k in range(1, p.cp) if p.cp % k == 0 and heads % k == 0]
    return p.cp_ulysses or max(fits, default=1)


def _check_context_parallel(recipe: Recipe) -> list[str]:
    m, p, problems = recipe.model, recipe.parallel, []
    if p.cp_ulysses and p.cp_kind != "both":
        problems.append(
            f"parallel.cp_ulysses={p.cp_ulysses} has no effect with cp_kind={p.cp_kind}; use cp_kind=both, or cp_ulysses=0."
        )
    if p.cp == 1:
        return problems
    if p.cp_kind == "both" and p.cp % max(p.cp_ulysses, 1):
        problems.append(
            f"parallel.cp_ulysses={p.cp_ulysses} does not divide cp={p.cp}: cp is a ring of Ulysses groups; use cp_ulysses in "
            f"{_divisors(p.cp)}."
        )
        return problems
    ulysses = _ulysses(recipe) if p.cp_kind == "both" else p.ulysses
    heads, kv = m.num_heads // p.tp, max(m.num_kv_heads // p.tp, 1)
    if ulysses > 1 and heads % ulysses:
        problems.append(
            f"parallel.cp={p.cp} with cp_kind={p.cp_kind} gives each of {ulysses} ranks an equal share of the {heads} heads "
            f"(num_heads={m.num_heads} / tp={p.tp}), which {ulysses} does not divide; use cp in {_divisors(heads)}, or "
            f"cp_kind=ring, which takes any number."
        )
    elif ulysses > 1 and kv % ulysses and ulysses % kv:
        fits = [str(k) for k in range(1, heads + 1) if heads % k == 0 and (kv % k == 0 or k % kv == 0)]
        problems.append(
            f"parallel.cp={p.cp} with cp_kind={p.cp_kind}: {kv} kv heads (num_kv_heads={m.num_kv_heads} / tp={p.tp}) can "
            f"neither be dealt out to {ulysses} ranks nor copied to equally many; use cp in {{{', '.join(fits)}}}, or "
            f"cp_kind=ring."
        )
    ring = p.cp // ulysses
    pieces = (2 * ring if ring > 1 else 1) * ulysses
    unit = math.lcm(pieces, p.cp * p.tp if recipe.parallel.sequence_parallel and p.tp > 1 else 1)
    if recipe.train.seq_len % unit:
        parts = f"2 x {ring} pieces, so that every rank of the ring has equal work" if ring > 1 else f"{ulysses} parts"
        tp = f", each divided by tp={p.tp}" if unit != pieces else ""
        problems.append(
            f"train.seq_len={recipe.train.seq_len} does not divide into the pieces that parallel.cp={p.cp} needs: a sequence "
            f"is cut into {parts}{tp}, {unit} in all; use seq_len={_nearest_multiples(recipe.train.seq_len, unit)}, or "
            f"another cp."
        )
    return problems


def _check_pipeline(recipe: Recipe, world_size: int) -> list[str]:
    p, layers, problems = recipe.parallel, recipe.model.num_layers, []
    if p.pp == 1:
        if p.layers_per_stage and sum(p.layers_per_stage) != layers:
            problems.append(_wrong_layers(recipe, 1))
        return problems
    parts = model_parts(str(p.schedule), p.pp, p.virtual_stages)
    dp = p.dp_replicate * (p.dp_shard or max(world_size // _fixed_ranks(recipe), 1))
    share = recipe.train.global_batch_size // dp
    name, size = str(p.schedule), recipe.train.micro_batch_size or _micro_batch_size(recipe, share)
    if size == 0 and share and recipe.train.global_batch_size % dp == 0:
        why = schedule_problems(name, p.pp, share, p.virtual_stages) or schedule_problems(name, p.pp, 1, p.virtual_stages)
        unit = dp * p.pp
        problems.append(
            f"train.global_batch_size={recipe.train.global_batch_size} gives each of the {dp} data ranks {share} sequences, "
            f"which divide into no number of microbatches that suits the schedule ({why[0].rstrip('.')}); use "
            f"global_batch_size={_nearest_multiples(recipe.train.global_batch_size, unit)}."
        )
    elif size and share % size == 0:
        problems += [f"parallel: {text}" for text in schedule_problems(name, p.pp, share // size, p.virtual_stages)]
    if p.layers_per_stage:
        if len(p.layers_per_stage) != parts or sum(p.layers_per_stage) != layers or min(p.layers_per_stage) < 0:
            problems.append(_wrong_layers(recipe, parts))
        elif 0 in p.layers_per_stage[1:-1]:
            problems.append(
                f"parallel.layers_per_stage={list(p.layers_per_stage)} has a stage without layers between others: only the "
                f"first (embedding) and the last (head) may have none; use for example {even_layers(layers, parts)}."
            )
    elif layers < parts:
        fits = [str(k) for k in range(1, p.pp) if model_parts(str(p.schedule), k, p.virtual_stages) <= layers][-1:]
        chunks = parts // p.pp
        stages = f"pp={p.pp}" + (f" x {chunks} virtual stages" if chunks > 1 else "")
        problems.append(
            f"parallel: {stages} are {parts} stages, more than the model's {layers} layers (model.num_layers): each "
            f"stage needs one; use pp={fits[0] if fits else 1} or fewer"
            + (", or a schedule with one chunk a rank." if chunks > 1 else ".")
        )
    return problems


def _micro_batch_size(recipe: Recipe, share: int) -> int:
    """Return the sequences of a microbatch where the recipe leaves them open: all `share` of a data rank without a
    pipeline; with one, the most that still give at least two microbatches a pipeline rank, or else as many microbatches
    as the schedule takes. 0 if no number fits."""
    p = recipe.parallel
    if p.pp == 1:
        return share
    counts = [count for count in range(1, share + 1) if share % count == 0]
    fits = [count for count in counts if not schedule_problems(str(p.schedule), p.pp, count, p.virtual_stages)]
    if not fits:
        return 0
    return share // next((count for count in fits if count >= 2 * p.pp), fits[-1])


def _wrong_layers(recipe: Recipe, parts: int) -> str:
    given, layers = list(recipe.parallel.layers_per_stage), recipe.model.num_layers
    example = even_layers(layers, parts)
    if len(given) != parts:
        return (
            f"parallel.layers_per_stage={given} has {len(given)} numbers, but the pipeline has {parts} stages (pp x virtual "
            f"stages): give one for each, for example {example}."
        )
    return (
        f"parallel.layers_per_stage={given} adds up to {sum(given)}, but model.num_layers={layers}: every layer belongs to "
        f"exactly one stage; use for example {example}."
    )


def _fixed_ranks(recipe: Recipe) -> int:
    p = recipe.parallel
    return p.pp * p.dp_replicate * p.cp * p.tp


def _check_world(recipe: Recipe, world_size: int) -> list[str]:
    p, fixed = recipe.parallel, _fixed_ranks(recipe)
    product = fixed * p.dp_shard
    layout = f"pp={p.pp} x dp_replicate={p.dp_replicate} x cp={p.cp} x tp={p.tp}"
    if p.dp_shard == 0 and world_size % fixed:
        sizes = ", ".join(str(fixed * k) for k in (1, 2, 3))
        return [
            f"The job has {_ranks(world_size)}, the layout ({layout}) needs a multiple of {fixed}: start {sizes}, ... "
            f"ranks (--nproc), or change the layout."
        ]
    if p.dp_shard and product != world_size:
        fix = f"start {_ranks(product)} (--nproc {product})"
        if world_size % fixed == 0:
            fix += f", or set parallel.dp_shard={world_size // fixed} (0 infers it)"
        return [
            f"The job has {_ranks(world_size)}, the layout ({layout} x dp_shard={p.dp_shard}) needs exactly {product}: {fix}."
        ]
    return []


def _check_batch(recipe: Recipe, world_size: int) -> list[str]:
    p, train = recipe.parallel, recipe.train
    shards = p.dp_shard or max(world_size // _fixed_ranks(recipe), 1)
    dp = p.dp_replicate * shards
    if train.micro_batch_size == 0:
        if train.global_batch_size % dp == 0:
            return []
        return [
            f"train.global_batch_size={train.global_batch_size} does not divide by the {dp} data ranks: each takes the same "
            f"number of sequences; use {_nearest_multiples(train.global_batch_size, dp)}, or another layout."
        ]
    product = train.micro_batch_size * dp
    if train.global_batch_size % product == 0:
        return []
    sizes = f"train.global_batch_size={train.global_batch_size}"
    fix = f"the nearest sizes that work are {_nearest_multiples(train.global_batch_size, product)}"
    if train.global_batch_size % dp == 0:
        per_rank = train.global_batch_size // dp
        best = max(k for k in range(1, min(per_rank, train.micro_batch_size) + 1) if per_rank % k == 0)
        fix += f", or keep it with train.micro_batch_size={best}"
    return [
        f"{sizes} is not a multiple of micro_batch_size x data ranks = {train.micro_batch_size} x {dp} = {product}: a step "
        f"is a whole number of microbatches on each data rank; {fix}."
    ]


def _nearest_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def _warn(recipe: Recipe) -> None:
    """Log settings that run but probably do not do what was meant."""
    m, lr = recipe.model, recipe.lr
    total = lr.total_steps or recipe.train.steps
    if lr.warmup_steps > total:
        logger.warning("lr.warmup_steps=%d is more than the %d steps: the peak is never reached", lr.warmup_steps, total)
    if m.sliding_window and m.sliding_window >= recipe.train.seq_len and m.family != "mistral":
        logger.warning(
            "model.sliding_window=%d never acts in sequences of %d tokens", m.sliding_window, recipe.train.seq_len
        )
    expected = {"qkv_bias": m.family == "qwen2", "qk_norm": m.family == "qwen3"}
    for name, usual in expected.items():
        if getattr(m, name) != usual:
            logger.warning(
                "model.%s=%s is not what model.family=%s has; the model trains, but cannot be exported under that family",
                name,
                str(getattr(m, name)).lower(),
                m.family,
            )


__all__ = ["SEGMENTS", "check_run"]
