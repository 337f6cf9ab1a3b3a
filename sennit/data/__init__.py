"""Text in, batches out: tokenizers, token files, packing, blending, the loader."""

from sennit.data.bundle import DataBundle, build_loaders
from sennit.data.indexed import IndexedDataset
from sennit.data.loader import IGNORED, Batch, Loader
from sennit.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IGNORED", "Batch", "DataBundle", "IndexedDataset", "Loader", "Tokenizer", "build_loaders", "load_tokenizer"]
