#!/usr/bin/env python3
"""Make a random-weight Llama model that llama.cpp's server serves; nothing is downloaded.

    python calibration/llama_cpp/make_model.py --size mid --out mid.gguf

The tokenizer is a byte-level BPE trained here, in about a second, on the topics of the standard library's
pydoc; it is also written as a Hugging Face folder (OUT without .gguf, with -tokenizer), for other benchmarks.

The text that such a model writes is nonsense, but serving it costs what serving a trained one of its shape
costs. The output rows of special tokens and of every token that is not printable ASCII are zero: the model
practically never ends by itself, and every token is sent at once, never held back as a part of a character.
Equal arguments give equal files.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

SIZES = {
    "tiny": {"layers": 6, "dim": 256, "ff": 704, "heads": 8, "kv_heads": 4},
    "mid": {"layers": 12, "dim": 768, "ff": 2048, "heads": 12, "kv_heads": 4},
}
VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOGIT_STD = 4.0
"""Spread of the logits; wide enough that sampling is not uniform."""


def train_tokenizer():
    """A byte-level BPE of `VOCABULARY` tokens."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(list(topics.values()), trainer)
    return tokenizer


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable character of every byte, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


def write_model(out: Path, size: dict[str, int], context: int, seed: int, name: str) -> None:
    """The model and its tokenizer as one GGUF file, weights in float16."""
    tokenizer = train_tokenizer()
    trained = json.loads(tokenizer.to_str())["model"]
    ids = trained["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in trained["merges"]]
    types = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    bytes_of = byte_of_character()
    plain = [token not in SPECIAL and all(32 <= bytes_of[c] < 127 for c in token) for token in tokens]
    dim, ff, heads, kv_heads = size["dim"], size["ff"], size["heads"], size["kv_heads"]
    head = dim // heads

    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(dim)
    writer.add_block_count(size["layers"])
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ids["<|endoftext|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|pad|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    generator = np.random.default_rng(seed)

    def weights(name: str, rows: int, columns: int, std: float, keep: np.ndarray | None = None) -> None:
        values = generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)
        if keep is not None:
            values[~keep] = 0
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(dim, np.float32))

    weights("token_embd", len(tokens), dim, 1.0)
    for layer in range(size["layers"]):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        weights(f"{block}.attn_q", heads * head, dim, dim**-0.5)
        weights(f"{block}.attn_k", kv_heads * head, dim, dim**-0.5)
        weights(f"{block}.attn_v", kv_heads * head, dim, dim**-0.5)
        weights(f"{block}.attn_output", dim, heads * head, dim**-0.5)
        norm(f"{block}.ffn_norm")
        weights(f"{block}.ffn_gate", ff, dim, dim**-0.5)
        weights(f"{block}.ffn_up", ff, dim, dim**-0.5)
        weights(f"{block}.ffn_down", dim, ff, ff**-0.5)
    norm("output_norm")
    weights("output", len(tokens), dim, LOGIT_STD * dim**-0.5, np.asarray(plain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(out.with_name(f"{out.stem}-tokenizer"), tokenizer, context)


def write_tokenizer(folder: Path, tokenizer, context: int) -> None:
    """The tokenizer in Hugging Face's layout."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--layers", type=int, help="instead of the size's")
    parser.add_argument("--context", type=int, default=32768, help="context length in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    size = SIZES[arguments.size] | ({"layers": arguments.layers} if arguments.layers else {})
    write_model(arguments.out, size, arguments.context, arguments.seed, f"random-llama-{arguments.size}")
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
