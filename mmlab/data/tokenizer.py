"""Text to tokens: any Hugging Face tokenizer.json, or a byte-level BPE trained here and stored beside the shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmlab.errors import DataError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<image>")
_BOS = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]")
_EOS = ("<eos>", "</s>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "[SEP]")
_IMAGE = ("<image>", "<|image_pad|>", "<image_soft_token>")
_PAD = ("<pad>", "<|pad|>", "[PAD]", "<|endoftext|>")


class TextTokenizer:
    """A tokenizer with its special tokens known. `path` names it in messages; `digest` changes with its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(data)
        except OSError as error:
            raise DataError(f"Tokenizer {path}: cannot be read ({error.strerror}). Set data.tokenizer.") from None
        except Exception as error:  # the library raises plain Exception on a broken file
            raise DataError(
                f"Tokenizer {path}: is no Hugging Face tokenizer.json ({error}). Set data.tokenizer to one that is."
            ) from None
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        image = self._find(_IMAGE)
        self.image_id: int = image if image is not None else self._add("<image>")
        eos = self._find((*self._configured("eos_token"), *_EOS))
        self.eos_id: int = eos if eos is not None else self._add("<eos>")
        self.bos_id: int | None = self._find((*self._configured("bos_token"), *_BOS))
        pad = self._find(_PAD)
        self.pad_id: int = pad if pad is not None else self.eos_id
        # Special tokens written in a text are text: nobody's caption may end a sequence or pose as an image.
        self._tokenizer.encode_special_tokens = True

    def _find(self, names: Iterable[str]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def _add(self, name: str) -> int:
        self._tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        return self._tokenizer.get_vocab(with_added_tokens=True)[name]

    def _configured(self, name: str) -> list[str]:
        """A special token named in the tokenizer_config.json beside the file."""
        try:
            value = json.loads((self.path.parent / "tokenizer_config.json").read_bytes()).get(name)
        except (OSError, ValueError, AttributeError):
            return []
        value = value.get("content") if isinstance(value, dict) else value
        return [value] if isinstance(value, str) else []

    @property
    def vocab_size(self) -> int:
        """Rows an embedding table needs: the largest token id plus one, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without any begin or end token. DataError where the tokenizer has none for it."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []
        except Exception as error:  # the library raises plain Exception, such as for an unknown word without an [UNK]
            raise DataError(
                f"Tokenizer {self.path}: cannot encode {text[:40]!r} ({error}). Set data.tokenizer."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    def __getstate__(self) -> dict:
        return {"path": self.path}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["path"])  # type: ignore[misc]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-level BPE (Sennrich et al. 2016; GPT-2's pre-tokenisation) as the bytes of a tokenizer.json.

    `vocab_size` is the most tokens it may have, special tokens (`SPECIAL_TOKENS`, ids 0 to 3) and the 256 bytes
    included; a small text gives fewer. DataError below 260.
    """
    least = len(SPECIAL_TOKENS) + 256
    if vocab_size < least:
        raise DataError(f"model.language.vocab_size = {vocab_size}: a byte-level tokenizer needs at least {least}.")
    tokenizer = Tokenizer(models.BPE())
    # A space before the first word too, so that a word is the same token at the start of an answer as inside it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()
