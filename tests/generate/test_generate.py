"""Generation with caches equals generation without, transformers, and itself on every layout."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sennit.data.tokenizer import byte_tokenizer
from sennit.errors import ConfigError
from sennit.generate import generate, sample_text
from sennit.mesh import Mesh, build_mesh
from sennit.models import Decoder, build_decoder
from sennit.models.hf import HFWeights, config_from_hf, load_hf_json, read_into
from sennit.nn import DecoderConfig
from tests.models.hf_models import VOCAB, loaded, logits, saved
from tests.ranks import run_ranks

CASES = ("llama3", "qwen2-window", "qwen3", "mistral", "llama2-tied")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (9, 1, 14)]


def without_caches(model: Decoder, prompt: list[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(logits(model, torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_no_cache_one_by_one_and_transformers(case: str, tmp_path: Path) -> None:
    theirs: Any = saved(case, tmp_path)
    model = loaded(tmp_path)
    batch = generate(model, prompts(), **GREEDY)
    assert len({tuple(row) for row in batch}) == 3
    for prompt, new in zip(prompts(), batch, strict=True):
        assert new == without_caches(model, prompt, 12)
        assert [new] == generate(model, [prompt], **GREEDY)
        ids = torch.tensor([prompt])
        settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert new == out[0, len(prompt) :].tolist()


def test_equal_lengths_go_without_a_mask(tmp_path: Path) -> None:
    saved("mistral", tmp_path)
    model = loaded(tmp_path)
    pair = [prompts()[0], prompts()[0][::-1]]
    assert generate(model, pair, **GREEDY) == [without_caches(model, prompt, 12) for prompt in pair]


def test_a_row_stops_before_its_end_token_and_the_others_go_on(tmp_path: Path) -> None:
    saved("llama3", tmp_path)
    model = loaded(tmp_path).train()
    free = generate(model, prompts(), **GREEDY)
    stop = next(token for token in free[0] if token not in free[1] and token not in free[2])
    seen: list[tuple[int, int]] = []
    rows = generate(model, prompts(), **GREEDY, eos_id=stop, on_token=lambda row, token: seen.append((row, token)))
    assert rows == [free[0][: free[0].index(stop)], free[1], free[2]]
    assert [[token for r, token in seen if r == row] for row in range(3)] == rows
    assert model.training and not any(p.grad is not None for p in model.parameters())
    two = generate(model, prompts(), **GREEDY, eos_id=[stop, free[1][0]])
    assert two[0] == rows[0] and two[1] == []
    assert all(row[: len(out)] == out for row, out in zip(free, two, strict=True))


def test_sampling_is_reproducible_and_top_k_1_is_greedy(tmp_path: Path) -> None:
    saved("llama3", tmp_path)
    model = loaded(tmp_path)

    def draw(**settings: Any) -> list[list[int]]:
        return generate(model, prompts(), **{"max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, **settings})

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    greedy = generate(model, prompts(), **GREEDY)
    assert draw(top_k=1) == draw(top_p=1e-9) == draw(temperature=1e-4) == greedy != draw(seed=1)
    same = generate(model, [prompts()[0]] * 2, max_new_tokens=12, temperature=1.0)
    assert same[0] != same[1], "rows with one prompt draw different texts"


def test_padded_tokens_are_never_drawn() -> None:
    config = DecoderConfig(
        hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=48, vocab_size=5,
        padded_vocab_size=64, max_position=64,
    )  # fmt: skip
    model = build_decoder(config, Mesh(), device=torch.device("cpu"), dtype=torch.float32, seed=1)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight[5:] = 10.0  # damaged padding
    rows = generate(model, [[1], [2, 3]], max_new_tokens=60, temperature=5.0, top_p=1.0)
    assert {token for row in rows for token in row} == set(range(5))


def test_bad_arguments_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    model = loaded(tmp_path)
    with pytest.raises(ConfigError, match=r"temperature=-1.*top_k=-2.*top_p=0"):
        generate(model, [[1]], max_new_tokens=1, temperature=-1, top_k=-2, top_p=0)
    with pytest.raises(ConfigError, match="Prompt 1 has token 131"):
        generate(model, [[1], [VOCAB]], max_new_tokens=1)
    with pytest.raises(ConfigError, match="Prompt 0 is empty"):
        generate(model, [[]], max_new_tokens=1)
    assert generate(model, [[]], **GREEDY, eos_id=7) == generate(model, [[7]], **GREEDY, eos_id=7)
    assert generate(model, [[1]], max_new_tokens=0) == [[]] and generate(model, [], max_new_tokens=3) == []
    with caplog.at_level(logging.WARNING):
        generate(model, [[1] * 60], **GREEDY)
    assert "position 72, beyond the 64" in caplog.text


def byte_model(mesh: Mesh, dtype: torch.dtype = torch.float32, layers: int = 2) -> Decoder:
    config = DecoderConfig(
        hidden_size=32, num_layers=layers, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=48, vocab_size=257,
        padded_vocab_size=384, max_position=64, init_std=0.3,
    )  # fmt: skip
    return build_decoder(config, mesh, device=torch.device("cpu"), dtype=dtype, seed=4)


def sampled(mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[list[list[int]], bool]:
    model = byte_model(mesh, dtype)
    return generate(model, [[65, 66], [], [9] * 5], max_new_tokens=16, seed=3, top_p=0.9, eos_id=256), model.training


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4}, {"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
def test_every_layout_draws_the_same_tokens(layout: Any) -> None:
    alone = sampled(Mesh())
    assert sum(map(len, alone[0])) > 40 and alone[1]
    ranks = next(iter(layout.values()))
    assert run_ranks(lambda: sampled(build_mesh(**layout)), ranks) == [alone] * ranks


def test_mixed_precision_under_fsdp() -> None:
    def rank() -> list[list[int]]:
        return generate(byte_model(build_mesh(dp_shard=2, tp=2), torch.bfloat16), [[65], [1, 2]], max_new_tokens=16)

    rows = run_ranks(rank, 4)
    assert rows == [rows[0]] * 4 and [len(row) for row in rows[0]] == [16, 16]


def test_sample_text_returns_the_continuation_alone() -> None:
    model, tokenizer = byte_model(Mesh()), byte_tokenizer()
    prompt = "ab\u00e9"
    ids = tokenizer.encode(prompt)
    tokens = generate(model, [ids], max_new_tokens=24, seed=8, eos_id=tokenizer.eos_id)[0]
    text = sample_text(model, tokenizer, prompt, max_new_tokens=24, seed=8)
    assert prompt + text == tokenizer.decode([*ids, *tokens]) and text


def test_tensor_parallel_reads_a_hugging_face_folder(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    alone = generate(loaded(tmp_path), prompts(), **GREEDY)

    def rank() -> list[list[int]]:
        config = config_from_hf(load_hf_json(tmp_path), vocab_multiple=2)
        model = build_decoder(config, build_mesh(tp=2), device=torch.device("cpu"), dtype=torch.float32, seed=None)
        with HFWeights(tmp_path) as weights:
            read_into(weights, dict(model.named_parameters()), config.vocab_size)
        return generate(model, prompts(), **GREEDY)

    assert run_ranks(rank, 2) == [alone] * 2


def test_ranks_follow_rank_0() -> None:
    def rank() -> list[list[int]]:
        mesh = build_mesh(dp_replicate=2)
        model = byte_model(mesh, layers=1)
        if mesh.world.rank == 1:
            assert model.norm is not None
            model.norm.weight.requires_grad_(False).neg_()  # this rank alone would choose other tokens
        return generate(model, [[1, 2]], **GREEDY)

    first, second = run_ranks(rank, 2)
    assert first == second


