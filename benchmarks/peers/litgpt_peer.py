"""litgpt: its GPT module under autocast, as its pretraining script runs it, with torch's fused AdamW."""

from __future__ import annotations

import torch
from common import arguments, batches, serve
from litgpt.config import Config  # pyright: ignore
from litgpt.model import GPT  # pyright: ignore


def main() -> None:
    args = arguments()
    config = Config(
        name="llama-58m",
        block_size=args.seq,
        n_layer=args.layers,
        n_embd=args.hidden,
        n_head=args.heads,
        n_query_groups=args.kv_heads,
        vocab_size=args.vocab,
        padded_vocab_size=args.vocab,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=args.ffn,
    )
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if args.compile else model
    draw = batches(args)

    def step() -> float:
        tokens = draw()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = forward(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    serve(step)


if __name__ == "__main__":
    main()
