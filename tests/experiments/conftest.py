"""The experiments are no installed package: they are run, and tested, from the repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))


@pytest.fixture(scope="session")
def repository():
    """Return the top folder of the repository."""
    return REPOSITORY


@pytest.fixture
def data_folder():
    """Return the folder of the real data sets, or skip."""
    value = os.environ.get("PTSTORE_DATA", "")
    if not value or not Path(value).is_dir():
        pytest.skip("PTSTORE_DATA does not name a folder with the real data sets")
    return Path(value)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder as Hugging Face's: random weights, and a tokenizer whose tokens are bytes."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model_folder(tmp_path_factory):
    """The same with heads as wide as the kernels of vLLM want them."""
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=256)


def make_model(folder, hidden_size=64):
    torch = pytest.importorskip("torch", reason="the driver runs a model")
    transformers = pytest.importorskip("transformers", reason="the driver runs a model")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=hidden_size, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
