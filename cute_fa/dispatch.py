"""What a problem is launched with on the device of its tensors: a compiled kernel, or on the CPU the emulator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_fa.arch import arch_of_capability
from cute_fa.emulator import DEFAULT_ARCH, emulated_launch
from cute_fa.ladder import select
from cute_fa.launch import get_launch
from cute_fa.problem import AttentionProblem
from layouts import SmemLayout


def launch_for(
    problem: AttentionProblem, kernel: str, layout: str | SmemLayout | None = None, *, needed: bool = True
) -> Callable | None:
    """A function that takes what that of ``get_launch`` takes; None, with every check made, unless ``needed``.

    It launches on the current stream of the problem's device, whichever device is the current one.

    Raises:
        ValueError: no such kernel or layout, a kernel that lacks what the problem needs, or a device of no known kind.
    """
    device = problem.device
    if device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"q, k and v must be on a CUDA device, the CPU or meta, got {device}")
    arch = arch_of_capability(torch.cuda.get_device_capability(device)) if device.type == "cuda" else DEFAULT_ARCH
    rung, config = select(problem, arch, kernel, layout)
    if not needed or device.type == "meta":
        return None
    if device.type == "cpu":
        return emulated_launch(problem.static, rung, config, arch)
    with torch.cuda.device(device):
        launch = get_launch(problem, rung, config, arch)

    def on_its_device(*arguments):
        if torch.cuda.current_device() == device.index:
            launch(*arguments)
        else:
            with torch.cuda.device(device.index):
                launch(*arguments)

    return on_its_device
