"""The blocks that networks are drawn from: each puts one or several lines upon a value.

A block takes the drawing and the name of a value, and returns the name of a new one. Refused, or
any error of the CPU's, says that this value does not suit it.
"""

from __future__ import annotations

import math

from tests.networks.drawing import Drawing, Refused
from tests.networks.expressions import (
    BINARY,
    OVER_DIMS,
    OVER_ONE,
    OVER_ROWS,
    PLAIN_SHAPES,
    POOLS,
    UNARY,
    WRITES,
)


def unary(d: Drawing, x: str) -> str:
    return d.step(d.r.choice(UNARY), x)


def binary(d: Drawing, x: str) -> str:
    return d.step(d.r.choice(BINARY), x, d.partner(x))


def outer_broadcast(d: Drawing, x: str) -> str:
    """A sum or product larger than each of its operands."""
    y = (
        d.given((d.r.choice(d.sizes), *[1] * len(d.shape(x))))
        if d.r.random() < 0.5
        else (d.parameter([1 if n != 1 else d.r.choice(d.sizes) for n in d.shape(x)]))
    )
    return d.step(
        d.r.choice(("{0} + {1}", "{0} * {1}", "{0} - {1}", "torch.maximum({1}, {0})")), x, y
    )


def over_dims(d: Drawing, x: str) -> str:
    dims = d.dims(x)
    return d.step(d.r.choice(OVER_DIMS), x, d=dims, one=dims[0], keep=d.r.random() < 0.5)


def over_one(d: Drawing, x: str) -> str:
    k = d.dim(x)
    n = d.shape(x)[k]
    return d.step(
        d.r.choice(OVER_ONE),
        x,
        d=k,
        n=n,
        keep=d.r.random() < 0.5,
        at=d.r.randrange(max(1, n)),
        shift=d.r.randint(-3, 5),
        times=d.r.randint(1, 3),
        window=d.r.randint(1, max(1, min(n, 5))),
    )


def plain_shape(d: Drawing, x: str) -> str:
    n = d.r.choice(d.shape(x) or (1,))
    return d.step(d.r.choice(PLAIN_SHAPES), x, n=n)


def permute(d: Drawing, x: str) -> str:
    order = list(range(len(d.shape(x))))
    if len(order) > 1 and d.r.random() < 0.5:
        a, b = d.r.sample(order, 2)
        order[a], order[b] = order[b], order[a]
    else:
        d.r.shuffle(order)
    return d.step("{0}.permute({order})", x, order=tuple(order))


def reshape(d: Drawing, x: str) -> str:
    """Two dimensions become one, one becomes two, or all become others."""
    shape = list(d.shape(x))
    choice = d.r.random()
    if choice < 0.4 and len(shape) > 1:
        k = d.r.randrange(len(shape) - 1)
        shape[k : k + 2] = [shape[k] * shape[k + 1]]
    elif choice < 0.75 and shape:
        k = d.r.randrange(len(shape))
        part = d.r.choice(_divisors(shape[k]))
        shape[k : k + 1] = [part, shape[k] // part if part else 0]
    else:
        count, shape = math.prod(shape), []
        while count > 1 and len(shape) < 3:
            shape.append(d.r.choice(_divisors(count)))
            count //= shape[-1]
        d.r.shuffle(shape)
        shape.append(count)
    return d.step("{0}.reshape({shape})", x, shape=tuple(shape))


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, min(n, 300) + 1) if n % k == 0] or [1]


def expand(d: Drawing, x: str) -> str:
    """Dimensions of size 1 become larger, and new ones come before them."""
    shape = [d.r.choice(d.sizes) if n == 1 and d.r.random() < 0.8 else n for n in d.shape(x)]
    if d.r.random() < 0.4:
        shape.insert(0, d.r.choice(d.sizes))
    return d.step("{0}.expand({shape})", x, shape=tuple(shape))


def repeat(d: Drawing, x: str) -> str:
    """Positions for every sample: repeated, and perhaps turned and added to a sequence."""
    times = [d.r.choice((1, 1, 2, 3, d.r.choice(d.sizes))) for _ in d.shape(x)]
    if math.prod((*d.shape(x), *times)) > 2 * d.most:  # it may fill the machine's memory
        raise Refused
    y = d.step("{0}.repeat({times})", x, times=tuple(times) or (2,))
    if d.r.random() < 0.4:
        y = permute(d, y)
    return d.step("{1} + {0}", y, d.partner(y)) if d.r.random() < 0.4 else y


def slices(d: Drawing, x: str) -> str:
    k = d.dim(x) % len(d.shape(x))
    n = d.shape(x)[k]
    first, step = d.r.randrange(max(1, n)), d.r.randint(1, 3)
    before = ":, " * k
    if d.r.random() < 0.5:
        return d.step("{0}[{before}{first}::{step}]", x, before=before, first=first, step=step)
    last = d.r.randint(first, n)
    return d.step("{0}[{before}{first}:{last}]", x, before=before, first=first, last=last)


def parts(d: Drawing, x: str) -> str:
    """A value in parts, some of which are put together again."""
    k = d.dim(x)
    n = d.shape(x)[k]
    first = d.r.randint(0, n)
    split = d.r.choice(
        (
            "{0}.chunk({count}, {d})",
            "{0}.chunk({count}, {d})",
            "{0}.split({count}, {d})",
            "{0}.unbind({d})",
            "{0}.split([{first}, {rest}], {d})",
            "torch.tensor_split({0}, {count}, {d})",
        )
    )
    count = max(1, d.r.choice((2, 2, 3, n // 2)))
    made = d.step(split, x, count=count, d=k, first=first, rest=n - first)
    number = len(d.values[made])
    if number > 12:
        raise Refused
    picked = [d.step("{0}[{k}]", made, k=d.r.randrange(number)) for _ in range(d.r.randint(1, 3))]
    if len(picked) == 1:
        return picked[0]
    whole = d.r.choice(
        ("torch.cat([{all}], {d})", "torch.stack([{all}], {d})", "{0} + {1}.tanh()", "{0} * {1}")
    )
    return _of_all(d, whole, picked, d=k)


def _of_all(d: Drawing, template: str, names: list[str], **attributes) -> str:
    holes = ", ".join(f"{{{k}}}" for k in range(len(names)))
    return d.step(template.replace("{all}", holes), *names, **attributes)


MOST_PARTS = 200  # each is a node or several
OF_PARTS = (
    "torch.stack([part.sin() for part in {0}.unbind({d})])",
    "torch.stack([part * k for k, part in enumerate({0}.unbind({d}))], -1)",
    "torch.cat([part.tanh() for part in {0}.split(1, {d})], {d})",
    "torch.stack([part.square().sum() for part in {0}.unbind({d})])",
    "sum(part.cos() for part in {0}.unbind({d}))",
)


def many_parts(d: Drawing, x: str) -> str:
    """All parts along a dimension, each computed by itself, as time steps are, put together."""
    k = d.dim(x)
    if not 0 < d.shape(x)[k] <= MOST_PARTS:
        raise Refused
    return d.step(d.r.choice(OF_PARTS), x, d=k)


def together(d: Drawing, x: str) -> str:
    """A value beside others along one dimension."""
    k = d.dim(x)
    if d.r.random() < 0.4:
        return d.step("torch.stack([{0}, {1}.expand_as({0})], {d})", x, d.partner(x), d=k)
    shape = list(d.shape(x))
    shape[k] = d.r.choice(d.sizes)
    same = [
        n
        for n in d.floats()
        if len(d.shape(n)) == len(shape)
        and all(a == b for m, (a, b) in enumerate(zip(d.shape(n), shape)) if m != k % len(shape))
    ]
    y = d.r.choice(same) if same and d.r.random() < 0.5 else d.either(shape)
    names = [x, y, x][: d.r.choice((2, 2, 3))]
    d.r.shuffle(names)
    return _of_all(d, "torch.cat([{all}], {d})", names, d=k)


def pad(d: Drawing, x: str) -> str:
    rank = len(d.shape(x))
    many = d.r.randint(1, max(1, min(rank, 3)))
    widths = tuple(d.r.randint(-1, 3) for _ in range(2 * many))
    mode = d.r.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        return d.step(
            "F.pad({0}, {widths}, value={value})", x, widths=widths, value=d.r.choice((0, 1.5))
        )
    widths = tuple(max(0, w) for w in widths)
    return d.step(
        "F.pad({0}, {widths}, mode='{mode}')",
        d.at_least(x, many + d.r.randint(1, 2)),
        widths=widths,
        mode=mode,
    )


# --- products ---


def linear(d: Drawing, x: str) -> str:
    k, n = d.shape(x)[-1], d.r.choice((*d.sizes, 1, 10, 48))
    scale = 1 / math.sqrt(k + 1)
    choice = d.r.random()
    if choice < 0.35:
        return d.step(
            "F.linear({0}, {1} * {s}, {2})", x, d.parameter((n, k)), d.parameter((n,)), s=scale
        )
    if choice < 0.6:
        return d.step("{0} @ ({1} * {s})", x, d.parameter((k, n)), s=scale)
    if choice < 0.7:
        return d.step("F.linear({0}, {1}) * {s}", x, d.parameter((n, k)), s=scale)
    if choice < 0.8:
        return d.step(
            "torch.einsum('...k,nk->...n', {0}, {1}) * {s}", x, d.parameter((n, k)), s=scale
        )
    if choice < 0.9:
        return d.step(
            "torch.addmm({2}, {0}, {1}, beta=0.5, alpha={s})",
            d.at_least(x, 2),
            d.parameter((k, n)),
            d.parameter((n,)),
            s=scale,
        )
    return d.step("{0} @ ({1} * {s})", x, d.parameter((k,)), s=scale)


def product(d: Drawing, x: str) -> str:
    """Of a value with itself, or with a batch of other matrices."""
    shape = d.shape(x)
    k = max(shape[-1:] + (1,))
    choices = (
        "{0} @ {0}.mT * {s}",
        "{0}.mT @ {0} * {s}",
        "{0} @ {1} * {s}",
        "{0} @ {2}.mT * {s}",
        "{3} @ {0} * {s}",
        "torch.einsum('i...,j...->ij', {0}, {0}) * {s}",
        "torch.outer({0}.flatten()[:33], {0}.flatten()[:17])",
        "torch.einsum('...ij,...kj->...ki', {0}, {2}) * {s}",
        "torch.einsum('abc,abd->acd', {0}, {0}) * {s}",
        "{0}.mT @ {3}.mT * {s}",
        "({0}.softmax(-1) @ {1})",
        "torch.baddbmm({0}, {0} @ {0}.mT, {0}, alpha={s})",
        "torch.kron({0}, {0}[:2])",
        "torch.cdist({0}, {2}) * {s}",
    )
    n = d.r.choice(d.sizes)
    batch = shape[:-2] if d.r.random() < 0.6 else ()
    if len(shape) < 2:
        return d.step("torch.outer({0}, {1})", x, d.parameter((n,)))
    others = (
        d.either((*batch, k, n)),
        d.either((*batch, n, k)),
        d.either((*batch, n, shape[-2])),
    )
    template = d.r.choice(choices)
    return d.step(template, x, *others, s=1 / math.sqrt(k + 1))


def attention(d: Drawing, x: str) -> str:
    choice = d.r.random()
    if choice < 0.35:
        return _split_heads(d, x)
    x = d.at_least(x, d.r.choice((3, 4)))
    *batch, length, width = d.shape(x)
    other = d.r.choice((length, d.r.choice(d.sizes)))
    key = d.either((*batch, other, width))
    value = d.either((*batch, other, d.r.choice((width, d.r.choice(d.sizes)))))
    if choice < 0.6:
        return d.step("F.scaled_dot_product_attention({0}, {1}, {2})", x, key, value)
    if choice < 0.75:
        return d.step("F.scaled_dot_product_attention({0}, {0}, {0} * 0.5, is_causal=True)", x)
    if choice < 0.85:
        mask = d.given((length, other))
        return d.step(
            "F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3})", x, key, value, mask
        )
    scores = d.step("{0} @ {1}.mT * {s}", x, key, s=1 / math.sqrt(width + 1))
    if d.r.random() < 0.5:
        scores = d.step("{0}.masked_fill({1}, -10.0)", scores, d.mask((length, other)))
    weights = d.step("{0}.softmax(-1)", scores)
    return d.step("{0} @ {1}", weights, value)


def _split_heads(d: Drawing, x: str) -> str:
    """Several heads, as modules write them: projected at once, cut, turned, attended, joined."""
    x = d.at_least(x, 3)
    batch, length, width = d.shape(x)
    heads, size = d.r.choice((1, 2, 3, 4)), d.r.choice((1, 2, 4, 8, 16, 5))
    y = d.step(
        "{0} @ ({1} * {s})", x, d.parameter((width, 3 * heads * size)), s=1 / math.sqrt(width + 1)
    )
    y = d.step(
        "{0}.reshape({b}, {n}, 3, {h}, {e}).permute(2, 0, 3, 1, 4)",
        y,
        b=batch,
        n=length,
        h=heads,
        e=size,
    )
    q, k, v = (d.step("{0}[{k}]", y, k=k) for k in range(3))
    if d.r.random() < 0.5:
        y = d.step("F.scaled_dot_product_attention({0}, {1}, {2})", q, k, v)
    else:
        w = d.step("({0} @ {1}.transpose(-2, -1) * 0.3).softmax(-1)", q, k)
        y = d.step("{0} @ {1}", w, v)
    return d.step(
        "{0}.transpose(1, 2).reshape({b}, {n}, {e})", y, b=batch, n=length, e=heads * size
    )


# --- layers ---


def norm(d: Drawing, x: str) -> str:
    shape = d.shape(x)
    if not shape:
        raise Refused
    last = tuple(shape[d.r.randrange(len(shape)) if d.r.random() < 0.3 else -1 :])
    weight = d.parameter(last)
    choice = d.r.random()
    if choice < 0.2:
        return d.step("F.layer_norm({0}, {last})", x, last=last)
    if choice < 0.45:
        return d.step(
            "F.layer_norm({0}, {last}, {1}, {2})", x, weight, d.parameter(last), last=last
        )
    if choice < 0.55:
        return d.step("F.rms_norm({0}, {last}, {1}, eps=1e-6)", x, weight, last=last)
    if choice < 0.62:
        return d.step("F.rms_norm({0}, {last}, eps=1e-6)", x, last=last)
    x = d.at_least(x, d.r.choice((2, 3, 4, max(2, len(shape)))))
    c = d.shape(x)[1]
    w, b = d.weight((c,)), d.parameter((c,))
    if choice < 0.72:
        return d.step(
            "F.group_norm({0}, {groups}, {1}, {2})", x, w, b, groups=d.r.choice(_divisors(c))
        )
    if choice < 0.82:
        return d.step("batch_norm({0}, None, None, {1}, {2}, training=True)", x, w, b)
    if choice < 0.88:
        return d.step("batch_norm({0}, None, None, training=True)", x)
    if choice < 0.94:
        return d.step("instance_norm({0}, weight={1}, bias={2})", x, w, b)
    if choice < 0.97:
        mean, var = d.given((c,), "normal"), d.given((c,), "positive")
        return d.step("batch_norm({0}, {1}, {2}, {3}, {4})", x, mean, var, w, b)
    return d.step("F.local_response_norm({0}, {size})", x, size=d.r.randint(1, 3))


def convolution(d: Drawing, x: str) -> str:
    rank = d.r.choice((1, 1, 2, 2, 2, 2, 3))
    x = d.at_least(x, rank + 2)
    channels, *pixels = d.shape(x)[1:]
    groups = d.r.choice([g for g in (1, 1, 1, 2, channels) if g and channels % g == 0])
    out = groups * d.r.choice((1, 2, 3, 4, 8, 16, 17) if groups < 5 else (1, 2))
    size = tuple(min(d.r.choice((1, 2, 3, 3, 5)), n + 2) for n in pixels)
    more = {"stride": d.r.choice((1, 1, 2)), "padding": d.r.choice((0, 1, 1, 2)), "groups": groups}
    scale = 1 / math.sqrt(channels // groups * math.prod(size) + 1)
    if d.r.random() < 0.25:
        weight = d.weight((channels, out // groups, *size))
        # PyTorch's gradient of the weight multiplies the input by padding: no number times 0.
        finite = ".nan_to_num(0, 8, -8)" if more["padding"] else ""
        return d.step(
            "F.conv_transpose{r}d({0}" + finite + ", {1} * {s}, "
            "stride={stride}, padding={padding}, groups={groups})",
            x,
            weight,
            r=rank,
            s=scale,
            **more,
        )
    weight = d.weight((out, channels // groups, *size))
    more["dilation"] = d.r.choice((1, 1, 1, 2))
    options = "stride={stride}, padding={padding}, groups={groups}, dilation={dilation}"
    if d.r.random() < 0.6:
        return d.step(
            "F.conv{r}d({0}, {1} * {s}, {2}, " + options + ")",
            x,
            weight,
            d.parameter((out,)),
            r=rank,
            s=scale,
            **more,
        )
    return d.step("F.conv{r}d({0}, {1}, " + options + ") * {s}", x, weight, r=rank, s=scale, **more)


def pool(d: Drawing, x: str) -> str:
    rank = d.r.choice((1, 2, 2, 2, 3))
    x = d.at_least(x, rank + 2)
    template = d.r.choice(POOLS)
    n = d.r.choice((1, 2, 2, 3))
    return d.step(
        template, x, r=rank, n=n, stride=d.r.randint(1, 3), padding=d.r.choice((0, 0, n // 2))
    )


def resample(d: Drawing, x: str) -> str:
    """Of finite numbers: PyTorch multiplies what is infinite by a weight of zero, too."""
    x = d.at_least(x, 4)
    if not bool(d.values[x].isfinite().all()):
        raise Refused
    return d.step(
        d.r.choice(
            (
                "F.interpolate({0}, scale_factor=2)",
                "F.interpolate({0}, scale_factor=2, mode='bilinear')",
                "F.interpolate({0}, size=({a}, {b}))",
                "F.interpolate({0}, size=({a}, {b}), mode='bilinear', align_corners=True)",
                "F.pixel_shuffle({0}, 2)",
                "F.pixel_unshuffle({0}, 2)",
                "F.unfold({0}, 2)",
                "F.interpolate({0}, size=({a}, {b}), mode='bicubic')",
            )
        ),
        x,
        a=d.r.randint(1, 9),
        b=d.r.randint(1, 9),
    )


def mlp(d: Drawing, x: str) -> str:
    """A residual pair of products around an activation, behind a norm."""
    k, n = d.shape(x)[-1], d.r.choice((*d.sizes, 32))
    y = d.step("F.layer_norm({0}, ({k},))", x, k=k)
    y = d.step(
        "F.{f}({0} @ ({1} * {s}))",
        y,
        d.parameter((k, n)),
        f=d.r.choice(("gelu", "relu", "silu")),
        s=1 / math.sqrt(k + 1),
    )
    return d.step("{1} + {0} @ ({2} * {s})", y, x, d.parameter((n, k)), s=1 / math.sqrt(n + 1))


def mixer(d: Drawing, x: str) -> str:
    """A product along the tokens in place of the channels."""
    x = d.at_least(x, 3)
    n = d.shape(x)[1]
    y = d.step(
        d.r.choice(
            (
                "F.layer_norm({0}, {last})",
                "{0}.softmax(-1)",
                "F.rms_norm({0}, {last}, eps=1e-6)",
                "F.normalize({0}, dim=-1)",
            )
        ),
        x,
        last=d.shape(x)[-1:],
    )
    y = d.step("{0}.transpose(1, 2)", y)
    if d.r.random() < 0.5:
        return d.step(
            "{0} + ({1} @ ({2} * {s})).transpose(1, 2)",
            x,
            y,
            d.parameter((n, n)),
            s=1 / math.sqrt(n + 1),
        )
    return d.step(
        d.r.choice(("{0}.sum({d}) * 0.3", "{0}.mean({d})", "{0}.amax({d})")), y, d=d.r.randrange(3)
    )


def averaged(d: Drawing, x: str) -> str:
    """Rows that are normalized, then turned, then added up across: averaged heads, mixed tokens."""
    if len(d.shape(x)) < 3:
        x = d.either(d.any_shape(d.r.choice((2, 3, 3, 4))))
    if d.r.random() < 0.5:
        x = d.step("{0} + {1}", x, d.partner(x))
    y = d.step(d.r.choice(OVER_ROWS), x, last=d.shape(x)[-1:])
    if d.r.random() < 0.8:
        y = permute(d, y)
    across = (0,) if d.r.random() < 0.5 else d.dims(y)
    return d.step(d.r.choice(("{0}.sum({d})", "{0}.mean({d})")), y, d=across)


def positioned(d: Drawing, x: str) -> str:
    """A parameter repeated for every sample, turned, added, normalized: its gradient is a sum."""
    if len(d.shape(x)) < 2:
        x = d.either(d.any_shape(d.r.choice((2, 3, 3, 4))))
    shape = d.shape(x)
    order = d.r.sample(range(len(shape)), len(shape))
    is_kept = [d.r.random() < 0.6 for _ in shape]
    small = [shape[k] if is_kept[k] else 1 for k in order]
    times = [1 if is_kept[k] else shape[k] for k in order]
    template = d.r.choice(("{0}.repeat({times})", "{0}.expand({whole})"))
    whole = tuple(shape[k] for k in order)
    y = d.step(template, d.parameter(small), times=tuple(times), whole=whole)
    back = tuple(order.index(k) for k in range(len(shape)))
    y = d.step("{0} + {1}.permute({order})", x, y, order=back)
    return d.step(d.r.choice(OVER_ROWS), y, last=shape[-1:])


def dropout(d: Drawing, x: str) -> str:
    """Dropout of numbers that are nowhere zero, so that what was dropped can be told."""
    if d.r.random() < 0.3:
        return d.step(d.r.choice(("F.dropout({0}, 0.0)", "F.dropout({0}, 0.5, training=False)")), x)
    if d.r.random() < 0.5:
        return d.step("{0} * random(torch.rand_like, {0})", x)
    if not bool((d.values[x] != 0).all()):
        raise Refused
    return d.step("random(F.dropout, {0}, {p})", x, p=d.r.choice((0.1, 0.5, 0.9)))


# --- indices and masks ---


def indexed(d: Drawing, x: str) -> str:
    """Rows taken, added, put: along one dimension, by indices that may repeat."""
    shape = d.shape(x)
    k = d.dim(x) % len(shape)
    n, count = shape[k], d.r.choice((1, 2, 3, 7, 8, 17, 33, max(1, shape[k])))
    at = d.index((count,), n)
    taken = list(shape)
    taken[k] = count
    choice = d.r.randrange(11)
    before = ":, " * k
    if choice < 2:
        return d.step("{0}.index_select({d}, {1})", x, at, d=k)
    if choice < 4:
        return d.step("{0}[{before}{1}]", x, at, before=before)
    if choice == 4:
        return d.step("{0}.index_add({d}, {1}, {2}, alpha=0.5)", x, at, d.either(taken), d=k)
    if choice == 5:
        return d.step("{0}.index_fill({d}, {1}, 0.25)", x, at, d=k)
    if choice == 6:
        order = d.step("{0}.argsort(stable=True)", at)  # each once: which copy stays is not said
        return d.step("{0}.index_copy({d}, {1}, {2})", x, order, d.either(taken), d=k)
    if choice == 7:
        table = d.at_least(x, 2)
        at = d.index(d.any_shape(d.r.randint(0, 2)), d.shape(table)[0])
        return d.step("F.embedding({1}, {0})", table, at)
    if choice == 8:
        table = d.at_least(x, 2)
        at = d.index((d.r.choice((1, 3, 8, 17)), d.r.choice((1, 2, 5))), d.shape(table)[0])
        return d.step(
            "F.embedding_bag({1}, {0}, mode='{mode}')",
            table,
            at,
            mode=d.r.choice(("sum", "mean", "max")),
        )
    if choice == 9 and len(shape) > 1:
        other = d.index((count,), shape[1])
        at = d.index((count,), shape[0])
        return d.step("{0}[{1}, {2}]", x, at, other)
    new = d.either(taken)
    return d.step(
        "{0}.movedim({d}, 0).index_put(({1},), {2}.movedim({d}, 0), accumulate=True)",
        x,
        at,
        new,
        d=k,
    )


def gathered(d: Drawing, x: str) -> str:
    shape = list(d.shape(x))
    k = d.dim(x)
    n = shape[k]
    shape[k] = d.r.choice((1, 2, max(1, n), d.r.choice(d.sizes)))
    at = d.index(shape, n)
    return d.step(
        d.r.choice(
            (
                "{0}.gather({d}, {1})",
                "{0}.gather({d}, {1})",
                "torch.zeros_like({0}).scatter_add({d}, {1}, {0}.gather({d}, {1}))",
                "{0}.scatter_add({d}, {1}, {2})",
                "{0}.scatter({d}, {1}, 0.5)",
                "{0}.scatter_reduce({d}, {1}, {2}, 'sum')",
                "{0}.scatter_reduce({d}, {1}, {2}, 'amax')",
                "{0}.scatter_reduce({d}, {1}, {2}, 'mean')",
                "{0}.take_along_dim({1}, {d})",
            )
        ),
        x,
        at,
        d.either(shape),
        d=k,
    )


def masked(d: Drawing, x: str) -> str:
    shape = [n if d.r.random() < 0.7 else 1 for n in d.shape(x)]
    m = d.mask(shape[d.r.randint(0, len(shape)) if d.r.random() < 0.3 else 0 :])
    return d.step(
        d.r.choice(
            (
                "{0}.masked_fill({1}, 0.5)",
                "{0} * {1}",
                "torch.where({1}, {0}, {2})",
                "torch.where({1}, {2}, {0})",
                "{0}.masked_fill(~{1}, -2.0).softmax(-1)",
                "torch.where({1}, {0}, 0.0).sum(-1)",
                "{0} * {1}.to({0}.dtype)",
                "({0} * {1}).sum(0) / (({1} * torch.ones_like({0})).sum(0) + 1)",
            )
        ),
        x,
        m,
        d.partner(x),
    )


def scored(d: Drawing, x: str) -> str:
    """What tells classes: losses by index, one-hot codes, the largest few."""
    x = d.at_least(x, 2)
    rows, classes = d.shape(x)
    at = d.index((rows,), classes)
    of_rows = ("F.multi_margin_loss({0}, {1})",) if rows else ()  # PyTorch writes nothing for none
    return d.step(
        d.r.choice(
            (
                "F.cross_entropy({0}, {1})",
                "F.cross_entropy({0}, {1}, reduction='none')",
                "F.cross_entropy({0}, {1}, label_smoothing=0.1)",
                "F.nll_loss({0}.log_softmax(-1), {1})",
                "{0} * F.one_hot({1}, {n})",
                "F.cross_entropy({0}, {0}.detach().softmax(-1))",
                *of_rows,
                "{0}[torch.arange({m}, device=device), {1}]",
            )
        ),
        x,
        at,
        n=classes,
        m=rows,
    )


# --- writes ---


def written(d: Drawing, x: str) -> str:
    """A value, or a view of it, is written to; what else shows the same memory goes on."""
    n = d.r.choice(d.shape(x) or (1,))
    partner = d.step("{1}.expand_as({0}).clone()", x, d.partner(x))
    y = x
    if d.r.random() < 0.6 or not d.is_writable(x):
        y = d.step("{0}.clone()", x)
    for _ in range(d.r.randint(1, 2)):
        view = y
        if d.r.random() < 0.35:
            view = d.step(
                d.r.choice(
                    (
                        "{0}.mT",
                        "{0}[1:]",
                        "{0}[..., :-1]",
                        "{0}.select(0, -1)",
                        "{0}.movedim(0, -1)",
                        "{0}.view(-1)",
                        "{0}[0]",
                    )
                ),
                y,
            )
            other = d.step("{0}.detach().clone() + 0.5", view)
        else:
            other = partner
        k = d.r.randrange(max(1, n))
        d.step(d.r.choice(WRITES), view, other, k=k)
        if d.r.random() < 0.3:
            y = d.step(d.r.choice(("{0} * 1.5", "{0}.mT", "{0}.clone()", "{0}[..., 1:]")), y)
            break
    return y if y != x else d.step("{0} + 1", y)


def copied_into(d: Drawing, x: str) -> str:
    """A larger value of which a part is overwritten, without writing to what was there."""
    x = d.apart(x)
    k = d.dim(x)
    at = d.r.randrange(max(1, d.shape(x)[k]))
    part = d.step("{0}.select({d}, {at}) * 2", x, d=k, at=at)
    return d.step(
        d.r.choice(
            (
                "torch.select_scatter({0}, {1}, {d}, {at})",
                "torch.slice_scatter({0}, {1}.unsqueeze({d}), {d}, {at}, {at} + 1)",
                "torch.select_scatter({0}, {1}.softmax(-1), {d}, {at})",
            )
        ),
        x,
        part,
        d=k,
        at=at,
    )


BLOCKS = (
    (unary, 16),
    (binary, 18),
    (outer_broadcast, 5),
    (over_dims, 13),
    (over_one, 18),
    (plain_shape, 10),
    (permute, 9),
    (reshape, 8),
    (expand, 5),
    (repeat, 5),
    (slices, 5),
    (parts, 5),
    (many_parts, 3),
    (together, 6),
    (pad, 4),
    (linear, 8),
    (product, 6),
    (attention, 5),
    (norm, 14),
    (convolution, 5),
    (pool, 3),
    (resample, 2),
    (mlp, 3),
    (mixer, 4),
    (averaged, 10),
    (positioned, 10),
    (dropout, 2),
    (indexed, 6),
    (gathered, 4),
    (masked, 4),
    (scored, 2),
    (written, 8),
    (copied_into, 2),
)
