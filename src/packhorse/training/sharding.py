"""A model -> its parts on many devices (FSDP2), for models whose weights, gradients and moments do not fit into one.

Every decoder layer is gathered when it is needed and let go again; embedding, last norm and output layer stay gathered
from forward to backward. Used by Lightning's `ModelParallelStrategy`, which sets `device_mesh`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from packhorse.errors import SettingsError


def shard(model: nn.Module, mesh: DeviceMesh, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Shard a language model over the data-parallel dimension of a mesh.

    Args:
        model: With `model.layers`; changed in place.
        mesh: With the dimensions `data_parallel` and `tensor_parallel`.
        forward: What uses the model, other than through its own `forward`.

    Returns:
        `forward`, which now gathers the weights that it needs.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise SettingsError("Tensors are not split within layers: set `tensor_parallel_size: 1`.")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    model.used_by_training = forward
    register_fsdp_forward_method(model, "used_by_training")
    return model.used_by_training


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; all ranks must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
