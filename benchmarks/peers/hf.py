"""Hugging Face transformers: LlamaForCausalLM under autocast, torch's fused AdamW, as its Trainer does it."""

from __future__ import annotations

import torch
from common import arguments, batches, serve
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore


def main() -> None:
    args = arguments()
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # pyright: ignore
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if args.compile else model
    draw = batches(args)

    def step() -> float:
        tokens = draw()
        labels = tokens[:, 1:].contiguous()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = forward(input_ids=tokens[:, :-1], labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    serve(step)


if __name__ == "__main__":
    main()
