"""Attention kernels, one mechanism a file. The ladder (``cute_fa.ladder``) gives them their names."""
