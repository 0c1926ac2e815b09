"""Triton kernels of attention with a position bias. Imported only if Triton is installed.

After Dao, "FlashAttention-2". Forward carries the maximum and the sum of every row across blocks of keys. Backward
recomputes the scores once, for a few heads at a time: `of_queries` writes the gradients of the queries, the weights and
the gradients of the scores; `of_keys_and_values` multiplies these with the queries and the output's gradient; the
caller sums the gradients of the scores over the batch for the shared bias.

Results are deterministic, because no sum is atomic. A hash of (seed, row of the batch, head, query, key) decides which
weights are dropped. Triton specializes kernels for integers that equal 1 or are multiples of 16. Lengths are excluded
from that: `aligned` says whether 16 divides the strides of memory accesses, so there are only two variants.

Queries, keys and values are (batch, heads, length, width) with last stride 1. "rows" are (batch, heads, queries),
contiguous.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _is_kept(seed, row, queries, keys, num_keys, threshold):
    """bool (queries, keys): whether the hash of the position is at least `threshold`, out of 2^32.

    The hash is Wellons's lowbias32, two rounds.
    """
    state = (queries[:, None] * num_keys + keys[None, :]).to(tl.uint32) + seed.to(tl.uint32)
    upper = (seed >> 32).to(tl.uint32) + row.to(tl.uint32) * 0x9E3779B9
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = (state ^ (state >> 15) ^ upper) * 0x846CA68B
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = (state ^ (state >> 15)) * 0x846CA68B
    return (state ^ (state >> 16)) >= threshold


@triton.jit
def _multiple(number, aligned: tl.constexpr):
    """`number`; if `aligned`, the compiler knows that 16 divides it, which allows vectorized loads."""
    if aligned:
        return number // 16 * 16
    else:
        return number


@triton.jit
def _block(at, stride, numbers, within, width: tl.constexpr):
    """(numbers, width): vectors of one head of one batch row, zero beyond its length."""
    return tl.load(at + numbers[:, None] * stride + tl.arange(0, width)[None, :], mask=within[:, None], other=0.0)


@triton.jit
def _scores(
    query, key, bias, mask, mask_stride, queries, keys, inside, has_key, num_keys, scaling, has_mask: tl.constexpr
):
    """fp32 (queries, keys): scores, -inf beyond the last key."""
    biases = tl.load(bias + queries[:, None] * num_keys + keys[None, :], mask=inside, other=0.0)
    scores = tl.dot(query, tl.trans(key)) * scaling + biases.to(tl.float32)
    if has_mask:
        scores += tl.load(mask + queries[:, None] * mask_stride + keys[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(has_key[None, :], scores, float("-inf"))


@triton.jit(do_not_specialize=["m_batch", "m_row", "num_queries", "num_keys"])
def forward(
    query, key, value, bias, mask, seed, output, largest, total,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, m_batch, m_row,
    heads, num_queries, num_keys, scaling, threshold, keep_scale,
    has_mask: tl.constexpr, drops: tl.constexpr, aligned: tl.constexpr, width: tl.constexpr,
    block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Write output: (batch, queries, heads, width), contiguous; largest and total: fp32 rows."""
    num_keys = _multiple(num_keys, aligned)
    m_batch, m_row = _multiple(m_batch, aligned), _multiple(m_row, aligned)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    queries = tl.program_id(0) * block_queries + tl.arange(0, block_queries)
    has_query = queries < num_queries
    q = _block(query + batch * q_batch + head * q_head, q_row, queries, has_query, width)
    bias += head * num_queries * num_keys
    mask += batch * m_batch
    most = tl.full((block_queries,), float("-inf"), tl.float32)
    sums = tl.zeros((block_queries,), tl.float32)
    mixed = tl.zeros((block_queries, width), tl.float32)
    if drops:
        drawn = tl.load(seed)
    for first in range(0, num_keys, block_keys):
        keys = first + tl.arange(0, block_keys)
        has_key = keys < num_keys
        k = _block(key + batch * k_batch + head * k_head, k_row, keys, has_key, width)
        v = _block(value + batch * v_batch + head * v_head, v_row, keys, has_key, width)
        inside = has_query[:, None] & has_key[None, :]
        scores = _scores(q, k, bias, mask, m_row, queries, keys, inside, has_key, num_keys, scaling, has_mask)
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # all keys of the row were masked so far
        shrink = tl.exp(most - base)
        weights = tl.exp(scores - base[:, None])
        sums = sums * shrink + tl.sum(weights, 1)
        if drops:
            weights = tl.where(_is_kept(drawn, row, queries, keys, num_keys, threshold), weights * keep_scale, 0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        most = new
    out = (mixed / sums[:, None]).to(output.dtype.element_ty)
    at = (batch * num_queries + queries) * heads + head
    tl.store(output + at[:, None] * width + tl.arange(0, width)[None, :], out, mask=has_query[:, None])
    tl.store(largest + row * num_queries + queries, most, mask=has_query)
    tl.store(total + row * num_queries + queries, sums, mask=has_query)


@triton.jit(do_not_specialize=["first_head", "some_heads", "m_batch", "m_row", "num_queries", "num_keys"])
def of_queries(
    query, key, value, bias, mask, seed, gradient, output, largest, total, used, d_scores, d_query,
    first_head, some_heads,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, m_batch, m_row,
    heads, num_queries, num_keys, scaling, threshold, keep_scale,
    has_mask: tl.constexpr, drops: tl.constexpr, aligned: tl.constexpr, width: tl.constexpr,
    block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Write for some heads:

    used, d_scores: (batch, some heads, queries, keys), contiguous: forward's weights, and gradients of the scores.
    d_query: (batch, queries, heads, width), contiguous.
    """
    num_keys = _multiple(num_keys, aligned)
    m_batch, m_row = _multiple(m_batch, aligned), _multiple(m_row, aligned)
    some_row = tl.program_id(1).to(tl.int64)
    batch, head = some_row // some_heads, first_head + some_row % some_heads
    row = batch * heads + head
    queries = tl.program_id(0) * block_queries + tl.arange(0, block_queries)
    has_query = queries < num_queries
    at = (batch * num_queries + queries) * heads + head
    q = _block(query + batch * q_batch + head * q_head, q_row, queries, has_query, width)
    g = _block(gradient, width, at, has_query, width)
    out = _block(output, width, at, has_query, width)
    products = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    most = tl.load(largest + row * num_queries + queries, mask=has_query, other=0.0)
    inverse = 1.0 / tl.load(total + row * num_queries + queries, mask=has_query, other=1.0)
    bias += head * num_queries * num_keys
    mask += batch * m_batch
    used += some_row * num_queries * num_keys
    d_scores += some_row * num_queries * num_keys
    summed = tl.zeros((block_queries, width), tl.float32)
    if drops:
        drawn = tl.load(seed)
    for first in range(0, num_keys, block_keys):
        keys = first + tl.arange(0, block_keys)
        has_key = keys < num_keys
        inside = has_query[:, None] & has_key[None, :]
        place = queries[:, None] * num_keys + keys[None, :]
        k = _block(key + batch * k_batch + head * k_head, k_row, keys, has_key, width)
        v = _block(value + batch * v_batch + head * v_head, v_row, keys, has_key, width)
        scores = _scores(q, k, bias, mask, m_row, queries, keys, inside, has_key, num_keys, scaling, has_mask)
        weights = tl.exp(scores - most[:, None]) * inverse[:, None]
        d_weights = tl.dot(g, tl.trans(v))
        kept = weights
        if drops:
            is_kept = _is_kept(drawn, row, queries, keys, num_keys, threshold)
            d_weights = tl.where(is_kept, d_weights * keep_scale, 0.0)
            kept = tl.where(is_kept, weights * keep_scale, 0.0)
        tl.store(used + place, kept.to(used.dtype.element_ty), mask=inside)
        of_score = (weights * (d_weights - products[:, None])).to(d_scores.dtype.element_ty)
        tl.store(d_scores + place, of_score, mask=inside)
        summed = tl.dot(of_score, k, summed)
    d_q = (summed * scaling).to(d_query.dtype.element_ty)
    tl.store(d_query + at[:, None] * width + tl.arange(0, width)[None, :], d_q, mask=has_query[:, None])


@triton.jit(do_not_specialize=["first_head", "some_heads", "num_queries", "num_keys"])
def of_keys_and_values(
    query, gradient, used, d_scores, d_key, d_value, first_head, some_heads, q_batch, q_head, q_row,
    heads, num_queries, num_keys, scaling,
    aligned: tl.constexpr, width: tl.constexpr, block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Write d_key and d_value for some heads: (batch, keys, heads, width), contiguous."""
    num_keys = _multiple(num_keys, aligned)
    some_row = tl.program_id(1).to(tl.int64)
    batch, head = some_row // some_heads, first_head + some_row % some_heads
    keys = tl.program_id(0) * block_keys + tl.arange(0, block_keys)
    has_key = keys < num_keys
    used += some_row * num_queries * num_keys
    d_scores += some_row * num_queries * num_keys
    of_key = tl.zeros((block_keys, width), tl.float32)
    of_value = tl.zeros((block_keys, width), tl.float32)
    for first in range(0, num_queries, block_queries):
        queries = first + tl.arange(0, block_queries)
        has_query = queries < num_queries
        inside = has_query[:, None] & has_key[None, :]
        place = queries[:, None] * num_keys + keys[None, :]
        q = _block(query + batch * q_batch + head * q_head, q_row, queries, has_query, width)
        g = _block(gradient, width, (batch * num_queries + queries) * heads + head, has_query, width)
        of_key = tl.dot(tl.trans(tl.load(d_scores + place, mask=inside, other=0.0)), q, of_key)
        of_value = tl.dot(tl.trans(tl.load(used + place, mask=inside, other=0.0)), g, of_value)
    at = ((batch * num_keys + keys) * heads + head)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(d_key + at, (of_key * scaling).to(d_key.dtype.element_ty), mask=has_key[:, None])
    tl.store(d_value + at, of_value.to(d_value.dtype.element_ty), mask=has_key[:, None])
