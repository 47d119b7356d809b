"""Placeholders for the ids that a model's forward is called with.

A trainer has no ids. A placeholder is a tensor that records, for each of its elements, from which
column of the data the id comes and which constant was added to it. Forward may select, reshape,
join and shift ids, and pass them to an embedding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _python_dispatch

Path = tuple[str | int, ...]
"""An argument of forward and the indices and keys picked from it: ("ids", 3), ("batch", "user")."""

REMEDY = (
    "ids may only be selected, reshaped, joined, shifted by constants and given to an embedding; for more, write the model by the contract "
    "(docs/models.md), for which `foreload adapt` writes a skeleton"
)


class UnsupportedUse(Exception):
    """Forward uses ids or an embedding in a way that `wrap` cannot follow.

    It is no TypeError, which torch's operators would turn into another error or another result.

    Attributes:
        what: what forward does.
        remedy: what to do instead.
    """

    def __init__(self, what: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


# Codes describe this number of samples, whatever the number of samples in the batch is: with fewer,
# a dimension of samples would look like one that a sample has itself.
_SAMPLES = 3
# The bits of a code, from the lowest: the sample, the place of the column, whether its values are
# dense, and the constant added to the ids.
_SAMPLE_BITS, _PLACE_BITS, _LOW_BITS = 2, 16, 20
_DENSE = 1 << (_SAMPLE_BITS + _PLACE_BITS)
_PLAIN = frozenset((int, bool, str, type(None), type(Ellipsis), torch.dtype))
_MOST_KEPT = 4096  # results of operations that the codes of a placeholder keep


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SELECTING = _words(
    "select narrow index_select unsqueeze squeeze transpose t T mT permute movedim moveaxis swapaxes swapdims unbind split split_with_sizes chunk "
    "tensor_split hsplit flip repeat repeat_interleave tile getitem"
)
"""Operations that a placeholder applies to its codes as they are given."""
_JOINING = _words("cat concat concatenate stack hstack vstack column_stack")
_SIZED = _words("view reshape flatten ravel unflatten view_as reshape_as")
"""Operations whose arguments may contain the number of samples."""
_EXPANDING = _words("expand expand_as broadcast_to")
_CONVERTING = _words("long int short float double to type type_as cpu cuda contiguous clone detach data")
_DESCRIBING = _words(
    "shape dtype device ndim layout is_cuda is_sparse is_meta is_quantized is_nested requires_grad is_leaf size dim ndimension numel nelement "
    "is_floating_point is_complex is_contiguous element_size get_device len"
)
_CREATING = _words("new_tensor new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like")
"""Operations that take the shape, type and device of ids, and no values."""
_SHIFTING = {"add": 1, "radd": 1, "iadd": 1, "add_": 1, "sub": -1, "isub": -1, "sub_": -1, "subtract": -1}


def text_of(path: Path) -> str:
    """Return a path as Python code: batch["user"], ids[3]."""
    picked = (f"[{key}]" if isinstance(key, int) else f'["{key}"]' for key in path[1:])
    return f"{path[0]}{''.join(picked)}"


class Codes:
    """The origin of each element of a placeholder, and what operations made of it in earlier calls.

    Attributes:
        tensor: int64, the code of each element, for `_SAMPLES` samples instead of b.
        elements: the number of elements.
        made: the results of operations on the placeholder, by the operation and its arguments.
        lookups: what `Ids.lookups` returns, once it is known.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.elements = tensor, tensor.numel()
        self.made: dict[Any, Codes | tuple[Codes, ...]] = {}
        self.lookups: list[tuple[Path, int]] | None = None

    def keep(self, key: Any, made: Codes | tuple[Codes, ...]) -> None:
        """Keep the result of an operation. Arguments that change from call to call do not add up."""
        if len(self.made) >= _MOST_KEPT:
            self.made.clear()
        self.made[key] = made

    @functools.cached_property
    def all_dense(self) -> bool:
        """Whether there are elements, and all are dense values."""
        with _apart():
            return self.elements > 0 and bool((self.tensor & _DENSE).all())


class Places:
    """The columns of a module's arguments, which stay the same from call to call of its forward.

    Attributes:
        assigns: whether forward assigns to elements of a placeholder. Results are not kept then.
    """

    def __init__(self) -> None:
        self.assigns = False
        self._places: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._codes: dict[Any, Codes] = {}

    def codes(self, paths: Sequence[Path], dense: Iterable[int] = (), *, keep: bool = True) -> Codes:
        """Return the codes of columns side by side.

        Args:
            paths: the columns.
            dense: the places of the columns that are dense.
            keep: whether a later call may get the same object.
        """
        key = (*paths, *dense)
        if keep and key in self._codes:
            return self._codes[key]
        for path in paths:
            if path not in self._places:
                self._places[path] = len(self._paths)
                self._paths.append(path)
        with _apart():
            places = torch.tensor([self._places[path] for path in paths]) << _SAMPLE_BITS
            is_dense = torch.tensor([place in dense for place in range(len(paths))])
            codes = Codes(places + is_dense * _DENSE + torch.arange(_SAMPLES)[:, None])
        if keep:
            self._codes[key] = codes
        return codes

    def path(self, code: int) -> Path:
        """Return the column that a code refers to."""
        return self._paths[(code >> _SAMPLE_BITS) & ((1 << _PLACE_BITS) - 1)]


class Origins:
    """The columns that the placeholders of one call of forward come from.

    Attributes:
        samples: b, the number of samples of the call.
        reads_offsets: whether constants that are added to ids are recorded. They are not while
            torch.export traces forward, where tensors have no values.
        keeps: whether results of operations on codes are kept for later calls.
    """

    def __init__(self, places: Places, samples: int, device: torch.device, reads_offsets: bool) -> None:
        self.places, self.samples, self.device, self.reads_offsets = places, samples, device, reads_offsets
        self.keeps = not (reads_offsets or places.assigns or _is_traced())

    def one(self, path: Path) -> Ids:
        """Return a placeholder [b] for a column, from which keys and indices may be picked."""
        values = torch.zeros(self.samples, dtype=torch.int64, device=self.device)
        codes = self.places.codes([path], keep=self.keeps)
        column = codes.made.get("column")
        if column is None:
            with _apart():
                column = codes.made["column"] = Codes(codes.tensor.squeeze(1))
        assert isinstance(column, Codes)
        return Ids(values, column, self, is_argument=True)

    def several(self, path: Path, count: int, dense: Mapping[int, Tensor]) -> Ids:
        """Return a placeholder [b, count] for several columns.

        Args:
            path: the argument that holds the columns.
            count: the number of columns.
            dense: the values float32 [b, 1] of the columns that are dense, by their place. If there
                are any, the placeholder is float32.
        """
        kind = torch.float32 if dense else torch.int64
        ids = torch.zeros(self.samples, 1, dtype=kind, device=self.device)
        values = torch.cat([dense.get(place, ids) for place in range(count)], 1) if dense else ids.expand(-1, count)
        codes = self.places.codes([(*path, place) for place in range(count)], sorted(dense), keep=self.keeps)
        return Ids(values, codes, self, is_argument=True)


class Ids(Tensor):
    """A placeholder for ids, of any shape that has the samples as one of its dimensions.

    Of an argument of forward, x[k], x[:, k] and x["name"] pick one column. Operations that need the
    values of the ids raise UnsupportedUse.

    Attributes:
        numbers: the values of the columns that are dense, and any numbers for ids. It has the shape
            of the placeholder.
        codes: the origin of each element.
        origins: the columns that codes refer to.
        is_argument: whether it is an argument of forward as it was given.
    """

    numbers: Tensor
    codes: Codes
    origins: Origins
    is_argument: bool

    @staticmethod
    def __new__(cls: type[Ids], values: Tensor, codes: Codes, origins: Origins, is_argument: bool = False) -> Ids:
        ids: Ids = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        ids.numbers, ids.codes, ids.origins, ids.is_argument = values, codes, origins, is_argument
        return ids

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, operation_name(function)
        first = args[0] if args else None
        own = first if isinstance(first, Ids) else next(value for value in _within((args, kwargs)) if isinstance(value, Ids))
        if name in ("repr", "str", "format"):
            return f"Ids({own.text()})"
        if name in _DESCRIBING or name in _CREATING:
            if own.is_argument and name == "len" and own.dim() == 2:
                return own.shape[1]
            return function(*mapped(args, _values), **mapped(kwargs, _values))
        if name == "stride" and own.is_argument and len(args) == 1:
            # A KeyedJaggedTensor of TorchRec returns the number of samples.
            return own.shape[0]
        if name in ("getitem", "iter", "unbind") and own.is_argument:
            return own._picked(name, args, kwargs)
        if name in _SHIFTING:
            return own._shifted(function, name, args, kwargs)
        if name in _CONVERTING:
            return own._converted(function, name, args, kwargs)
        if name in _SELECTING or name in _JOINING or name in _SIZED or name in _EXPANDING or name == "setitem":
            return own._selected(function, name, args, kwargs)
        own._refuse(name)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        own = next(value for value in _within((args, kwargs)) if isinstance(value, Ids))
        own._refuse(str(function))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._picked("iter", (), {}) if self.is_argument else self._refuse("iter"))

    def lookups(self) -> list[tuple[Path, int]]:
        """Return the column, and the constant added to its ids, of each element of a sample.

        Raises:
            UnsupportedUse: elements are dense values, or samples are left out or in another order.
        """
        lookups = self._lookups() if self.codes.lookups is None else self.codes.lookups
        if self.origins.keeps:
            # Otherwise the codes may still change.
            self.codes.lookups = lookups
        return lookups

    def _lookups(self) -> list[tuple[Path, int]]:
        with _apart():
            own = self.codes.tensor
            codes = own.reshape(_SAMPLES, -1) if self.codes.elements % _SAMPLES == 0 else own[:0, None]
            wanted = codes[:1] - (codes[:1] & ((1 << _SAMPLE_BITS) - 1)) + torch.arange(_SAMPLES)[:, None]
            if len(codes) == 0 or not torch.equal(codes, wanted.expand_as(codes)):
                raise UnsupportedUse(
                    f"forward gives the ids {self.text()} to an embedding with samples left out, repeated or in another order"
                )
            dense = [code for code in codes[0].tolist() if code & _DENSE]
            if dense:
                raise UnsupportedUse(
                    f"forward gives dense values, {text_of(self.origins.places.path(dense[0]))}, to an embedding",
                    "take them out of dense if they are ids",
                )
            return [(self.origins.places.path(code), code >> _LOW_BITS) for code in codes[0].tolist()]

    def text(self) -> str:
        """Return a name for messages: that of the column, or of the argument for several columns."""
        with _apart():
            paths = list(dict.fromkeys(self.origins.places.path(code) for code in self.codes.tensor.reshape(-1).tolist()))
        return text_of(paths[0] if len(paths) == 1 else paths[0][:1]) if paths else "none"

    def _picked(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return columns of an argument: x["name"], x[k], x[:, k], x.unbind(1), and all of them in a loop."""
        dims = self.numbers.dim()  # its own would come here as an operation
        if name != "getitem":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            if dims == 1 or (name == "unbind" and dim not in (1, -1)):
                self._refuse(name, self._how_many() if dims == 1 else "")
            return tuple(self[:, place] for place in range(self.shape[1]))
        key = args[1]
        if dims == 1:
            if isinstance(key, tuple) and len(key) == 2 and key[0] in (slice(None), Ellipsis):
                key = key[1]
            if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool) and key >= 0):
                return self.origins.one((*self._path(), key))
            if isinstance(key, int | slice) and not isinstance(key, bool):
                self._refuse(f"[{key!r}]", self._how_many())
        elif isinstance(key, int) and not isinstance(key, bool):
            key = (slice(None), key)
        # The most frequent of all: x[:, k].
        column = key[1] if self.origins.keeps and type(key) is tuple and len(key) == 2 and key[0] == slice(None) else None
        if type(column) is int and isinstance(kept := self.codes.made.get(("column", column)), Codes):
            return self._made(self.numbers[:, column], kept, name)
        try:
            picked = self._selected(Tensor.__getitem__, "getitem", (self, key), {})
        except IndexError as error:
            raise IndexError(
                f"{self._path()[0]} has {self.shape[-1]} columns, as given to wrap; forward takes [{args[1]!r}]"
            ) from error
        if type(column) is int and isinstance(picked, Ids):
            self.codes.keep(("column", column), picked.codes)
        return picked

    def _how_many(self) -> str:
        return f'say how many they are: columns={{"{self._path()[0]}": [...]}}'

    def _selected(self, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Apply an operation that moves elements, to the values and to the codes."""
        if name in _SIZED and any(isinstance(value, torch.dtype) for value in _within((args, kwargs))):
            self._refuse(name)
        if name == "squeeze" and len(args) == 1 and not kwargs:
            # The number of samples may be 1, too, and must stay a dimension.
            args = (*args, tuple(dim for dim, size in enumerate(self.codes.tensor.shape) if size == 1))
        values = function(*mapped(args, _values), **mapped(kwargs, _values))
        key = None
        if self.origins.keeps:
            if name == "setitem":
                raise UnsupportedUse(
                    f"forward assigns to the ids {self.text()} in some of its calls only", "it must always do the same"
                )
            key = (name, *values.shape[1:]) if name in _SIZED or name in _EXPANDING else _key((name, args, tuple(kwargs.items())))
        codes = self.codes.made.get(key) if key is not None else None
        if codes is None:
            try:
                codes = self._codes_of(function, name, args, kwargs, values)
            except (RuntimeError, IndexError, TypeError) as error:
                raise self._refusal(name) from error
            if key is not None:
                self.codes.keep(key, codes)
        if name == "setitem":
            self.origins.places.assigns = True
            return None
        if isinstance(codes, Codes):
            return self._made(values, codes, name)
        if len(values) != len(codes):
            self._refuse(name)
        return tuple(self._made(*part, name) for part in zip(values, codes, strict=True))

    def _codes_of(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Any
    ) -> Codes | tuple[Codes, ...]:
        """Return the codes of the result, or results, of an operation that moves elements."""
        code_of = self._code_or_dense if name in _JOINING else _code_or_index
        with _apart():
            own = self.codes.tensor
            if name in _SIZED:
                return Codes(own.reshape(-1, *values.shape[1:]))
            if name in _EXPANDING:
                return Codes(own.expand(own.shape[0], *values.shape[1:]))
            made = function(*mapped(args, code_of), **mapped(kwargs, code_of))
            return self.codes if made is None else Codes(made) if isinstance(made, Tensor) else tuple(map(Codes, made))

    def _made(self, values: Tensor, codes: Codes, name: str) -> Any:
        """Return the placeholder for the result of an operation, or the values if all are dense."""
        if values.numel() * _SAMPLES != codes.elements * self.origins.samples:
            self._refuse(name)
        if (values.is_floating_point() or not self.is_argument) and codes.all_dense:
            return values
        return Ids(values, codes, self.origins)

    def _code_or_dense(self, value: Any) -> Any:
        """Return the codes of a tensor that is joined with ids. Those of a plain tensor are dense."""
        if isinstance(value, Ids) or not isinstance(value, Tensor):
            return _code_or_index(value)
        samples = torch.arange(_SAMPLES).reshape(-1, *[1] * (value.dim() - 1))
        return (samples + _DENSE).expand(_SAMPLES, *value.shape[1:])

    def _converted(self, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the placeholder with another type. It stays on the device of the step's rows."""
        if name in ("to", "type", "type_as"):
            given = list(_within((args[1:], kwargs)))
            if name == "type" and not given:
                return function(self.numbers)
            kinds = [getattr(value, "dtype", value) for value in given if isinstance(value, torch.dtype | Tensor)]
            values = self.numbers.to(kinds[0]) if kinds else self.numbers.long() if name == "type" else self.numbers
        else:
            values = self.numbers if name in ("cpu", "cuda") else function(self.numbers)
        codes = self.codes
        if name == "clone" and not self.origins.keeps:
            with _apart():
                codes = Codes(codes.tensor.clone())
        return Ids(values, codes, self.origins, self.is_argument)

    def _shifted(self, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the ids plus or minus constants, which are the same for all samples."""
        others = [value for value in args if value is not self]
        other = others[0] if others else kwargs.get("other")
        kept = [value for value in kwargs if value != "other"]
        if len(others) > 1 or other is None or isinstance(other, Ids) or kept or (_SHIFTING[name] < 0 and args[0] is not self):
            self._refuse(name)
        other = torch.as_tensor(other, device=self.device) if hasattr(other, "__array__") or isinstance(other, list) else other
        shape: tuple[int, ...] = tuple(other.shape) if isinstance(other, Tensor) else ()
        dims = self.numbers.dim()
        if len(shape) > dims or (len(shape) == dims and shape[0] != 1):
            self._refuse(name, "add the same numbers to the ids of all samples")
        numbers = self.numbers + _SHIFTING[name] * other
        in_place = name in ("iadd", "isub", "add_", "sub_")
        codes = self._shifted_codes(name, other, shape, in_place)
        if in_place:
            self.numbers = numbers.to(self.numbers.dtype)
            return self
        return self._made(numbers, codes, name)

    def _shifted_codes(self, name: str, other: Any, shape: tuple[int, ...], in_place: bool) -> Codes:
        """Return the codes after constants were added. In place they change those of all views, too."""
        key = ("shifted", shape)
        kept = self.codes.made.get(key) if self.origins.keeps else None
        if isinstance(kept, Codes):
            return kept
        with _apart():
            offsets = torch.zeros(shape, dtype=torch.int64)
            if self.origins.reads_offsets:
                constants = torch.as_tensor(other).detach().cpu()
                if bool((constants != constants.round()).any()):
                    self._refuse(name, "add whole numbers")
                offsets = _SHIFTING[name] * constants.long()
            if in_place and not self.origins.keeps:
                self.codes.tensor.add_(offsets << _LOW_BITS)
                return self.codes
            # Without offsets, this broadcasts the codes.
            codes = Codes(self.codes.tensor + (offsets << _LOW_BITS))
        if self.origins.keeps:
            self.codes.keep(key, codes)
        return codes

    def _refuse(self, name: str, remedy: str = "") -> NoReturn:
        raise self._refusal(name, remedy)

    def _refusal(self, name: str, remedy: str = "") -> UnsupportedUse:
        hint = f'{REMEDY}; if they are dense values, say dense={{"{self._path()[0]}": [...]}}'
        return UnsupportedUse(f"forward takes {name} of the ids {self.text()}", remedy or hint)

    def _path(self) -> Path:
        """Return the column of the first element."""
        with _apart():
            return self.origins.places.path(int(self.codes.tensor.reshape(-1)[0])) if self.codes.elements else ("...",)

    # Without this, code that hashes ids would silently use their identity.
    __hash__ = None  # type: ignore[assignment]


@functools.cache
def operation_name(function: Any) -> str:
    """Return the name of an operation: "getitem", "add_", or "shape" for the property."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(function.__self__, "__name__", name)
    return name.removeprefix("__").removesuffix("__")


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Run operations on codes apart from the operations of forward.

    Codes have values even while torch.export traces forward, and are not part of its program.
    """
    with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes() if _is_traced() else contextlib.nullcontext():
        yield


def _is_traced() -> bool:
    """Whether operations go to a mode, such as that by which torch.export traces forward."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_exporting()


def _within(value: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and mappings, one after the other."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and dicts with each value changed."""
    kind = type(value)
    if kind is tuple:
        return tuple([mapped(item, change) for item in value])
    if kind is list:
        return [mapped(item, change) for item in value]
    if kind is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def _values(value: Any) -> Any:
    return value.numbers if isinstance(value, Ids) else value


def _code_or_index(value: Any) -> Any:
    """Return the codes of ids. A tensor of indices is brought to the codes' device."""
    if isinstance(value, Ids):
        return value.codes.tensor
    return value.cpu() if isinstance(value, Tensor) else value


def _key(value: Any) -> Any:
    """Return what identifies the arguments of an operation, or None if nothing does: some are tensors of indices."""
    kind = type(value)
    if kind in _PLAIN:
        # True and 1 are different indices.
        return (kind, value)
    if kind is Ids:
        return value.codes
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return (slice, *bounds) if all(bound is None or type(bound) is int for bound in bounds) else None
    if kind not in (tuple, list):
        return None
    parts = [_key(part) for part in value]
    return None if None in parts else tuple(parts)
