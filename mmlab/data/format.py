"""A sample's text as a conversation, and a conversation as tokens: only answers (and the end after each) are targets.

    <bos> <image> what is this? \\n   a red apple. <eos>   which colour? \\n   red. <eos>
    ----------- prompt -----------   -- target --------   --- prompt ----   -- target --

A caption is a conversation whose only prompt is the image. A text without image is all target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmlab.data.sequence import IGNORE, TextSequence
from mmlab.data.tokenizer import TextTokenizer
from mmlab.errors import DataError

IMAGE_MARK = "<image>"
"""Where an image stands in a prompt (LLaVA's mark)."""
_HUMAN = ("human", "user")
_MODEL = ("gpt", "assistant", "model")


@dataclass(frozen=True)
class Turn:
    """One exchange: `prompt` may hold image marks, `answer` is what the model should write."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one kind: an image (no ids; P placeholders later), a prompt or a target."""

    ids: tuple[int, ...]
    target: bool = False
    image: bool = False


def parse_caption(text: str, images: int, where: str) -> list[Turn]:
    """A caption under its image(s), or a text alone. DataError when there is neither."""
    text = text.strip()
    if not text and not images:
        raise DataError(f"{where}: the text is empty and there is no picture. Write a text or remove the sample.")
    return [Turn(IMAGE_MARK * images, text)]


def parse_json(raw: bytes, images: int, where: str) -> tuple[list[Turn], bool] | None:
    """Turns of a sample's json, and whether they are a conversation or only a caption.

    LLaVA-style `conversations` (or `messages`), else `caption` or `text`. None when it has none of them (a json of
    metadata beside a txt). DataError when it is broken.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: its json cannot be read ({error}). Correct the file.") from None
    if isinstance(value, str):
        return parse_caption(value, images, where), False
    turns = value if isinstance(value, list) else None
    if isinstance(value, dict):
        turns = value.get("conversations") or value.get("messages")
        if turns is None:
            caption = value.get("caption") or value.get("text")
            return (parse_caption(caption, images, where), False) if isinstance(caption, str) else None
    return _parse_turns(turns, images, where), True


def _parse_turns(turns: Any, images: int, where: str) -> list[Turn]:
    """Pairs of human and model turns; several human (or system) turns in a row are joined."""
    result: list[Turn] = []
    prompts: list[str] = []
    for turn in turns if isinstance(turns, list) else [None]:
        speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if speaker not in (*_HUMAN, *_MODEL, "system") or not isinstance(text, str):
            raise DataError(
                f'{where}: its conversation is not a list of {{"from": "human" | "gpt", "value": text}}. Correct it.'
            )
        if speaker in _MODEL:
            result.append(Turn("\n".join(prompts), text.strip()))
            prompts = []
        else:
            prompts.append(text.strip())
    if not result:
        raise DataError(
            f'{where}: its conversation has no answer (a turn "from": "gpt"). Add one or remove the sample.'
        )
    marks = sum(turn.prompt.count(IMAGE_MARK) for turn in result)
    if marks > images:
        raise DataError(f"{where}: {marks} {IMAGE_MARK} marks but {images} pictures. Add the picture or drop the mark.")
    result[0] = Turn(IMAGE_MARK * (images - marks) + result[0].prompt, result[0].answer)
    return result


def prompt_pieces(prompt: str, tokenizer: TextTokenizer) -> list[Piece]:
    """Pieces of a prompt: images where the marks stand, text between, a line end before the answer."""
    parts = [part.strip() for part in prompt.split(IMAGE_MARK)]
    pieces: list[Piece] = []
    for number, part in enumerate(parts):
        if number:
            pieces.append(Piece((), image=True))
        if part:
            pieces.append(Piece(tuple(tokenizer.encode(part + ("\n" if number == len(parts) - 1 else "")))))
    return pieces


def conversation_pieces(turns: Sequence[Turn], tokenizer: TextTokenizer) -> list[Piece]:
    """The whole sample as pieces, in order."""
    pieces = start_pieces(tokenizer)
    for turn in turns:
        pieces += prompt_pieces(turn.prompt, tokenizer)
        pieces.append(Piece((*tokenizer.encode(turn.answer), tokenizer.eos_id), target=True))
    return pieces


def start_pieces(tokenizer: TextTokenizer) -> list[Piece]:
    """What every sequence begins with: the begin token, where the tokenizer has one."""
    return [] if tokenizer.bos_id is None else [Piece((tokenizer.bos_id,))]


def to_segments(pieces: Sequence[Piece]) -> list[int]:
    """Pieces as an index stores them: +n prompt tokens, -n target tokens, 0 an image."""
    return [0 if piece.image else len(piece.ids) * (-1 if piece.target else 1) for piece in pieces]


def measure(segments: Sequence[int], image_tokens: Sequence[int], seq_len: int) -> tuple[int, int, int]:
    """(input tokens, target tokens, images) that `build` would give, from the lengths alone."""
    total = targets = images = 0
    first_is_target = False
    for segment in segments:
        n = image_tokens[images] if segment == 0 else abs(segment)
        if segment == 0 and total + n > seq_len:
            break
        n = min(n, seq_len + 1 - total)
        if n > 0 and total == 0:
            first_is_target = segment < 0
        total += n
        images += segment == 0
        targets += n if segment < 0 else 0
        if total > seq_len:
            break
    # The last token is only ever a target and the first only ever an input.
    return max(total - 1, 0), targets - first_is_target, images


def build(pieces: Sequence[Piece], image_id: int, image_tokens: Sequence[int], seq_len: int) -> TextSequence:
    """The sequence the model sees: cut to `seq_len` input tokens, never inside an image, targets shifted by one.

    `image_tokens` says how many tokens each image has.
    """
    ids: list[int] = []
    mask: list[bool] = []
    counts = iter(image_tokens)
    for piece in pieces:
        new = (image_id,) * next(counts) if piece.image else piece.ids
        if piece.image and len(ids) + len(new) > seq_len:
            break
        new = new[: seq_len + 1 - len(ids)]
        ids += new
        mask += [piece.target] * len(new)
        if len(ids) > seq_len:
            break
    targets = [token if target else IGNORE for token, target in zip(ids[1:], mask[1:], strict=True)]
    return TextSequence(tuple(ids[:-1]), tuple(targets))


def build_prompt(pieces: Sequence[Piece], image_id: int, image_tokens: Sequence[int]) -> TextSequence:
    """A prompt alone, nothing cut, no targets: what generation continues. Images beyond `image_tokens` are left out."""
    ids: list[int] = []
    counts = iter(image_tokens)
    for piece in pieces:
        ids += (image_id,) * next(counts, 0) if piece.image else piece.ids
    return TextSequence(tuple(ids), (IGNORE,) * len(ids))
