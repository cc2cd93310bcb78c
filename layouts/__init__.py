"""Shared-memory layouts as values, the bank model, and the catalog that users edit."""

from layouts.catalog import CATALOG, PADDED_8, PLAIN, SWIZZLE_333
from layouts.smem_layout import COLS, IDENTITY, SmemLayout, Swizzle, TileCols, TileLayout

__all__ = [
    "CATALOG",
    "COLS",
    "IDENTITY",
    "PADDED_8",
    "PLAIN",
    "SWIZZLE_333",
    "SmemLayout",
    "Swizzle",
    "TileCols",
    "TileLayout",
]
