"""`mmlab data pack`: captioned pictures in files and folders become shards that train.

    sources -> Record (where the pictures lie, what is said) -> prepare (read, check, resize) -> Shelf (tar, journal)

Records come in the source's order and are written in it, whatever the number of workers, so the same source and
options give the same bytes; the journal lets a pack that was killed go on from its last note.
"""

from __future__ import annotations

from mmlab.data.packing.options import FORMATS, PackOptions
from mmlab.data.packing.pack import Packed, pack

__all__ = ["FORMATS", "PackOptions", "Packed", "pack"]
