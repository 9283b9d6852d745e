"""Which blocks the Triton kernels work in, from a written table: never an autotuner, which would change numerics silently. No triton here.

A block is what one program holds on chip; a tile is what ``Numerics`` names. Where tile boundaries change values, the kernels keep the
tile: it is one block, or it is walked in blocks that divide it. Elsewhere a tile that fits is the block, and a larger one (512, or 0
for the whole sequence) leaves the choice to the table.
"""

from dataclasses import dataclass, replace

from ..numerics import LOW_FORMATS, OF_TILES, SITES, Numerics

SMALLEST = 16
"""Rows and columns that Triton's matrix product needs at least."""
LARGEST_HEAD_DIM = 256


def head_dim_obstacle(head_dim: int) -> str | None:
    """Why the kernels cannot take a head dim, or None: random bits come for 8 elements at once."""
    if head_dim % 8 or not SMALLEST <= head_dim <= LARGEST_HEAD_DIM:
        return f"it takes head dims divisible by 8 from {SMALLEST} to {LARGEST_HEAD_DIM}, not {head_dim}"
    return None


def head_dim_above(head_dim: int) -> int:
    """The least head dim that the kernels take and that is no smaller; they refuse it themselves where there is none."""
    return max(SMALLEST, -(-head_dim // 8) * 8)


def width(head_dim: int) -> int:
    """Columns that a block of rows has on chip, where their number must be a power of 2; in memory there are no more."""
    return 1 << (head_dim - 1).bit_length()


@dataclass(frozen=True)
class Blocks:
    """One kernel's block and launch: rows (queries), columns (keys), warps, stages of the load pipeline, registers a thread,
    whether Hopper's copy engine fetches the blocks that the loop walks, whether one loop walks diagonal and other blocks, and how
    many heads programs walk side by side."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    descriptors: bool = False
    one_loop: bool = False
    heads: int = 1


# (kernel, head dim up to) where every product reads 2-byte operands. Measured on H200s: experiments/kernels/sweep.csv, sweep_wide.csv.
_NARROW = {
    ("forward", 64): Blocks(64, 64, 4, 3, registers=112, one_loop=True, heads=48),
    ("forward", 128): Blocks(64, 64, 4, 3, descriptors=True, one_loop=True, heads=8),
    ("tiled", 64): Blocks(64, 64, 4, 3, descriptors=True),
    ("tiled", 128): Blocks(64, 64, 8, 2, descriptors=True),
    ("keys", 64): Blocks(64, 64, 4, 2, registers=168, descriptors=True, heads=16),
    ("keys", 128): Blocks(64, 64, 4, 2, descriptors=True, heads=8),
    ("queries", 64): Blocks(64, 64, 4, 3, descriptors=True),
    ("queries", 128): Blocks(64, 64, 4, 2, descriptors=True, heads=8),
    ("forward", 256): Blocks(128, 64, 8, 2, descriptors=True, heads=8),
    ("tiled", 256): Blocks(64, 64, 8, 2, descriptors=True),
    ("keys", 256): Blocks(64, 64, 8, 2, descriptors=True, heads=8),
    ("queries", 256): Blocks(128, 32, 8, 2, descriptors=True, heads=8),
}
# An operand in float32 against one in BF16 is three products of BF16 operands (``round_blocks.dot``).
_SPLIT = {
    "forward": Blocks(64, 64, 4, 2, descriptors=True),
    "tiled": Blocks(64, 32, 4, 2, descriptors=True),
    "keys": Blocks(32, 64, 4, 3, descriptors=True),
    "queries": Blocks(64, 64, 4, 2, descriptors=True),
}
# Float32 against float32 takes twice the room and no tensor core.
_WIDE = {kind: Blocks(64, 32, 4, 1) for kind in ("forward", "tiled", "queries")} | {"keys": Blocks(32, 64, 4, 1)}


def boundaries_matter(n: Numerics) -> bool:
    """Whether the forward pass rounds or normalizes once a tile, so that other tiles would give other values."""
    if n.probabilities in LOW_FORMATS:
        return True  # exponents run out: P_bar rounded with the m of a smaller tile differs
    return any(declared.per_tile and getattr(n, name) != declared.elsewhere for name, declared in SITES.items())


def tile_obstacle(n: Numerics) -> str | None:
    """Why the kernels cannot keep the tiles of ``n``, or the scales that tiles have, or None."""
    if boundaries_matter(n) and n.tile_k % SMALLEST:
        return f"with these roundings tiles change values, and it needs tile_k divisible by {SMALLEST}, not {n.tile_k}"
    scales = {getattr(n, name).partition("_")[2] for name in OF_TILES if getattr(n, name) in LOW_FORMATS}
    if "row" in scales and n.tile_k not in (16, 32):
        return f"a scale each row of P, dP or dS is that of a tile, and it needs tile_k 16 or 32, not {n.tile_k}"
    for scale, size in (("mx", 32), ("nv", 16)):
        if scale in scales and n.tile_k % size:
            return f"a scale of P, dP or dS counts {size} neighbors, and it needs tile_k divisible by {size}, not {n.tile_k}"
    # The largest P of a row may be 1 + 2^-23 in the kernels, 1 - 2^-24 in the reference, as S differs in its last bit. It is the same where
    # it is a P_bar in (1/2, 1], rounded so far that the bit is lost, over a sum of such.
    if any(fmt.endswith("_mx") for fmt in (n.probabilities, n.probabilities_in_dv)):
        coarse = n.probabilities == "bf16" or (n.probabilities in LOW_FORMATS and not n.probabilities.endswith("_row"))
        able = {
            "row_max_rounding": (n.row_max_rounding == "up", "up"),
            "backward_probabilities": (n.backward_probabilities == "forward", "forward"),
            "probabilities": (coarse, "bf16, or e4m3, e5m2, e2m1 or int8 with no scale or mx, or e2m1_nv"),
        }
        for name, (right, expected) in able.items():
            if not right:
                reason = "an mx scale of P doubles where the largest P is 1, not just below"
                return f"{reason}: {name} = {getattr(n, name)!r}, expected {expected}"
    if n.delta_error == "zero_sum" and any(getattr(n, name) in LOW_FORMATS for name in SITES):
        return "it has no delta_error zero_sum beside a format below BF16"
    return None


def forward_blocks(n: Numerics, dtype: str, head_dim: int, rows: int, columns: int) -> Blocks:
    """Blocks of the forward kernel; the arguments are a concrete ``Numerics``, the format of q, D, T and S."""
    narrow = _narrow(n.probabilities, dtype) and _stored(n.inputs, dtype)
    coarse = (n.tile_product, n.accumulator) != ("fp32", "fp32")
    blocks = _choose("tiled" if coarse else "forward", narrow, dtype, head_dim)
    if walks_tiles(n, _fit(blocks, n, rows, columns)):
        blocks = _choose("tiled", narrow, dtype, head_dim)
    if n.probabilities_rounding == "stochastic" and blocks.registers == 112:
        # Threads exchange the random words through shared memory, which leaves room for three programs an SM.
        blocks = replace(blocks, registers=168)
    elif n.output_rounding == "stochastic" and blocks.registers == 112:
        blocks = replace(blocks, registers=128)  # the random words stay in registers over the loop
    return _fit(blocks, n, rows, columns)


def walks_tiles(n: Numerics, blocks: Blocks) -> bool:
    """Whether the forward kernel must walk a tile of ``n`` in several blocks."""
    return boundaries_matter(n) and n.tile_k != blocks.columns


def backward_blocks(n: Numerics, dtype: str, head_dim: int, rows: int, columns: int) -> tuple[Blocks, Blocks]:
    """Blocks of the dK/dV kernel and of the dQ kernel; the latter also makes delta from P."""
    shared = _narrow(n.score_gradients, dtype) and _stored(n.inputs, dtype) and _stored(n.output_gradient, dtype)
    keys = _choose("keys", shared and _narrow(n.probabilities, dtype), dtype, head_dim)
    takes_p = n.row_residual == "corrected_rows"  # for P K
    narrow = shared and (not takes_p or _narrow(n.probabilities, dtype))
    queries = _choose("queries", narrow, dtype, head_dim)
    return _fit(keys, n, rows, columns), _fit(queries, n, rows, columns)


def _narrow(fmt: str, dtype: str) -> bool:
    """Whether a product reads values of this format as 2-byte operands."""
    if dtype != "bf16":
        return fmt == dtype == "fp16"
    return fmt == "bf16" or (fmt[0] == "m" and int(fmt[1:]) <= 7)


def _stored(fmt: str, dtype: str) -> bool:
    return dtype != "fp32" and (fmt == "fp32" or _narrow(fmt, dtype))


def _choose(kind: str, narrow: bool, dtype: str, head_dim: int) -> Blocks:
    if narrow:
        return _NARROW[kind, max(64, width(head_dim))]
    blocks = (_SPLIT if dtype == "bf16" else _WIDE)[kind]
    return blocks if head_dim <= 128 else replace(blocks, rows=32, columns=32, warps=8, stages=1)


def _fit(blocks: Blocks, n: Numerics, rows: int, columns: int) -> Blocks:
    return replace(
        blocks,
        rows=min(_divisor(n.tile_q, blocks.rows), _power_above(rows)),
        columns=min(_divisor(n.tile_k, blocks.columns), _power_above(columns)),
    )


def _divisor(tile: int, largest: int) -> int:
    """The largest power of two up to ``largest`` that divides the tile (0 is any), or ``largest`` where none of 16 or more does."""
    power = tile & -tile or largest
    return min(power, largest) if power >= SMALLEST else largest


def _power_above(length: int) -> int:
    return max(SMALLEST, 1 << (length - 1).bit_length())
