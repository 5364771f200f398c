"""LoRA layers of vLLM on a CPU, over products whose kernel has taken the weight away. For the child alone."""

# pyright: reportMissingImports=false


def use_the_cpu() -> None:
    """Have vLLM keep A and B of each layer on the CPU.

    It asks the layer's weight for the device. The int8 kernel for CPUs packs the weight elsewhere and leaves None
    there, and such a model would not load.
    """
    import torch
    from vllm.lora.layers import base_linear

    base_linear._get_lora_device = lambda base_layer: torch.device("cpu")
