"""Recording: construction runs on meta tensors, and every aten call is appended to a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardkit._torch import dispatch, has_own_dispatch
from shardkit.errors import ShardkitError, message
from shardkit.meta.replay import evaluate
from shardkit.meta.tape import Op, Recording, Stream, Tape, View, leaves, map_leaves, tensors_of, view_of

aten = torch.ops.aten

# In-place ops that overwrite what they are called on without reading it.
_FILLS = {
    "fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_",
    "cauchy_", "log_normal_", "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
# Ops that make memory and write nothing to it.
_EMPTY = {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}


class Recorder(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends every aten call to its tape and runs it on the meta device only.

    Ops on real tensors alone run as usual. A real tensor used together with a meta tensor becomes a constant.
    """

    def __init__(self, tape: Tape, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self._before: dict[Stream, Tensor] = {}  # the state of each generator at its first use
        default = self._stream(torch.default_generator)
        self._recording = Recording(len(tape.ops), device, default.enter())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one aten call: recorded and on meta, or for real where only real tensors take part."""
        kwargs = kwargs or {}
        tensors = tensors_of((args, kwargs))
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            rule = "A model is built with plain tensors, and sharded afterwards"
            raise ShardkitError(message("a DTensor", "is used inside init_on_meta", rule, "Call shard_model after it"))
        if any(has_own_dispatch(type(tensor)) for tensor in tensors):
            return NotImplemented  # a wrapper subclass: it calls aten on the plain tensors inside
        with dispatch.no_torch_function():  # FakeDeviceMode is for the model's code, not for ours
            if func is aten.lift_fresh.default:  # torch.tensor, from_numpy, ...: memory that nobody else knows yet
                return args[0] if args[0].is_meta else self._stand_in(args[0])
            return self._record(func, args, kwargs) if _makes_tensor(func, tensors) else func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real_of: dict[int, Tensor] = {}  # by id of the stand-in

        def on_meta(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                return leaf
            stand_in = self._stand_in(leaf)
            real_of[id(stand_in)] = leaf
            return stand_in

        args, kwargs = map_leaves(on_meta, (args, kwargs))
        if dispatch.has_tag(func, "data_dependent_output"):  # item(), equal(): the value decides what comes next
            return self._run_on_values(func, args, kwargs)
        op = self._describe(func, args, kwargs)
        out = self._run_on_meta(func, args, kwargs)
        op.outs = tuple(None if self.tape.find(tensor) else self._add(tensor) for tensor in tensors_of(out))
        random = dispatch.has_tag(func, "nondeterministic_seeded")
        if op.writes or random or any(op.outs):  # else a view, or a change of sizes and strides
            self._append(op, kwargs.get("generator") or torch.default_generator if random else None)
            written = {view for view, _ in op.writes}
            for stand_in in tensors_of((args, kwargs)):
                if id(stand_in) in real_of and self.view(stand_in) in written:  # real.normal_()
                    real_of[id(stand_in)].detach().copy_(self.value(stand_in))
        return map_leaves(lambda leaf: real_of.get(id(leaf), leaf), out)

    def record_sampler(self, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Append a Python function that fills ``tensor`` at random, as one op."""
        view = self.view(tensor)
        generators = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        writes = (self._write(view, True),)
        op = Op(func, (view, *args), kwargs, writes=writes, default_dtype=torch.get_default_dtype())
        self._append(op, *generators or [torch.default_generator])

    def view(self, tensor: Tensor) -> View:
        """Return a meta tensor as a View; a storage that is not on the tape is added."""
        found = self.tape.find(tensor)
        if found is None:  # made where no mode sees it (by a storage's own methods), or on meta before recording began
            found = self._add(tensor)
            self._append(Op(None, outs=(found,), undefined=True))
        return found

    def value(self, tensor: Tensor) -> Tensor:
        return evaluate(self.tape, self.view(tensor))

    def close(self, failed: bool) -> None:
        """End the recording: leave generators where replay takes them on, or as they were before if it failed."""
        for stream, state in self._before.items():
            if failed:
                stream.generator.set_state(state)
            else:
                self._recording.ends[stream] = stream.leave()
        if not failed:
            self.tape.recordings.append(self._recording)

    def _describe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        """Return the op of a call: what it reads, and what it writes and how."""
        name, names = _name(func), _argument_names(func)
        reads: list[View] = []
        written: list[tuple[View, bool]] = []
        arguments = dispatch.schema(func).arguments
        given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
        for argument, value in given:
            views = [self.view(tensor) for tensor in tensors_of(value)]
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [(view, argument.is_out or name in _FILLS) for view in views]
            elif not (name in _EMPTY or name.endswith("_like") or name.startswith("new_")):
                reads += views  # the others look at sizes only
        if dispatch.has_tag(func, "inplace_view"):  # set_, resize_, t_: of sizes and strides, not of values
            reads, written = [], []
        read = {view.storage for view in reads}
        writes = tuple(self._write(view, overwrites and view.storage not in read) for view, overwrites in written)
        args, kwargs = map_leaves(lambda leaf: self.view(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        op = Op(func, args, kwargs, reads=tuple(reads), writes=writes, default_dtype=torch.get_default_dtype())
        op.undefined, op.on_device = name in _EMPTY, "device" in names
        return op

    def _write(self, view: View, overwrites: bool) -> tuple[View, str]:
        return view.written(self.tape.storages[view.storage].nbytes(), overwrites=overwrites)

    def _run_on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "device" in _argument_names(func):
            kwargs = {**kwargs, "device": torch.device("meta")}
        # Some meta kernels raise for a generator of the CPU: exponential_, geometric_ (torch 2.13).
        kwargs = {n: None if n == "generator" else value for n, value in kwargs.items() if n != "pin_memory"}
        if not dispatch.has_tag(func, "dynamic_output_shape") or _name(func) == "index":
            try:
                return func(*args, **kwargs)
            except NotImplementedError:
                pass  # no meta kernel, or an index by mask
        # The shapes follow from values: compute the call for real, once, and keep the shapes.
        kwargs.pop("device", None)
        with torch.random.fork_rng(devices=[]):
            out = self._run_on_values(func, args, kwargs)
        return map_leaves(lambda leaf: _meta_like(leaf) if isinstance(leaf, Tensor) else leaf, out)

    def _append(self, op: Op, generator: torch.Generator | None = None) -> None:
        if generator is not None:
            op.stream = self._stream(generator)
            op.at = op.stream.draw(len(self.tape.ops))
        self.tape.ops.append(op)

    def _add(self, tensor: Tensor) -> View:
        return view_of(tensor, self.tape.add(tensor.untyped_storage()))

    def _stream(self, generator: torch.Generator) -> Stream:
        if id(generator) not in self.tape.streams:
            self.tape.streams[id(generator)] = Stream(generator)
        stream = self.tape.streams[id(generator)]
        if stream not in self._before:
            self._before[stream] = generator.get_state()
        return stream

    def _run_on_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call for real, on the values that its meta tensors have at this point."""
        args, kwargs = map_leaves(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    def _stand_in(self, real: Tensor) -> Tensor:
        """Return a meta tensor for a real one, whose present value is recorded as a constant."""
        value = real.detach().clone()  # it may change later, and so may memory that torch does not own, as numpy's
        meta = _meta_like(value)
        self._append(Op(None, outs=(self._add(meta),), value=value))
        return meta


class FakeDeviceMode(TorchFunctionMode):
    """Makes meta tensors look like ordinary ones: transformers, torch.nn.init and others skip initializers for them.

    Methods that return values (``tolist``, ``numpy``) compute them from the tape.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        super().__init__()
        self._recorder = recorder
        self._device = device
        answers = {"device": device, "is_meta": False, "is_cpu": device.type == "cpu", "is_cuda": device.type == "cuda"}
        # By the function that a mode sees when an attribute of a tensor is read.
        self._answers = {getattr(Tensor, name).__get__: answer for name, answer in answers.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer as for an ordinary tensor; anything else runs unchanged."""
        kwargs = kwargs or {}
        if func is Tensor.to and any(isinstance(arg, Tensor) and arg.is_meta for arg in (*args, *kwargs.values())):
            return self._to(args[0], args[1:], kwargs)
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func]
        if func in _VALUES:
            return func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if func is Tensor.cpu and self._device.type == "cpu":
            return args[0]
        return func(*args, **kwargs)

    def _to(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run ``tensor.to(...)``; to the device that the tensors pretend to be on, it is only a cast."""
        names: tuple[str, ...] = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], (torch.dtype, Tensor)):
            names = ("dtype" if isinstance(args[0], torch.dtype) else "tensor", "non_blocking", "copy")
        given = dict(zip(names, args, strict=False)) | kwargs
        other = given.pop("tensor", None)
        if other is not None:
            given |= {"device": self._device if other.is_meta else other.device, "dtype": other.dtype}
        device, dtype = given.pop("device", None), given.pop("dtype", None) or tensor.dtype
        if device is None or torch.device(device).type == self._device.type:
            return Tensor.to(tensor, dtype, **given)
        return Tensor.to(tensor, device, dtype, **given)


_VALUES = {Tensor.numpy, Tensor.tolist, Tensor.__array__}


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _name(func: Any) -> str:
    return str(dispatch.schema(func).name).rpartition("::")[2]


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in dispatch.schema(func).arguments}


def _makes_tensor(func: Any, tensors: list[Tensor]) -> bool:
    """Return whether a call belongs on the tape: it uses meta tensors, draws random numbers, or allocates."""
    if any(tensor.is_meta for tensor in tensors) or dispatch.has_tag(func, "nondeterministic_seeded"):
        return True
    return (not tensors or _name(func) in _EMPTY) and "device" in _argument_names(func)
