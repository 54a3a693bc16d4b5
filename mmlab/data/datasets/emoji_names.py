"""What an emoji picture shows, from its Unicode name: a plain name, its concept family, skin tones and subject."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmlab.data.datasets.colours import join

_TONE = re.compile(r" ?\b(medium-light|medium-dark|light|medium|dark) skin tone\b")
_HAIR = re.compile(r"\b(bald|beard|blond hair|curly hair|red hair|white hair)\b")
# Variants of one concept that Unicode names with different words.
_SAME = (
    (r"\b(old man|old woman|older person)\b", "older"),
    (r"\b(mrs\. claus|mx claus|santa claus)\b", "claus"),
    (r"\b(mermaid|merman)\b", "merperson"),
    (r"\b(princess|prince|person with crown)\b", "royal"),
    (r"\bpolice officer\b", "police officer"),
)
_GENDER = re.compile(r"\b(woman|women|man|men|person|people|adult|girl|boy|child)\b(?!’)")
_GROUP = re.compile(r"(kiss|couple with heart|family) ((?:(?:man|woman|person|adult|girl|boy|child) ?)+)")
_PAIR = re.compile(r"\b(couple|kiss|holding hands|wrestling|bunny ears|people hugging)\b")
_HAND = re.compile(
    r"\b(hand|hands|fist|thumbs|finger|fingers|palm|palms|index pointing|gesture|salute|horns|nail|handshake)\b"
)
_BODY = re.compile(
    r"^(ear|ear with hearing aid|nose|leg|foot|flexed biceps|eye|eyes|mouth|tongue|tooth|bone|brain|anatomical heart|"
    r"lungs|mechanical arm|mechanical leg|biting lip|fingerprint|footprints)\b"
)
_PLANT = re.compile(
    r"\b(flower|blossom|bouquet|cactus|tree|leaf|clover|herb|hibiscus|hyacinth|lotus|mushroom|plant|rose|rosette|"
    r"seedling|shamrock|rice|sunflower|tulip)\b"
)
_BY_CATEGORY = {
    "Food & Drink": "food",
    "Travel & Places": "a place or vehicle",
    "Activities": "a game or sport",
    "Objects": "an object",
    "Symbols": "a sign",
    "Flags": "a flag",
}


@dataclass(frozen=True)
class Concept:
    """What a picture shows. `name` without skin tones; `family` is shared by all variants of one concept in skin tone,
    gender and hair; `tones` in order; `subject` a word for the kind of thing ("" when Unicode's category is unknown
    here)."""

    name: str
    family: str
    tones: tuple[str, ...]
    subject: str

    @property
    def full_name(self) -> str:
        """ "woman running, medium skin tone"."""
        if not self.tones:
            return self.name
        return f"{self.name}, {join(self.tones)} skin tone{'s' if len(self.tones) > 1 else ''}"


def concept(unicode_name: str, category: str) -> Concept:
    """`unicode_name` as the `emoji` package has it without colons, spaces for underscores; `category` Unicode's."""
    lower = unicode_name.lower()
    tones = tuple(_TONE.findall(lower))
    bare = _TONE.sub("", lower).strip()
    if category == "Flags" and "flag" not in bare:
        bare = f"flag of {bare}"
    if tones and category != "People & Body":
        category = "People & Body" if bare else category
    if not bare:  # the colour swatches of the skin tones themselves
        return Concept(lower, lower, (), "a sign")
    return Concept(_plain(bare), _family(bare), tones, _subject(bare, category))


def _plain(bare: str) -> str:
    """The name as a person would write it: "man red hair" -> "man with red hair", "kiss woman man" -> "kiss, ..."."""
    if match := re.fullmatch(r"(man|woman|person) (beard|.* hair)", bare):
        return f"{match[1]} with {match[2]}"
    if match := re.fullmatch(r"(man|woman|person) bald", bare):
        return f"bald {match[1]}"
    if match := _GROUP.fullmatch(bare):
        return f"{match[1]}, {join(match[2].split())}"
    return bare


def _family(bare: str) -> str:
    for pattern, word in _SAME:
        bare = re.sub(pattern, word, bare)
    bare = re.sub(r"\bwoman and man\b|\bwoman man\b", "person", bare)
    if _GENDER.search(bare):
        bare = _HAIR.sub("", bare)
    return " ".join(_GENDER.sub("", bare).split()) or "person"


def _people(bare: str) -> str:
    if bare.startswith("family"):
        return "a family"
    if _PAIR.search(bare):
        if re.search(r"\bwoman and man\b|\bwoman man\b", bare):
            return "a woman and a man"
        if re.search(r"\bwomen\b|\bwoman woman\b", bare):
            return "two women"
        return "two men" if re.search(r"\bmen\b|\bman man\b", bare) else "two people"
    if re.search(r"\b(woman|girl|princess|mermaid|mrs\.)", bare):
        return "a woman"
    return "a man" if re.search(r"\b(man|boy|prince|merman|santa)\b", bare) else "a person"


def _subject(bare: str, category: str) -> str:
    """The kind of thing, in words that are seen in many families."""
    if category == "People & Body":
        if _BODY.search(bare):
            return "a body part"
        return "a hand" if _HAND.search(bare) and not _GENDER.search(bare) else _people(bare)
    if category == "Smileys & Emotion":
        if "heart" in bare and "face" not in bare and "cat" not in bare:
            return "a heart"
        return "an animal" if re.search(r"\b(cat|monkey)\b", bare) else "a face"
    if category == "Animals & Nature":
        return "a plant" if _PLANT.search(bare) else "an animal"
    return _BY_CATEGORY.get(category, "")
