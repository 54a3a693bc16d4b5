"""Shards that are elsewhere: HTTP(S), S3 and what else fsspec reads, and `pipe:` commands.

A remote shard is a path too: of its *address*, a small file in the data cache that says where the shard is, how large
and of which version. Beside it are the blocks that were read so far, and the index. So a rank, its decode processes
and other ranks of the host share what one of them fetched, and all that handles shards handles paths.
"""

from __future__ import annotations

from mmlab.data.remote.addresses import beside, expand, is_address, is_remote, join, remote_folder, shown_name
from mmlab.data.remote.blocks import RemoteFile, RemoteShard, set_limit

__all__ = [
    "RemoteFile",
    "RemoteShard",
    "beside",
    "expand",
    "is_address",
    "is_remote",
    "join",
    "remote_folder",
    "set_limit",
    "shown_name",
]
