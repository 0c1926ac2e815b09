"""The idea of offloadkit in one file: AdamW while the GPU holds only the bf16 weights of the model.

Mixed-precision AdamW keeps 16 bytes per parameter: bf16 weights (2) and gradients (2), fp32 master weights (4) and two
fp32 moments (8). Forward and backward read only the bf16 weights. The other 14 bytes are needed once per step, so they
stay in RAM, and the CPU takes the step:

    forward    a hook on each layer waits until the layer's new weights have arrived on the GPU
    backward   when a layer has all its gradients, they are copied to RAM as one buffer
    step       a thread steps the layers on the CPU in forward order and copies each layer's weights to the GPU at once

The last layers are stepped while the first ones compute the next forward pass, and every layer computes with its newest
weights. Without clipping, `offloadkit.OffloadEngine` trains the same weights, bit for bit.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Cut fp32 numbers into bf16 numbers (rounded to nearest) and the 16 bits that the rounding took away."""
    bits = master.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 numbers again. So a master weight takes 2 bytes in addition to the bf16 weight, instead of 4."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, step: int, lr, betas, eps, weight_decay) -> None:
    """One step in place. Each operation rounds once, so C and Triton kernels can give the same bits."""
    (b1, b2), decay = betas, 1 - lr * weight_decay
    exact = (b1, b2, 1 - b1, 1 - b2, eps, decay, lr / (1 - b1**step), 1 / math.sqrt(1 - b2**step))
    b1, b2, one_minus_b1, one_minus_b2, eps, decay, size, correction = torch.tensor(exact, dtype=torch.float32).tolist()
    m.mul_(b1).add_(g * one_minus_b1)
    v.mul_(b2).add_((g * one_minus_b2) * g)
    root = v.double().sqrt().float()  # torch's fp32 root on the CPU is not always the nearest number
    w.mul_(decay).sub_((m / (root * correction + eps)) * size)


class FlatLayer:
    """The parameters of one layer: a bf16 buffer on the device, and everything else in RAM."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.parameters = list(module.parameters())
        self.streams = torch.get_device_module(device)  # the streams and events of torch.cpu do nothing
        weights, remainder = split(torch.cat([p.detach().cpu().float().flatten() for p in self.parameters]))
        in_ram = [weights, remainder, torch.zeros_like(weights), *torch.zeros(2, len(weights))]
        if device.type == "cuda":  # pinned memory is copied while the CPU and the GPU compute
            in_ram = [tensor.pin_memory() for tensor in in_ram]
        self.weights, self.remainder, self.gradient, self.exp_avg, self.exp_avg_sq = in_ram
        self.device_weights = weights.to(device, copy=True)  # also on the CPU: the thread writes self.weights
        self.num_gradients = 0
        self.pending: Future[None] | None = None
        self.to_ram, self.to_device = self.streams.Stream(), self.streams.Stream()
        self.gradient_in_ram, self.weights_arrived = self.streams.Event(), self.streams.Event()
        views = self.device_weights.split([p.numel() for p in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self.count_gradient)
        module.register_forward_pre_hook(lambda *_: self.wait())

    def count_gradient(self, _: Tensor) -> None:
        """Runs in backward after each gradient of the layer. The last one sends all of them to RAM."""
        self.num_gradients += 1
        if self.num_gradients != len(self.parameters):
            return
        bucket = torch.cat([p.grad.flatten() for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        self.to_ram.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.to_ram):
            self.gradient.copy_(bucket, non_blocking=True)
            self.gradient_in_ram.record(self.to_ram)
        if bucket.is_cuda:
            bucket.record_stream(self.to_ram)  # the allocator must not reuse the bucket before it is copied

    def update(self, backward_done: torch.cuda.Event, **options) -> None:
        """Runs in the stepping thread: step the layer on the CPU and send its new weights to the device."""
        self.gradient_in_ram.synchronize()
        master = join(self.weights, self.remainder)
        adamw(master, self.gradient.float(), self.exp_avg, self.exp_avg_sq, **options)
        for kept, new in zip((self.weights, self.remainder), split(master), strict=True):
            kept.copy_(new)
        with self.streams.stream(self.to_device):
            backward_done.wait(self.to_device)  # backward reads the old weights
            self.device_weights.copy_(self.weights, non_blocking=True)
            self.weights_arrived.record(self.to_device)

    def wait(self) -> None:
        """Runs before the layer's forward: wait for this layer's update and for no other."""
        if self.pending is not None:
            self.pending.result()  # first on the host: an event cannot be waited for before it is recorded
            self.weights_arrived.wait(self.streams.current_stream())
            self.pending = None


class MinimalOffload:
    """AdamW for `model`. Layers are the blocks of each ModuleList and the other children, in forward order."""

    def __init__(self, model: nn.Module, device: str, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.num_steps, self.options = 0, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        children = [list(child) if isinstance(child, nn.ModuleList) else [child] for child in model.children()]
        modules = [module for modules in children for module in modules if list(module.parameters())]
        self.layers = [FlatLayer(module, torch.device(device)) for module in modules]
        held = [id(parameter) for layer in self.layers for parameter in layer.parameters]
        if sorted(held) != sorted(map(id, model.parameters())):
            raise ValueError("each parameter must belong to exactly one layer")
        self.thread = ThreadPoolExecutor(max_workers=1)

    def step(self) -> None:
        """Start the updates and return. The next forward waits for each layer."""
        self.num_steps += 1
        if any(layer.num_gradients != len(layer.parameters) for layer in self.layers):
            raise RuntimeError("one backward pass per step must give each parameter one gradient")
        backward_done = self.layers[0].streams.Event()
        backward_done.record()
        for layer in self.layers:
            layer.num_gradients = 0
            layer.pending = self.thread.submit(layer.update, backward_done, step=self.num_steps, **self.options)

    def synchronize(self) -> None:
        """Wait until the weights of all layers have arrived."""
        for layer in self.layers:
            layer.wait()


def main(num_steps: int = 20) -> float:
    """Learn a fixed permutation of 64 tokens; returns the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
    model = nn.Sequential(nn.Embedding(64, 256), *blocks, nn.Linear(256, 64))
    permutation = torch.randperm(64, device=device)
    optimizer = MinimalOffload(model, device)
    for step in range(num_steps):
        tokens = torch.randint(64, (256,), device=device)
        loss = nn.functional.cross_entropy(model(tokens).float(), permutation[tokens])
        loss.backward()
        optimizer.step()
        print(f"step {step:2}, loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
