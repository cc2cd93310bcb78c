"""What a process pays until its first result: run by ``perf.host`` as a process of its own; prints JSON."""

from __future__ import annotations

import json
import time


def main() -> None:
    """Seconds to import the DSL after PyTorch has started the device, then ``cute_fa``, and of the first call."""
    import torch

    q = torch.randn(1, 128, 16, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    import cutlass.cute  # noqa: F401

    dsl_imported = time.perf_counter()
    import cute_fa

    imported = time.perf_counter()
    cute_fa.forward(q, q, q)
    torch.cuda.synchronize()
    called = time.perf_counter()
    times = {"dsl_s": dsl_imported - start, "import_s": imported - dsl_imported, "first_call_s": called - imported}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
