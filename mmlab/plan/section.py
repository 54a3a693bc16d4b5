"""What all sections of the plan share: their base class, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LIVE: dict[str, Any] = {"live": True}
"""Marks a field that `run.set` may change at a step boundary."""

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Compressor = Literal["none", "bf16", "fp16", "int8", "topk", "powersgd", "onebit"]
Counts = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""Whole numbers of at least 1; a list in TOML, a tuple here, so that a plan stays hashable."""
Ranks = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""Whole numbers from 0 on."""
Shares = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""Positive numbers; a list in TOML, a tuple here."""
MODULES = ("vision", "projector", "language")
"""The three trainable parts, in the order data flows through them."""


def _names(value: Any) -> Any:
    """A list as a tuple (plans are immutable); text such as `q_proj,v_proj`, as a shell leaves it, as its names."""
    if isinstance(value, str):
        return tuple(part.strip(" \"'") for part in value.strip("[] ").split(",") if part.strip(" \"'"))
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""A list of names."""


class Section(BaseModel):
    """Base of all plan sections: unknown keys refused, immutable, documented."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
