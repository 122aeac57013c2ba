"""`shard`: a model parted over all processes by torch's ``fully_shard``, block by block."""

from __future__ import annotations

from torch import nn

from whence.distributed.ranks import current
from whence.errors import ModelError, RankError

__all__ = ["shard"]


def shard(model: nn.Module) -> nn.Module:
    """Shard a model over all processes of torch.distributed's default group, in place; every process calls it.

    A unit, which a pass gathers while it runs, is each module of the model's lists of blocks (`torch.nn.ModuleList`,
    `torch.nn.Sequential`) that has parameters, and the model itself with what is left. A model that you have sharded
    yourself, with units of your own, will do as well.

    Args:
        model: whole and with the same weights on every process, on the device where it is to be.

    Returns:
        The same model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = current()
    if ranks.size == 1:
        raise RankError(
            "there is one process, and nothing to shard over. Start several with torchrun, and call "
            "torch.distributed.init_process_group()"
        )
    device = next(iter(model.parameters())).device
    if device.type == "meta":
        raise ModelError(
            "the model's parameters are on the meta device, without numbers; load its weights first"
        )
    mesh = init_device_mesh(device.type, (ranks.size,))
    for module in list(model.modules()):
        if module is not model and isinstance(module, (nn.ModuleList, nn.Sequential)):
            for block in module:
                if any(True for _ in block.parameters()) and not isinstance(
                    block, (nn.ModuleList, nn.Sequential)
                ):
                    fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model
