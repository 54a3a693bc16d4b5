"""Pictures in a size that a page takes with its messages."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path

SIDE = 128
"""Longest side of a picture, in pixels."""
MOST = 12_000
"""Bytes of a picture as PNG beyond which it becomes a JPEG."""


def thumbnail(path: Path) -> tuple[str, str] | None:
    """(key, data URL) of a picture; equal pictures have equal keys. None where there is none that can be read."""
    from PIL import Image

    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as opened:
            image = opened.convert("RGBA" if opened.mode in ("RGBA", "LA", "P", "PA") else "RGB")
        image.thumbnail((SIDE, SIDE))
        coded = io.BytesIO()
        image.save(coded, "PNG", optimize=True)
        kind = "png"
        if coded.tell() > MOST:
            coded, kind = io.BytesIO(), "jpeg"
            plain = Image.new("RGB", image.size, "white")
            plain.paste(image, mask=image.getchannel("A") if image.mode == "RGBA" else None)
            plain.save(coded, "JPEG", quality=80)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    url = f"data:image/{kind};base64,{base64.b64encode(coded.getvalue()).decode()}"
    return hashlib.sha256(data).hexdigest()[:12], url
