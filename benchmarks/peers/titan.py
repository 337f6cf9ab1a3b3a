"""torchtitan: its own Trainer and train_step on one CPU rank.

What it takes to run release 0.3.0 on a CPU is done here, without touching its code: the device look-up says cpu,
torch.cpu gets the functions the Trainer calls, attention is PyTorch's SDPA (its default, FlexAttention, has no CPU
backward), data and tokenizer are stand-ins, activation checkpointing is off. The loss is its chunked one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from dataclasses import dataclass

import torch
from common import arguments, batches, serve

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")


def pretend_cpu_is_a_device() -> None:
    """Give torch.cpu what torchtitan asks of a device module."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu = torch.cpu
    properties = types.SimpleNamespace(total_memory=1 << 34, name="cpu", multi_processor_count=1)
    stubs = {
        "set_device": lambda *a: None,
        "get_device_name": lambda *a: "cpu",
        "get_device_properties": lambda *a: properties,
        "memory_stats": lambda *a: {},
        "reset_peak_memory_stats": lambda *a: None,
        "empty_cache": lambda *a: None,
        "mem_get_info": lambda *a: (1 << 34, 1 << 34),
        "max_memory_reserved": lambda *a: 0,
        "is_initialized": lambda: True,
        "manual_seed_all": lambda *a: None,
    }
    for name, stub in stubs.items():
        setattr(cpu, name, stub)
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *a, **k: None  # type: ignore[attr-defined]


@dataclass
class Data:
    """Stands in for the dataloader: random tokens."""

    draw: object = None

    def build(self, **_: object) -> Data:
        return self

    def __iter__(self):
        while True:
            tokens = self.draw()  # type: ignore[operator]
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def to_dict(self) -> dict[str, object]:
        return {}

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, _: object) -> None:
        return


class Nothing:
    """Stands in for the tokenizer."""

    def build(self, **_: object) -> None:
        return None

    def to_dict(self) -> dict[str, object]:
        return {}


def main() -> None:
    args = arguments()
    pretend_cpu_is_a_device()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    import torchtitan.distributed.utils as titan_dist  # pyright: ignore

    titan_dist.init_distributed = lambda *a, **k: 1
    from torchtitan.models import llama3  # pyright: ignore
    from torchtitan.models.common import attention, config_utils  # pyright: ignore

    sdpa = attention.ScaledDotProductAttention
    config_utils.get_attention_config = llama3.get_attention_config = lambda backend: sdpa.Config()
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # pyright: ignore
    from torchtitan.components.optimizer import default_adamw  # pyright: ignore
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # pyright: ignore
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # pyright: ignore
    from torchtitan.models.llama3.model import Llama3Model  # pyright: ignore
    from torchtitan.protocols.model_spec import ModelSpec  # pyright: ignore
    from torchtitan.trainer import Trainer  # pyright: ignore

    dim, vocab = args.hidden, args.vocab
    model = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True,
            n_layers=args.layers,
            dim=dim,
            n_heads=args.heads,
            n_kv_heads=args.kv_heads,
            hidden_dim=args.ffn,
            rope=ComplexRoPE.Config(dim=dim // args.heads, max_seq_len=max(args.seq, 512), theta=10000, scaling="none"),
            attn_backend="sdpa",
        ),
    )
    spec = ModelSpec(
        name="llama3",
        flavor="58m",
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=tempfile.mkdtemp(prefix="titan-"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab)),
        optimizer=default_adamw(lr=1e-4),
        training=TrainingConfig(
            local_batch_size=args.batch,
            seq_len=args.seq,
            steps=10_000,
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if args.dtype == "bf16" else "float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile=CompileConfig(enable=args.compile),
        activation_checkpoint=None,
    )
    config.tokenizer, config.dataloader = Nothing(), Data(batches(args))
    config.metrics.log_freq = 1
    trainer = Trainer(config)
    iterator = trainer.batch_generator(trainer.dataloader)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *a, **k: losses.append(float(loss))

    def step() -> float:
        trainer.step += 1
        trainer.train_step(iterator)
        return losses[-1] if losses else 0.0

    serve(step)


if __name__ == "__main__":
    sys.exit(main())
