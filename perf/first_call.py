"""What a process pays until its first result: run by ``perf.host`` as a process of its own; prints JSON."""

from __future__ import annotations

import json
import time


def main() -> None:
    """Seconds to import ``cute_fa`` after PyTorch has started the device, and of the first call after that."""
    import torch

    q = torch.randn(1, 128, 16, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    import cute_fa

    imported = time.perf_counter()
    cute_fa.forward(q, q, q)
    torch.cuda.synchronize()
    called = time.perf_counter()
    print(json.dumps({"import_s": imported - start, "first_call_s": called - imported}))


if __name__ == "__main__":
    main()
