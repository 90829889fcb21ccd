"""Types of what is computed of whole matrices: factors, solutions, determinants, distances."""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    COMPLEX,
    FULL,
    Shape,
    axis_of,
    broadcast,
    is_value,
    number_of,
    of_one_dtype,
    of_one_type,
    type_of,
)
from ltc.device.shapes.formulas.table import Types, types_of

_FIELDS = FULL | COMPLEX


def _is_matrix(x: Any) -> bool:
    return is_value(x) and x.dtype in _FIELDS and len(x.shape) >= 2 and 0 not in x.shape


def _is_square(x: Any) -> bool:
    return _is_matrix(x) and x.shape[-1] == x.shape[-2]


@types_of("aten::linalg_inv_ex", "aten::linalg_cholesky_ex")
def _with_info(x: Any, *, check_errors: bool = False, upper: bool = False) -> Types | None:
    """What is computed, and of each matrix whether it could be."""
    is_known = _is_square(x) and not check_errors
    return (type_of(x), (x.shape[:-2], torch.int32)) if is_known else None


@types_of("aten::linalg_lu_factor_ex")
def _factors(x: Any, *, pivot: bool = True, check_errors: bool = False) -> Types | None:
    if not _is_matrix(x) or not pivot or check_errors:
        return None
    batch, least = x.shape[:-2], min(x.shape[-2:])
    return type_of(x), ((*batch, least), torch.int32), (batch, torch.int32)


@types_of("aten::_linalg_det")
def _determinant(x: Any) -> Types | None:
    if not _is_square(x):
        return None
    return (x.shape[:-2], x.dtype), type_of(x), (x.shape[:-1], torch.int32)


@types_of("aten::_linalg_slogdet")
def _log_determinant(x: Any) -> Types | None:
    """Its sign first."""
    found = _determinant(x)
    return None if found is None else (found[0], (x.shape[:-2], x.dtype.to_real()), *found[1:])


@types_of("aten::_linalg_solve_ex")
def _solution(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Types | None:
    """Of one right side for each matrix; whether `b` holds vectors is seen by its rank."""
    if not _is_square(a) or not of_one_dtype(_FIELDS, a, b) or 0 in b.shape:
        return None
    if check_errors or not left:
        return None
    is_vector = len(b.shape) == 1 or b.shape == a.shape[:-1]
    if b.shape != a.shape[:-1] and (is_vector or b.shape[:-1] != a.shape[:-1]):
        return None
    return type_of(b), type_of(a), (a.shape[:-1], torch.int32), (a.shape[:-2], torch.int32)


@types_of("aten::linalg_solve_triangular")
def _triangular_solution(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Types | None:
    if not _is_square(a) or not of_one_dtype(_FIELDS, a, b) or len(b.shape) < 2 or 0 in b.shape:
        return None
    if a.shape[:-2] != b.shape[:-2] or b.shape[-2 if left else -1] != a.shape[-1]:
        return None
    return (type_of(b),)


@types_of("aten::linalg_lu_solve")
def _solution_by_factors(
    factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False
) -> Types | None:
    if type_of(pivots) != (factors.shape[:-1], torch.int32):
        return None
    return _triangular_solution(factors, b, upper=True, left=left)


@types_of("aten::linalg_qr")
def _orthogonal_factors(x: Any, mode: str = "reduced") -> Types | None:
    if not _is_matrix(x) or mode != "reduced":
        return None
    *batch, rows, columns = x.shape
    least = min(rows, columns)
    return ((*batch, rows, least), x.dtype), ((*batch, least, columns), x.dtype)


@types_of("aten::_linalg_svd")
def _singular_values(
    x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> Types | None:
    if not _is_matrix(x) or not compute_uv or driver is not None:
        return None
    *batch, rows, columns = x.shape
    least = min(rows, columns)
    kept = (rows, columns) if full_matrices else (least, least)
    left, right = (*batch, rows, kept[0]), (*batch, kept[1], columns)
    return (left, x.dtype), ((*batch, least), x.dtype.to_real()), (right, x.dtype)


@types_of("aten::_linalg_eigh")
def _eigenvalues(x: Any, UPLO: str = "L", compute_v: bool = True) -> Types | None:
    if not _is_square(x) or UPLO not in ("L", "U") or not compute_v:
        return None
    return (x.shape[:-1], x.dtype.to_real()), type_of(x)


@types_of("aten::linalg_matrix_exp")
def _exponential(x: Any) -> Types | None:
    return (type_of(x),) if _is_square(x) else None


@types_of("aten::trace")
def _trace(x: Any) -> Types | None:
    return (((), x.dtype),) if _is_matrix(x) and len(x.shape) == 2 else None


@types_of("aten::linalg_cross")
def _cross_product(x: Any, y: Any, *, dim: int = -1) -> Types | None:
    if not of_one_type(_FIELDS, x, y) or 0 in x.shape:
        return None
    axis = axis_of(dim, len(x.shape))
    return (type_of(x),) if axis is not None and x.shape[axis] == 3 else None


# --- distances ------------------------------------------------------------------------------------


def _pairs(x: Any, y: Any) -> Shape | None:
    """One number for each point of x and each of y."""
    if not of_one_dtype(FULL, x, y) or min(len(x.shape), len(y.shape)) < 2:
        return None
    if 0 in x.shape or 0 in y.shape or x.shape[-1] != y.shape[-1]:
        return None
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    return None if batch is None else (*batch, x.shape[-2], y.shape[-2])


@types_of("aten::_cdist_forward")
def _distances(x: Any, y: Any, p: Any, compute_mode: int | None) -> Types | None:
    shape = _pairs(x, y) if number_of(p) >= 0 and compute_mode in (None, 0, 1, 2) else None
    return None if shape is None else ((shape, x.dtype),)


@types_of("aten::_cdist_backward")
def _distances_gradient(gradient: Any, x: Any, y: Any, p: Any, distances: Any) -> Types | None:
    found = _distances(x, y, p, None)
    if found != (type_of(gradient),) or found != (type_of(distances),):
        return None
    return (type_of(x),) if x.shape[:-2] == y.shape[:-2] else None


@types_of("aten::_euclidean_dist")
def _euclidean_distances(x: Any, y: Any) -> Types | None:
    return _distances(x, y, 2.0, None) if x.shape[:-2] == y.shape[:-2] else None


@types_of("aten::_pdist_forward")
def _distances_within(x: Any, p: Any = 2.0) -> Types | None:
    if not is_value(x) or x.dtype not in FULL or len(x.shape) != 2 or 0 in x.shape:
        return None
    points = x.shape[0]
    is_known = points > 1 and number_of(p) >= 0
    return (((points * (points - 1) // 2,), x.dtype),) if is_known else None


@types_of("aten::_pdist_backward")
def _distances_within_gradient(gradient: Any, x: Any, p: Any, distances: Any) -> Types | None:
    found = _distances_within(x, p)
    is_known = found == (type_of(gradient),) and found == (type_of(distances),)
    return (type_of(x),) if is_known else None
