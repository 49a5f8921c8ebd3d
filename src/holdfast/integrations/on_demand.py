"""Tensors whose elements are read when something asks for them, and only those it asks for.

A view of one reads nothing. What computes with one, or copies it, gets a real tensor: the elements
of that view. So code that narrows a weight to the part of its rank reads that part alone. Knows no
checkpoint and no framework.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..convert.as_transformers import box_of_view
from ..layout import Box, Shape, whole

Read = Callable[[Box], torch.Tensor]


class Origin:
    """A whole tensor that nobody has read yet.

    Args:
        shape, dtype: of it.
        read: returns a box of it as a new contiguous tensor, of the shape of the box.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, read: Read) -> None:
        self.shape, self._read = shape, read
        self.view = torch.empty(shape, dtype=dtype, device="meta")
        self._kept: torch.Tensor | None = None

    def fetch(self, view: torch.Tensor) -> torch.Tensor:
        """Return the elements of a view, as an ordinary tensor.

        Args:
            view: of `view`, without memory.
        """
        if self._kept is None:
            order = sorted(range(view.dim()), key=view.stride, reverse=True)
            turned = view.permute(order)  # as the elements lie, whatever has been transposed
            if (box := box_of_view(turned, self.shape)) is not None:
                back = [order.index(d) for d in range(view.dim())]
                return self._read(box).reshape(turned.shape).permute(back)
        self.keep()
        assert self._kept is not None
        return self._kept.as_strided(view.size(), view.stride(), view.storage_offset())

    def keep(self) -> None:
        """Read all of it, and keep it: someone writes to it, or takes elements from all over."""
        if self._kept is None:
            self._kept = self._read(whole(self.shape))


class OnDemand(torch.Tensor):
    """A view of an `Origin`, for code that takes tensors. It says that it is on the CPU.

    Args:
        origin: what is read.
        view: which of its elements; default: all.
    """

    _origin: Origin
    _view: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: "type[OnDemand]", origin: Origin, view: torch.Tensor | None = None) -> Any:
        view = origin.view if view is None else view
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            view.size(),
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=torch.device("cpu"),
        )
        made._origin, made._view = origin, view
        return made

    def __init__(self, origin: Origin, view: torch.Tensor | None = None) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<OnDemand {list(self.shape)} {self.dtype}>"

    def fetch(self) -> torch.Tensor:
        """Read it; return an ordinary tensor."""
        return self._origin.fetch(self._view)

    def numpy(self, *, force: bool = False) -> Any:
        """Read it, as an array."""
        return self.fetch().numpy(force=force)

    def tolist(self) -> Any:
        """Read it, as numbers."""
        return self.fetch().tolist()

    def data_ptr(self) -> int:
        """Read all of it, and keep it; return where its first element is."""
        self._origin.keep()
        return self.fetch().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Read all of it, and keep it; return its memory."""
        self._origin.keep()
        return self.fetch().untyped_storage()

    def __dlpack__(self, **how: Any) -> Any:
        """Read it, for other libraries."""
        return self.fetch().__dlpack__(**how)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """Read it; return an ordinary tensor."""
        return self.fetch().clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view and args and isinstance(args[0], cls):
            origin, view = args[0]._origin, args[0]._view
            seen = func(view, *args[1:], **kwargs)
            views = [seen] if isinstance(seen, torch.Tensor) else seen
            if all(each.dtype == view.dtype for each in views):
                return tree_map(lambda each: cls(origin, each), seen)
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            return args[0]  # only the sizes count there: it has no memory to fill
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                alias = argument.alias_info
                if isinstance(value, cls) and alias is not None and alias.is_write:
                    value._origin.keep()
        whole_args, whole_kwargs = tree_map(
            lambda each: each.fetch() if isinstance(each, cls) else each, (args, kwargs)
        )
        result = func(*whole_args, **whole_kwargs)
        return args[0] if args and result is whole_args[0] else result
