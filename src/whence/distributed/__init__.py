"""Several processes that work on one question: who they are, what they hold of every vector, how they are watched."""

from whence.distributed.launch import launched
from whence.distributed.ranks import ALONE, Ranks, alone, current, one_process
from whence.distributed.sharding import shard
from whence.distributed.shards import Shards

__all__ = ["ALONE", "Ranks", "Shards", "alone", "current", "launched", "one_process", "shard"]
