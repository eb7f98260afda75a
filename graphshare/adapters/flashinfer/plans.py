"""What FlashInfer plans: the numbers of a plan by name, and the memory that a plan takes.

A plan has two parts. Numbers on the host (``plan_info``) become grids, template choices and
addresses when a kernel is launched, so a capture freezes all of them. Indices on the device, in
the int workspace at the offsets that the numbers name, are read by the kernels and written by
each plan. Nothing here imports FlashInfer.

Sources are paths in FlashInfer 0.6.14, under ``include/flashinfer/attention`` unless said.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

from graphshare.arguments import shown

__all__ = [
    "BatchAttentionPlan",
    "DecodePlan",
    "FA2Plan",
    "FA3Plan",
    "Kernel",
    "Plan",
    "batch_attention_float_bytes",
    "check_kernel",
    "decode_float_bytes",
    "fa2_float_bytes",
    "fa2_tile_rows",
    "int_workspace_bytes",
    "named_plan",
]

Kernel = Literal["decode", "fa2", "fa3", "batch_attention"]
"""``decode`` on CUDA cores, one row for each request; ``fa2`` and ``fa3`` on tensor cores, any
rows; ``batch_attention``, one persistent kernel for any rows."""


class DecodePlan(NamedTuple):
    """Of ``BatchDecodeWithPagedKVCacheWrapper`` on CUDA cores: scheduler.cuh, DecodePlanInfo.

    Offsets are bytes: ``v`` and ``s`` in the float workspace, the others in the int workspace.
    """

    padded_batch_size: int
    v_offset: int
    s_offset: int
    request_indices_offset: int
    kv_tile_indices_offset: int
    o_indptr_offset: int
    block_valid_mask_offset: int
    kv_chunk_size_ptr_offset: int
    enable_cuda_graph: int
    split_kv: int


class FA2Plan(NamedTuple):
    """Of ``BatchPrefillWithPagedKVCacheWrapper``, backend fa2: scheduler.cuh, PrefillPlanInfo.

    Offsets are bytes: ``v`` and ``s`` in the float workspace, the others in the int workspace.
    """

    padded_batch_size: int
    total_num_rows: int
    total_num_rows_offset: int
    cta_tile_q: int
    request_indices_offset: int
    qo_tile_indices_offset: int
    kv_tile_indices_offset: int
    merge_indptr_offset: int
    o_indptr_offset: int
    kv_chunk_size_ptr_offset: int
    v_offset: int
    s_offset: int
    block_valid_mask_offset: int
    enable_cuda_graph: int
    split_kv: int


class FA3Plan(NamedTuple):
    """Of ``BatchPrefillWithPagedKVCacheWrapper``, backend fa3: scheduler.cuh, PrefillPlanSM90Info.

    Offsets are bytes in the int workspace; the float workspace is not used.
    """

    qo_tile_indices_offset: int
    qo_indptr_offset: int
    kv_indptr_offset: int
    qo_len_offset: int
    kv_len_offset: int
    head_indices_offset: int
    work_indptr_offset: int
    batch_indices_offset: int
    same_schedule_for_all_heads: int


class BatchAttentionPlan(NamedTuple):
    """Of ``BatchAttention``: scheduler.cuh, HolisticPlanInfo<2>.

    Tiles of 128 packed rows are the first task, tiles of 16 the second. Offsets are bytes:
    ``partial`` outputs and sums in the float workspace, the others in the int workspace.
    """

    num_blks_x: int
    num_blks_y: int
    task0_q_indptr_offset: int
    task0_kv_indptr_offset: int
    task0_partial_indptr_offset: int
    task0_q_len_offset: int
    task0_kv_len_offset: int
    task0_q_start_offset: int
    task0_kv_start_offset: int
    task0_kv_end_offset: int
    task0_kv_head_idx_offset: int
    task0_work_indptr_offset: int
    task1_q_indptr_offset: int
    task1_kv_indptr_offset: int
    task1_partial_indptr_offset: int
    task1_q_len_offset: int
    task1_kv_len_offset: int
    task1_q_start_offset: int
    task1_kv_start_offset: int
    task1_kv_end_offset: int
    task1_kv_head_idx_offset: int
    task1_work_indptr_offset: int
    len_kv_chunk_offset: int
    partial_o_offset: int
    partial_lse_offset: int
    merge_indptr_offset: int
    merge_o_indices_offset: int
    num_qo_len_offset: int


Plan: TypeAlias = DecodePlan | FA2Plan | FA3Plan | BatchAttentionPlan

_PLANS: dict[str, type[Plan]] = {
    "decode": DecodePlan,
    "fa2": FA2Plan,
    "fa3": FA3Plan,
    "batch_attention": BatchAttentionPlan,
}


def check_kernel(what: str, kernel: object) -> Kernel:
    """Return a kernel's name, or refuse one that there is not.

    Args:
        what: Which argument.
        kernel: The argument.

    Raises:
        ValueError: For anything else.
    """
    if not isinstance(kernel, str) or kernel not in _PLANS:
        names = ", ".join(get_args(Kernel))
        raise ValueError(f"FlashInfer: {what}: expected one of {names}, got {shown(kernel)}")
    return kernel  # pyright: ignore[reportReturnType]


def named_plan(kernel: Kernel, plan_info: Iterable[int]) -> Plan:
    """Give the numbers of a plan their names.

    Args:
        kernel: Which kernel was planned.
        plan_info: The numbers, as the library returned them.

    Raises:
        ValueError: There are more or fewer than this kernel's plan has: another version.
    """
    values = tuple(plan_info)
    plan = _PLANS[kernel]
    if len(values) != len(plan._fields):
        raise ValueError(
            f"plan of {kernel}: expected {len(plan._fields)} numbers, as of FlashInfer 0.6, "
            f"got {len(values)}. What they mean is not known"
        )
    return plan._make(values)


def int_workspace_bytes(plan: Plan) -> int:
    """Bytes of the int workspace that a plan fills, from its start.

    The library allocates 8 MiB for each wrapper. What it copies ends with the last thing that the
    scheduler allocates there, so a workspace of this size serves each plan with these numbers, and
    the scheduler refuses a plan that needs more.
    """
    if isinstance(plan, DecodePlan):
        if plan.split_kv:
            return plan.block_valid_mask_offset + plan.padded_batch_size
        return plan.kv_chunk_size_ptr_offset + 4
    if isinstance(plan, FA2Plan):
        if plan.split_kv:
            return plan.block_valid_mask_offset + plan.padded_batch_size
        return plan.total_num_rows_offset + 4
    if isinstance(plan, FA3Plan):
        # All seven arrays of works are of one length, and each starts at a multiple of 16 bytes.
        return plan.batch_indices_offset + plan.qo_indptr_offset - plan.qo_tile_indices_offset
    return plan.num_qo_len_offset + 4


def fa2_tile_rows(
    num_rows: int, num_reqs: int, num_q_heads: int, num_kv_heads: int, head_size: int
) -> int:
    """Packed query rows of one tile, as FA2 chooses them under graphs, on Ampere or newer.

    Source: scheduler.cuh, PrefillSplitQOKVIndptr, and utils.cuh, FA2DetermineCtaTileQ.
    """
    packed = (num_rows - num_reqs + 1) * (num_q_heads // num_kv_heads)
    if head_size >= 512:
        return 16 if packed <= 32 else 32
    if packed > 64 and head_size < 256:
        return 128
    return 64 if packed > 16 else 16


def fa2_float_bytes(
    num_rows: int,
    num_reqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_sms: int,
    *,
    largest_tile: bool = False,
) -> int:
    """Bytes of the float workspace that FA2 needs for a key under graphs.

    There the keys and values are always split, and the grid is for the worst case, so this grows
    with the rows: for 32 query and 8 KV heads of 128 on an H200, 70 MB for 64 rows of 8 requests,
    and 1.1 GB for 8192 rows of 256.

    Source: scheduler.cuh, PrefillPlan.

    Args:
        num_rows: Rows of the key.
        num_reqs: Requests of the key, padding included.
        num_q_heads: Query heads of one rank.
        num_kv_heads: Key and value heads of one rank.
        head_size: Elements of one head.
        num_sms: Multiprocessors of the GPU.
        largest_tile: For every key of at most these rows and requests.
    """
    shape = (num_q_heads, num_kv_heads, head_size)
    # One request of all rows has the largest tiles.
    tile_rows = fa2_tile_rows(num_rows, 1 if largest_tile else num_reqs, *shape)
    group = num_q_heads // num_kv_heads
    tiles = -(-num_rows * group // tile_rows) + num_reqs - 1
    padded = max(2 * num_sms // num_kv_heads, tiles)
    sums = num_q_heads * padded * tile_rows * 4
    return sums * head_size + sums


def decode_float_bytes(num_q_heads: int, num_kv_heads: int, head_size: int, num_sms: int) -> int:
    """Bytes of the float workspace that CUDA-core decode needs at most, for any batch.

    The grid is as large as fits on the GPU at a time; blocks have 128 threads or more, so at most
    16 of them share a multiprocessor. For 32 and 8 heads of 128 on an H200: 4.4 MB.

    Source: scheduler.cuh, DecodePlan.
    """
    padded = 16 * num_sms // num_kv_heads
    sums = num_q_heads * padded * 4
    return sums * head_size + sums


def batch_attention_float_bytes(num_kv_heads: int, head_size: int, num_sms: int) -> int:
    """Bytes of the float workspace that ``BatchAttention`` needs, for any batch.

    For 8 heads of 128 on an H200: 316 MB. The library allocates 384 MiB, and refuses to plan for
    more heads.

    Source: scheduler.cuh, TwoStageHolisticPlan.
    """
    clusters = num_sms if head_size >= 256 else 2 * num_sms
    splits = 4 * clusters * (128 + 16)
    return splits * num_kv_heads * (2 * head_size + 4)
