"""What Python says, in the language of the page that shows it.

Sentences are made in English, with values in them, all over the package; API and command line say them so. Here, where
a view sends text, a sentence is matched with the catalogue `static/said.LANGUAGE.json`: English templates as they stand
in the source, `{0}` for the first value. Values are translated in their turn, since sentences are made of others. What
has no translation stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from html import escape, unescape
from importlib.resources import files
from itertools import chain
from typing import Any

LANGUAGES = ("zh-CN",)
"""Languages beside English, each with two catalogues in `static/`: what pages say, and what Python says in them."""
KEPT = 4096
"""Sentences whose translation is kept: views say the same ones five times a second."""
SHORT = 6
"""Letters of a template below which it may be part of any sentence, so that its values must not be prose."""
DEEP = 5
"""Sentences within sentences, within each of which several templates are tried."""
LONG = 600
"""Characters of a line from which only its beginning is translated: what it may be made of grows faster than it does;
60 sentences in a row (1,600 characters) took 18 s."""
BEGINNING = 240
"""Characters of that beginning, at most."""
MANY = 8
"""Parts of a list from which each is translated by itself, not together with those after it."""

_HOLE = re.compile(r"\{(\d)\}")
_PROSE = re.compile(r"[a-z]{2,} [a-z]{2,}")
_ENGLISH = re.compile(r"(?<![\w.=/\"'-])[A-Za-z][a-z]+(?![\w.=/(-])")
_LEAD = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)
_TIMED = re.compile(r"(\d\d:\d\d:\d\d\s+)(.*)", re.DOTALL)
_NAMES = re.compile(r"[.=\"]$|\b(checkpoint|run|lab|saved|restored?) $")
"""What stands before a name."""
_TEXT = re.compile(r"(?<=>)[^<>]+(?=<)")
_PARTS = ("  ", "; ", ": ", ", ", ". ", " and ")
"""What sentences and lists are joined by."""
_WIDE = re.compile(r"[\u3400-\u9fff]")


def catalogue(language: str, name: str = "words") -> dict[str, str]:
    """Texts of pages ("words"), or of Python ("said"), in another language, by the English ones."""
    path = files("mmlab.ui") / "static" / f"{name}.{language}.json"
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


class Template:
    """A sentence with holes for values, and its translation."""

    def __init__(self, english: str, translated: str) -> None:
        pieces = _HOLE.split(english)
        texts = pieces[::2]
        self.literal = max(texts, key=len)
        """Its longest piece: a sentence without it is none of these."""
        self.weight = sum(map(len, texts))
        self.short = len(re.sub(r"[^A-Za-z]", "", "".join(texts))) < SHORT
        self._holes = pieces[1::2]
        self.names = {hole for before, hole in zip(texts, self._holes, strict=False) if _NAMES.search(before)}
        """Holes for names that somebody gave (`checkpoint {0}`) and parts of names (`model.language.{0}`): not
        translated."""
        self.inner = self._inner(texts, _HOLE.split(translated))
        """Holes for values that are hardly sentences of their own: neither first nor last, nor in brackets."""
        self._patterns = [re.compile("".join(_patterns(texts, more)), re.DOTALL) for more in ("?", "")]
        self._translated = translated

    def _inner(self, texts: list[str], translated: list[str]) -> list[str]:
        outer = {self._holes[0]} if not texts[0] and not translated[0] else set()
        outer |= {self._holes[-1]} if not texts[-1] and not translated[-1] else set()
        closed = {hole for hole, after in zip(self._holes, texts[1:], strict=True) if after.startswith(")")}
        return [hole for hole in self._holes if hole not in outer | closed]

    def values(self, text: str) -> list[dict[str, str]]:
        """The values in a sentence by the number of their hole, with as little as can be in the first holes and with as
        much; none where it is another sentence."""
        if self.literal not in text:
            return []
        found = {match.groups() for each in self._patterns if (match := each.fullmatch(text))}
        return [dict(zip(self._holes, groups, strict=True)) for groups in sorted(found)]

    def filled(self, values: Mapping[str, str]) -> str:
        """The translation with values in it, with a blank between Chinese and other letters."""
        pieces = enumerate(_HOLE.split(self._translated))
        return _joined(values[piece] if index % 2 else piece for index, piece in pieces)


def _patterns(texts: list[str], more: str) -> Iterator[str]:
    """A pattern for each piece of a template and the hole after it: one between blanks is never empty, one just before
    another is a word, a point before one is none of a number."""
    for index, text in enumerate(texts):
        literal = re.escape(text)
        if index == len(texts) - 1:
            yield literal
            return
        after = texts[index + 1]
        word = (text.endswith(" ") or not (text or index)) and not after[:1].isalpha()
        some = f"(.+{more})" if word else f"(.*{more})"
        yield (literal + r"(?!\d)" if text.endswith(".") else literal) + (
            some if after or index == len(texts) - 2 else r"(\s?[^\s,;:()]*)"
        )


def _joined(pieces: Iterable[str]) -> str:
    """One text of several."""
    made = ""
    for piece in pieces:
        made += " " * (bool(made and piece) and _apart(made[-1], piece[0])) + piece
    return made


def _apart(left: str, right: str) -> bool:
    """Whether a blank belongs between two letters: one is Chinese, the other a Latin letter or a digit."""
    wide = (bool(_WIDE.match(left)), bool(_WIDE.match(right)))
    return (wide[0] and right.isascii() and right.isalnum()) or (wide[1] and left.isascii() and left.isalnum())


class Language:
    """Translates what Python says."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self._whole = {text: translated for text, translated in words.items() if not _HOLE.search(text)}
        holed = [Template(text, translated) for text, translated in words.items() if text not in self._whole]
        self._templates = sorted(holed, key=lambda template: -template.weight)
        kept = {word for translated in words.values() for word in _ENGLISH.findall(translated)}
        self._kept = {word for word in kept if self._whole.get(word, word) == word}
        """English words of this language, such as rank and token."""
        self._known = lru_cache(KEPT)(self._find)

    def say(self, text: str) -> str:
        """A text in this language; itself where it is not known. Raises nothing: English is better than no answer."""
        try:
            return self._known(text, DEEP)
        except Exception:
            return text

    def _find(self, text: str, deep: int) -> str:
        if "\n" in text:
            return "\n".join(self._known(line, deep) for line in text.split("\n"))
        if text in self._whole:
            return self._whole[text]
        if timed := _TIMED.fullmatch(text):
            return timed[1] + self._known(timed[2], deep)
        found = _LEAD.fullmatch(text)
        assert found is not None
        before, sentence, after = found.groups()
        if sentence in self._whole:
            return before + self._whole[sentence] + after
        if not deep or not (_ENGLISH.search(sentence) or "(" in sentence):
            return text
        if len(text) > LONG:
            end = max(text.rfind(mark, 0, BEGINNING) for mark in (": ", "; ", ", "))
            return text if end < 0 else self._known(text[:end], deep) + text[end:]
        best, least = text, self._left(text) + 0.5
        readings = self._readings(text, deep)
        if sentence != text:
            inner = self._readings(sentence, deep)
            readings = chain(readings, ((before + one + after, oddity) for one, oddity in inner))
        for reading, oddity in readings:  # the longest sentences come first and win among equals
            left = self._left(reading) + oddity
            if left < least:
                best, least = reading, left
            if not left:
                break
        return best

    def _left(self, text: str) -> int:
        """How many words are still English."""
        return sum(word not in self._kept for word in _ENGLISH.findall(text))

    def _readings(self, text: str, deep: int) -> Iterator[tuple[str, int]]:
        """Translations of a text as each of the sentences that it may be, the longest first, then as several; each with
        how odd it is to take the text so."""
        for template in self._templates:
            for values in template.values(text):
                said = {
                    h: value if h in template.names else self._known(value, deep - 1) for h, value in values.items()
                }
                if not (template.short and any(map(_PROSE.search, said.values()))):
                    yield template.filled(said), sum(any(m in values[h] for m in (": ", "; ")) for h in template.inner)
        for mark in _PARTS:
            many = mark in ("; ", ", ") and text.count(mark) >= MANY
            parts = text.split(mark) if many else text.split(mark, 1)
            if len(parts) > 1:
                said_parts = [self._known(part, deep - 1) for part in parts[:-1]]
                said_parts.append(self._known(parts[-1], deep - many))
                listed = mark in (", ", " and ") and any(map(_PROSE.search, said_parts))  # half a list would be worse
                if not listed and said_parts != parts:
                    between = [self._whole[mark]] * len(parts)
                    yield _joined([*chain.from_iterable(zip(said_parts, between, strict=True))][:-1]), 0

    def html(self, html: str) -> str:
        """Still HTML with its texts translated."""
        return _TEXT.sub(lambda found: escape(self.say(unescape(found[0])), quote=False), html)


@cache
def language(name: str) -> Language | None:
    """The language of a page by its code, whatever the place (zh, zh-CN, zh_Hans_CN); None for English and others."""
    main = re.split(r"[-_.]", name.lower())[0]
    found = next((known for known in LANGUAGES if known.partition("-")[0] == main), None)
    if found is None:
        return None
    words = {text: word for text, word in catalogue(found).items() if not _HOLE.search(text)}
    return Language(words | catalogue(found, "said"))


def spoken(value: Any, paths: Iterable[str], into: Language) -> Any:
    """A copy of JSON with the texts at dotted paths translated: `reason`, `events.*.text`; all texts below each."""
    for path in paths:
        value = _at(value, path.split(".") if path else [], into)
    return value


def _at(value: Any, path: list[str], into: Language) -> Any:
    if path:
        chosen = dict(_chosen(value, path[0]))
        if isinstance(value, Mapping):
            return {key: _at(each, path[1:], into) if key in chosen else each for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [_at(each, path[1:], into) if index in chosen else each for index, each in enumerate(value)]
        return value
    if isinstance(value, str):
        return into.html(value) if value.startswith("<") else into.say(value)
    return _at(value, ["*"], into) if isinstance(value, Mapping | list | tuple) else value


def _chosen(value: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The entries of a table or list that a part of a path names."""
    if isinstance(value, Mapping):
        yield from ((key, each) for key, each in value.items() if name in ("*", key))
    elif isinstance(value, list | tuple):
        yield from ((index, each) for index, each in enumerate(value) if name in ("*", str(index)))
