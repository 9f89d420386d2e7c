"""One sequence over many processes: `sequence_parallel(build)`, on torch.distributed alone."""

from headwise.distributed.collectives import LostRankError
from headwise.distributed.sequence_parallel import SequenceParallel, sequence_parallel
from headwise.distributed.slices import Slices
from headwise.distributed.traffic import CountedTraffic, Traffic, traffic

__all__ = ["CountedTraffic", "LostRankError", "SequenceParallel", "Slices", "Traffic", "sequence_parallel", "traffic"]
