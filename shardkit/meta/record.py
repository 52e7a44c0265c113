"""init_on_meta: construction runs on meta tensors, and every aten call is appended to a tape."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shardkit._torch import dispatch, has_own_dispatch, is_wrapper
from shardkit._torch.dispatch import tensors_of, tree_map
from shardkit.errors import ShardkitError
from shardkit.meta.replay import evaluate
from shardkit.meta.tape import Op, Stream, Tape, View, open_tape
from shardkit.shards import local_value

aten = torch.ops.aten

# In-place ops that overwrite what they are called on without reading it.
_FILLS = {
    "fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "geometric_", "cauchy_", "log_normal_", "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
# Ops that make memory and write nothing to it.
_EMPTY = {
    "empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided",
}  # fmt: skip


class Record(NamedTuple):
    """What was recorded of one module."""

    tape: Tape  # strong, so that it lives as long as a model waits for it
    views: dict[str, View]  # of its parameters and buffers when recording ended


_current: Recorder | None = None
# By module and name, because fully_shard replaces the tensors and frees their storages.
records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Build models without memory, so that ``materialize`` can compute their ordinary values later.
    Local.

    Inside the context every tensor that is made is a meta tensor, which holds no memory, and each
    operation on it is recorded. The code of the model sees ordinary tensors: it need not know about
    the meta device, and needs no ``reset_parameters``, ``init_weights`` or ``param_init_fn``.

    Everything that computes initial values belongs inside: your initializers, ``load_state_dict``,
    ties, casts. Real tensors that were made outside can be read, not written. What depends on
    values (``tensor.item()``) is computed immediately, which costs time and, briefly, memory.
    Python's and numpy's random numbers are drawn as usual. On exit torch's generators have a
    placeholder state; ``materialize`` sets the state that ordinary construction leaves, unless they
    were seeded since. Enter it in one thread at a time.

    Raises:
        ShardkitError: the code uses a DTensor, or writes to a tensor from outside.

    Examples:
        >>> with init_on_meta():
        ...     model = Transformer(config)
        >>> shard_model(model)
        >>> materialize(model)
    """
    global _current
    if _current is not None:  # contexts inside each other are one
        yield
        return
    device = torch.get_default_device()
    if device.type == "meta":
        device = torch.device("cpu")
    recorder = _current = Recorder(open_tape(device))
    try:
        with dispatch.recorded_samplers(recorder.record_sampler), _LooksReal(recorder), recorder:
            yield
    except BaseException:
        recorder.close(failed=True)
        raise
    else:
        recorder.close(failed=False)
    finally:
        _current = None
    _note_modules(recorder.tape)


def _note_modules(tape: Tape) -> None:
    """Note which tensors of each module alive are on the tape.

    Through the garbage collector, because modules and parameters come about in too many ways to
    hook: deep copies, unpickling, writes to module._parameters.
    """
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or "_parameters" not in vars(module):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(tensor, Tensor) and is_wrapper(tensor):
                tensor = local_value(tensor)  # float8 training weights wrap one plain tensor
            view = tape.find(tensor) if is_plain_meta(tensor) else None
            if view is not None:
                records.setdefault(module, Record(tape, {})).views[name] = view


def is_plain_meta(tensor: Any) -> bool:
    """Return whether this is a meta tensor with its own storage: no DTensor or other wrapper, not
    lazy.
    """
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return False
    return tensor.is_meta and not has_own_dispatch(type(tensor))


def is_recorded(model: nn.Module) -> bool:
    """Return whether ``materialize`` can replay how the model was constructed. Local, pure."""
    return any(module in records for module in model.modules())


class Recorder(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends every aten call to its tape and runs it on the meta device only.

    Ops on real tensors alone run as usual. A real tensor used together with a meta tensor becomes a
    constant.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self._before: dict[Stream, Tensor] = {}  # the state of each generator at its first use
        self._stream(torch.default_generator).enter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one aten call: recorded and on meta, or for real where only real tensors take
        part.
        """
        kwargs = kwargs or {}
        tensors = tensors_of((args, kwargs))
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise ShardkitError(
                "a DTensor is used inside init_on_meta. A model is built with plain tensors, and "
                "sharded afterwards. Call shard_model after it."
            )
        if any(has_own_dispatch(type(tensor)) for tensor in tensors):
            return NotImplemented  # a wrapper subclass: it calls aten on the plain tensors inside
        is_random = dispatch.has_tag(func, "nondeterministic_seeded")
        makes = (not tensors or _name(func) in _EMPTY) and "device" in _argument_names(func)
        with dispatch.no_torch_function():  # _LooksReal is for the model's code, not for ours
            # torch.tensor, from_numpy: memory that nobody else has
            if func is aten.lift_fresh.default:
                return self._on_meta(args[0])
            if is_random or makes or any(tensor.is_meta for tensor in tensors):
                return self._record(func, args, kwargs, is_random)
            return func(*args, **kwargs)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_random: bool
    ) -> Any:
        _refuse_real_writes(func, args, kwargs)
        args, kwargs = tree_map(self._on_meta, (args, kwargs))
        kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        if dispatch.has_tag(func, "data_dependent_output"):  # item(), equal(): what comes next
            return self._run_on_values(func, args, kwargs)
        op = self._describe(func, args, kwargs)  # before the call, which may change sizes
        out = self._run_on_meta(func, args, kwargs)
        for tensor in tensors_of(out):
            view = None if self.tape.find(tensor) else self.tape.add(tensor)
            op.outs.append(view)
            if view is not None:
                op.makes.add(view.storage)
        if is_random:
            self._append(op, kwargs.get("generator") or torch.default_generator)
        elif op.changes():  # else a view, or a change of sizes and strides
            self._append(op)
        return out

    def _describe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        """Return the op of a call: what it reads, and what it writes and how."""
        name = _name(func)
        if name in _EMPTY:
            return Op()
        viewed_args, viewed_kwargs = tree_map(self._as_view, (args, kwargs))
        op = Op(func, viewed_args, viewed_kwargs, default_dtype=torch.get_default_dtype())
        op.on_device = "device" in _argument_names(func)
        looks_at_sizes = name.endswith("_like") or name.startswith("new_")
        if looks_at_sizes or dispatch.has_tag(func, "inplace_view"):  # set_, resize_, t_: no values
            return op
        written = []
        for argument, value in _arguments(func, args, kwargs):
            for tensor in tensors_of(value):
                view = self.view(tensor)
                if _is_written(argument):
                    written.append((view, argument.is_out or name in _FILLS))
                else:
                    op.reads.add(view.storage)
        for view, overwrites in written:  # when all that is read is known
            self._note_write(op, view, overwrites)
        return op

    def _note_write(self, op: Op, view: View, overwrites: bool) -> None:
        if not overwrites or view.storage in op.reads:
            op.reads.add(view.storage)
            op.updates.add(view.storage)
        elif view.covers(self.tape.storages[view.storage]):
            op.makes.add(view.storage)
        else:
            op.updates.add(view.storage)

    def record_sampler(
        self, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Append a Python function that fills ``tensor`` at random, as one op."""
        view = self.view(tensor)
        op = Op(func, (view, *args), kwargs, default_dtype=torch.get_default_dtype())
        self._note_write(op, view, overwrites=True)
        generator = torch.default_generator
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, torch.Generator):
                generator = arg
        self._append(op, generator)

    def view(self, tensor: Tensor) -> View:
        """Return a meta tensor as a View; a storage that is not on the tape is added."""
        view = self.tape.find(tensor)
        if view is None:  # made where no mode sees it (by a storage's own methods), or before
            view = self._constant(tensor, None)
            self.tape.unseen.add(view.storage)
        return view

    def value(self, tensor: Tensor) -> Tensor:
        """Compute the present value of a meta tensor."""
        view = self.view(tensor)
        self._refuse_unseen({view.storage})
        return evaluate(self.tape, view)

    def _refuse_unseen(self, read: set[int]) -> None:
        if read & self.tape.unseen:
            raise ShardkitError(
                "a meta tensor is read in init_on_meta(), which did not see it being made. Its "
                "values are unknown. Make it inside, and from Python data by torch.tensor(data)."
            )

    def close(self, failed: bool) -> None:
        """Leave generators where replay takes them on, or as they were before if the code
        failed.
        """
        for stream, state in self._before.items():
            if failed:
                stream.generator.set_state(state)
            else:
                stream.leave()

    def _run_on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Some meta kernels raise for a generator of the CPU: exponential_, geometric_ (torch 2.13).
        on_meta = {name: None if name == "generator" else value for name, value in kwargs.items()}
        if "device" in _argument_names(func):
            on_meta["device"] = torch.device("meta")
        if not dispatch.has_tag(func, "dynamic_output_shape") or _name(func) == "index":
            try:
                return func(*args, **on_meta)
            except NotImplementedError:
                pass  # no meta kernel, or an index by mask
        # The shapes follow from values: compute the call for real, once, and keep the shapes.
        with torch.random.fork_rng(devices=[]):
            out = self._run_on_values(func, args, kwargs)
        return tree_map(lambda leaf: _meta_like(leaf) if isinstance(leaf, Tensor) else leaf, out)

    def _run_on_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call for real, on the values that its meta tensors have at this point."""

        def value(leaf: Any) -> Any:
            return self.value(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(value, (args, kwargs))
        return func(*args, **kwargs)

    def _append(self, op: Op, generator: torch.Generator | None = None) -> None:
        self._refuse_unseen(op.reads)
        self.tape.unseen -= op.changes()
        if generator is not None:
            op.generator = generator
            op.before = self._stream(generator).draw(len(self.tape.ops))
        self.tape.ops.append(op)

    def _stream(self, generator: torch.Generator) -> Stream:
        if generator not in self.tape.streams:
            self.tape.streams[generator] = Stream(generator)
        stream = self.tape.streams[generator]
        self._before.setdefault(stream, generator.get_state())
        return stream

    def _as_view(self, leaf: Any) -> Any:
        return self.view(leaf) if isinstance(leaf, Tensor) else leaf

    def _on_meta(self, leaf: Any) -> Any:
        """Return a meta tensor for a real one, whose present value is recorded as a constant."""
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        value = leaf.detach().clone()  # it may change later, and so may memory of numpy
        meta = _meta_like(value)
        self._constant(meta, value)
        return meta

    def _constant(self, tensor: Tensor, value: Tensor | None) -> View:
        view = self.tape.add(tensor)
        self._append(Op(outs=[view], makes={view.storage}, value=value))
        return view


class _LooksReal(TorchFunctionMode):
    """Makes meta tensors look like ordinary ones: transformers, torch.nn.init and others skip meta
    tensors.

    Methods that return values (``tolist``, ``numpy``) compute them from the tape.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._device = recorder.tape.device
        kind = self._device.type
        answers = {
            "device": self._device,
            "is_meta": False,
            "is_cpu": kind == "cpu",
            "is_cuda": kind == "cuda",
        }
        # By the function that a mode sees when an attribute of a tensor is read.
        self._answers = {getattr(Tensor, name).__get__: answer for name, answer in answers.items()}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer as for an ordinary tensor; anything else runs unchanged."""
        kwargs = kwargs or {}
        on_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if func is Tensor.to:
            args = (args[0], *(self._target(arg, on_meta) for arg in args[1:]))
            kwargs = {name: self._target(value, on_meta) for name, value in kwargs.items()}
        elif on_meta and func in self._answers:
            return self._answers[func]
        elif on_meta and func in _VALUES:
            return func(self._recorder.value(args[0]), *args[1:], **kwargs)
        elif on_meta and func is Tensor.cpu and self._device.type == "cpu":
            return args[0]
        elif on_meta and func in _INDEXING:
            # On meta, torch makes tensors of Python data without values, where no mode sees it.
            args = (args[0], _without_lists(args[1]), *args[2:])
        elif on_meta and func is Tensor.new_tensor:  # likewise
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs})
        return func(*args, **kwargs)

    def _target(self, arg: Any, on_meta: bool) -> Any:
        """Return an argument of ``to`` in the terms of meta tensors, which are all on one
        device.
        """
        if isinstance(arg, Tensor):
            return arg.dtype
        is_device = on_meta and isinstance(arg, (str, torch.device))
        return "meta" if is_device and torch.device(arg).type == self._device.type else arg


_VALUES = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


def _without_lists(index: Any) -> Any:
    """Return an index with a tensor in place of each list, tuple, range or array."""
    if isinstance(index, tuple):
        return tuple(_as_tensor(item) for item in index)
    if isinstance(index, list) and not all(isinstance(item, Number) for item in index):
        return index  # up to torch 2.13 it stands for a tuple, with a warning
    return _as_tensor(index)


def _as_tensor(index: Any) -> Any:
    if isinstance(index, Tensor) or not isinstance(index, Sized):
        return index
    tensor = torch.tensor(index)
    return tensor if tensor.dtype in (torch.bool, torch.uint8) else tensor.long()


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _name(func: Any) -> str:
    return str(dispatch.schema(func).name).rpartition("::")[2]


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in dispatch.schema(func).arguments}


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of a call's schema with what was given for them."""
    for position, argument in enumerate(dispatch.schema(func).arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _is_written(argument: Any) -> bool:
    if argument.name in ("running_mean", "running_var"):
        return True  # by batch_norm in training, whose schemas do not say so
    return argument.alias_info is not None and argument.alias_info.is_write


def _refuse_real_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for argument, value in _arguments(func, args, kwargs):
        if _is_written(argument) and not all(tensor.is_meta for tensor in tensors_of(value)):
            raise ShardkitError(
                f"a tensor from outside init_on_meta is written inside of it, by {_name(func)}. "
                "What a construction computes has no values yet. Make it inside."
            )
